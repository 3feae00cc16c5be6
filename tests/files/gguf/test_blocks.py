"""Every type of ggml, bit for bit against the reference package's values (tests/files/golden/make_gguf.py)."""

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from octavo.files import FileError
from octavo.files.gguf import TYPES, Gguf, Tensor, write_gguf
from octavo.files.gguf.encode import ENCODERS
from tests.files.common import dequantized

with np.load(Path(__file__).parents[1] / "golden" / "gguf.npz") as file:
    GOLDEN = dict(file)
DECODED = sorted(name.partition("/")[0] for name in GOLDEN if name.endswith("/bytes"))


def same(a, b):
    return np.array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))


def with_blocks(path, kind, blocks, shape):
    """A file with one tensor of any type, whose bytes are given: the writer's file with another type in its header."""
    write_gguf(path, {}, {"t": Tensor(np.frombuffer(blocks, np.int8), "I8")})
    data = bytearray(path.read_bytes())
    head = data.index(b"t", 24) + 1
    info = np.array([len(shape)], "<u4").tobytes() + np.array(shape[::-1], "<u8").tobytes()
    info += np.array([TYPES[kind].number], "<u4").tobytes() + bytes(8)
    start = head + len(info)
    path.write_bytes(bytes(data[:head]) + info + bytes(-start % 32) + bytes(blocks))
    return Gguf(path)


def test_all_readable_types_are_compared():
    plain = {"F32", "F16", "F64", "I8", "I16", "I32", "I64"}
    assert set(DECODED) | plain | {"Q8_K"} == {name for name, kind in TYPES.items() if kind.readable}


