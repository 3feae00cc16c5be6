"""The text of a serialized tf.train.Example, without TensorFlow.

An Example is nested protocol buffers: features (1) → a map (1) of name (1) to feature (2) → bytes_list (1) → value (1).
"""

from collections.abc import Iterator


def parse_text(record: bytes, column: str = "text") -> str:
    """The text of a column of a serialized tf.train.Example."""
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
    """The values of a length-delimited field; others are skipped."""
    index = 0
    while index < len(data):
        tag, index = _varint(data, index)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            _, index = _varint(data, index)
        elif wire_type == 2:
            size, index = _varint(data, index)
            if index + size > len(data):
                raise ValueError("truncated")
            if number == wanted:
                yield data[index : index + size]
            index += size
        elif wire_type in (1, 5):
            index += 8 if wire_type == 1 else 4
        else:
            raise ValueError("unknown wire type")


def _varint(data: bytes, index: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[index]
        value |= (byte & 0x7F) << shift
        index, shift = index + 1, shift + 7
        if byte < 0x80:
            return value, index
