"""The registry of number formats."""

import re
from typing import Any

import jax.numpy as jnp
import ml_dtypes

from octavo._names import unknown_name
from octavo.numerics.blocks import BlockFormat, block_formats
from octavo.numerics.floats import FloatFormat
from octavo.numerics.format import Format
from octavo.numerics.integers import IntFormat
from octavo.numerics.tables import NF4_VALUES, TableFormat

type FormatLike = Format | str | Any
"""A format, its name, or a dtype of the same name."""

_formats: dict[str, Format] = {}
_aliases: dict[str, str] = {}


def register_format(fmt: Format, *, aliases: tuple[str, ...] = (), replace: bool = False) -> Format:
    """Register a format, so that rules, commands and files can name it.

    Args:
      fmt: The format; it is registered by its `name`.
      aliases: Further names.
      replace: Whether a format of the same name may be replaced; otherwise that is an error.

    Returns:
      The format.

    >>> fmt = register_format(TableFormat(name="quarters", values=(-1.0, -0.25, 0.25, 1.0)), replace=True)
    >>> get_format("quarters").bits
    2
    """
    for name in (fmt.name, *aliases):
        if not replace and (name in _formats or name in _aliases):
            raise ValueError(f"a format named {name!r} exists; choose another name or pass replace=True")
    _formats[fmt.name] = fmt
    _aliases.update(dict.fromkeys(aliases, fmt.name))
    return fmt


def formats() -> dict[str, Format]:
    """All registered formats.

    Returns:
      A new dictionary from names to formats.

    >>> formats()["nvfp4"].tile
    16
    """
    return dict(_formats)


def get_format(qtype: FormatLike) -> Format:
    """Look up a number format.

    Args:
      qtype: A registered name; a dtype; a float of any width such as "e3m0"; a block format with the rounding of its
        scale, such as "mxfp4,floor"; or a `Format`, which is returned as it is.

    Returns:
      The format. An unknown name is a ValueError that suggests the nearest ones.

    >>> get_format("int8").bound, get_format(jnp.float8_e4m3fn).name, get_format("e3m0").bits
    (127.5, 'float8_e4m3fn', 4)
    """
    if isinstance(qtype, Format):
        return qtype
    name = _name_of(qtype)
    if name in _aliases:
        name = _aliases[name]
    if name in _formats:
        return _formats[name]
    base, comma, rounding = name.partition(",")
    if comma and isinstance(_formats.get(_aliases.get(base, base)), BlockFormat):
        return get_format(base).replace(scale_rounding=rounding.strip())
    if match := re.fullmatch(r"e(\d+)m(\d+)", name):
        return FloatFormat(exponent_bits=int(match[1]), mantissa_bits=int(match[2]))
    if name == "float8_e8m0fnu":
        raise ValueError(
            "float8_e8m0fnu holds powers of two only: it is the scale of mxfp8, mxfp6 and mxfp4; use those"
        )
    if name in ("float16", "bfloat16", "float32", "float64"):
        raise ValueError(f"{name} is not a low-precision format: leave the type out (None) to keep values in float")
    raise ValueError(f"unknown number format {qtype!r}: {unknown_name(name, [*_formats, *_aliases])}")


def _name_of(qtype: Any) -> str:
    if isinstance(qtype, str):
        return qtype.strip().lower()
    try:
        return jnp.dtype(qtype).name
    except TypeError:
        raise ValueError(
            f"a number format is a name or a dtype, got {qtype!r} of type {type(qtype).__name__}: "
            f"{unknown_name(str(qtype), list(_formats))}"
        ) from None


def _float(dtype: Any, exponent: int, mantissa: int, specials: str, bias: int | None = None) -> FloatFormat:
    return FloatFormat(
        exponent_bits=exponent, mantissa_bits=mantissa, specials=specials, bias=bias, dtype=jnp.dtype(dtype).name
    )


for _bits in (2, 3, 4, 5, 6, 7, 8):
    register_format(IntFormat(bits=_bits))
register_format(IntFormat(bits=16, edge=2.0**15))
register_format(IntFormat(bits=1, preserve_zero=False))
register_format(IntFormat(bits=1, preserve_zero=False, preserve_max=True, unit=2.0, name="binary"))
register_format(IntFormat(bits=2, preserve_max=True, narrow=True, name="ternary"))
for _bits in (2, 4, 8):
    register_format(IntFormat(bits=_bits, signed=False))

register_format(_float(ml_dtypes.float8_e4m3fn, 4, 3, "fn"), aliases=("fp8", "fp8_e4m3", "e4m3", "e4m3fn"))
register_format(_float(ml_dtypes.float8_e5m2, 5, 2, "ieee"), aliases=("fp8_e5m2", "e5m2"))
register_format(_float(ml_dtypes.float8_e4m3, 4, 3, "ieee"))
register_format(_float(ml_dtypes.float8_e3m4, 3, 4, "ieee"), aliases=("e3m4",))
register_format(_float(ml_dtypes.float8_e4m3fnuz, 4, 3, "fnuz"), aliases=("e4m3fnuz",))
register_format(_float(ml_dtypes.float8_e5m2fnuz, 5, 2, "fnuz"), aliases=("e5m2fnuz",))
register_format(_float(ml_dtypes.float8_e4m3b11fnuz, 4, 3, "fnuz", bias=11), aliases=("e4m3b11fnuz",))
register_format(_float(ml_dtypes.float4_e2m1fn, 2, 1, "none"), aliases=("fp4", "e2m1"))
# XLA's CPU backend cannot convert float6 (jax 0.12), so these are kept as bit patterns everywhere.
register_format(FloatFormat(exponent_bits=2, mantissa_bits=3, name="float6_e2m3fn"), aliases=("fp6", "e2m3"))
register_format(FloatFormat(exponent_bits=3, mantissa_bits=2, name="float6_e3m2fn"), aliases=("fp6_e3m2", "e3m2"))

register_format(TableFormat(name="nf4", values=NF4_VALUES))
# Stretched elastic quantization: balanced levels without a zero. Liu et al., ParetoQ, arXiv:2502.02631.
register_format(TableFormat(name="seq2", values=(-1.0, -1 / 3, 1 / 3, 1.0)))

for _block in block_formats():
    register_format(_block)
_aliases.update({"mxfp8_e4m3": "mxfp8", "mxfp6_e2m3": "mxfp6", "mxfp4_e2m1": "mxfp4"})