@pytest.mark.parametrize("kind", DECODED)
def test_values_are_those_of_the_reference(kind, tmp_path):
    values = GOLDEN[f"{kind}/values"]
    assert np.isfinite(values).all()
    assert np.count_nonzero(values) > values.size // 3
    with with_blocks(tmp_path / "m.gguf", kind, GOLDEN[f"{kind}/bytes"].tobytes(), (2, values.size // 2)) as file:
        assert file.info("t").kind == kind
        read = file.read("t")
    assert read.dtype == np.float32
    assert same(read.reshape(-1), values)


@pytest.mark.parametrize("kind", [k for k in DECODED if TYPES[k].quantized])
def test_what_is_kept_in_codes_has_the_same_values(kind, tmp_path):
    values = GOLDEN[f"{kind}/values"]
    data = np.frombuffer(GOLDEN[f"{kind}/bytes"].tobytes(), TYPES[kind].block).copy()
    if kind == "MXFP4":
        data["e"] = np.clip(data["e"], 2, 252)
        values = None
    if kind == "TQ2_0":
        data["qs"] &= 0x55
        values = None
    with with_blocks(tmp_path / "m.gguf", kind, data.tobytes(), (2, len(data) // 2 * TYPES[kind].values)) as file:
        values = file.read("t") if values is None else values.reshape(2, -1)
        q = file.read_quantized("t")
    if kind in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K", "NVFP4"):
        assert q is None  # minima that are no zero points; nvfp4 has its second scale elsewhere
        return
    bits = {"Q8_0": 8, "Q6_K": 6, "Q5_0": 5, "Q3_K": 3, "TQ1_0": 2, "TQ2_0": 2}.get(kind, 4)
    assert q.qtype.bits == bits
    assert q.shape == values.shape
    assert q.tile_shape == (1, 16 if kind in ("Q6_K", "Q3_K") else 256 if kind.startswith("TQ") else 32)
    assert np.array_equal(dequantized(q), values)
    assert np.array_equal(jax.jit(lambda q: q.pack().dequantize())(q), values)


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1"])
def test_minima_that_are_zero_points_are_kept(kind, tmp_path):
    data = np.frombuffer(GOLDEN[f"{kind}/bytes"].tobytes(), TYPES[kind].block).copy()
    data["d"] = np.float16([[0.5], [1], [2], [-0.25], [0], [3]])
    data["m"] = data["d"] * np.float16([[0], [-1], [-15], [-7], [5], [-8]])
    with with_blocks(tmp_path / "m.gguf", kind, data.tobytes(), (6, 32)) as file:
        values, q = file.read("t"), file.read_quantized("t")
    assert q.zero_point.astype(int).ravel().tolist() == [0, 1, 15, 7, 0, 8]
    assert np.array_equal(np.asarray(q.dequantize()), values)
    data["m"][1] = -0.5
    with with_blocks(tmp_path / "m.gguf", kind, data.tobytes(), (6, 32)) as file:
        assert file.read_quantized("t") is None


@pytest.mark.parametrize("kind", ["Q2_K", "Q4_1", "Q4_K", "Q5_1", "Q5_K"])
def test_minima_are_zero_points_in_float32_if_a_rounding_is_allowed(kind, tmp_path):
    values = GOLDEN[f"{kind}/values"].reshape(2, -1)
    with with_blocks(tmp_path / "m.gguf", kind, GOLDEN[f"{kind}/bytes"].tobytes(), values.shape) as file:
        q = file.read_quantized("t", exact=False)
    assert q.zero_point.dtype == np.float32
    assert q.qtype.bits == (4 if kind.startswith("Q4") else 8)
    error = np.abs(dequantized(q) - values)
    span = np.repeat(np.abs(q.zero_point * q.scale) + 128 * np.abs(q.scale), q.tile_shape[1], axis=1)
    assert (error <= 2.0**-22 * span).all()
    assert error.max() > 0, "otherwise they would be exact"


def test_a_block_without_a_scale_has_its_minimum(tmp_path):
    data = np.frombuffer(GOLDEN["Q4_1/bytes"].tobytes(), TYPES["Q4_1"].block).copy()
    data["d"][1:3], data["m"][1:3] = 0, [[-1.5], [0]]
    with with_blocks(tmp_path / "m.gguf", "Q4_1", data.tobytes(), (len(data), 32)) as file:
        assert np.asarray(dequantized(file.read_quantized("t", exact=False)))[1:3].tolist() == [[-1.5] * 32, [0] * 32]
    data["d"][1] = np.inf
    with with_blocks(tmp_path / "m.gguf", "Q4_1", data.tobytes(), (len(data), 32)) as file:
        assert file.read_quantized("t", exact=False) is None


@pytest.mark.parametrize(("exponent", "code"), [(255, 0), (254, 7), (0, 1)])
def test_mxfp4_that_e8m0_cannot_say_is_not_kept(exponent, code, tmp_path):
    data = np.zeros(2, TYPES["MXFP4"].block)
    data["e"], data["qs"] = 127, 0x22
    data["e"][1], data["qs"][1] = exponent, code
    with with_blocks(tmp_path / "m.gguf", "MXFP4", data.tobytes(), (2, 32)) as file:
        assert file.read_quantized("t") is None
        assert file.read("t")[0].tolist() == [1.0] * 32


def test_a_fourth_ternary_code_is_not_kept(tmp_path):
    data = np.zeros(1, TYPES["TQ2_0"].block)
    data["d"], data["qs"] = 1, 0xFF
    with with_blocks(tmp_path / "m.gguf", "TQ2_0", data.tobytes(), (256,)) as file:
        assert file.read("t").tolist() == [2.0] * 256
        assert file.read_quantized("t") is None


def test_q8_k(tmp_path):
    data = np.zeros(2, TYPES["Q8_K"].block)
    data["qs"] = np.arange(512).reshape(2, 256) - 128
    data["d"] = [[0.5], [-2.0]]
    with with_blocks(tmp_path / "m.gguf", "Q8_K", data.tobytes(), (2, 256)) as file:
        assert np.array_equal(file.read("t"), data["qs"] * data["d"])
        assert np.array_equal(np.asarray(file.read_quantized("t").dequantize()), data["qs"] * data["d"])


def test_plain_types(tmp_path):
    arrays = {
        "F32": np.float32([1.5, -2]), "F16": np.float16([1.5, -2]), "F64": np.float64([1e300]), "I8": np.int8([-128]),
        "I16": np.int16([-5]), "I32": np.int32([7]), "I64": np.int64([1 << 40]),
        "BF16": np.asarray([1.5, 3.0], ml_dtypes.bfloat16),
    }  # fmt: skip
    write_gguf(tmp_path / "m.gguf", {}, arrays)
    with Gguf(tmp_path / "m.gguf") as file:
        for kind, array in arrays.items():
            assert file.info(kind).kind == kind
            wanted = array.astype(np.float32) if kind in ("F16", "BF16") else array
            read = file.read(kind)
            assert read.dtype == wanted.dtype
            assert np.array_equal(read, wanted)
            assert file.read_quantized(kind) is None


def test_scales_that_are_not_finite_stay_so(tmp_path):
    data = np.zeros(1, TYPES["Q8_0"].block)
    data["d"], data["qs"] = np.inf, 1
    data["qs"][0, 0] = 0
    with with_blocks(tmp_path / "m.gguf", "Q8_0", data.tobytes(), (32,)) as file:
        read = file.read("t")
    assert np.isnan(read[0])
    assert np.isinf(read[1:]).all()


def test_a_type_of_known_size_only_is_named(tmp_path):
    with with_blocks(tmp_path / "m.gguf", "IQ2_XXS", bytes(66), (256,)) as file:
        with pytest.raises(FileError, match=r"tensor 't' is of type IQ2_XXS, which cannot be read here\. Requantize"):
            file.read("t")
        assert file.read_quantized("t") is None


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_encoders_are_the_reference_bit_for_bit(kind):
    assert np.array_equal(ENCODERS[kind]("x", GOLDEN["encode/input"]).reshape(-1), GOLDEN[f"encode/{kind}"])


def test_encoders_take_numbers_too_small_for_a_scale():
    tiny = np.full((1, 32), 1e-44, np.float32)
    assert not ENCODERS["Q8_0"]("x", tiny).any()
    assert ENCODERS["Q4_0"]("x", tiny).tolist() == [0, 0x80] + [0x88] * 16  # a scale of -0, codes of 0


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_what_cannot_be_encoded_raises(kind):
    bad = np.zeros(32, np.float32)
    bad[3] = np.nan
    with pytest.raises(FileError, match=f"tensor 'x': holds inf or NaN, which {kind} cannot"):
        ENCODERS[kind]("x", bad)
    with pytest.raises(FileError, match=r"tensor 'x': the scale .* is beyond float16; write it as F32"):
        ENCODERS[kind]("x", np.full(32, 1e9, np.float32))


def test_float16_does_not_overflow_in_silence():
    with pytest.raises(FileError, match=r"tensor 'x': 70000 is beyond float16, which ends at 65504; use F32"):
        ENCODERS["F16"]("x", np.float32([1, 70000]))
    assert np.isinf(ENCODERS["F16"]("x", np.float32([np.inf])).view(np.float16)).all()
