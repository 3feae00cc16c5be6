"""write_gguf: what was given is read back, tensor by tensor, and the file is there when it is whole."""

import tracemalloc

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo.files import FileError
from octavo.files.gguf import Gguf, Tensor, write_gguf
from octavo.files.gguf.header import SCALARS
from octavo.qarray import QArray

METADATA = {
    "u8": np.uint8(200), "i8": np.int8(-3), "u16": np.uint16(60000), "i16": np.int16(-300),
    "u32": np.uint32(4_000_000_000), "i32": np.int32(-70000),
    "f32": np.float32(0.1), "bool": np.bool_(True), "u64": np.uint64(1 << 63),
    "i64": np.int64(-(1 << 40)), "f64": np.float64(0.1),
    "text": "naïve \u2581 🎉", "empty": "",
    "texts": ["a", "", "\u00e9"], "numbers": np.arange(5, dtype=np.int16), "flags": np.array([True, False]),
    "none": np.zeros(0, np.float32), "nested": [np.arange(2, dtype=np.uint8), np.arange(3, dtype=np.uint8)],
    "no texts": np.array([], dtype=str),
}  # fmt: skip


def read_back(path, metadata, tensors):
    write_gguf(path, metadata, tensors)
    return Gguf(path)


def test_metadata_of_all_types(tmp_path):
    with read_back(tmp_path / "a.gguf", METADATA, {}) as file:
        typed = file.typed_metadata()
        assert list(typed) == list(METADATA)
        for key, value in METADATA.items():
            if isinstance(value, np.generic):
                assert typed[key].dtype == value.dtype
                assert typed[key] == value
                assert not isinstance(file.metadata[key], np.generic)
        assert file.metadata["text"] == METADATA["text"]
        assert file.metadata["texts"] == METADATA["texts"]
        assert file.metadata["no texts"] == []
        assert file.metadata["numbers"].dtype == np.int16
        assert file.metadata["flags"].tolist() == [True, False]
        assert [x.tolist() for x in file.metadata["nested"]] == [[0, 1], [0, 1, 2]]
        write_gguf(tmp_path / "b.gguf", typed | {"no texts": METADATA["no texts"]}, {})
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_the_bytes_are_those_of_the_reference_writer(tmp_path):
    # It writes no empty arrays, and lists in lists as int32 only.
    values = {key: value for key, value in METADATA.items() if key not in ("none", "no texts", "nested")}
    x = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    tensors = {kind: Tensor(x, kind) for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0")}
    writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", "llama")
    types = {np.dtype(t): gguf.GGUFValueType(number) for number, t in SCALARS.items()}
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_key_value(key, value, gguf.GGUFValueType.STRING)
        elif isinstance(value, np.generic):
            writer.add_key_value(key, value.item(), types[value.dtype])
        elif isinstance(value, np.ndarray):
            writer.add_key_value(key, value.tolist(), gguf.GGUFValueType.ARRAY, types[value.dtype])
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY)
    for kind in tensors:
        number = gguf.GGMLQuantizationType[kind]
        data = x if kind == "F32" else x.astype(np.float16) if kind == "F16" else gguf.quants.quantize(x, number)
        writer.add_tensor(kind, data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_gguf(tmp_path / "ours.gguf", {"general.architecture": "llama", **values}, tensors)
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (True, np.bool_),
        (7, np.uint32),
        (-7, np.int32),
        (1 << 40, np.uint64),
        (-(1 << 40), np.int64),
        (0.5, np.float32),
        ([1, 2], np.uint32),
        ([-1, 2], np.int32),
        ([0.5], np.float32),
        ([True], np.bool_),
    ],
)
def test_plain_numbers_get_a_type(value, dtype, tmp_path):
    with read_back(tmp_path / "a.gguf", {"k": value}, {}) as file:
        typed = file.typed_metadata()["k"]
        assert typed.dtype == dtype
        assert typed.tolist() == value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, r"metadata 'k': values are bools, numbers, texts and lists of them, got NoneType"),
        ({"a": 1}, r"got dict"),
        (np.complex64(1), r"got complex64"),
        (1 << 70, r"metadata 'k': 1180591620717411303424 is no number of 64 bits"),
        ([], r"metadata 'k': an empty list has no type; give an empty NumPy array, of dtype str for texts"),
        ([1, "a"], r"metadata 'k': a list holds one kind of value; give an array of NumPy to say which"),
    ],
)
def test_other_metadata_raise(value, text, tmp_path):
    with pytest.raises(FileError, match=text):
        write_gguf(tmp_path / "a.gguf", {"k": value}, {})
    assert list(tmp_path.iterdir()) == []


def test_tensors_are_aligned(tmp_path):
    tensors = {f"t{n}": np.arange(n, dtype=np.float32) for n in (1, 7, 33)}
    with read_back(tmp_path / "a.gguf", {}, tensors) as file:
        assert (file.alignment, file.names()) == (32, list(tensors))
        for name, array in tensors.items():
            assert file.info(name).offset % 32 == 0
            assert np.array_equal(file.read(name), array)
    with pytest.raises(FileError, match=r"general\.alignment is 64 in the metadata, but files are written with 32"):
        write_gguf(tmp_path / "a.gguf", {"general.alignment": 64}, {})


def test_tensors_are_loaded_one_at_a_time_and_quantized(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 8, 64)).astype(np.float32)
    order = []

    def load(kind):
        order.append(kind)
        return x

    tensors = {k: Tensor(lambda k=k: load(k), k, x.shape) for k in ("F32", "F16", "BF16", "Q8_0", "Q4_0")}
    with read_back(tmp_path / "a.gguf", {"general.architecture": "llama"}, tensors) as file:
        assert order == list(tensors)
        errors = {k: np.abs(file.read(k) - x).max() / np.abs(x).max() for k in tensors}
        assert file.info("Q4_0").nbytes == x.size // 32 * 18
        assert file.read_quantized("Q4_0").shape == x.shape
    assert errors["F32"] == 0
    assert errors["F16"] < 5e-4
    assert errors["BF16"] < 4e-3
    assert errors["Q8_0"] < 5e-3
    assert 5e-3 < errors["Q4_0"] < 0.13


