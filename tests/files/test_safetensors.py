"""Safetensors: both ways the bytes of the reference implementation, and one tensor in memory at a time."""

import json
import os
import tracemalloc

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from octavo.files import FileError
from octavo.files.safetensors import Info, Lazy, SafeTensors, write
from octavo.files.safetensors.dtypes import DTYPES, bits_of, encode, name_of
from octavo.files.safetensors.read import INDEX
from tests.files.common import entry, raw

# What the reference implementation calls dtypes where it takes them, if not by NumPy's name.
THEIRS = {"F4": "float4_e2m1fn_x2"}
MISSING = ("F6_E2M3", "F6_E3M2")  # it only reads these


def values(kind, shape, rng):
    """Random bits of a dtype."""
    dtype = DTYPES[kind]
    top = 2 if kind == "BOOL" else 2 ** min(8, bits_of(kind))
    return rng.integers(0, top, (*shape, dtype.itemsize)).astype(np.uint8).view(dtype).reshape(shape)


def one_of_each(kinds=DTYPES):
    rng = np.random.default_rng(0)
    return {f"layer.{i}": values(kind, (4, 6), rng) for i, kind in enumerate(kinds)}


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_every_dtype_goes_there_and_back(tmp_path):
    tensors = one_of_each()
    write(tmp_path / "x.safetensors", tensors, {"format": "pt"})
    with SafeTensors(tmp_path / "x.safetensors") as file:
        assert file.metadata == {"format": "pt"}
        assert set(file.names()) == set(tensors)
        assert file.nbytes == sum(encode(x).size for x in tensors.values())
        for name, x in tensors.items():
            assert file.info(name) == Info.of(x)
            assert same(file.read(name), x)


def test_the_reference_implementation_reads_the_same_bytes(tmp_path):
    tensors = one_of_each()
    write(tmp_path / "x.safetensors", tensors)
    theirs = dict(safetensors.deserialize((tmp_path / "x.safetensors").read_bytes()))
    assert theirs.keys() == tensors.keys()
    for name, x in tensors.items():
        assert theirs[name]["dtype"] == name_of(x.dtype)
        assert tuple(theirs[name]["shape"]) == x.shape
        assert bytes(theirs[name]["data"]) == encode(x).tobytes()


@given(kinds=st.lists(st.sampled_from([k for k in DTYPES if k not in MISSING]), max_size=8), seed=st.integers(0, 99))
def test_files_are_the_reference_implementations_to_the_byte(kinds, seed, tmp_path_factory):
    rng = np.random.default_rng(seed)
    tensors = {f"{rng.integers(99)}.ä{i}": values(k, rng.integers(0, 4, 2) * 2, rng) for i, k in enumerate(kinds)}
    path = tmp_path_factory.mktemp("bytes") / "x.safetensors"
    write(path, tensors, {"format": "pt"})
    data = {name: encode(x) for name, x in tensors.items()}
    specs = {}
    for name, x in tensors.items():
        kind = name_of(x.dtype)
        shape = (*x.shape[:-1], x.shape[-1] // 2) if kind == "F4" else x.shape
        where = {"data_ptr": data[name].ctypes.data, "data_len": data[name].nbytes}
        specs[name] = safetensors.TensorSpec(dtype=THEIRS.get(kind, x.dtype.name), shape=shape, **where)
    assert path.read_bytes() == bytes(safetensors.serialize(specs, metadata={"format": "pt"}))


def test_numpy_files_of_the_reference_implementation(tmp_path):
    rng = np.random.default_rng(1)
    tensors = {kind: values(kind, (3, 4), rng) for kind in ("F32", "F16", "F64", "I64", "U8", "BOOL", "I16")}
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors", {"a": "b"})
    file = SafeTensors(tmp_path / "x.safetensors")
    assert file.metadata == {"a": "b"}
    assert all(same(file.read(name), x) for name, x in tensors.items())
    write(tmp_path / "y.safetensors", tensors)
    loaded = safetensors.numpy.load_file(tmp_path / "y.safetensors")
    assert all(same(loaded[name], x) for name, x in tensors.items())


def test_four_bit_floats_lie_low_half_first(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw({"x": entry("F4", (2, 2), (0, 2))}, bytes([0x21, 0xF7])))
    assert SafeTensors(path).read("x").astype(np.float32).tolist() == [[0.5, 1.0], [6.0, -6.0]]


def test_jax_arrays_scalars_and_empty_arrays(tmp_path):
    tensors = {"j": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), "s": np.float32(3), "e": np.zeros((0, 5), np.int8)}
    write(tmp_path / "x.safetensors", tensors)
    file = SafeTensors(tmp_path / "x.safetensors")
    assert file.read("j").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert file.read("s").shape == ()
    assert file.read("e").shape == (0, 5)
    write(tmp_path / "none.safetensors", {})
    assert SafeTensors(tmp_path / "none.safetensors").names() == []


