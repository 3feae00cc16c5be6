"""Decoding's matrix products: a token through all the weights of a small language model, in float32 and low-bit.

The layers have the shapes of SmolLM2-135M. Every product reads another matrix, 134 million weights in all, so that
none is in a cache when its turn comes again. Attention and norms are left out: this is about reading weights.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from timing import header, side_by_side

import octavo
from octavo import kernels

EMB, KV, MLP, VOCAB, LAYERS = 576, 192, 1536, 49152, 30
SHAPES = {
    "query": (EMB, EMB), "key": (EMB, KV), "value": (EMB, KV), "out": (EMB, EMB),
    "gate": (EMB, MLP), "up": (EMB, MLP), "down": (MLP, EMB),
}  # fmt: skip
FORMATS = {
    "float32": None,
    "int8": ("int8", 0, None),
    "int4 g32": ("int4", 32, None),
    "int4 g32, bf16 scales": ("int4", 32, "bfloat16"),
}
CONTRACT = {False: (((1,), (0,)), ((), ())), True: (((1,), (1,)), ((), ()))}


def matrix(rng: np.random.Generator, shape: tuple[int, int], how: Any, *, axis: int) -> Any:
    """A random matrix, quantized along `axis` and packed."""
    w = jnp.asarray(rng.standard_normal(shape, np.float32) / np.float32(shape[axis] ** 0.5))
    if how is None:
        return w
    name, group, scale = how
    tiles = {axis: group} if group else {}
    return octavo.quantize(w, name, channelwise_axes=(1 - axis,), tiled_axes=tiles, scale_dtype=scale).pack(axis)


def model(how: Any, *, layers: int, vocab: int) -> dict[str, Any]:
    """All the weights in one format."""
    rng = np.random.default_rng(0)
    stack = [{name: matrix(rng, shape, how, axis=0) for name, shape in SHAPES.items()} for _ in range(layers)]
    return {"layers": stack, "head": matrix(rng, (vocab, EMB), how, axis=1)}


@jax.jit
def decode(weights: dict[str, Any], x: jax.Array) -> jax.Array:
    """The products of one token, each fed by the one before."""

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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    options = parser.parse_args()
    print(header(), kernels.status(), sep="\n", end="\n\n")
    weights = {name: model(how, layers=options.layers, vocab=options.vocab) for name, how in FORMATS.items()}
    size = {name: sum(x.nbytes for x in jax.tree.leaves(w)) for name, w in weights.items()}
    for batch in options.batch:
        x = jnp.asarray(np.random.default_rng(1).standard_normal((batch, EMB)), jnp.float32)
        calls = {name: (decode, (w, x)) for name, w in weights.items()}
        times = side_by_side(calls, repeats=options.repeats)
        with kernels.disabled():
            slow = {f"{name}, no kernel": (decode, (w, x)) for name, w in weights.items() if "int" in name}
            # XLA's own code takes seconds where it unpacks; a few rounds are enough to tell.
            times |= side_by_side(slow, repeats=max(1, options.repeats // 10))
        print(f"batch {batch:<24}  MiB   ms/token  spread   GB/s  against float32")
        for name, timing in times.items():
            held = size[name.removesuffix(", no kernel")]
            ratio = times["float32"].seconds / timing.seconds
            print(
                f"{name:30}{held / 2**20:6.0f}{timing.seconds * 1e3:10.2f}{timing.spread:8.0%}"
                f"{held / timing.seconds / 1e9:8.1f}{ratio:12.2f}x"
            )
        print()


if __name__ == "__main__":
    main()
