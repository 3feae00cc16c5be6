"""Optimizers with moments in few bits: bytes of the state, time of a step, and the loss after training.

    python benchmarks/optimizers.py [--quick] [--json FILE] [--steps 300] [--seeds 3]

The first table updates the parameters of `step.py` (4 layers, width 512, MLP 2048) with given gradients, against
`optax.adamw`. The second trains the model of `convergence.py`, 2 layers of width 128, on Python's own library, the last
tenth of it held out. All optimizers start from the same parameters and see the same batches in turn. A gap is the mean
over the seeds of the difference in held-out loss to float32 AdamW (or Muon) after the same batches, with the half width
of its 95 % interval.
"""

import statistics
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import step
from convergence import BATCH, LENGTH, text
from timing import Results, arguments, progress, side_by_side

from octavo import optim

# Student's t for a 95 % interval, by the number of seeds.
T = {1: float("nan"), 2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
MOMENTS = ("dynamic8", "linear8", "float8", "dynamic4")


def nbytes(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def costs(results: Results, repeats: int) -> None:
    """Bytes, temporary memory and time of an update of all parameters."""
    params = step.init(jax.random.key(0))
    count = sum(x.size for x in jax.tree.leaves(params))
    optimizers = {"float32": optax.adamw(1e-3)} | {name: optim.adamw(1e-3, moments=name) for name in MOMENTS}
    optimizers["bfloat16 weights, dynamic8"] = optim.with_stochastic_rounding(optim.adamw(1e-3))
    calls, sizes = {}, {}
    for name, optimizer in optimizers.items():
        dtype = jnp.bfloat16 if "bfloat16" in name else jnp.float32
        weights = jax.tree.map(lambda x, d=dtype: x.astype(d), params)

        def update(params, state, grads, optimizer=optimizer):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        state = jax.jit(optimizer.init)(weights)
        compiled = jax.jit(update).lower(weights, state, weights).compile()
        calls[name] = (compiled, (weights, state, weights))
        # In place, as in a training step, whose gradients are temporary.
        donated = jax.jit(update, donate_argnums=(0, 1, 2)).lower(weights, state, weights).compile()
        sizes[name] = (nbytes(state), donated.memory_analysis().temp_size_in_bytes)
    t = side_by_side(calls, repeats=repeats)
    base = sizes["float32"][0]
    rows = [
        [
            name,
            f"{held / count:.2f}",
            f"{held / base:.3f}",
            f"{temporary / count:.2f}",
            f"{1e9 * t[name].seconds / count:.1f}",
            f"{t[name].spread:.0%}",
        ]
        for name, (held, temporary) in sizes.items()
    ]
    columns = ["AdamW", "state bytes / param", "of float32", "temporary bytes / param", "ns / param", "spread"]
    results.add(f"The state and an update of {count / 1e6:.1f} million parameters", columns, rows)


def contenders(rate) -> dict[str, tuple[optax.GradientTransformation, str]]:
    """Optimizers by name, each with the one that it is compared with."""
    found = {"adamw float32": (optax.adamw(rate), "adamw float32")}
    found |= {f"adamw {name}": (optim.adamw(rate, moments=name), "adamw float32") for name in MOMENTS}
    rounded = optim.with_stochastic_rounding(optax.adamw(rate))
    found["adamw, bfloat16 weights, stochastic"] = (rounded, "adamw float32")
    found["adamw, bfloat16 weights, nearest"] = (_float32_state(optax.adamw(rate)), "adamw float32")
    both = optim.with_stochastic_rounding(optim.adamw(rate))
    found["adamw dynamic8, bfloat16 weights, stochastic"] = (both, "adamw float32")
    found["muon float32"] = (optax.contrib.muon(rate), "muon float32")
    found["muon linear8"] = (optim.muon(rate), "muon float32")
    return found


def _float32_state(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer that sees bfloat16 parameters and gradients in float32."""
    wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)  # noqa: E731
    return optax.GradientTransformation(
        lambda params: optimizer.init(wide(params)),
        lambda updates, state, params: optimizer.update(wide(updates), state, wide(params)),
    )


def train(optimizer, params, batches) -> dict:
    """The parameters after training on batches [steps, rows, length]; one program."""

    def body(carry, tokens):
        params, state = carry
        # The weights are multiplied in float32, so that only their rounding differs.
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        grads = jax.grad(step.loss)(wide, tokens, jnp.matmul, jnp.einsum)
        grads = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, params)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(body, (params, optimizer.init(params)), batches)[0][0]


def losses(results: Results, steps: int, seeds: int) -> None:
    """Held-out losses by optimizer, compared batch by batch."""
    step.LAYERS, step.WIDTH, step.HIDDEN, step.HEADS = 2, 128, 512, 4
    data = text()
    cut = len(data) * 9 // 10
    held_out = jnp.asarray(data[cut:][: 32 * 16 * (LENGTH + 1)].reshape(32, 16, LENGTH + 1), jnp.int32)
    evaluate = jax.jit(
        lambda params: jax.lax.map(lambda tokens: step.loss(params, tokens, jnp.matmul, jnp.einsum), held_out)
    )
    chosen = contenders(optax.cosine_decay_schedule(3e-3, steps))
    runs = {name: jax.jit(lambda p, b, o=o: train(o, p, b)) for name, (o, _) in chosen.items()}
    ends: dict[str, list[np.ndarray]] = {name: [] for name in chosen}
    for seed in range(seeds):
        params, rng = step.init(jax.random.key(seed)), np.random.default_rng(seed)
        starts = rng.integers(len(data[:cut]) - LENGTH - 1, size=(steps, BATCH, 1))
        batches = jnp.asarray(data[starts + np.arange(LENGTH + 1)], jnp.int32)
        for name, run in runs.items():
            progress(f"seed {seed}: {name}")
            dtype = jnp.bfloat16 if "bfloat16" in name else jnp.float32
            found = run(jax.tree.map(lambda x, d=dtype: x.astype(d), params), batches)
            ends[name].append(np.asarray(evaluate(jax.tree.map(lambda x: x.astype(jnp.float32), found))))
    rows = []
    for name, found in ends.items():
        base = ends[chosen[name][1]]
        gaps = [100 * float(np.mean(a - b) / np.mean(b)) for a, b in zip(found, base, strict=True)]
        width = T.get(seeds, 1.96) * float(np.std(gaps, ddof=min(1, seeds - 1))) / seeds**0.5
        rows.append([name, f"{np.mean(found):.4f}", f"{statistics.fmean(gaps):+.2f}", f"{width:.2f}"])
    results.add(f"Held-out loss after {steps} steps", ["", "loss", "gap %", "+-"], rows)


def main() -> None:
    parser = arguments(__doc__, quick="100 steps, one seed, fewer repeats")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=0)
    options = parser.parse_args()
    steps, seeds = options.steps or (100 if options.quick else 300), options.seeds or (1 if options.quick else 3)
    repeats = 3 if options.quick else 9
    warnings.filterwarnings("ignore", message="Some donated buffers")  # no output has the place of the gradients
    method = f"best of {repeats} interleaved rounds; {steps} steps of {BATCH} x {LENGTH} bytes, seeds: {seeds}"
    results = Results("optax", method=method, file=options.json)
    costs(results, repeats)
    losses(results, steps, seeds)


if __name__ == "__main__":
    sys.exit(main())
