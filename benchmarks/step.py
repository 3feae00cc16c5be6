"""A training step of a small transformer: float32, octavo, Qwix and AQT in int8, torch and torchao, interleaved.

    python benchmarks/step.py [--quick] [--json FILE] [--torch PYTHON] [--recipes]

Four layers, width 512, MLP 2048, 8 heads, 2048 tokens as 16 x 128 and as 4 x 512; forward, backward and AdamW. The
linear layers are quantized, the rest stays in float32; in the row "+ attention" the two matmuls of attention are int8
too. The row "no linears" replaces every linear layer by a trivial operation: the cost of the rest of a step, and so the
limit of what quantizing them can gain. "octavo fp8" is float8 with a scale per tensor. In the rows "+ residuals" other
operations store residuals in int8, and in the last of them AdamW has moments in 8 bits. Prints time, peak temporary
memory, the bytes of the optimizer's state and compile time.

The second table, which alone is printed with --recipes, has recipes whose float8 and float4 matmuls CPUs emulate in
float32; without --quick also with XLA's own operations in place of the kernels that quantize.

PYTHON is an interpreter with torch and torchao, whose steps are interleaved with ours: the same model and optimizer,
compiled by inductor, in float32 and as torchao trains it in int8 and in float8. Each is also compared with torch's own
float32.
"""

import contextlib
import functools
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from matmul import PLAIN, contenders
from peers import Torch, attempt, torch_process
from timing import Results, Timing, arguments, side_by_side

import octavo

LAYERS, WIDTH, HIDDEN, HEADS, VOCAB = 4, 512, 2048, 8, 256
FP8 = ("fp8_full", "te_fp8_currentscaling", "mxfp8")
RECIPES = ("int8", *FP8, "mxfp4", "nvfp4", "te_nvfp4", "tetrajet2", "quartet2")


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
    parser = arguments(__doc__, peers=("torch",))
    parser.add_argument("--recipes", action="store_true", help="only the table of recipes")
    options = parser.parse_args()
    repeats = 3 if options.quick else 9
    warnings.simplefilter("ignore", DeprecationWarning)  # aqtp 0.9 converts arrays to dtypes implicitly
    results = Results("qwix", "aqtp", "optax", method=f"best of {repeats} interleaved rounds", file=options.json)
    if not options.recipes:
        with torch_process(results, options.torch) as torch:
            for batch, length in ((16, 128), (4, 512))[: 1 if options.quick else 2]:
                compare(results, batch, length, repeats, torch)
    compare_recipes(results, 16, 128, repeats, plain=not options.quick)


def implementations() -> dict:
    """The matmul of the linear layers of each contender, and the einsum of its attention."""
    found = {name: (dot, jnp.einsum) for name, dot in contenders().items()}
    int8 = functools.partial(octavo.einsum, config=octavo.DotConfig.qt("int8"))
    found["octavo + attention"] = (found["octavo"][0], int8)
    fp8 = octavo.DotConfig.qt("float8_e4m3fn", "float8_e5m2", per_tensor=True)
    found["octavo fp8"] = (lambda x, w: octavo.dot_general(x, w, PLAIN, config=fp8), jnp.einsum)
    found["no linears"] = (lambda x, w: x[:, :1] * w[:1], jnp.einsum)
    return found


def compressed(attention: bool) -> Callable[..., jax.Array]:
    """The loss with int8 linear layers, and attention if asked for, and residuals of other operations in int8."""
    int8 = {"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8", "residual_qtype": "int8"}
    rules = [
        octavo.QtRule(module_path="head", skip=True),
        octavo.QtRule(**int8, scope="all" if attention else "weights"),
    ]
    return octavo.quantized(lambda params, tokens: loss(params, tokens, jnp.matmul, jnp.einsum), rules)


def steps(optimizer: optax.GradientTransformation) -> dict:
    """The training step of each contender, and its optimizer."""
    losses = {
        name: functools.partial(loss, dot=dot, einsum=einsum) for name, (dot, einsum) in implementations().items()
    }
    losses |= {"octavo + residuals": compressed(False), "octavo + attention + residuals": compressed(True)}
    optimizers = dict.fromkeys(losses, optimizer)
    losses["octavo + residuals, 8-bit AdamW"] = losses["octavo + residuals"]
    losses["octavo + attention + residuals, 8-bit AdamW"] = losses["octavo + attention + residuals"]
    found = {}
    for name, fn in losses.items():
        own = optimizers.get(name) or octavo.optim.adamw(1e-3)

        def step(params, state, tokens, fn=fn, own=own):
            value, grads = jax.value_and_grad(fn)(params, tokens)
            updates, state = own.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        found[name] = step, own
    return found


