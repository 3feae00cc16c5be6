"""The text in a serialized tf.train.Example, read without TensorFlow.

An Example is nested protocol buffers: features (1) → a map (1) of name (1) to feature (2) → bytes_list (1) → value (1).
"""

from collections.abc import Iterator


def text_in(record: bytes, column: str = "text") -> str:
    """The text of one column of a serialized tf.train.Example."""
    columns = {}
    try:
        for features in _fields(record, 1):
            for entry in _fields(features, 1):
                name = b"".join(_fields(entry, 1)).decode()
                columns[name] = [
                    value for feature in _fields(entry, 2) for held in _fields(feature, 1) for value in _fields(held, 1)
                ]
    except (IndexError, ValueError):
        raise ValueError(f"a record of {len(record)} bytes is no tf.train.Example") from None
    if not columns.get(column):
        raise ValueError(f"a record has no text in {column!r}; its columns are {', '.join(sorted(columns)) or 'none'}")
    return b"".join(columns[column]).decode("utf-8", errors="replace")


def _fields(data: bytes, wanted: int) -> Iterator[bytes]:
    """The values of a field that has a length, and nothing of the others."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            _, place = _varint(data, place)
        elif kind == 2:
            size, place = _varint(data, place)
            if place + size > len(data):
                raise ValueError("cut short")
            if number == wanted:
                yield data[place : place + size]
            place += size
        elif kind in (1, 5):
            place += 8 if kind == 1 else 4
        else:
            raise ValueError("unknown kind of field")


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
