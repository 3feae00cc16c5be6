"""Whatever a safetensors file or an index has in it, nothing but a FileError comes out."""

import json
import os

import numpy as np
import pytest
import safetensors
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.files import FileError, SafeTensors
from octavo.files.safetensors import write
from octavo.files.safetensors.read import INDEX
from tests.files.common import entry, raw

BIG = 2**62
# A header, the bytes after it, and what the error says.
REFUSED = {
    "hole before": ({"x": entry(offsets=(4, 12))}, 12, "'x' at byte 4 leaves a hole after the header, which ends at 0"),
    "hole": ({"x": entry(), "y": entry(offsets=(9, 17))}, 17, "'y' at byte 9 leaves a hole after 'x', which ends at 8"),
    "overlap": ({"x": entry(), "y": entry(offsets=(4, 12))}, 12, "'y' at byte 4 overlaps 'x', which ends at 8"),
    "twice": ({"x": entry(), "y": entry()}, 8, "'y' at byte 0 overlaps 'x'"),
    "truncated": ({"x": entry()}, 7, "the header declares 8 bytes of tensors but only 7 bytes follow: it is truncated"),
    "too long": ({"x": entry()}, 9, "the header declares 8 bytes of tensors but 9 bytes follow"),
    "wrong size": ({"x": entry(shape=(3,))}, 8, r"of F32 \[3\] needs 12 bytes but has 8"),
    "half a byte": ({"x": entry("F4", (3,), (0, 1))}, 1, r"of F4 \[3\] needs 1.5 bytes but has 1"),
    "dtype": ({"x": entry("F33")}, 8, "unknown dtype 'F33'; did you mean 'F32', .* Known: BF16, BOOL"),
    "no dtype": ({"x": entry(None)}, 8, "unknown dtype None"),
    "negative": ({"x": entry(shape=(-1, -2))}, 8, r"the shape \[-1, -2\], not a list of up to 64 sizes"),
    "bool": ({"x": entry(shape=(True, 2))}, 8, "not a list of up to 64 sizes"),
    "float": ({"x": entry(shape=(2.0,))}, 8, "not a list of up to 64 sizes"),
    "rank": ({"x": entry(shape=(1,) * 65)}, 8, "not a list of up to 64 sizes"),
    "overflow": ({"x": entry(shape=(BIG, 4, BIG))}, 8, "too large to count"),
    "overflow of nothing": ({"x": entry(shape=(BIG, 0, BIG), offsets=(0, 0))}, 0, "too large to count"),
    "beyond 64 bits": ({"x": entry(shape=(2**64,))}, 8, "not a list of up to 64 sizes"),
    "reversed": ({"x": entry(offsets=(8, 0))}, 8, r"data_offsets \[8, 0\], not a beginning and an end"),
    "three": ({"x": entry(offsets=(0, 8, 8))}, 8, "not a beginning and an end"),
    "keys": ({"x": entry() | {"more": 1}}, 8, "has dtype, shape and data_offsets, got"),
    "no keys": ({"x": {}}, 8, "has dtype, shape and data_offsets, got {}"),
    "not a table": ({"x": 3}, 8, "has dtype, shape and data_offsets, got 3"),
    "metadata": ({"__metadata__": {"a": 1}}, 0, "__metadata__ is an object of strings"),
    "metadata list": ({"__metadata__": []}, 0, r"__metadata__ is an object of strings, got \[\]"),
    "list": (b"[]", 0, "the header does not begin with '{'"),
    "space": (b" {}", 0, "the header does not begin with '{'"),
    "empty": (b"", 0, "the header does not begin with '{'"),
    "not JSON": (b"{a}", 0, "the header is not JSON"),
    "NaN": (b'{"x": NaN}', 0, "the header is not JSON .Out of range float"),
    "duplicate": (b'{"x": {}, "x": {}}', 0, "the header is not JSON .the key 'x' is there twice"),
    "inner duplicate": (
        b'{"x": {"dtype": 1, "dtype": 2}}',
        0,
        "the header is not JSON .the key 'dtype' is there twice",
    ),
    "not UTF-8": (b'{"\xff": {}}', 0, "the header is not JSON"),
    "surrogate": (b'{"\\ud800": {}}', 0, "the header is not JSON"),
    "deep": (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0, "the header is not JSON .it is nested too deeply"),
    "digits": (b'{"x": ' + b"1" * 10_000 + b"}", 0, "the header is not JSON"),
    "bytes of BOOL": ({"x": entry("BOOL", (2,), (0, 2))}, b"\1\2", "is BOOL but has bytes other than 0 and 1"),
}


