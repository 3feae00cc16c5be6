"""Reading the header: what is right is read, and whatever is wrong is a FileError, at once and without much memory."""

import resource
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.files import FileError
from octavo.files.gguf import Gguf, Tensor, tokenizer_of, write_gguf


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def info(name, dims, kind=0, offset=0, rank=None):
    rank = len(dims) if rank is None else rank
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", rank, *dims, kind, offset)


def build(*, pairs=(), tensors=(), data=b"", magic=b"GGUF", version=3, counts=None, align=32):
    """A file, made by hand: `pairs` and `tensors` are bytes already."""
    n_tensors, n_pairs = counts or (len(tensors), len(pairs))
    head = magic + struct.pack("<IQQ", version, n_tensors, n_pairs) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % align) + data


def pair(key, kind, payload):
    return text(key) + struct.pack("<I", kind) + payload


FLOATS = np.arange(8, dtype=np.float32).tobytes()


@pytest.fixture
def opened(tmp_path):
    def make(data):
        path = tmp_path / "m.gguf"
        path.write_bytes(data)
        return Gguf(path)

    return make


@pytest.mark.parametrize("align", [8, 4096])
def test_other_alignments_are_read(align, opened):
    pairs = [pair("general.alignment", 4, struct.pack("<I", align))]
    tensors = [info("w", (2,)), info("x", (6,), offset=align)]
    data = FLOATS[:8] + bytes(align - 8) + FLOATS[8:]
    file = opened(build(pairs=pairs, tensors=tensors, data=data, align=align))
    assert (file.alignment, file.read("w").tolist(), file.read("x").tolist()) == (align, [0, 1], [2, 3, 4, 5, 6, 7])


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_made_by_hand(version, opened):
    pairs = [
        pair("a.b", 4, struct.pack("<I", 7)),
        pair("s", 8, text("héllo")),
        pair("l", 9, struct.pack("<IQ", 8, 2) + text("x") + text("")),
        pair("n", 9, struct.pack("<IQ", 9, 2) + struct.pack("<IQ2b", 1, 2, -1, 5) + struct.pack("<IQ", 6, 0)),
    ]
    tensors = [info("w", (4, 2)), info("scalar", (), offset=32)]
    file = opened(build(version=version, pairs=pairs, tensors=tensors, data=FLOATS + struct.pack("<f", 9.0)))
    assert (file.version, file.alignment, file.names()) == (version, 32, ["w", "scalar"])
    assert file.metadata["a.b"] == 7
    assert type(file.metadata["a.b"]) is int
    assert file.metadata["s"] == "héllo"
    assert file.metadata["l"] == ["x", ""]
    assert [x.tolist() for x in file.metadata["n"]] == [[-1, 5], []]
    assert file.info("w").shape == (2, 4)
    assert file.read("w").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert file.read("scalar").shape == ()
    assert repr(file).endswith("m.gguf': 2 tensors, 4 metadata)")
    with pytest.raises(FileError, match=r"has no tensor 'wq'; did you mean 'w'\?"):
        file.info("wq")
    file.close()
    with pytest.raises(FileError, match="is closed"):
        file.read("w")


def test_headers_longer_than_what_is_read_at_once(opened):
    words = [f"word{i}" * (i % 40) for i in range(30_000)]
    array = struct.pack("<IQ", 8, len(words)) + b"".join(map(text, words))
    numbers = np.arange(400_000, dtype=np.int32)
    pairs = [pair("w", 9, array), pair("n", 9, struct.pack("<IQ", 5, numbers.size) + numbers.tobytes())]
    file = opened(build(pairs=pairs, tensors=[info("t", (8,))], data=FLOATS))
    assert file.metadata["w"] == words
    assert np.array_equal(file.metadata["n"], numbers)
    assert file.read("t").tolist() == list(range(8))


