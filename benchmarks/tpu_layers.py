"""The layers of `accelerators.py`."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention

from octavo.models.moe import permute, weighted_sum

TOKENS, HEAD = (4, 2048), 128
SPLASH = splash_attention.BlockSizes(
    block_q=512,
    block_kv=512,
    block_q_dkv=512,
    block_kv_dkv=512,
    block_kv_dkv_compute=512,
    block_q_dq=512,
    block_kv_dq=512,
)


def dense(width: int, name: str) -> nn.Dense:
    return nn.Dense(width, use_bias=False, dtype=jnp.bfloat16, name=name)


class Linear(nn.Module):
    """One linear layer."""

    width: int

    @nn.compact
    def __call__(self, x):
        return dense(self.width, "dense")(x)


class GatedMlp(nn.Module):
    """A gated MLP: (silu(x gate) * x up) down."""

    hidden: int

    @nn.compact
    def __call__(self, x):
        gated = nn.silu(dense(self.hidden, "gate")(x)) * dense(self.hidden, "up")(x)
        return dense(x.shape[-1], "down")(gated)


def causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention without a kernel."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def splash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention by JAX's own flash kernel for TPUs, in bfloat16."""
    mask = splash_attention.MultiHeadMask([splash_attention.CausalMask((q.shape[1],) * 2)] * q.shape[2])
    kernel = splash_attention.make_splash_mha(mask, block_sizes=SPLASH, head_shards=1, q_seq_shards=1)
    q, k, v = (x.swapaxes(1, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
    return jax.vmap(kernel)(q, k, v).swapaxes(1, 2)


class Layer(nn.Module):
    """A transformer layer with RMSNorm, causal attention and a gated MLP."""

    hidden: int
    attend: Callable[..., jax.Array] = causal

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        y = nn.RMSNorm(dtype=jnp.bfloat16, name="norm1")(x)
        q, k, v = (dense(width, name)(y).reshape(*x.shape[:-1], width // HEAD, HEAD) for name in "qkv")
        x = x + dense(width, "o")(self.attend(q, k, v).reshape(x.shape))
        y = nn.RMSNorm(dtype=jnp.bfloat16, name="norm2")(x)
        gated = nn.silu(dense(self.hidden, "gate")(y)) * dense(self.hidden, "up")(y)
        return x + dense(width, "down")(gated)


class Scores(nn.Module):
    """Causal attention of queries, keys and values alone."""

    attend: Callable[..., jax.Array] = causal

    def __call__(self, x):
        q, k, v = (y.reshape(*y.shape[:-1], -1, HEAD) for y in jnp.split(x, 3, axis=-1))
        return self.attend(q, k, v).reshape(*x.shape[:-1], -1)


class Attention(nn.Module):
    """Causal attention with its four linear layers."""

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        q, k, v = (dense(width, name)(x).reshape(*x.shape[:-1], width // HEAD, HEAD) for name in "qkv")
        return dense(width, "o")(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


class Experts(nn.Module):
    """One matmul of all experts with the tokens of each."""

    experts: int
    width: int

    @nn.compact
    def __call__(self, rows, sizes):
        shape = (self.experts, rows.shape[-1], self.width)
        kernel = self.param("kernel", nn.initializers.lecun_normal(batch_axis=0), shape)
        return jax.lax.ragged_dot(rows, kernel.astype(rows.dtype), sizes)


class Moe(nn.Module):
    """Gated MLPs as experts, some of them for all tokens."""

    hidden: int
    experts: int
    chosen: int
    shared: int

    @nn.compact
    def __call__(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        router = self.param("router", nn.initializers.lecun_normal(), (x.shape[-1], self.experts))
        scores = jax.nn.softmax(jnp.einsum("td,de->te", tokens.astype(jnp.float32), router))
        weights, experts = jax.lax.top_k(scores, self.chosen)
        order = jnp.argsort(experts.reshape(-1))
        back, sizes = jnp.argsort(order), jnp.bincount(experts.reshape(-1), length=self.experts)
        rows = permute(jnp.repeat(tokens, self.chosen, axis=0), order, back)
        wide = lambda name: Experts(self.experts, self.hidden, name=name)(rows, sizes)  # noqa: E731
        out = Experts(self.experts, x.shape[-1], name="down")(nn.silu(wide("gate")) * wide("up"), sizes)
        out = weighted_sum(permute(out, back, order).reshape(-1, self.chosen, x.shape[-1]), weights)
        return out.reshape(x.shape) + GatedMlp(self.shared * self.hidden, name="shared")(x)


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (Linear(4096), (2, 2048, 4096)),
    "mlp": (GatedMlp(14336), (*TOKENS, 4096)),
    "scores": (Scores(), (*TOKENS, 3 * 4096)),
    "flash-scores": (Scores(splash), (*TOKENS, 3 * 4096)),
    "attention": (Attention(), (*TOKENS, 4096)),
    "moe": (Moe(1408, experts=64, chosen=6, shared=2), (*TOKENS, 2048)),
    "layer-1b": (Layer(8192), (*TOKENS, 2048)),
    "layer-8b": (Layer(14336), (*TOKENS, 4096)),
    "flash-8b": (Layer(14336, splash), (*TOKENS, 4096)),
}