def test_arrays_that_are_not_contiguous(tmp_path):
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    write(tmp_path / "x.safetensors", {"t": x.T, "s": x[:, ::2], "n": x.astype(ml_dtypes.float4_e2m1fn).T})
    file = SafeTensors(tmp_path / "x.safetensors")
    assert np.array_equal(file.read("t"), x.T)
    assert np.array_equal(file.read("s"), x[:, ::2])
    assert np.array_equal(file.read("n"), x.astype(ml_dtypes.float4_e2m1fn).T)


def test_shards(tmp_path):
    tensors = {f"layer.{i}": np.full(100, i, np.float32) for i in range(7)}
    write(tmp_path, tensors, {"format": "pt"}, max_shard_bytes=1000)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [*(f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)), INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 2800}
    for path in (tmp_path, tmp_path / INDEX):
        with SafeTensors(path) as file:
            assert set(file.names()) == set(tensors)
            assert file.metadata == {"format": "pt"}
            assert all(same(file.read(name), x) for name, x in tensors.items())
    # What was there before does not hide what is written over it.
    write(tmp_path, {"only": np.zeros(3, np.int8)})
    assert SafeTensors(tmp_path).names() == ["only"]


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(tmp_path):
    write(tmp_path, {"big": np.zeros(100, np.int8), "small": np.zeros(1, np.int8)}, max_shard_bytes=10)
    assert SafeTensors(tmp_path).info("big").shape == (100,)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    count, size = 20, 2**20
    info = Info.make(np.float32, (size,))
    lazy = {f"layer.{i}": Lazy(info, lambda i=i: np.full(size, i, np.float32)) for i in range(count)}
    tracemalloc.start()
    try:
        write(tmp_path, lazy, max_shard_bytes=5 * info.nbytes)
        with SafeTensors(tmp_path) as file:
            assert all(file.read(name)[-1] == i for i, name in enumerate(lazy))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * info.nbytes


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "x.safetensors"
    write(path, {"x": np.asarray([1], np.int8)})

    def fail():
        raise RuntimeError("no such layer")

    with pytest.raises(RuntimeError, match="no such layer"):
        write(path, {"x": np.asarray([2], np.int8), "y": Lazy(Info.make(np.int8, (1,)), fail)})
    assert os.listdir(tmp_path) == ["x.safetensors"]
    assert SafeTensors(path).read("x").tolist() == [1]


@pytest.mark.parametrize(("dtype", "size"), [(np.int8, 3), (np.int16, 2)])
def test_what_is_loaded_is_what_was_announced(tmp_path, dtype, size):
    lazy = Lazy(Info.make(np.int8, (2,)), lambda: np.zeros(size, dtype))
    message = rf"'x' was to be int8 \[2\] but is {np.dtype(dtype).name} \[{size}\]"
    with pytest.raises(FileError, match=message):
        write(tmp_path / "x.safetensors", {"x": lazy})
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written(tmp_path):
    x = np.zeros(2, np.int8)
    for tensors, metadata, message in [
        ({"x": x.astype(ml_dtypes.int4)}, None, "no dtype for int4; pack the codes, see octavo.files.layouts"),
        ({"x": np.zeros(2, "U3")}, None, "safetensors has no dtype for str"),
        ({"x": np.zeros(3, ml_dtypes.float4_e2m1fn)}, None, "3 values of F4 do not fill whole bytes"),
        ({"__metadata__": x}, None, "a tensor cannot be called __metadata__"),
        ({"\ud800": x}, None, "not text that UTF-8 can hold"),
        ({"x": x}, {"a": 1}, "metadata is from strings to strings"),
    ]:
        with pytest.raises(FileError, match=message):
            write(tmp_path / "x.safetensors", tensors, metadata)
        assert not list(tmp_path.iterdir())
    with pytest.raises(FileError, match="is one file; to write shards, give a folder"):
        write(tmp_path / "x.safetensors", {"x": x}, max_shard_bytes=1)
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match=r"cannot write .*file"):
        write(tmp_path / "file" / "x.safetensors", {"x": x})
