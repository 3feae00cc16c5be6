"""The header of a safetensors file: its length in eight bytes, then JSON with dtype, shape and offsets of each tensor.

Everything that the rest relies on is validated here: after `parse`, each tensor is within the data, none overlaps
another, no bytes are unused, and each has as many bytes as its dtype and shape need.
"""

import dataclasses
import json
import math
from typing import Any

from octavo._documents import parse_json
from octavo._names import unknown_name
from octavo.files.errors import FileError
from octavo.files.safetensors.dtypes import DTYPES, LARGEST, Info, bits_of

LIMIT = 100_000_000  # bytes; the reference implementation's
MAX_RANK = 64  # NumPy's
_DAMAGED = "the file is damaged or not safetensors; fetch or write it again"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor of a file, and the offset of its bytes from the end of the header."""

    kind: str
    info: Info
    start: int


def parse(text: bytes, room: int, path: str) -> tuple[dict[str, str], dict[str, Entry]]:
    """The metadata and tensors that a header declares, for a file with `room` bytes of data."""
    if text[:1] != b"{":
        raise FileError(f"{path}: the header does not begin with '{{'; {_DAMAGED}")
    table = load_object(text, f"{path}: the header")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FileError(f"{path}: __metadata__ is an object of strings, got {_short(metadata)}; {_DAMAGED}")
    entries = {name: _entry(value, f"{path}: tensor {name!r}") for name, value in table.items()}
    end, last = 0, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].info.nbytes)):
        if entry.start != end:
            what = "overlaps" if entry.start < end else "leaves a hole after"
            raise FileError(f"{path}: tensor {name!r} at byte {entry.start} {what} {last}, which ends at {end}")
        end, last = entry.start + entry.info.nbytes, f"{name!r}"
    if end != room:
        what = f"only {room} bytes follow: it is truncated" if end > room else f"{room} bytes follow"
        raise FileError(f"{path}: the header declares {end} bytes of tensors but {what}; fetch the file again")
    return metadata, entries


def load_object(text: bytes, source: str) -> dict[str, Any]:
    """Parse a JSON object from an untrusted file; `source` names it in errors."""
    try:
        table = parse_json(text.decode("utf-8"))
        # Raises for NaN, and for half of a surrogate pair, which are not JSON.
        json.dumps(table, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (ValueError, RecursionError) as error:  # Also raised for a number of thousands of digits.
        raise FileError(f"{source} is not JSON ({error}); {_DAMAGED}") from None
    if not isinstance(table, dict):
        raise FileError(f"{source} is not a JSON object; {_DAMAGED}")
    return table


def _entry(value: Any, label: str) -> Entry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise FileError(f"{label} has dtype, shape and data_offsets, got {_short(value)}; {_DAMAGED}")
    kind, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise FileError(f"{label} has the unknown dtype {_short(kind)}; {unknown_name(str(kind)[:40], list(DTYPES))}")
    if not _counts(shape) or len(shape) > MAX_RANK:
        raise FileError(f"{label} has the shape {_short(shape)}, not a list of up to {MAX_RANK} sizes; {_DAMAGED}")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FileError(f"{label} has the data_offsets {_short(offsets)}, not a beginning and an end; {_DAMAGED}")
    # NumPy raises even for an empty array if its other sizes multiply to more than 2**63 - 1.
    if math.prod(size for size in shape if size) * DTYPES[kind].itemsize > LARGEST:
        raise FileError(f"{label} has the shape {_short(shape)}, which is too large to count; {_DAMAGED}")
    bits, given = bits_of(kind) * math.prod(shape), offsets[1] - offsets[0]
    if bits != 8 * given:
        raise FileError(f"{label} of {kind} {_short(shape)} needs {bits / 8:g} bytes but has {given}; {_DAMAGED}")
    return Entry(kind, Info(DTYPES[kind], tuple(shape), given), offsets[0])


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= LARGEST for n in value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
