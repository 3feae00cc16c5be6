"""Writing K-quants and importance matrices, against the `gguf` package and a search over a dense grid."""

import struct

import gguf
import numpy as np
import pytest

from octavo.files.errors import FileError
from octavo.files.gguf import Gguf, Tensor, read_imatrix, write_gguf, write_imatrix
from octavo.files.gguf.encode import ENCODERS
from octavo.files.gguf.kquants_encode import KQUANTS, encode_kquant

RNG = np.random.default_rng(0)
X = (RNG.normal(size=(24, 256)) * RNG.uniform(0.1, 3, (24, 1)) + RNG.uniform(-1, 1, (24, 1))).astype(np.float32)


def decoded(kind: str, blocks: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(blocks.view(np.uint8).reshape(len(blocks), -1), gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize(("kind", "most"), [("Q4_K", 0.08), ("Q5_K", 0.04), ("Q6_K", 0.021)])
def test_the_reference_reads_what_is_written(kind, most, tmp_path):
    write_gguf(tmp_path / "a.gguf", {}, {"x": Tensor(X, kind)})
    with Gguf(tmp_path / "a.gguf") as file:
        read = file.read("x")
    assert np.array_equal(read, decoded(kind, encode_kquant(KQUANTS[kind], X)))
    assert np.sqrt(np.mean((read - X) ** 2) / np.mean(X**2)) < most


def grid_search(x: np.ndarray, h: np.ndarray, top: int) -> float:
    """The least weighted error of a group, over many scales and minima."""
    scale = (np.linspace(0.6, 1.1, 120) * (x.max() - min(x.min(), 0)) / top)[:, None, None]
    low = np.linspace(min(x.min(), 0) * 1.1, 0, 80)[:, None]
    codes = np.clip(np.rint((x - low) / scale), 0, top)
    return float(np.sum(h * (codes * scale + low - x) ** 2, axis=-1).min())


def test_scales_are_near_the_best_of_a_dense_grid():
    h = RNG.exponential(size=X.shape).astype(np.float32)
    weight = h * np.sqrt(2 * np.mean(X * X, axis=1, keepdims=True) + X * X)
    groups = (4, 8, 32)
    error = (weight * (decoded("Q4_K", encode_kquant(KQUANTS["Q4_K"], X, h)) - X) ** 2)[:4].reshape(groups).sum(-1)
    wanted = [
        [grid_search(x, w, 15) for x, w in zip(*pair, strict=True)]
        for pair in zip(X[:4].reshape(groups), weight[:4].reshape(groups), strict=True)
    ]
    assert error.sum() < 1.1 * np.sum(wanted)  # of which 6-bit scales and minima are a part
    plain = (weight * (decoded("Q4_K", encode_kquant(KQUANTS["Q4_K"], X)) - X) ** 2)[:4].sum()
    assert error.sum() < 0.95 * plain


@pytest.mark.parametrize("kind", [*KQUANTS, "Q5_0"])
def test_special_blocks(kind):
    for value in (0.0, 1.0, -3.0, 1e-30):
        x = np.full(256, value, np.float32)
        read = gguf.quants.dequantize(ENCODERS[kind]("x", x).reshape(1, -1), gguf.GGMLQuantizationType[kind])
        assert np.abs(read - x).max() <= 0.04 * abs(value) + 1e-6  # float16 has no scales below
    with pytest.raises(FileError, match=f"tensor 'x': holds inf or NaN, which {kind} cannot"):
        ENCODERS[kind]("x", np.full(256, np.nan, np.float32))
    with pytest.raises(FileError, match="beyond float16; write it as F32"):
        ENCODERS[kind]("x", np.full(256, 1e9, np.float32) * np.sign(RNG.normal(size=256)).astype(np.float32))


def test_q5_0_is_the_reference_bit_for_bit():
    wanted = gguf.quants.quantize(X, gguf.GGMLQuantizationType.Q5_0)
    assert np.array_equal(ENCODERS["Q5_0"]("x", X).reshape(-1), wanted.reshape(-1))


def test_importances_that_do_not_fit():
    with pytest.raises(FileError, match=r"an importance of shape \(3,\) fits neither \(24, 256\) nor its columns"):
        Tensor(X, "Q4_K", importance=np.ones(3, np.float32))
    with pytest.raises(FileError, match="importances are finite and at least 0"):
        Tensor(X, "Q4_K", importance=-np.ones(256, np.float32))


def test_importance_matrices(tmp_path):
    found = {"a.weight": RNG.exponential(size=8).astype(np.float32), "b.weight": np.ones((2, 4), np.float32)}
    write_imatrix(tmp_path / "m.gguf", found, tokens=128, dataset="book.txt")
    back = read_imatrix(tmp_path / "m.gguf")
    assert back.keys() == found.keys()
    for name, array in found.items():
        np.testing.assert_allclose(back[name], array, rtol=1e-6)
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert bytes(fields["general.type"].parts[-1]) == b"imatrix"
    entry = struct.pack("<i", 1) + struct.pack("<i", 5) + b"a.wei" + struct.pack("<ii2f", 4, 2, 8.0, 2.0)
    (tmp_path / "old.dat").write_bytes(entry)
    assert read_imatrix(tmp_path / "old.dat")["a.wei"].tolist() == [2.0, 0.5]
    (tmp_path / "cut.dat").write_bytes(entry[:-5])
    with pytest.raises(FileError, match=r"'a\.wei' has 2 values in 4 calls: it is damaged"):
        read_imatrix(tmp_path / "cut.dat")
    write_gguf(tmp_path / "other.gguf", {}, {"a": np.ones(3, np.float32)})
    with pytest.raises(FileError, match="has no importances"):
        read_imatrix(tmp_path / "other.gguf")
