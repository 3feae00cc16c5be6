"""A training step of a small transformer: float32, octavo int8, Qwix int8 and AQT int8, interleaved.

    python benchmarks/step.py [--quick] [--json FILE]

Four layers, width 512, MLP 2048, 8 heads, 2048 tokens as 16 x 128 and as 4 x 512; forward, backward and AdamW. The
linear layers are quantized, the rest stays in float32; in the row "+ attention" the two products of attention are int8
too. The row "no linears" replaces every linear layer by next to nothing: what a step costs besides them, and so the
limit of what quantizing them can give. Prints time, peak temporary memory and compile time.
"""

import functools
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import optax
from matmul import contenders
from timing import Results, arguments, side_by_side

import octavo

LAYERS, WIDTH, HIDDEN, HEADS, VOCAB = 4, 512, 2048, 8, 256


def init(key: jax.Array) -> dict:
    """Parameters, the layers stacked by name."""
    keys = iter(jax.random.split(key, 2 + 6 * LAYERS))

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

    layer = lambda: {  # noqa: E731
        **{name: matrix(WIDTH, WIDTH) for name in "qkvo"},
        "up": matrix(WIDTH, HIDDEN),
        "down": matrix(HIDDEN, WIDTH),
        "norm1": jnp.ones(WIDTH),
        "norm2": jnp.ones(WIDTH),
    }
    return {"embed": matrix(VOCAB, WIDTH), "layers": [layer() for _ in range(LAYERS)], "head": matrix(WIDTH, VOCAB)}


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * weight


def loss(params: dict, tokens: jax.Array, dot, einsum) -> jax.Array:
    """Next-token cross-entropy; `dot` multiplies the linear layers, `einsum` the rest of attention."""
    batch, length = tokens.shape[0], tokens.shape[1] - 1
    x = params["embed"][tokens[:, :-1]].reshape(-1, WIDTH)
    mask = jnp.tril(jnp.ones((length, length), bool))
    for p in params["layers"]:
        y = norm(x, p["norm1"])
        q, k, v = (dot(y, p[n]).reshape(batch, length, HEADS, -1) for n in "qkv")
        scores = einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
        x = x + dot(einsum("bhqk,bkhd->bqhd", weights, v).reshape(-1, WIDTH), p["o"])
        x = x + dot(jax.nn.gelu(dot(norm(x, p["norm2"]), p["up"])), p["down"])
    logits = x @ params["head"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:].reshape(-1)))


def main() -> None:
    options = arguments(__doc__).parse_args()
    repeats = 3 if options.quick else 9
    warnings.simplefilter("ignore", DeprecationWarning)  # aqtp 0.9 converts arrays to dtypes implicitly
    how = f"best of {repeats} interleaved rounds"
    results = Results("qwix", "aqtp", "optax", how=how, file=options.json)
    for batch, length in ((16, 128), (4, 512))[: 1 if options.quick else 2]:
        compare(results, batch, length, repeats)


def compare(results: Results, batch: int, length: int, repeats: int) -> None:
    """One table: every contender on the same tokens."""
    params = init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (batch, length + 1), 0, VOCAB)
    adam = optax.adamw(1e-3)
    state = adam.init(params)
    int8 = functools.partial(octavo.einsum, config=octavo.DotConfig.qt("int8"))
    ways = {name: (dot, jnp.einsum) for name, dot in contenders().items()}
    ways["octavo + attention"] = (ways["octavo"][0], int8)
    ways["no linears"] = (lambda x, w: x[:, :1] * w[:1], jnp.einsum)
    calls, memory, compiling = {}, {}, {}
    for name, (dot, einsum) in ways.items():

        def step(params, state, tokens, dot=dot, einsum=einsum):
            value, grads = jax.value_and_grad(loss)(params, tokens, dot, einsum)
            updates, state = adam.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        start = time.perf_counter()
        compiled = jax.jit(step).lower(params, state, tokens).compile()
        compiling[name] = time.perf_counter() - start
        memory[name] = compiled.memory_analysis().temp_size_in_bytes
        calls[name] = (compiled, (params, state, tokens))
    t = side_by_side(calls, repeats=repeats)
    rows = [
        [
            name,
            f"{1e3 * timing.seconds:.0f}",
            f"{t['f32'].seconds / timing.seconds:.2f}",
            f"{memory[name] / 1e6:.0f}",
            f"{memory[name] / memory['f32']:.3f}",
            f"{compiling[name]:.1f}",
            f"{compiling[name] / compiling['f32']:.2f}",
            f"{timing.spread:.0%}",
        ]
        for name, timing in t.items()
    ]
    ours = t["octavo"].seconds
    results.add(
        f"A training step on {batch} x {length} tokens",
        ["", "ms", "f32 / it", "temporary MB", "of f32", "trace and compile s", "of f32", "spread"],
        rows,
        f"octavo is {t['qwix'].seconds / ours:.2f}x as fast as Qwix, {t['aqt'].seconds / ours:.2f}x as AQT.",
        ratios=["f32 / it"],
    )


if __name__ == "__main__":
    sys.exit(main())
