"""Rollouts: the time of Engine.update next to a pass over the weights, and the mismatch of sampled tokens by precision.

    python benchmarks/rollout.py MODEL [--slots 8] [--tokens 48]

The engine samples by the CPU kernels, one token at a time from a cache, in int8. A pass reads each float weight and
writes it in place. Tokens are sampled at temperature 1 after the beginning-of-text token.
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import octavo
from octavo.examples.grpo import rules_of
from octavo.models import apply
from octavo.pretrained import open_model
from octavo.qarray import is_qarray
from octavo.rollout import mismatch, token_logprobs
from octavo.serve import Engine, SamplingParams


def timed(*fns, repeats: int = 21) -> list[float]:
    """The median time of each function in milliseconds; called in turn, so that load slows all of them alike."""
    times = [[] for _ in fns]
    for _ in range(repeats + 2):
        for fn, own in zip(fns, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(fn())
            own.append(time.perf_counter() - start)
    return [1e3 * statistics.median(own[2:]) for own in times]


def update_times(engine: Engine, params) -> None:
    def update():
        engine.update(params)
        return engine.programs._leaves

    held = [jax.tree.map(jnp.copy, params)]
    scale = jax.jit(lambda tree, s: jax.tree.map(lambda x: x * s, tree), donate_argnums=0)

    def one_pass():
        held[0] = scale(held[0], jnp.float32(1))
        return held[0]

    one, ours = timed(one_pass, update)
    size = sum(x.nbytes for x in jax.tree.leaves(params)) / 2**20
    print(f"update {ours:.1f} ms, a pass over {size:.0f} MiB of weights {one:.1f} ms: {ours / one:.2f} of it")


def sample(engine: Engine, prompt: list[int], rows: int, count: int):
    """Sampled texts and the log probabilities of their tokens."""
    texts, logprobs = [[*prompt] for _ in range(rows)], [[] for _ in range(rows)]
    params = [SamplingParams(temperature=1.0, max_tokens=count, seed=i) for i in range(rows)]
    for event in engine.generate([prompt] * rows, params):
        texts[int(event.request_id)].append(event.token)
        logprobs[int(event.request_id)].append(event.logprob)
    least = min(map(len, logprobs))
    return np.asarray([t[: len(prompt) + least] for t in texts]), np.asarray([row[:least] for row in logprobs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    given = parser.parse_args()
    source = open_model(given.model)
    config, rules = source.config, rules_of("int8")
    floats = jax.tree.map(
        lambda x: x.dequantize("float32") if is_qarray(x) else jnp.asarray(x, jnp.float32),
        source.params("float32"),
        is_leaf=is_qarray,
    )
    policy = functools.partial(apply, config)
    codes = octavo.convert(policy, floats, jnp.zeros((1, 8), jnp.int32), rules=rules)
    engine = Engine(
        config, codes, rules=rules, slots=given.slots, max_length=given.tokens + 16, chunk=16, eos_ids=()
    )  # fmt: skip
    update_times(engine, floats)

    texts, sampled = sample(engine, [source.tokenizer.bos_id], given.slots, given.tokens)
    scored = np.stack(engine.logprobs(texts.tolist()))
    print(f"{sampled.size} tokens, decoding by {engine.programs.decoding}")

    def training(fn, params):
        return np.asarray(jax.jit(lambda p: token_logprobs(fn(p, jnp.asarray(texts))[0], jnp.asarray(texts)))(params))

    int8 = training(octavo.quantized(policy, rules), floats)
    half = functools.partial(apply, config.replace(dtype="bfloat16"))
    rows = (
        ("int8, the same codes", "scored by the engine", int8, scored),
        ("int8, the same codes", "sampled", int8, sampled),
        ("float32", "sampled", training(policy, floats), sampled),
        ("bfloat16", "sampled", training(half, floats), sampled),
    )
    print(f"{'training':22} {'int8 rollout':22} {'k1':>10} {'k3':>10} {'max':>10} {'ess':>7}")
    for name, kind, logprobs, other in rows:
        found = mismatch(logprobs[:, -other.shape[1] :], other)
        numbers = " ".join(f"{float(x):10.2g}" for x in found[:3])
        print(f"{name:22} {kind:22} {numbers} {float(found.effective_sample_size):7.4f}")


if __name__ == "__main__":
    main()
