"""How long a quantized model takes to trace and compile: float, octavo and Qwix, int8 in all three matmuls.

    python benchmarks/trace.py [--quick] [--layers 12]

The gradient of a Linen transformer whose layers are written out one by one, width 256, 8 heads. All products are
quantized; in the rows "linear" those of the linear layers, as MaxText does it. Each contender is traced and compiled
afresh in every round, in turn; the fastest round counts. The size of the jaxpr is in equations at any depth and in
lines when printed.
"""

import argparse
import time
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import qwix
from timing import header

import octavo

WIDTH, HEADS, VOCAB = 256, 8, 256


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x))
        y = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(y)


class Transformer(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        for _ in range(self.layers):
            x = Block()(x)
        return nn.Dense(VOCAB)(x)


def size(jaxpr) -> int:
    """Equations, those of nested jaxprs included."""
    count = 0
    for eqn in jaxpr.eqns:
        count += 1
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                count += size(inner) if hasattr(inner, "eqns") else 0
    return count


def contenders(layers: int):
    model = Transformer(layers)
    found = {"float": model}
    for suffix, ops in (("", ()), (" linear", ("dot_general",))):
        rule = {"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8", "op_names": ops}
        found[f"octavo{suffix}"] = octavo.quantize_model(model, octavo.QtProvider([octavo.QtRule(**rule)]))
        found[f"qwix{suffix}"] = qwix.quantize_model(model, qwix.QtProvider([qwix.QtRule(**rule)]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    rounds = 2 if options.quick else 4
    print(header("flax", "qwix"), f"{options.layers} layers, best of {rounds} interleaved rounds", sep="\n")
    warnings.simplefilter("ignore", DeprecationWarning)
    tokens = jnp.zeros((4, 128), jnp.int32)
    models = contenders(options.layers)
    params = models["float"].init(jax.random.key(0), tokens)["params"]
    best: dict[str, list[float]] = {name: [1e9, 1e9, 1e9] for name in models}
    sizes = {}
    for _ in range(rounds):
        for name, model in models.items():
            jax.clear_caches()

            def loss(params, tokens, model=model):
                return jnp.mean(model.apply({"params": params}, tokens) ** 2)

            start = time.perf_counter()
            traced = jax.jit(jax.grad(loss)).trace(params, tokens)
            traced_at = time.perf_counter()
            lowered = traced.lower()
            lowered_at = time.perf_counter()
            lowered.compile()
            end = time.perf_counter()
            now = traced_at - start, lowered_at - traced_at, end - lowered_at
            best[name] = [min(pair) for pair in zip(best[name], now, strict=True)]
            sizes[name] = size(traced.jaxpr), len(str(traced.jaxpr).splitlines())
    columns = (
        f"{'trace s':>8} {'lower s':>8} {'compile s':>10} {'sum s':>7} {'of float':>9} {'equations':>10} {'lines':>7}"
    )
    print(f"\n{'':>13} {columns}")
    whole = sum(best["float"])
    for name, (trace, lower, build) in best.items():
        total = trace + lower + build
        print(
            f"{name:>13} {trace:>8.2f} {lower:>8.2f} {build:>10.2f} {total:>7.2f} {total / whole:>9.2f} "
            f"{sizes[name][0]:>10} {sizes[name][1]:>7}"
        )


if __name__ == "__main__":
    main()