def test_large_tensors_go_in_pieces(tmp_path):
    x = np.random.default_rng(1).normal(size=(1 << 18, 64)).astype(np.float32)
    tracemalloc.start()
    with read_back(tmp_path / "a.gguf", {}, {"x": Tensor(x, "Q8_0"), "y": np.float32([5])}) as file:
        assert tracemalloc.get_traced_memory()[1] < 0.5 * x.nbytes
        tracemalloc.reset_peak()
        read = file.read("x")
        assert tracemalloc.get_traced_memory()[1] < 1.2 * x.nbytes
        tracemalloc.stop()
        assert np.abs(read - x).max() < 0.03
        assert np.array_equal(np.asarray(file.read_quantized("x").dequantize()), file.read("x"))
        assert file.read("y").tolist() == [5]


@pytest.mark.parametrize(("kind", "qtype"), [("Q8_0", "int8"), ("Q4_0", "int4")])
@pytest.mark.parametrize("packed", [False, True])
def test_a_qarray_is_kept(kind, qtype, packed, tmp_path):
    x = jnp.asarray(np.random.default_rng(2).normal(size=(4, 128)), jnp.float32)
    for tile in (32, 128):
        axes = {"channelwise_axes": (0,), "tiled_axes": {1: tile}, "scale_dtype": jnp.float16}
        q = jax.jit(lambda x, axes=axes: octavo.quantize(x, qtype, **axes).astype(jnp.float32))(x)
        with read_back(tmp_path / "a.gguf", {}, {"q": Tensor(q.pack() if packed else q, kind)}) as file:
            back = file.read_quantized("q")
            assert np.array_equal(np.asarray(back.qvalue).astype(int), np.asarray(q.qvalue).astype(int))
            assert np.array_equal(np.asarray(back.dequantize()), np.asarray(q.dequantize()))


def test_a_qarray_that_would_change_raises(tmp_path):
    x = jnp.asarray(np.random.default_rng(2).normal(size=(4, 128)), jnp.float32)
    path = tmp_path / "a.gguf"
    with pytest.raises(FileError, match="tensor 'q': a QArray of nf4 cannot be stored as Q4_0; symmetric int8 can"):
        write_gguf(path, {}, {"q": Tensor(octavo.quantize(x, "nf4", tiled_axes={1: 32}), "Q4_0")})
    with pytest.raises(
        FileError, match="tensor 'q': its scales are not float16 values, as Q8_0 stores them; round them first"
    ):
        write_gguf(path, {}, {"q": Tensor(octavo.quantize(x, "int8", tiled_axes={1: 32}), "Q8_0")})
    with pytest.raises(FileError, match="tiles of 16 along the last axis are no multiple of blocks of 32"):
        write_gguf(path, {}, {"q": Tensor(octavo.quantize(x, "int8", tiled_axes={1: 16}), "Q8_0")})
    huge = QArray(np.ones((1, 32), np.int8), np.full((1, 1), 1e6, np.float32))
    with pytest.raises(FileError, match="the scale 1e\\+06 is beyond float16"):
        write_gguf(path, {}, {"q": Tensor(huge, "Q8_0")})
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.gguf"
    write_gguf(path, {"k": 1}, {})
    before = path.read_bytes()

    def fail():
        raise RuntimeError("no more disk")

    with pytest.raises(RuntimeError, match="no more disk"):
        write_gguf(path, {}, {"a": np.ones(4, np.float32), "b": Tensor(fail, "F16", (4,))})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_shapes_and_types_are_checked(tmp_path):
    path = tmp_path / "a.gguf"
    with pytest.raises(FileError, match="tensors of type 'Q3_K' cannot be written: "):
        Tensor(np.ones(256, np.float32), "Q3_K")
    with pytest.raises(FileError, match="a tensor that is loaded later needs its shape"):
        Tensor(lambda: None, "F32")
    with pytest.raises(FileError, match=r"tensor 'a': rows of Q8_0 are multiples of 32, got \(2, 33\)"):
        write_gguf(path, {}, {"a": Tensor(np.ones((2, 33), np.float32), "Q8_0")})
    with pytest.raises(FileError, match=r"at most 4 axes, none of length 0, got \(2, 0\)"):
        write_gguf(path, {}, {"a": np.ones((2, 0), np.float32)})
    with pytest.raises(FileError, match=r"tensor 'a': has shape \(3,\), but \(4,\) was announced"):
        write_gguf(path, {}, {"a": Tensor(lambda: np.ones(3), "F32", (4,))})
    with pytest.raises(FileError, match=r"tensor 'a': ggml has no type for complex64; give Tensor\(values, kind\)"):
        write_gguf(path, {}, {"a": np.ones(3, np.complex64)})
    with pytest.raises(FileError, match="tensor 'a': I8 needs int8, got float32"):
        write_gguf(path, {}, {"a": Tensor(np.ones(3, np.float32), "I8")})
    with pytest.raises(FileError, match="tensor 'a': F32 is made of numbers, got bool"):
        write_gguf(path, {}, {"a": Tensor(np.ones(3, bool), "F32")})
    with pytest.raises(FileError, match="a key has 1 to 65535 bytes, got 0"):
        write_gguf(path, {"": 1}, {})
    assert list(tmp_path.iterdir()) == []