def compare(results: Results, batch: int, length: int, repeats: int, torch: Torch | None) -> None:
    """One table: every contender on the same tokens."""
    params = init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (batch, length + 1), 0, VOCAB)
    calls, costs = {}, {}
    for name, (step, optimizer) in steps(optax.adamw(1e-3)).items():
        state = jax.jit(optimizer.init)(params)
        start = time.perf_counter()
        compiled = jax.jit(step).lower(params, state, tokens).compile()
        seconds, stored = time.perf_counter() - start, sum(x.nbytes for x in jax.tree.leaves(state))
        costs[name] = (compiled.memory_analysis().temp_size_in_bytes / 1e6, seconds, stored / 1e6)
        calls[name] = (compiled, (params, state, tokens))
    if torch is not None:
        calls |= steps_of(torch, results, batch, length)
    t = side_by_side(calls, repeats=repeats)
    rivals = {"qwix": "Qwix", "aqt": "AQT", "torch int8": "torchao's int8"}
    ahead = [f"{t[name].seconds / t['octavo'].seconds:.2f}x as {words}" for name, words in rivals.items() if name in t]
    results.add(
        f"A training step on {batch} x {length} tokens",
        [
            "",
            "ms",
            "f32 / it",
            "torch f32 / it",
            "temporary MB",
            "of f32",
            "trace and compile s",
            "of f32",
            "state MB",
            "of f32",
            "spread",
        ],
        [row(name, t, costs) for name in t],
        f"octavo is {', '.join(ahead).replace('x as', 'x as fast as', 1)}. Memory and compile time are "
        "XLA's; torch's are not measured.",
        ratios=["f32 / it"],
    )


def recipe_step(name: str, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """The training step of a recipe, or in float for an empty name."""
    plain = lambda params, tokens: loss(params, tokens, jnp.matmul, jnp.einsum)  # noqa: E731
    rules = [octavo.QtRule(module_path="head", skip=True), *octavo.recipe(name or "int8", exclude=None)]
    low = octavo.quantized(plain, rules)

    def step(params, state, tokens, key):
        fn = (lambda p: low.stateful(key=key)(p, tokens)[0]) if name else (lambda p: plain(p, tokens))
        value, grads = jax.value_and_grad(fn)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def compare_recipes(results: Results, batch: int, length: int, repeats: int, *, plain: bool) -> None:
    """A table of recipes; if `plain`, each also without the CPU kernels."""
    params, optimizer = init(jax.random.key(0)), optax.adamw(1e-3)
    tokens = jax.random.randint(jax.random.key(1), (batch, length + 1), 0, VOCAB)
    given = params, jax.jit(optimizer.init)(params), tokens, jax.random.key(2)
    calls, memory = {}, {}
    for name in ("", *RECIPES):
        for kind in ("", " plain")[: 2 if plain and name else 1]:
            with octavo.kernels.disabled() if kind else contextlib.nullcontext():
                compiled = jax.jit(recipe_step(name, optimizer)).lower(*given).compile()
            calls[name + kind] = compiled, given
            memory[name + kind] = compiled.memory_analysis().temp_size_in_bytes / 1e6
    t = side_by_side(calls, repeats=repeats)

    def cells(name: str) -> list[str]:
        found = [name or "f32", f"{1e3 * t[name].seconds:.0f}", f"{t[name].seconds / t[''].seconds:.2f}"]
        found += [f"{t[other].seconds / t[''].seconds:.2f}" if (other := f"{name} plain") in t else ""]
        return [*found, f"{memory[name]:.0f}", f"{memory[name] / memory['']:.3f}", f"{t[name].spread:.0%}"]

    results.add(
        f"Recipes in a training step on {batch} x {length} tokens",
        ["", "ms", "time of f32's", "without kernels", "temporary MB", "of f32", "spread"],
        [cells(name) for name in ("", *RECIPES)],
        "The linear layers are quantized, with a key where a recipe rounds stochastically.",
    )


def steps_of(torch: Torch, results: Results, batch: int, length: int) -> dict:
    """torch's steps, as calls."""
    sizes = {"batch": batch, "length": length}
    sizes |= {"layers": LAYERS, "width": WIDTH, "hidden": HIDDEN, "heads": HEADS, "vocab": VOCAB}
    found = {}
    for name, kind in (("torch f32", "float32"), ("torch int8", "int8"), ("torch float8", "float8")):
        found |= attempt(results, name, functools.partial(torch.step, kind, **sizes))
    return found


def row(name: str, t: dict[str, Timing], costs: dict[str, tuple[float, float, float]]) -> list[str]:
    """Cells of a contender: times, and where they are known memory, compile time and the optimizer's state."""
    cells = [name, f"{1e3 * t[name].seconds:.0f}", f"{t['f32'].seconds / t[name].seconds:.2f}"]
    cells.append(f"{t['torch f32'].seconds / t[name].seconds:.2f}" if "torch f32" in t else "")
    if name in costs:
        (memory, compiling, state), base = costs[name], costs["f32"]
        cells += [f"{memory:.0f}", f"{memory / base[0]:.3f}", f"{compiling:.1f}", f"{compiling / base[1]:.2f}"]
        cells += [f"{state:.0f}", f"{state / base[2]:.3f}"]
    else:
        cells += [""] * 6
    return [*cells, f"{t[name].spread:.0%}"]


if __name__ == "__main__":
    sys.exit(main())
