"""Makes gguf.npz: blocks of random bytes for every type, and what the reference package `gguf` says they are.

    pip install gguf==0.19.0 && python tests/files/golden/make_gguf.py

The tests compare with the file, so that they need no such package.
"""

from pathlib import Path

import gguf
import numpy as np

BLOCKS = 6
TYPES = [
    "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K",
    "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
]  # fmt: skip
HALVES = {  # where float16 scales lie in a block: random bytes there must not be inf or NaN
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "TQ1_0": [52], "TQ2_0": [64],
}  # fmt: skip


def decoded(rng: np.random.Generator) -> dict[str, np.ndarray]:
    arrays = {}
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        values, size = gguf.GGML_QUANT_SIZES[kind]
        count = BLOCKS if values > 1 else 64
        data = rng.integers(0, 256, (1, count * size), dtype=np.uint8)
        blocks = data.reshape(count, size)
        for at in HALVES.get(name, []):
            scales = rng.normal(0, 1, count) * 10.0 ** rng.integers(-7, 3, count)  # some are subnormal
            blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(count, 2)
        if name == "BF16":
            blocks[:, 1] &= 0xBF  # no inf, no NaN
        if name == "MXFP4":
            blocks[:, 0] = [0, 1, 2, 127, 200, 252]
        if name == "NVFP4":
            blocks[:, 0] = [0, 1, 7, 8, 0x7E, 0x7F]
        arrays[f"{name}/bytes"] = data.reshape(-1)
        arrays[f"{name}/values"] = gguf.quants.dequantize(data, kind).reshape(-1)
    return arrays


def encoded(rng: np.random.Generator) -> dict[str, np.ndarray]:
    x = rng.normal(0, 1, (24, 64)).astype(np.float32) * 10.0 ** rng.integers(-9, 4, (24, 1)).astype(np.float32)
    x[0] = 0
    x[1] = np.arange(64) - 32  # halves
    x[2] = np.arange(64) % 5 * np.float32(0.5) * (127 / 2)
    x[3, 5] = x[3, 9] = -np.abs(x[3]).max() * 2  # two that are largest
    x[4, 5], x[4, 9] = 3, -3
    arrays = {"encode/input": x}
    for name in ("F16", "BF16", "Q8_0", "Q4_0"):
        arrays[f"encode/{name}"] = gguf.quants.quantize(x, gguf.GGMLQuantizationType[name]).view(np.uint8).reshape(-1)
    return arrays


if __name__ == "__main__":
    rng = np.random.default_rng(7)
    np.savez_compressed(Path(__file__).with_name("gguf.npz"), **decoded(rng), **encoded(rng))
