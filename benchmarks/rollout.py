"""Rollouts: the time of Engine.update next to a pass over the weights, and the mismatch of sampled tokens by precision.

    python benchmarks/rollout.py MODEL [--slots 8] [--tokens 48]

Engines sample one token at a time from a cache: in int8 by the program of training, and, where only weights are int8,
by the CPU kernels. A pass reads each float weight and writes it to a buffer that exists. Tokens are sampled at
temperature 1 after the beginning-of-text token.
"""

import argparse
import functools
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


def timed(*fns, repeats: int = 100) -> list[float]:
    """The least time of each function in milliseconds, which load changes least; they are called in turn."""
    best = [float("inf")] * len(fns)
    for _ in range(repeats):
        for i, fn in enumerate(fns):
            start = time.perf_counter()
            jax.block_until_ready(fn())
            best[i] = min(best[i], time.perf_counter() - start)
    return [1e3 * x for x in best]


def update_times(engine: Engine, params) -> None:
    def update():
        engine.update(params)
        return engine.programs._leaves

    held = [jax.tree.map(jnp.copy, params)]
    copy = jax.jit(lambda old, new, s: jax.tree.map(lambda x: x * s, new), donate_argnums=0, keep_unused=True)

    def one_pass():
        held[0] = copy(held[0], params, jnp.float32(1))
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


def logprobs_of(fn, *, params, texts) -> np.ndarray:
    """The log probabilities of tokens by the program of training."""
    texts = jnp.asarray(texts)
    return np.asarray(jax.jit(lambda params: token_logprobs(fn(params, texts)[0], texts))(params))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    given = parser.parse_args()
    source = open_model(given.model)
    config = source.config
    floats = jax.tree.map(
        lambda x: x.dequantize("float32") if is_qarray(x) else jnp.asarray(x, jnp.float32),
        source.params("float32"),
        is_leaf=is_qarray,
    )
    policy, half = (functools.partial(apply, c) for c in (config, config.replace(dtype="bfloat16")))
    weights = (octavo.QtRule(module_path="decoder/layers.*", scope="weights", weight_qtype="int8"),)
    ids = jnp.zeros((1, 8), jnp.int32)
    for rules, of_engine in ((rules_of("int8"), rules_of("int8")), (weights, None)):
        codes = octavo.convert(policy, floats, ids, rules=rules)
        engine = Engine(
            config, codes, rules=of_engine, slots=given.slots, max_length=given.tokens + 16, chunk=16, eos_ids=()
        )  # fmt: skip
        update_times(engine, floats)
        texts, sampled = sample(engine, [source.tokenizer.bos_id], given.slots, given.tokens)
        scored = np.stack(engine.logprobs(texts.tolist()))
        name = "int8" if of_engine else "int8 weights"
        print(f"{name}: {sampled.size} tokens, decoding by {engine.programs.decoding}")

        training = functools.partial(logprobs_of, params=floats, texts=texts)
        own = training(octavo.quantized(policy, rules))
        rows = (
            (f"{name}, the same codes", "scored by the engine", own, scored),
            (f"{name}, the same codes", "sampled", own, sampled),
            ("float32", "sampled", training(policy), sampled),
            ("bfloat16", "sampled", training(half), sampled),
        )
        print(f"{'training':28} {'rollout':22} {'k1':>10} {'k3':>10} {'max':>10} {'ess':>7} {'above 1e-4':>10}")
        for name, kind, logprobs, other in rows:
            found, logprobs = mismatch(logprobs[:, -other.shape[1] :], other), logprobs[:, -other.shape[1] :]
            numbers = " ".join(f"{float(x):10.2g}" for x in found[:3])
            far = np.mean(np.abs(logprobs - other) > 1e-4)
            print(f"{name:28} {kind:22} {numbers} {float(found.effective_sample_size):7.4f} {far:10.1%}", flush=True)


if __name__ == "__main__":
    main()