BAD = {
    "nothing": (b"", r"is truncated: the magic number needs bytes 0 to 4 of 0"),
    "magic": (build(magic=b"GGML"), r"is not a GGUF file: it does not begin with 'GGUF'"),
    "version 1": (build(version=1), r"is GGUF of version 1; known are 2 and 3: convert it again with llama\.cpp"),
    "big-endian": (build(version=3 << 24), r"is GGUF of version 50331648; known are 2 and 3: it is a big-endian file"),
    "short": (build()[:12], r"is truncated: the number of tensors needs bytes"),
    "tensors": (build(counts=(1 << 60, 0)), r"declares 1152921504606846976 tensors, more than fit in the"),
    "pairs": (build(counts=(0, 1 << 33)), r"declares 8589934592 metadata entries, more than fit"),
    "key": (build(pairs=[struct.pack("<Q", 1 << 62) + bytes(99)]), r"a key of the metadata is a text of 4611686018427"),
    "utf-8": (build(pairs=[pair("k", 8, text(b"\xff\xfe"))]), r"metadata 'k' is not UTF-8"),
    "twice": (build(pairs=[pair("k", 0, b"\1")] * 2), r"metadata 'k' is given twice"),
    "type": (build(pairs=[pair("k", 13, bytes(8))]), r"metadata 'k' is of type 13, which does not exist"),
    "item type": (
        build(pairs=[pair("k", 9, struct.pack("<IQ", 99, 1))]),
        r"metadata 'k' is an array of type 99, which does not exist",
    ),
    "bool": (build(pairs=[pair("k", 7, b"\2")]), r"metadata 'k' is a bool that is neither 0 nor 1"),
    "values": (
        build(pairs=[pair("k", 9, struct.pack("<IQ", 10, 1 << 61))]),
        r"declares 2305843009213693952 values in metadata 'k', more than fit",
    ),
    "texts": (build(pairs=[pair("k", 9, struct.pack("<IQ", 8, 1 << 50))]), r"texts in metadata 'k', more than fit"),
    "deep": (
        build(pairs=[pair("k", 9, struct.pack("<IQ", 9, 1) * 50 + bytes(12))]),
        r"metadata 'k' has arrays in arrays deeper than 4",
    ),
    "alignment type": (build(pairs=[pair("general.alignment", 8, text("8"))]), r"general.alignment should be a uint32"),
    "alignment": (
        build(pairs=[pair("general.alignment", 4, struct.pack("<I", 48))]),
        r"general\.alignment is 48, not a power of two",
    ),
    "alignment 0": (build(pairs=[pair("general.alignment", 4, bytes(4))]), r"general\.alignment is 0, not a power"),
    "rank": (build(tensors=[info("w", (), rank=5) + bytes(64)]), r"tensor 'w' has 5 axes, and at most 4 are allowed"),
    "unknown type": (
        build(tensors=[info("w", (8,), kind=77)], data=FLOATS),
        r"is of type 77, unknown\. Known: F32",
    ),
    "removed type": (
        build(tensors=[info("w", (32,), kind=31)], data=FLOATS),
        r"tensor 'w' is of type 31, Q4_0_4_4, which ggml removed: quantize the model again",
    ),
    "overflow": (
        build(tensors=[info("w", (1 << 32, 1 << 32, 4))], data=FLOATS),
        r"tensor 'w' has shape \(4, 4294967296, 4294967296\), more than the file of \d+ bytes can hold",
    ),
    "zero": (build(tensors=[info("w", (1 << 60, 0))]), r"tensor 'w' has shape \(0, \d+\), with an axis of length 0"),
    "rows": (
        build(tensors=[info("w", (16, 2), kind=8)], data=bytes(34)),
        r"tensor 'w' has rows of 16, not a multiple of 32 as Q8_0 needs",
    ),
    "unaligned": (build(tensors=[info("w", (4,), offset=4)], data=FLOATS), r"'w' is at offset 4, not a multiple of 32"),
    "outside": (
        build(tensors=[info("w", (8,), offset=32)], data=FLOATS),
        r"is truncated: tensor 'w' needs",
    ),
    "far outside": (build(tensors=[info("w", (8,), offset=(1 << 64) - 32)], data=FLOATS), r"is truncated: tensor 'w'"),
    "cut": (build(tensors=[info("w", (8,))], data=FLOATS[:-1]), r"is truncated: tensor 'w' needs bytes"),
    "same name": (
        build(tensors=[info("w", (8,)), info("w", (8,), offset=32)], data=FLOATS * 2),
        r"tensor 'w' is given twice",
    ),
    "overlap": (
        build(tensors=[info("w", (16,)), info("v", (8,), offset=32)], data=FLOATS * 2),
        r"tensors 'w' and 'v' overlap",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_said(case, opened):
    data, message = BAD[case]
    with pytest.raises(FileError, match=message):
        opened(data)


def test_long_names_are_cut_short_in_errors(opened):
    with pytest.raises(FileError) as error:
        opened(build(pairs=[pair("k" * 60_000, 13, b"")]))
    assert len(str(error.value)) < 400


def test_a_file_that_became_shorter_is_an_error(opened, tmp_path):
    file = opened(build(tensors=[info("w", (8,))], data=FLOATS))
    with (tmp_path / "m.gguf").open("r+b") as other:
        other.truncate(80)
    with pytest.raises(FileError, match="was truncated while it was read, at w"):
        file.read("w")


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    metadata = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "\u2581", "a", "\u2581a"],
        "tokenizer.ggml.scores": np.float32([0, 0, -1, -2, -0.5]),
        "tokenizer.ggml.token_type": np.int32([2, 3, 1, 1, 1]),
        "nested": [np.uint8([1]), np.uint8([2, 3])],
    }
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    write_gguf(path, metadata, {"a": x, "b": Tensor(x, "Q8_0"), "c": Tensor(x, "Q4_0"), "d": Tensor(x, "F16")})
    return path.read_bytes()


