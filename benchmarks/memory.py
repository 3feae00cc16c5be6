"""Memory: a matrix in low-bit formats against Qwix's and AQT's arrays, and the KV cache.

    python benchmarks/memory.py [--quick] [--json FILE]

Nothing is timed. Sizes are those of the buffers as the backend reports them, not theoretical ones. The memory of a
training step is in the tables of `step.py`, that of conversion in those of `convert.py`.
"""

import sys
import warnings

import jax
import qwix
from aqt.jax.v2 import aqt_quantizer
from formats import AQT, QWIX
from timing import Results, arguments

import octavo
from octavo.models import ModelConfig
from octavo.serve import KVCache, KVConfig

FORMATS = {
    "int8": None, "float8_e4m3fn": None, "mxfp8": 32, "int4": None, "int4 g32": 32, "nf4": 64, "mxfp4": 32,
    "nvfp4": 16, "int3": None, "int2": None, "ternary": None,
}  # fmt: skip
CACHES = {
    "float32": KVConfig(dtype="float32"),
    "bfloat16": KVConfig(dtype="bfloat16"),
    "int8": KVConfig.of("int8"),
    "int8, one scale for all heads": KVConfig.of("int8", axis="heads_and_dkv"),
    "fp8": KVConfig.of("fp8"),
    "int8 keys, int4 values": KVConfig(keys="int8", values="int4"),
    "int4": KVConfig.of("int4"),
    "int4, kivi": KVConfig.of("int4", axis="kivi"),
}


def nbytes(tree) -> int:
    """Bytes of the buffers of all arrays in a pytree."""
    return sum(x.on_device_size_in_bytes() for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))


def matrix(results: Results, size: int) -> None:
    w = jax.random.normal(jax.random.key(0), (size, size))
    rows = [["float32", f"{nbytes(w) / 2**20:.2f}", "1.00", "", ""]]
    for label, tile in FORMATS.items():
        name = label.split()[0]
        tiled = {0: tile} if tile else None
        calibration = "absmean" if name == "ternary" else "absmax"
        quantizer = octavo.Quantizer(name, channelwise_axes=(1,), tiled_axes=tiled, calibration=calibration)
        ours = nbytes(jax.jit(lambda w, q=quantizer: q.quantize(w).pack(0))(w))
        row = [label, f"{ours / 2**20:.2f}", f"{nbytes(w) / ours:.2f}"]
        try:
            peer = nbytes(qwix.quantize(w, name, channelwise_axes=(1,), tiled_axes=tiled)) if name in QWIX else 0
        except Exception:
            peer = 0
        row.append(f"{peer / 2**20:.2f}" if peer else "-")
        bits = AQT.get(name)
        peer = nbytes(aqt_quantizer.quantizer_make(bits).quant(w, calibration_axes=[0])[0]) if bits and not tile else 0
        rows.append([*row, f"{peer / 2**20:.2f}" if peer else "-"])
    columns = ["", "octavo, packed MiB", "float32 / octavo", "Qwix MiB", "AQT MiB"]
    results.add(f"A {size} x {size} matrix with its scales", columns, rows)


def cache(results: Results, length: int) -> None:
    sizes = {"emb_dim": 576, "num_layers": 30, "num_query_heads": 9, "num_kv_heads": 3, "head_dim": 64, "mlp_dim": 1536}
    config = ModelConfig(vocab_size=64, scan_layers=False, **sizes)
    made = {
        name: jax.eval_shape(lambda kv=kv: KVCache.empty(config, kv, slots=1, max_length=length))
        for name, kv in CACHES.items()
    }
    base = made["float32"].nbytes
    rows = [[name, f"{c.nbytes / 2**20:.2f}", f"{base / c.nbytes:.2f}"] for name, c in made.items()]
    results.add(f"KV cache of {length} tokens, 30 layers of 3 heads of 64", ["", "MiB", "float32 / it"], rows)


def main() -> None:
    options = arguments(__doc__, quick="a smaller matrix").parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)  # aqtp 0.9 converts arrays to dtypes implicitly
    results = Results("qwix", "aqtp", method="sizes, nothing is timed", file=options.json)
    matrix(results, 1024 if options.quick else 4096)
    cache(results, 2048)


if __name__ == "__main__":
    sys.exit(main())
