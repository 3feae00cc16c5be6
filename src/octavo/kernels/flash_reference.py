"""The specification of `flash_attention.py` in plain JAX: the same codes and scales, on whole arrays."""

import jax
import jax.numpy as jnp

from octavo._typing import Array, Float
from octavo.kernels.flash_blocks import LIMIT, MASKED, Flash


def flash_reference(config: Flash, q: Array, k: Array, v: Array, g: Array) -> tuple[Float[Array, "..."], ...]:
    """The context of queries, and the gradients of queries, keys and values, for a cotangent.

    Args:
        config: The static arguments.
        q: Queries, [batch, length, heads, dim].
        k: Keys, [batch, length, kv_heads, dim].
        v: Values, as the keys.
        g: The cotangent, as the queries.
    """
    (batch, length, heads, dim), kv, block = q.shape, k.shape[2], config.block
    blocks = length // block
    split = lambda x: x.reshape(batch, blocks, block, *x.shape[2:])  # noqa: E731
    joined = lambda x: x.reshape(batch, length, *x.shape[3:])  # noqa: E731
    repeated = lambda x: jnp.repeat(x, heads // kv, axis=2)  # noqa: E731
    wide = lambda x: x.astype(jnp.float32)  # noqa: E731

    qc, qs = _quantize(wide(q), 3)
    kc, ks = _quantize(split(wide(k) - jnp.mean(wide(k), 1, keepdims=True)), (2, 4))
    vc, vs = _quantize(wide(v), 1)
    kc, ks, vc, vs = repeated(joined(kc)), jnp.repeat(ks, heads // kv, axis=3), repeated(vc), repeated(vs)
    ks = joined(jnp.broadcast_to(ks, (batch, blocks, block, heads, 1)))

    # Scores [batch, heads, queries, blocks of keys, keys].
    by_head = lambda x: x.transpose(0, 2, 1, 3)  # noqa: E731
    z = jnp.einsum("bihd,bjhd->bhij", qc, kc) * (by_head(qs) * config.exponent * by_head(ks).swapaxes(2, 3))
    if config.causal:
        z = jnp.where(jnp.tril(jnp.ones((1, 1, length, length), bool)), z, MASKED)
    z = z.reshape(batch, heads, length, blocks, block)
    tops = jnp.max(z, 4)
    before = jnp.stack([jnp.max(tops[..., : n + 1], -1) for n in range(blocks)], -1)  # as the kernel meets them
    top = before[..., -1:]
    p = jnp.exp2(z - before[..., None])
    decay = jnp.exp2(before - top)
    total = jnp.sum(jnp.sum(p, 4) * decay, 3)[..., None]
    rounded = (jnp.round(LIMIT * p) * decay[..., None]).reshape(batch, heads, length, length)
    out = by_head(jnp.einsum("bhij,bjhd->bhid", rounded, vc) / (LIMIT * total)) * vs
    out = out.astype(q.dtype)

    p = jnp.exp2(z - top[..., None]).reshape(batch, heads, length, length)
    scaled = wide(g) * by_head(1 / total)
    delta = by_head(jnp.sum(scaled * wide(out), 3, keepdims=True) * qs)
    gc, gs = _quantize(split(scaled), 2)
    dv = jnp.einsum(
        "bhnij,bnihd,bnhd->bjhd", jnp.round(LIMIT * p).reshape(batch, heads, blocks, block, -1), gc, gs[:, :, 0] / LIMIT
    )
    dp = jnp.einsum("bihd,bjhd->bhij", _round_to_bfloat16(scaled * vs * qs), vc)
    ds = (p * (dp - delta)).reshape(batch, heads, blocks, block, blocks, block)
    by_query, by_key = (jnp.multiply(*_quantize(ds, axis)).reshape(p.shape) for axis in (5, 3))
    dq = jnp.einsum("bhij,bjhd->bihd", by_query, kc * ks) * (config.scale / qs)
    dk = jnp.einsum("bhij,bihd->bjhd", by_key, qc) * config.scale
    dk, dv = (x.reshape(batch, length, kv, -1, dim).sum(3) for x in (dk, dv))
    return out, *(x.astype(q.dtype) for x in (dq, dk, dv))


def _round_to_bfloat16(x: Array) -> Array:
    """Values rounded to bfloat16; XLA leaves out a conversion there and back."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _quantize(x: Array, axes: int | tuple[int, ...]) -> tuple[Array, Array]:
    """Codes, as float32, and scales that are shared along some axes."""
    most = jnp.max(jnp.abs(x), axes, keepdims=True)
    scale = jnp.where(most == 0, 1.0, most / LIMIT)
    return jnp.round(x * (1 / scale)), scale
