"""Small models for the tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from octavo.models import ModelConfig, abstract_params, apply, init_params
from tests.arrays import random_params

DENSE = ModelConfig(vocab_size=31, emb_dim=16, num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24)
MOE = DENSE.replace(num_experts=4, experts_per_token=2, moe_mlp_dim=12, shared_experts=2)
LATENT = MOE.replace(
    num_layers=3, first_dense_layers=1, num_kv_heads=4, head_dim=12, rotary_dim=4, rope_interleaved=True,
    kv_lora_rank=10, q_lora_rank=14, v_head_dim=6, num_experts=8, router_scores="sigmoid", router_bias=True,
    router_groups=4, router_top_groups=2, router_scale=2.5,
)  # fmt: skip
MIXED = MOE.replace(num_layers=5, first_dense_layers=2, unscanned_first=1, unscanned_last=1)


init = jax.jit(init_params, static_argnums=0)
run = jax.jit(apply, static_argnums=0)


@functools.cache
def params_of(config):
    """Random parameters, with norm scales that are not all one."""
    rng = np.random.default_rng(1)
    noisy = lambda x: jnp.asarray((x * (1 + 0.3 * rng.standard_normal(x.shape))).astype(x.dtype))  # noqa: E731
    return jax.tree.map(noisy, jax.device_get(random_params(abstract_params(config))))


def batch(config, shape=(2, 7), key=2):
    """Tokens, positions and segments; the first sequence packs two documents."""
    split = shape[1] // 2
    tokens = jax.random.randint(jax.random.key(key), shape, 0, config.vocab_size)
    index = np.broadcast_to(np.arange(shape[1]), shape)
    segments = 1 + ((np.arange(shape[0])[:, None] == 0) & (index >= split))
    positions = np.where(segments == 2, index - split, index)
    return tuple(jnp.asarray(x, jnp.int32) for x in (tokens, positions, segments))


def one_document(tokens):
    """`tokens` as a batch in which every row is one document: the defaults, in the form of `batch`."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return tokens, positions, jnp.ones_like(tokens)


def loss_of(config):
    """Cross-entropy of the next token, and the load balance: something of which every parameter has a gradient."""

    def loss(params, tokens, positions, segments):
        logits, aux = apply(config, params, tokens, positions, segments)
        wanted = jax.nn.one_hot(jnp.roll(tokens, -1, axis=1), config.vocab_size, dtype=jnp.float32)
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * wanted, axis=-1)) + 0.1 * aux.load_balance

    return loss


@functools.cache
def step_of(config):
    """The loss and its gradient."""
    return jax.jit(jax.value_and_grad(loss_of(config)))
