"""The tables of formats in the documentation are those of the registry."""

import re
from pathlib import Path

from octavo import Quantizer, formats
from octavo.numerics import BlockFormat

PAGE = Path(__file__).parents[2] / "docs" / "numbers.md"


def table(mark):
    """The rows between `<!-- mark -->` and `<!-- end -->`, without the two of the head."""
    found = re.search(f"<!-- {mark} -->\n(.*?)<!-- end -->", PAGE.read_text(), re.DOTALL)
    assert found
    return found[1].splitlines()[2:]


def format_row(fmt):
    cells = [
        f"`{fmt.name}`",
        fmt.storage.name,
        fmt.bits,
        f"{fmt.bound:.9g}",
        f"{fmt.smallest:.9g}",
        f"{fmt.largest:.9g}",
        fmt.carrier.name,
        "yes" if fmt.has_nan else "no",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def block_row(fmt):
    bits = Quantizer(fmt).bits_per_value((256, 4096))
    outer = "float32" if fmt.outer else "none"
    cells = [f"`{fmt.name}`", fmt.tile, fmt.scale_dtype, fmt.scale_rounding, outer, f"{bits:.4g}"]
    return f"| {' | '.join(map(str, cells))} |"


def test_the_table_of_formats_is_complete_and_true():
    assert table("formats") == [format_row(fmt) for fmt in formats().values()]


def test_the_table_of_block_formats_is_complete_and_true():
    assert table("blocks") == [block_row(fmt) for fmt in formats().values() if isinstance(fmt, BlockFormat)]
