"""Small models to serve, and plain ways to do what the engine does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from octavo.models import ModelConfig, apply, init_params

DENSE = ModelConfig(
    vocab_size=31,
    emb_dim=16,
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=24,
    scan_layers=False,
)
MOE = DENSE.replace(num_experts=4, experts_per_token=2, moe_mlp_dim=12, shared_experts=1)


@functools.cache
def params_of(config):
    return jax.jit(init_params, static_argnums=0)(config, jax.random.key(0))


run = jax.jit(apply, static_argnums=0)


def tokens_of(config, shape, key=1):
    return jax.random.randint(jax.random.key(key), shape, 0, config.vocab_size)


@functools.partial(jax.jit, static_argnums=0)
def _padded(config, params, tokens):
    return apply(config, params, tokens)[0]


def greedy(config, params, prompt, count):
    """The likeliest tokens one after the other, without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        row = np.zeros((1, 64), np.int32)
        row[0, : len(tokens)] = tokens
        tokens.append(int(jnp.argmax(_padded(config, params, row)[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


class Bytes:
    """A tokenizer of bytes: 256 of them, and an end."""

    eos_ids = (256,)
    bos_id = 256

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def chat(self, messages):
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))
