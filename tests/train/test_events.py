"""Event files hold what TensorBoard expects, read by a decoder that shares nothing with the writer."""

import math
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.train.events import EventWriter, crc32c, masked, record


def checksum(data):
    """CRC-32C bit by bit, from its polynomial in the usual direction, against the table in the code."""
    reverse = lambda x, bits: int(f"{x:0{bits}b}"[::-1], 2)  # noqa: E731
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= reverse(byte, 8) << 24
        for _ in range(8):
            crc = ((crc << 1) ^ (0x1EDC6F41 if crc >> 31 else 0)) & 0xFFFFFFFF
    return reverse(crc ^ 0xFFFFFFFF, 32)


def unmask(value):
    rotated = (value - 0xA282EAD8) % 2**32
    return ((rotated >> 17) | (rotated << 15)) % 2**32


def records(data):
    at = 0
    while at < len(data):
        head, (length, check) = data[at : at + 8], struct.unpack_from("<QI", data, at)
        assert unmask(check) == checksum(head)
        body = data[at + 12 : at + 12 + length]
        assert unmask(struct.unpack_from("<I", data, at + 12 + length)[0]) == checksum(body)
        yield body
        at += 16 + length
    assert at == len(data)


def fields(message):
    """(number, value) of a protobuf message: numbers, bytes, or raw bytes of fixed width."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def take(count):
        nonlocal at
        at += count
        return message[at - count : at]

    readers = {0: varint, 1: lambda: take(8), 2: lambda: take(varint()), 5: lambda: take(4)}
    while at < len(message):
        key = varint()
        yield key >> 3, readers[key & 7]()


def events(path):
    for body in records(path.read_bytes()):
        event = dict(fields(body))
        values = [dict(fields(value)) for _, value in fields(event.pop(5, b""))]
        scalars = {value[1].decode(): struct.unpack("<f", value[2])[0] for value in values}
        yield struct.unpack("<d", event.pop(1))[0], event.pop(2), event, scalars


@pytest.mark.parametrize(
    ("data", "crc"),
    # RFC 3720, appendix B.4, and the check value of the CRC catalogues.
    [
        (b"\0" * 32, 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_known_checksums(data, crc):
    assert crc32c(data) == crc == checksum(data)


@given(st.binary(max_size=200))
def test_checksums_and_frames(data):
    assert crc32c(data) == checksum(data)
    assert unmask(masked(crc32c(data))) == crc32c(data)
    assert list(records(record(data))) == [data]


def test_file(tmp_path):
    writer = EventWriter(tmp_path / "tensorboard")
    before = time.time()
    writer.write(0, {"learning/loss": 2.5, "perf/µ": -0.1})
    writer.write(300, {"learning/loss": math.nan, "large": 1e300, "small": -1e300})
    writer.write(301, {})
    writer.close()
    writer.close()
    assert writer.path.name.startswith("events.out.tfevents.")
    first, second, third = events(writer.path)
    assert first[1:] == (0, {3: b"brain.Event:2"}, {})
    assert before <= second[0] <= time.time()
    assert second[1:] == (0, {}, {"learning/loss": 2.5, "perf/µ": pytest.approx(-0.1, rel=1e-6)})
    assert third[1] == 300
    assert math.isnan(third[3].pop("learning/loss"))
    assert third[3] == {"large": math.inf, "small": -math.inf}


def test_each_record_is_written_at_once(tmp_path):
    writer = EventWriter(tmp_path)
    writer.write(7, {"loss": 1.0})
    assert [event[1] for event in events(writer.path)] == [0, 7]
    writer.close()


def test_a_second_file_replaces_later_steps(tmp_path):
    paths = []
    for start in (0, 5):
        writer = EventWriter(tmp_path, start_step=start)
        writer.write(start, {"loss": 1.0})
        writer.close()
        paths.append(writer.path)
    assert sorted(tmp_path.iterdir()) == paths, "TensorBoard reads files by name, so names go by time"
    _, purge, again = events(paths[1])
    # session_log with the status START, which makes TensorBoard drop what it has of this step and later ones.
    assert purge[1:] == (5, {7: b"\x08\x01"}, {})
    assert again[1:] == (5, {}, {"loss": 1.0})


def test_protobuf_reads_it(tmp_path):
    """Google's own decoder, given the messages' definitions, finds the same."""
    pytest.importorskip("google.protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = {"double": 1, "float": 2, "int64": 3, "string": 9, "message": 11}
    file = descriptor_pb2.FileDescriptorProto(name="test_events.proto", package="test_events", syntax="proto3")
    for message, members in {
        "Value": [("tag", 1, "string", 1), ("simple_value", 2, "float", 1)],
        "Summary": [("value", 1, "message:Value", 3)],
        "Event": [
            ("wall_time", 1, "double", 1),
            ("step", 2, "int64", 1),
            ("file_version", 3, "string", 1),
            ("summary", 5, "message:Summary", 1),
        ],
    }.items():
        described = file.message_type.add(name=message)
        for name, number, kind, label in members:
            base, _, other = kind.partition(":")
            field = described.field.add(name=name, number=number, type=kinds[base], label=label)
            if other:
                field.type_name = f".test_events.{other}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    parse = message_factory.GetMessageClass(pool.FindMessageTypeByName("test_events.Event")).FromString

    writer = EventWriter(tmp_path)
    writer.write(123456789012, {"a": 1.5, "b": -2.0})
    writer.close()
    version, event = map(parse, records(writer.path.read_bytes()))
    assert version.file_version == "brain.Event:2"
    assert event.step == 123456789012
    assert {v.tag: v.simple_value for v in event.summary.value} == {"a": 1.5, "b": -2.0}


def test_tensorboard_reads_it(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for start, stop, value in ((0, 8, 1.0), (5, 10, 2.0)):
        writer = EventWriter(tmp_path, start_step=start)
        for step in range(start, stop):
            writer.write(step, {"learning/loss": value})
        writer.close()
    found = accumulator.EventAccumulator(str(tmp_path)).Reload().Scalars("learning/loss")
    assert [(s.step, s.value) for s in found] == [(i, 1.0) for i in range(5)] + [(i, 2.0) for i in range(5, 10)]
