"""Trace and compile time of a quantized model: float, octavo and Qwix, int8 in all three matmuls.

    python benchmarks/trace.py [--quick] [--json FILE] [--layers 12]

The gradient of a Linen transformer whose layers are written out one by one, width 256, 8 heads. All matmuls are
quantized; in the rows "linear" those of the linear layers, as in MaxText. Each implementation is traced and compiled
anew in every interleaved round; the fastest counts. The size of the jaxpr is in equations at any depth and in
lines when printed.
"""

import time
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import qwix
from timing import Results, Timing, arguments

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
    parser = arguments(__doc__, quick="fewer rounds, four layers")
    parser.add_argument("--layers", type=int, default=0)
    options = parser.parse_args()
    rounds, layers = (2, 4) if options.quick else (4, 12)
    layers = options.layers or layers
    method = f"{layers} layers, best of {rounds} interleaved rounds"
    results = Results("flax", "qwix", method=method, file=options.json)
    warnings.simplefilter("ignore", DeprecationWarning)
    tokens = jnp.zeros((4, 128), jnp.int32)
    models = contenders(layers)
    params = models["float"].init(jax.random.key(0), tokens)["params"]
    runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in models}
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
            runs[name].append((traced_at - start, lowered_at - traced_at, end - lowered_at))
            sizes[name] = size(traced.jaxpr), len(str(traced.jaxpr).splitlines())
    # The stages and their sum are each the fastest of all rounds.
    best = {name: [Timing.of(part) for part in zip(*found, strict=True)] for name, found in runs.items()}
    total = {name: Timing.of([sum(parts) for parts in found]) for name, found in runs.items()}
    rows = [
        [
            name,
            *(f"{part.seconds:.2f}" for part in parts),
            f"{total[name].seconds:.2f}",
            f"{total[name].seconds / total['float'].seconds:.2f}",
            *map(str, sizes[name]),
            f"{total[name].spread:.0%}",
        ]
        for name, parts in best.items()
    ]
    columns = ["", "trace s", "lower s", "compile s", "sum s", "of float", "equations", "lines", "spread"]
    results.add("Tracing and compiling the gradient of a transformer", columns, rows)


if __name__ == "__main__":
    main()
