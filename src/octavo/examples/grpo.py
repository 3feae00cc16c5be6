"""Reinforcement learning with quantized rollouts: GRPO on a task whose answers can be checked.

Z. Shao et al., "DeepSeekMath", 2024: several answers to each prompt are sampled, and the advantage of an answer is its
reward relative to the others of its prompt, (r - mean) / std. The task is to count on: after `start a` come a + 1,
a + 2 and a + 3, modulo 10; the reward is the share of right digits. The policy starts from random weights.

    python -m octavo.examples.grpo --mode int8
    python -m octavo.examples.grpo --mode all --out runs/grpo

The second command writes a page with the rewards and the mismatch of all modes. Modes: float; int8, where training and
sampling multiply the same int8 codes; rollout, where the policy is trained in float and sampled in int8, so that both
differ, and importance weights correct for it.
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import octavo
from octavo.models import ModelConfig, apply, init_params
from octavo.report import render
from octavo.report.record import ROLLOUTS, write_record
from octavo.rollout import importance_weights, mismatch, token_logprobs
from octavo.serve import Engine, SamplingParams

START, DIGITS, ANSWER = 10, 10, 3
PROMPT = 2
MODES = {"float": ("", ""), "int8": ("int8", "int8"), "rollout": ("", "int8")}
"""The number formats of training and of rollouts."""
DESCRIPTIONS = {
    "float": "trained and sampled in float32",
    "int8": "trained and sampled in int8, by the same codes",
    "rollout": "trained in float32, sampled in int8, with importance weights",
}
MODEL = ModelConfig(
    vocab_size=DIGITS + 1,
    emb_dim=64,
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=128,
    scan_layers=False,
)


def rules_of(qtype: str) -> Any:
    """The rules of training in a number format: the matmuls of weights in layers; none for float."""
    if not qtype:
        return ()
    types = {"weight_qtype": qtype, "act_qtype": qtype, "bwd_qtype": qtype}
    # By absmax alone, a largest value that is negative is the tie -127.5: the last bit of a sum, which depends on the
    # shapes of a program, decides between two codes.
    types["act_calibration_method"] = "absmax,1.01"
    return (octavo.QtRule(module_path="decoder/layers.*", scope="weights", **types),)


def reward(prompt: np.ndarray, answer: np.ndarray) -> float:
    """The share of digits that count on from the prompt.

    >>> reward(np.asarray([START, 8]), np.asarray([9, 0, 2]))
    0.6666666666666666
    """
    return float(np.mean(answer == (prompt[-1] + 1 + np.arange(ANSWER)) % DIGITS))


def make_step(forward: Callable[..., Any], optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """A jitted step: the policy gradient of one batch of rollouts."""

    def loss(params: Any, tokens: jax.Array, sampled: jax.Array, advantages: jax.Array) -> tuple[Any, Any]:
        logprobs = token_logprobs(forward(params, tokens)[0], tokens)[:, PROMPT - 1 :]
        weights = importance_weights(logprobs, sampled)
        # The gradient of the ratio of probabilities at 1, where the policy has not changed since the rollout.
        ratio = jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))
        return -jnp.mean(weights * ratio * advantages[:, None]), mismatch(logprobs, sampled)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, *batch: jax.Array) -> Any:
        gradients, found = jax.grad(loss, has_aux=True)(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, found

    return step


def sample(engine: Engine, prompts: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Answers to prompts: all tokens [rows, prompt and answer], and the log probabilities of the answers."""
    tokens, logprobs = np.zeros((len(prompts), ANSWER), np.int32), np.zeros((len(prompts), ANSWER), np.float32)
    count = np.zeros(len(prompts), int)
    params = [SamplingParams(max_tokens=ANSWER, seed=seed + i) for i in range(len(prompts))]
    for event in engine.generate(prompts.tolist(), params):
        row = int(event.request_id)
        tokens[row, count[row]], logprobs[row, count[row]] = event.token, event.logprob
        count[row] += 1
    return np.concatenate([prompts, tokens], axis=1), logprobs


def train(
    mode: str = "int8",
    *,
    steps: int = 120,
    prompts: int = 10,
    group: int = 8,
    learning_rate: float = 1e-3,
    seed: int = 0,
    log: Callable[[str], None] | None = print,
) -> list[dict[str, float]]:
    """Train a policy, and return the mean reward and the mismatch of each step."""
    trained, sampled = (rules_of(qtype) for qtype in MODES[mode])
    policy = functools.partial(apply, MODEL)
    params = init_params(MODEL, jax.random.key(seed))
    optimizer = optax.adam(learning_rate)
    state, step = optimizer.init(params), make_step(octavo.quantized(policy, trained) if trained else policy, optimizer)
    tokens = jnp.zeros((1, 8), jnp.int32)
    codes = octavo.convert(policy, params, tokens, rules=sampled) if sampled else params
    engine = Engine(MODEL, codes, rules=sampled, slots=prompts * group, max_length=8, chunk=PROMPT, eos_ids=())
    rng, history = np.random.default_rng(seed), []
    for number in range(steps):
        engine.update(params)
        starts = rng.integers(0, DIGITS, prompts)
        rows = np.repeat(np.stack([np.full_like(starts, START), starts], axis=1), group, axis=0)
        texts, logprobs = sample(engine, rows, seed=number * len(rows))
        rewards = np.asarray([reward(row[:PROMPT], row[PROMPT:]) for row in texts]).reshape(prompts, group)
        spread = rewards.std(axis=1, keepdims=True)
        advantages = ((rewards - rewards.mean(axis=1, keepdims=True)) / (spread + 1e-4)).reshape(-1)
        params, state, found = step(params, state, texts, logprobs, advantages.astype(np.float32))
        history.append({"reward": float(rewards.mean()), **{k: float(v) for k, v in found._asdict().items()}})
        if log is not None and (number % 10 == 0 or number == steps - 1):
            log(f"step {number}: " + ", ".join(f"{name} {value:.3g}" for name, value in history[-1].items()))
    return history


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=(*MODES, "all"), default="int8")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a directory for the page about the runs")
    given = parser.parse_args()
    runs = {}
    for mode in MODES if given.mode == "all" else (given.mode,):
        print(f"{mode}: {DESCRIPTIONS[mode]}")
        runs[mode] = train(mode, steps=given.steps, seed=given.seed)
    if given.out is not None:
        options = {"steps": given.steps, "seed": given.seed}
        record = {"task": "counting on by GRPO", "runs": runs, "describes": DESCRIPTIONS, "options": options}
        write_record(given.out / ROLLOUTS, record)
        print(f"the page about it is {render(given.out)}")


if __name__ == "__main__":
    main()