def read_all(path):
    """All the tensors of a file, which is what a program would do with it."""
    with SafeTensors(path) as file:
        return {name: file.read(name) for name in file.names()}


@pytest.mark.parametrize("case", REFUSED)
def test_errors(case, tmp_path):
    header, data, message = REFUSED[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw(header, data if isinstance(data, bytes) else bytes(data)))
    with pytest.raises(FileError, match=message) as info:
        read_all(path)
    assert str(path) in str(info.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is truncated: the length of the header"),
        (b"1234567", "is truncated: the length of the header"),
        ((99).to_bytes(8, "little") + b"{}", "is truncated: the header"),
        ((2**63).to_bytes(8, "little") + b"{}", "a header of 9223372036854775808 bytes is over 100000000"),
        ((100_000_001).to_bytes(8, "little"), "a header of 100000001 bytes is over 100000000; is this safetensors?"),
    ],
)
def test_no_header(data, message, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(FileError, match=message):
        SafeTensors(path)


def valid():
    header = {
        "__metadata__": {"format": "pt"},
        "a": entry("F32", (2, 2), (0, 16)),
        "b": entry("F4", (4,), (16, 18)),
        "c": entry("BOOL", (2,), (18, 20)),
        "d": entry("I8", (0, 3), (20, 20)),
    }
    return raw(header, bytes(20))


def check(data, folder):
    """Bytes are a file that reads whole, and then the reference implementation accepts it too, or a FileError."""
    path = folder / "x.safetensors"
    path.write_bytes(data)
    try:
        read_all(path)
    except FileError:
        return
    safetensors.deserialize(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@settings(max_examples=150)
@given(data=st.binary(max_size=200))
@example(data=bytes(8))
def test_random_bytes(data, folder):
    check(data, folder)
    check(raw(b"{" + data), folder)


@settings(max_examples=150)
@given(
    edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3),
    cut=st.integers(0, 400) | st.none(),
    more=st.binary(max_size=8),
)
def test_changed_bytes(edits, cut, more, folder):
    data = bytearray(valid())
    for place, value in edits:
        data[place % len(data)] = value
    check(bytes(data[:cut]) + more, folder)


numbers = st.integers(-2, 40) | st.sampled_from([2**31, 2**32, 2**63 - 1, 2**63, 2**64]) | st.booleans() | st.floats()
json_values = st.none() | numbers | st.text(max_size=4) | st.lists(numbers, max_size=3)


@settings(max_examples=150)
@given(
    path=st.sampled_from([("a",), ("b",), ("c", "shape"), ("a", "dtype"), ("a", "data_offsets"), ("b", "shape")]),
    value=json_values | st.dictionaries(st.text(max_size=3), json_values, max_size=3),
    item=st.integers(0, 1),
)
def test_changed_headers(path, value, item, folder):
    data = valid()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    place = header
    for key in path[:-1]:
        place = place[key]
    inner = place[path[-1]]
    if isinstance(inner, list) and not isinstance(value, list | dict):
        inner[item % len(inner)] = value
    else:
        place[path[-1]] = value
    check(raw(json.dumps(header).encode(), data[8 + length :]), folder)


def test_a_file_that_becomes_shorter_is_an_error_and_not_a_signal(tmp_path):
    path = tmp_path / "x.safetensors"
    write(path, {"x": np.zeros(10_000, np.float32)})
    with SafeTensors(path) as file:
        os.truncate(path, 20_000)
        with pytest.raises(FileError, match="was truncated while it was read, at tensor 'x'"):
            file.read("x")


def test_a_closed_file_and_a_wrong_name(tmp_path):
    write(tmp_path / "x.safetensors", {"model.norm.weight": np.zeros(1, np.float32)})
    with SafeTensors(tmp_path / "x.safetensors") as file:
        with pytest.raises(FileError, match=r"no tensor 'model.norm.weigth'; did you mean 'model.norm.weight'\?"):
            file.info("model.norm.weigth")
        with pytest.raises(FileError, match="no tensor 'z'; it has 1 others"):
            file.read("z")
    with pytest.raises(FileError, match="is closed"):
        file.read("model.norm.weight")


def index(folder, weights):
    (folder / INDEX).write_text(json.dumps({"weight_map": weights}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../x.safetensors", "a shard is a file next to the index"),
        ("/etc/x.safetensors", "a shard is a file next to the index"),
        ("a/../../x.safetensors", "a shard is a file next to the index"),
        ("..", "a shard is a file next to the index"),
        ("", "a shard is a file next to the index"),
        ("..\\x.safetensors", "a shard is a file next to the index"),
        ("x\0.safetensors", "a shard is a file next to the index"),
        ("pytorch_model.bin", "only .safetensors files are read, never pickles"),
        ("gone.safetensors", "there is no such file"),
    ],
)
def test_shards_are_next_to_the_index(name, message, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    write(tmp_path / "x.safetensors", {"x": np.zeros(1)})
    index(folder, {"x": name})
    with pytest.raises(FileError, match=message):
        SafeTensors(folder)


def test_links_do_not_lead_out(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    write(tmp_path / "secret.safetensors", {"x": np.zeros(1)})
    (folder / "model.safetensors").symlink_to("../secret.safetensors")
    with pytest.raises(FileError, match="is a link to outside of the folder; copy the file there"):
        SafeTensors(folder)
    index(folder, {"x": "model.safetensors"})
    with pytest.raises(FileError, match="is a link to outside of the folder"):
        SafeTensors(folder)
    # Within the folder they may.
    write(folder / "real.safetensors", {"x": np.ones(1)})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("real.safetensors")
    assert SafeTensors(folder).read("x") == 1


def test_the_cache_of_the_hub_has_links_to_its_blobs(tmp_path):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    write(blobs / "x.safetensors", {"x": np.ones(1)})
    (blobs / "x.safetensors").rename(blobs / "4567")
    (snapshot / "model.safetensors").symlink_to("../../blobs/4567")
    assert SafeTensors(snapshot).read("x") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "is not a JSON object"),
        ("{}", "has no weight_map from names of tensors to files"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"x": 1}}', "has no weight_map"),
        ('{"weight_map": {"x": "a", "x": "b"}}', "the key 'x' is there twice"),
        ("", "is not JSON"),
    ],
)
def test_indexes_that_are_not(text, message, tmp_path):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(FileError, match=message):
        SafeTensors(tmp_path)


