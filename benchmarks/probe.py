"""What telemetry costs: a probe of a small transformer's quantized products, beside its training step.

    python benchmarks/probe.py [--quick]

The model of `step.py`, its linear layers quantized by rules, 2048 tokens as 16 x 128; forward, backward and AdamW for
the step, forward and backward for the probe. Prints the time of both, and what a probe every hundred steps adds.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import optax
import step
from timing import header, side_by_side

import octavo
from octavo.transform import probe

RECIPES = ("int8", "fp8_full", "mxfp8", "te_fp8_currentscaling")


def loss(params: dict, tokens: jax.Array) -> jax.Array:
    return step.loss(params, tokens, jnp.matmul, jnp.einsum)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats, a quarter of the tokens")
    quick = parser.parse_args().quick
    repeats, batch = (3, 4) if quick else (7, 16)
    params = step.init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (batch, 129), 0, step.VOCAB)
    adam = optax.adamw(1e-3)
    state = adam.init(params)
    print(header("optax"), f"best of {repeats} interleaved rounds, {batch} x 128 tokens", sep="\n")
    print(f"{'recipe':>22} {'step ms':>8} {'probe ms':>9} {'probe/step':>11} {'every 100':>10} {'spread':>7}")
    for name in RECIPES:
        rules = octavo.recipe(name, exclude="head")
        low = octavo.quantized(loss, rules)

        def train(params, state, tokens, low=low):
            value, grads = jax.value_and_grad(low)(params, tokens)
            updates, state = adam.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        calls = {
            "step": (jax.jit(train).lower(params, state, tokens).compile(), (params, state, tokens)),
            "probe": (jax.jit(probe(loss, rules)).lower(params, tokens).compile(), (params, tokens)),
        }
        t = side_by_side(calls, repeats=repeats)
        share = t["probe"].seconds / t["step"].seconds
        print(
            f"{name:>22} {1e3 * t['step'].seconds:8.0f} {1e3 * t['probe'].seconds:9.0f} {share:11.2f} {share:9.1f}% "
            f"{100 * max(x.spread for x in t.values()):6.0f}%",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
