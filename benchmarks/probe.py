"""The cost of telemetry: a probe of a small transformer's quantized matmuls, against its training step.

    python benchmarks/probe.py [--quick] [--json FILE]

The model of `step.py`, its linear layers quantized by rules, 2048 tokens as 16 x 128; forward, backward and AdamW for
the step, forward and backward for the probe. Prints the time of both, and what a probe every hundred steps adds.
"""

import sys

import jax
import jax.numpy as jnp
import optax
import step
from timing import Results, arguments, side_by_side, spreads

import octavo
from octavo.inspect import telemetry

RECIPES = ("int8", "fp8_full", "mxfp8", "te_fp8_currentscaling")


def loss(params: dict, tokens: jax.Array) -> jax.Array:
    return step.loss(params, tokens, jnp.matmul, jnp.einsum)


def main() -> None:
    options = arguments(__doc__, quick="fewer repeats, a quarter of the tokens").parse_args()
    repeats, batch = (3, 4) if options.quick else (7, 16)
    params = step.init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (batch, 129), 0, step.VOCAB)
    adam = optax.adamw(1e-3)
    state = adam.init(params)
    method = f"best of {repeats} interleaved rounds, {batch} x 128 tokens"
    results, rows = Results("optax", method=method, file=options.json), []
    for name in RECIPES:
        rules = octavo.recipe(name, exclude="head")
        low = octavo.quantized(loss, rules)

        def train(params, state, tokens, low=low):
            value, grads = jax.value_and_grad(low)(params, tokens)
            updates, state = adam.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        calls = {
            "step": (jax.jit(train).lower(params, state, tokens).compile(), (params, state, tokens)),
            "probe": (jax.jit(telemetry(loss, rules)).lower(params, tokens).compile(), (params, tokens)),
        }
        t = side_by_side(calls, repeats=repeats)
        share = t["probe"].seconds / t["step"].seconds
        times = (f"{1e3 * t[part].seconds:.0f}" for part in ("step", "probe"))
        rows.append([name, *times, f"{share:.2f}", f"{share:.1f}%", spreads(t)])
    columns = ["", "step ms", "probe ms", "probe / step", "one in 100 steps adds", "spread"]
    results.add("A probe of all quantized matmuls, against a training step", columns, rows)


if __name__ == "__main__":
    sys.exit(main())
