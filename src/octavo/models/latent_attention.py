"""Multi-head latent attention: keys and values of all heads are projected from one low-rank latent of each token.

DeepSeek-V2, arXiv:2405.04434, section 2.1: with the hidden state h of a token and norms N,

    query_i = [W_q N(W_qa h)]_i,   (c, r) = W_kva h,   [key_i, value_i] = [W_kvb N(c)]_i,   key_i = (key_i, rotate(r)),

where the last `rotary_dim` values of a query are rotated too, and r is shared by all heads.
"""

import functools

import jax.numpy as jnp
from flax import nnx

from octavo._typing import Array, Float
from octavo.models.attention import QKV, AttentionOptions, Cache, RotaryAngles, attend, rotate
from octavo.models.config import ModelConfig
from octavo.models.layers import NORMS, Dense
from octavo.models.remat import name_result
from octavo.models.sharding import TOKEN_AXES, shard_activation

NORM_EPS = 1e-6
"""Of the norms of latents, whatever `norm_eps` is: as in DeepSeek's own implementation."""


class LatentAttention(nnx.Module):
    """Attention with the parameter names of MaxText: `wq_a`, `wq_b`, `wkv_a`, `wkv_b`, and `query` without wq_a."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, gain: float):
        heads, size, dtype = config.num_query_heads, config.emb_dim, config.weight_dtype
        dense = functools.partial(Dense, dtype=dtype, rngs=rngs)
        self.rope_dim, self.nope_dim = config.rotated, config.head_dim - config.rotated
        if config.q_lora_rank:
            self.wq_a = dense(size, config.q_lora_rank)
            self.q_norm = NORMS["rms"](config.q_lora_rank, NORM_EPS, dtype)
            self.wq_b = dense(config.q_lora_rank, heads * config.head_dim)
        else:
            self.query = dense(size, heads * config.head_dim)
        self.wkv_a = dense(size, config.kv_lora_rank + self.rope_dim)
        self.kv_norm = NORMS["rms"](config.kv_lora_rank, NORM_EPS, dtype)
        self.wkv_b = dense(config.kv_lora_rank, heads * (self.nope_dim + config.v_head_dim))
        self.out = dense(heads * config.v_head_dim, size, gain=gain)
        self.config = config

    def __call__(
        self, x: Float[Array, "batch length size"], angles: RotaryAngles, cache: Cache | None = None, layer: str = ""
    ) -> tuple[Float[Array, "batch length size"], Cache | None]:
        config = self.config
        query, (latent, shared) = self.project_query(x, angles), self.project_latent(x, angles)
        if getattr(cache, "is_latent", False):
            assert cache is not None
            context, cache = self.attend_to_latents(query, latent, shared, angles, cache, layer)
            return self.out(context.reshape(*x.shape[:2], -1)), cache
        key, value = self.expand(latent, shared)
        query = shard_activation(config.placement, query, *TOKEN_AXES, "activation_heads", None)
        # A query attends to all keys of its row: where the length is sharded, keys and values are all-gathered.
        kv_axes = (TOKEN_AXES[0], "activation_kv_length", "activation_heads", None)
        key, value = (shard_activation(config.placement, x, *kv_axes) for x in (key, value))
        options = AttentionOptions(angles.window, config.attention_softcap)
        if cache is not None:
            context, cache = cache.attend(layer, QKV(query, key, value), angles.positions, options)
        else:
            assert angles.mask is not None
            context = attend(query, key, value, angles.mask, options)
        context = name_result(context, "context")
        return name_result(self.out(context.reshape(*x.shape[:2], -1)), "out_proj"), cache

    def project_query(
        self, x: Float[Array, "batch length size"], angles: RotaryAngles
    ) -> Float[Array, "batch length heads dim"]:
        """Queries by head, scaled so that scores are as `attention_scale` has them."""
        config = self.config
        latent = self.q_norm(name_result(self.wq_a(x), "query_proj")) if config.q_lora_rank else None
        query = self.query(x) if latent is None else self.wq_b(latent)
        query = name_result(query, "query_proj").reshape(*x.shape[:2], -1, config.head_dim)
        plain, rotary = jnp.split(query, (self.nope_dim,), axis=-1)
        query = jnp.concatenate([plain, rotate(rotary, angles, interleaved=config.rope_interleaved)], axis=-1)
        return query if config.attention_scale is None else query * (config.attention_scale * config.head_dim**0.5)

    def project_latent(
        self, x: Float[Array, "batch length size"], angles: RotaryAngles
    ) -> tuple[Float[Array, "batch length rank"], Float[Array, "batch length 1 rope_dim"]]:
        """The normalized latent, and the rotated part of keys that all heads share."""
        latent, shared = jnp.split(name_result(self.wkv_a(x), "key_proj"), (self.config.kv_lora_rank,), axis=-1)
        return self.kv_norm(latent), rotate(shared[:, :, None], angles, interleaved=self.config.rope_interleaved)

    def expand(
        self, latent: Float[Array, "batch length rank"], shared: Float[Array, "batch length 1 rope_dim"]
    ) -> tuple[Float[Array, "batch length heads dim"], Float[Array, "batch length heads value_dim"]]:
        """Keys and values by head."""
        both = name_result(self.wkv_b(latent), "value_proj").reshape(*latent.shape[:2], self.config.num_query_heads, -1)
        key, value = jnp.split(both, (self.nope_dim,), axis=-1)
        shared = jnp.broadcast_to(shared, (*key.shape[:-1], self.rope_dim))
        return jnp.concatenate([key, shared], axis=-1), value

    def attend_to_latents(
        self,
        query: Float[Array, "batch length heads dim"],
        latent: Float[Array, "batch length rank"],
        shared: Float[Array, "batch length 1 rope_dim"],
        angles: RotaryAngles,
        cache: Cache,
        layer: str,
    ) -> tuple[Float[Array, "batch length heads value_dim"], Cache]:
        """The same with latents in the cache: W_kvb multiplies queries and contexts, of which there are few."""
        config, rank = self.config, self.config.kv_lora_rank
        weights = self.wkv_b.kernel[...].astype(query.dtype).reshape(rank, config.num_query_heads, -1)
        to_key, to_value = jnp.split(weights, (self.nope_dim,), axis=-1)
        plain, rotary = jnp.split(query, (self.nope_dim,), axis=-1)
        query = jnp.concatenate([jnp.einsum("blhn,rhn->blhr", plain, to_key), rotary], axis=-1)
        # A cache divides scores by the root of the width of these queries.
        query = query * (query.shape[-1] / config.head_dim) ** 0.5
        options = AttentionOptions(angles.window, config.attention_softcap)
        key = jnp.concatenate([latent[:, :, None], shared], axis=-1)
        context, cache = cache.attend(layer, QKV(query, key, latent[:, :, None]), angles.positions, options)
        return jnp.einsum("blhr,rhv->blhv", context, to_value), cache
