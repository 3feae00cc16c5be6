"""Numbers and tables as text for people."""

from collections.abc import Sequence


def format_bytes(count: int | float) -> str:
    """A number of bytes with a binary unit.

    >>> format_bytes(1536), format_bytes(3 * 2**30)
    ('1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_bytes_si(count: int | float) -> str:
    """A number of bytes with a decimal unit, as the speed of links is measured.

    >>> format_bytes_si(999), format_bytes_si(1_852_000), format_bytes_si(999_900)
    ('999 B', '1.85 MB', '1 MB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            return f"{count:.3g} {unit}" if count < 999.5 else f"{count:.0f} {unit}"
        count /= 1000
    raise AssertionError


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table with aligned columns.

    >>> format_table([("path", "op"), ("a", "einsum")])
    ['path  op', 'a     einsum']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
