"""The matrix-vector products of decoding: all weights of a small language model, in float32 and low precision.

    python benchmarks/matvec.py [--quick] [--json FILE] [--batch 1 8] [--repeats 30] [--layers 30] [--vocab 49152]

The layers have the shapes of SmolLM2-135M. Every matmul reads another matrix, 134 million weights in all, so that none
is in a CPU cache. Attention and norms are left out: memory bandwidth is what is measured. The rows "XLA" are the same
matmuls without Octavo's own CPU kernels.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from timing import Results, arguments, side_by_side

import octavo
from octavo import kernels

EMB, KV, MLP, VOCAB, LAYERS = 576, 192, 1536, 49152, 30
SHAPES = {
    "query": (EMB, EMB), "key": (EMB, KV), "value": (EMB, KV), "out": (EMB, EMB),
    "gate": (EMB, MLP), "up": (EMB, MLP), "down": (MLP, EMB),
}  # fmt: skip
FORMATS = {
    "float32": None,
    "octavo int8": ("int8", 0, None),
    "octavo int4 g32": ("int4", 32, None),
    "octavo int4 g32, bf16 scales": ("int4", 32, "bfloat16"),
    "octavo int4_double:minmax": ("int4_double", 32, None),
}
# The head is stored as [vocabulary, inputs]; scales of two levels are for matrices [inputs, outputs].
HEADS = {("int4_double", 32, None): ("int4", 32, "bfloat16")}
CONTRACT = {False: (((1,), (0,)), ((), ())), True: (((1,), (1,)), ((), ()))}


def matrix(rng: np.random.Generator, shape: tuple[int, int], spec: Any, *, axis: int) -> Any:
    """A random matrix, quantized along `axis` and packed."""
    w = jnp.asarray(rng.standard_normal(shape, np.float32) / np.float32(shape[axis] ** 0.5))
    if spec is None:
        return w
    name, group, scale = spec
    options = {"tiled_axes": {axis: group} if group else {}, "scale_dtype": scale}
    method = "minmax" if name.endswith("_double") else "absmax"
    return octavo.quantize(w, name, channelwise_axes=(1 - axis,), calibration_method=method, **options).pack(axis)


def model(spec: Any, *, layers: int, vocab: int) -> dict[str, Any]:
    """All the weights in one format."""
    rng = np.random.default_rng(0)
    stack = [{name: matrix(rng, shape, spec, axis=0) for name, shape in SHAPES.items()} for _ in range(layers)]
    return {"layers": stack, "head": matrix(rng, (vocab, EMB), HEADS.get(spec, spec), axis=1)}


@jax.jit
def decode(weights: dict[str, Any], x: jax.Array) -> jax.Array:
    """The matmuls of one token, each depending on the previous one."""

    def dot(x: jax.Array, w: Any, transposed: bool = False) -> jax.Array:
        if isinstance(w, octavo.QArray):
            return octavo.dot_general(x, w, CONTRACT[transposed], preferred_element_type=jnp.float32)
        return jax.lax.dot_general(x, w, CONTRACT[transposed])

    for w in weights["layers"]:
        key, value = dot(x, w["key"]), dot(x, w["value"])
        x = x + dot(dot(x, w["query"]) + jnp.mean(key * value), w["out"])
        x = x + dot(jax.nn.silu(dot(x, w["gate"])) * dot(x, w["up"]), w["down"])
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6)
    return dot(x, weights["head"], True)


def main() -> None:
    parser = arguments(__doc__, quick="fewer repeats (9), a third of the weights (--layers 10 --vocab 16384)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--vocab", type=int)
    options = parser.parse_args()
    usual = (9, 10, 16_384) if options.quick else (30, LAYERS, VOCAB)
    asked = (options.repeats, options.layers, options.vocab)
    repeats, layers, vocab = (a or b for a, b in zip(asked, usual, strict=True))
    method = f"{kernels.status()}; {layers} layers, vocabulary {vocab}; best of {repeats} interleaved rounds"
    results = Results(method=method, file=options.json)
    weights = {name: model(spec, layers=layers, vocab=vocab) for name, spec in FORMATS.items()}
    for batch in options.batch:
        measure(results, weights, batch, repeats)


def measure(results: Results, weights: dict[str, Any], batch: int, repeats: int) -> None:
    """One table: all formats at a batch size."""
    size = {name: sum(x.nbytes for x in jax.tree.leaves(w)) for name, w in weights.items()}
    x = jnp.asarray(np.random.default_rng(1).standard_normal((batch, EMB)), jnp.float32)
    times = side_by_side({name: (decode, (w, x)) for name, w in weights.items()}, repeats=repeats)
    with kernels.disabled():
        slow = {name.replace("octavo", "XLA"): (decode, (w, x)) for name, w in weights.items() if "int" in name}
        # XLA's own code takes seconds to unpack; a few rounds are enough.
        times |= side_by_side(slow, repeats=max(2, repeats // 10))
    rows = []
    for name, timing in times.items():
        nbytes = size[name.replace("XLA", "octavo")]
        ratio = times["float32"].seconds / timing.seconds
        cells = [f"{1e3 * timing.seconds:.2f}", f"{ratio:.2f}", f"{nbytes / 2**20:.0f}"]
        rows.append([name, *cells, f"{nbytes / timing.seconds / 1e9:.1f}", f"{timing.spread:.0%}"])
    results.add(
        f"All matrices of a model, batch size {batch}",
        ["", "ms", "float32 / it", "MiB", "GB/s", "spread"],
        rows,
        ratios=["float32 / it"],
    )


if __name__ == "__main__":
    main()
