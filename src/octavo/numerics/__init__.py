"""Number formats, rounding and bit packing."""

from octavo.numerics.blocks import E8M0, BlockFormat, power_of_two_scale, round_scale
from octavo.numerics.floats import FloatFormat, round_to_grid
from octavo.numerics.format import Format, round_unit, type_name
from octavo.numerics.integers import IntFormat
from octavo.numerics.moments import DynamicFormat, PositiveFormat
from octavo.numerics.packing import pack_bits, unpack_bits
from octavo.numerics.registry import FormatLike, formats, get_format, register_format
from octavo.numerics.rounding import Eden, Nearest, Rounding, Stochastic, get_rounding
from octavo.numerics.tables import TableFormat
from octavo.numerics.unrounded import UnroundedFormat

__all__ = [
    "E8M0",
    "BlockFormat",
    "DynamicFormat",
    "Eden",
    "FloatFormat",
    "Format",
    "FormatLike",
    "IntFormat",
    "Nearest",
    "PositiveFormat",
    "Rounding",
    "Stochastic",
    "TableFormat",
    "UnroundedFormat",
    "formats",
    "get_format",
    "get_rounding",
    "pack_bits",
    "power_of_two_scale",
    "register_format",
    "round_scale",
    "round_to_grid",
    "round_unit",
    "type_name",
    "unpack_bits",
]
