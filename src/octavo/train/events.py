"""TensorBoard event files, written without TensorBoard.

A file is a sequence of records, each `length, crc(length), bytes, crc(bytes)` as in TFRecord. The bytes are
`Event` messages in protobuf's wire format, of which a scalar needs so little that it is written here by hand:

    Event     wall_time = 1 (double)  step = 2 (int64)  file_version = 3 (string)  summary = 5  session_log = 7
    Summary   value = 1, repeated: tag = 1 (string)  simple_value = 2 (float)
    SessionLog  status = 1 (enum; START = 1)
"""

import math
import os
import re
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

_NAME = re.compile(r"events\.out\.tfevents\.(\d+)")


class EventWriter:
    """Writes scalars to a new event file in `directory`, each record as soon as it is there.

    Where a directory has event files already, the new one starts by telling TensorBoard to forget what they say about
    `start_step` and later steps.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     writer = EventWriter(directory)
    ...     writer.write(0, {"learning/loss": 2.5})
    ...     writer.close()
    ...     print(writer.path.name.split(".")[:3], writer.path.stat().st_size)
    ['events', 'out', 'tfevents'] 93
    """

    def __init__(self, directory: str | os.PathLike[str], *, start_step: int = 0):
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        earlier = [int(match[1]) for path in folder.iterdir() if (match := _NAME.match(path.name))]
        # TensorBoard reads files in the order of their names, so a later one needs a later time.
        stamp = max([int(time.time()), *(t + 1 for t in earlier)])
        self.path = folder / f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = self.path.open("xb", buffering=0)
        self._append(0, _bytes(3, b"brain.Event:2"))
        if earlier:
            self._append(start_step, _bytes(7, _number(1, 1)))

    def write(self, step: int, scalars: Mapping[str, int | float]) -> None:
        """One event with these scalars, which are kept as float32."""
        if scalars:
            values = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, x)) for tag, x in scalars.items())
            self._append(step, _bytes(5, values))

    def close(self) -> None:
        """Close the file; harmless when it is closed."""
        self._file.close()

    def _append(self, step: int, what: bytes) -> None:
        self._file.write(record(_key(1, 1) + struct.pack("<d", time.time()) + _number(2, step) + what))


def record(data: bytes) -> bytes:
    """The frame of one record: its length and itself, each with a masked checksum.

    >>> len(record(b"abc"))
    19
    """
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked(crc32c(length))) + data + struct.pack("<I", masked(crc32c(data)))


def masked(crc: int) -> int:
    """A checksum as records store it: rotated and shifted, so that data which holds checksums has good ones too."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """The checksum CRC-32C (Castagnoli, RFC 3720), which zlib does not have.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 * (byte & 1))
        table.append(byte)
    return table


_TABLE = _table()


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _key(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _number(field: int, value: int) -> bytes:
    return _key(field, 0) + _varint(value)


def _bytes(field: int, data: bytes) -> bytes:
    return _key(field, 2) + _varint(len(data)) + data


def _float(field: int, value: int | float) -> bytes:
    try:
        data = struct.pack("<f", value)
    except OverflowError:
        data = struct.pack("<f", math.copysign(math.inf, value))
    return _key(field, 5) + data
