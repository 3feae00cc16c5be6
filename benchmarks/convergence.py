"""Convergence of a small byte-level transformer: float32, octavo's recipes, Qwix int8 and AQT int8.

    python benchmarks/convergence.py [--quick] [--json FILE] [--steps 300] [--seeds 3]

The model of `step.py` with 2 layers of width 128, on the source of Python's own library, the last tenth of it held out.
Linear layers are quantized in all three matmuls, attention, embedding and logits are not. Contenders
start from the same parameters, see the same batches and are interleaved, so that times can be compared. AQT rounds
gradients stochastically here, as its own constructor does by default; the others to nearest, where a recipe does not
say otherwise. Gaps are to float from the same seed.
"""

import statistics
import sys
import sysconfig
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import step
from matmul import contenders
from timing import Results, arguments

import octavo

RECIPES = ("qat_int8", "fp8_full", "mxfp8", "te_nvfp4", "nvfp4", "mxfp4", "int4")
QUICK = ("float32", "int8", "fp8_full", "te_nvfp4")
BATCH, LENGTH = 8, 64


def text() -> np.ndarray:
    """About two million bytes of Python's library, in the order of file names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files)[: 2**21], np.uint8)


def losses() -> dict:
    """The loss of each contender: a function of parameters, tokens and a key."""
    from aqt.jax.v2 import config as aqt_config

    dots = contenders()
    plain = lambda params, tokens: step.loss(params, tokens, jnp.matmul, jnp.einsum)  # noqa: E731
    found = {"float32": lambda p, t, key: plain(p, t)}
    found |= {
        f"{name} int8": lambda p, t, key, dot=dots[name]: step.loss(p, t, dot, jnp.einsum)
        for name in ("octavo", "qwix")
    }

    def aqt(params, tokens, key):
        # The key is part of AQT's config, which is therefore made inside the traced function.
        config = aqt_config.fully_quantized(fwd_bits=8, bwd_bits=8, use_stochastic_rounding=True)
        config = aqt_config.set_context(config, key=key, train_step=None)
        return step.loss(params, tokens, lambda x, w: config(x, w, (((1,), (0,)), ((), ()))), jnp.einsum)

    found["aqt int8"] = aqt
    for name in RECIPES:
        rules = [octavo.QuantizationRule(module_path="(head|embed).*", skip=True), *octavo.recipe(name, exclude=None)]
        rules = [
            rule.replace(scope="weights") if not rule.skip else rule for rule in rules if rule.scope != "activations"
        ]
        low = octavo.quantized(plain, rules, weights="params")
        found[f"octavo {name}"] = lambda p, t, key, low=low: low.stateful(key=key)(p, t)[0]
    return found


def train(loss, params, data, held_out, *, steps: int, seed: int):
    """Yields after every step; the last value is the pair of the held-out loss and the median time of a step."""
    adam = optax.adamw(optax.cosine_decay_schedule(3e-3, steps))
    state = adam.init(params)

    @jax.jit
    def update(params, state, tokens, key):
        value, grads = jax.value_and_grad(loss)(params, tokens, key)
        updates, state = adam.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    evaluate = jax.jit(loss)
    rng, key, times = np.random.default_rng(seed), jax.random.key(seed), []
    for i in range(steps):
        starts = rng.integers(len(data) - LENGTH - 1, size=BATCH)
        tokens = jnp.asarray(np.stack([data[s : s + LENGTH + 1] for s in starts]), jnp.int32)
        begin = time.perf_counter()
        params, state, value = update(params, state, tokens, jax.random.fold_in(key, i))
        jax.block_until_ready(value)
        times.append(time.perf_counter() - begin)
        yield None
    values = [float(evaluate(params, tokens, key)) for tokens in held_out]
    yield statistics.fmean(values), statistics.median(times[1:] or times)


def main() -> None:
    parser = arguments(__doc__, quick="100 steps, one seed, fewer recipes")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)  # aqtp 0.9 converts arrays to dtypes implicitly
    steps, seeds = options.steps or (100 if options.quick else 300), options.seeds or (1 if options.quick else 3)
    step.LAYERS, step.WIDTH, step.HIDDEN, step.HEADS = 2, 128, 512, 4
    data = text()
    cut = len(data) * 9 // 10
    rows = data[cut:][: 16 * 16 * (LENGTH + 1)].reshape(16, 16, LENGTH + 1)
    held_out = [jnp.asarray(row, jnp.int32) for row in rows]
    chosen = losses()
    if options.quick:
        chosen = {name: loss for name, loss in chosen.items() if name.split()[-1] in QUICK}
    results = Results(
        "qwix",
        "aqtp",
        "optax",
        method=f"{steps} steps of {BATCH} x {LENGTH} bytes, {seeds} seed{'s' * (seeds > 1)}",
        file=options.json,
    )
    ends: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
    for seed in range(seeds):
        params = step.init(jax.random.key(seed))
        runs = {
            name: train(loss, params, data[:cut], held_out, steps=steps, seed=seed) for name, loss in chosen.items()
        }
        for _ in range(steps):
            for run in runs.values():
                next(run)
        for name, run in runs.items():
            ends[name].append(next(run))
    table = []
    for name, found in ends.items():
        gaps = [100 * (loss / base - 1) for (loss, _), (base, _) in zip(found, ends["float32"], strict=True)]
        ratios = [base / mine for (_, mine), (_, base) in zip(found, ends["float32"], strict=True)]
        mean, span = statistics.fmean(gaps), f"{min(gaps):+.2f} to {max(gaps):+.2f}"
        loss = statistics.fmean(loss for loss, _ in found)
        table.append([name, f"{loss:.4f}", f"{mean:+.2f}", span, f"{statistics.median(ratios):.2f}"])
    results.add(
        "Held-out loss after training",
        ["", "loss", "gap %", "gaps of the seeds", "float32 / step time"],
        table,
        "Gap: the loss above float's from the same seed, in percent. "
        "So small a model spends much of its step outside of matmuls; `step.py` has a larger one.",
        ratios=["float32 / step time"],
    )


if __name__ == "__main__":
    sys.exit(main())