def use(path, data, *, deep=True):
    """All that can be done with a file; errors other than FileError come out."""
    path.write_bytes(data)
    try:
        with Gguf(path) as file:
            for name in file.names():
                for read in (file.read, file.read_quantized) if deep else (file.read,):
                    try:
                        read(name)
                    except FileError:
                        continue
            if deep:
                tokenizer_of(file).tokenizer.encode("a a")
    except FileError:
        return False
    return True


def test_the_valid_file_is_used(valid, tmp_path):
    assert use(tmp_path / "m.gguf", valid)


def test_every_truncation_raises(valid, tmp_path):
    path = tmp_path / "m.gguf"
    last = len(valid) - len(valid) % 32  # padding after the last tensor may be missing
    assert not any(use(path, valid[:size]) for size in range(0, last - 128, 7))


@given(st.binary(max_size=200))
def test_random_bytes_raise(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "random.gguf"
    for head in (b"", b"GGUF\3\0\0\0", b"GGUF\3\0\0\0\1" + bytes(7), b"GGUF\2\0\0\0" + bytes(8) + b"\1" + bytes(7)):
        use(path, head + data)


@given(st.data())
def test_damage_anywhere_is_an_error_or_another_file(tmp_path_factory, valid, data):
    path, broken = tmp_path_factory.getbasetemp() / "broken.gguf", bytearray(valid)
    special = st.sampled_from([0, 1, 2, 8, 9, 127, 128, 255])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(broken) - 9))
        width = data.draw(st.sampled_from([1, 4, 8]))
        value = data.draw(st.one_of(special, st.integers(0, 256**width - 1)))
        broken[at : at + width] = (value % 256**width).to_bytes(width, "little")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    use(path, bytes(broken))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "a few bytes took 64 MiB"


def test_every_byte_of_the_header_set_to_extremes(valid, tmp_path):
    with_data = [
        at
        for at in range(valid.index(b"general"), valid.index(b"\1\0\0\0\0\0\0\0d") + 40)
        if use(tmp_path / "m.gguf", valid[:at] + b"\xff" + valid[at + 1 :], deep=False)
    ]
    assert 20 < len(with_data) < 200  # numbers of the metadata may be others, and texts are no longer UTF-8