def test_an_index_that_is_wrong_about_its_shards(tmp_path):
    write(tmp_path / "a.safetensors", {"x": np.zeros(1)})
    index(tmp_path, {"x": "a.safetensors", "y": "a.safetensors"})
    with pytest.raises(FileError, match=r"the index has 'y' in a\.safetensors, which does not have it"):
        SafeTensors(tmp_path)


@settings(max_examples=50)
@given(weights=st.dictionaries(st.text(max_size=3), st.text(max_size=6) | json_values, max_size=3))
def test_random_indexes(weights, folder):
    (folder / "index").mkdir(exist_ok=True)
    index(folder / "index", weights)
    with pytest.raises(FileError):
        SafeTensors(folder / "index")


def test_folders(tmp_path):
    with pytest.raises(FileError, match="has no safetensors file; is this the folder of the model"):
        SafeTensors(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileError, match=r"has only pickles \(pytorch_model.bin\), which may run code; convert it to"):
        SafeTensors(tmp_path)
    with pytest.raises(FileError, match="is a pickle, which may run code when it is read; convert it to safetensors"):
        SafeTensors(tmp_path / "pytorch_model.bin")
    write(tmp_path / "a.safetensors", {"x": np.zeros(1)})
    assert SafeTensors(tmp_path).names() == ["x"]
    write(tmp_path / "b.safetensors", {"x": np.zeros(1)})
    with pytest.raises(FileError, match=r"has 2 safetensors files and no model\.safetensors\.index\.json; give one of"):
        SafeTensors(tmp_path)


def test_what_is_not_a_file(tmp_path):
    with pytest.raises(FileError, match="there is no such file"):
        SafeTensors(tmp_path / "gone.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(FileError, match="is not a regular file"):
        SafeTensors(tmp_path / "pipe.safetensors")
