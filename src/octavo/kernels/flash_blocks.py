"""The bodies of the kernels of `flash_attention.py`.

They hold scores transposed, [keys, queries]: what a query has one number of is a row there.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from octavo._typing import Array

LANES, LIMIT = 128, 127.0
MASKED = -1e30
"""The score of a masked key, and less than any other."""
_NN, _NT = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class Flash:
    """The static arguments of the kernels.

    Attributes:
        causal: Whether a query attends to the keys before it and its own only.
        scale: What scores are multiplied by.
        block: How many queries, and keys, a block of scores has.
        interpret: Whether the kernels are interpreted, on any device.
    """

    causal: bool
    scale: float
    block: int
    interpret: bool = False

    @property
    def exponent(self) -> float:
        """What scores are multiplied by for powers of two in place of e."""
        return self.scale / math.log(2)


def forward_kernel(config: Flash, *refs: Any) -> None:
    """The context of a block of queries; the first block of a head also quantizes its keys and values."""
    q_ref, k_ref, v_ref, o_ref, qc_ref, kc_ref, vc_ref, qs_ref, ks_ref, vs_ref, m_ref, l_ref, vt_ref, acc_ref = refs
    block, i = config.block, pl.program_id(2)
    length, dim = kc_ref.shape

    @pl.when(i == 0)
    def _():
        at = lambda j: pl.ds(pl.multiple_of(j * block, block), block)  # noqa: E731

        def measure(j: Any, carry: Any) -> Any:
            k, v = (ref[at(j), :].astype(jnp.float32) for ref in (k_ref, v_ref))
            return carry[0] + jnp.sum(k, 0, keepdims=True), jnp.maximum(carry[1], jnp.max(jnp.abs(v), 0, keepdims=True))

        start = jnp.zeros((1, dim), jnp.float32)
        total, most = jax.lax.fori_loop(0, length // block, measure, (start, start))
        vs_ref[...], v_inverse = _scale(most)

        @pl.loop(0, length // block)
        def _(j: Any) -> None:
            k = k_ref[at(j), :].astype(jnp.float32) - total / length
            scale, inverse = _scale(jnp.max(jnp.max(jnp.abs(k), 0, keepdims=True), 1, keepdims=True))
            ks_ref[:, at(j)] = jnp.broadcast_to(scale, (1, block))
            kc_ref[at(j), :] = _round(k * inverse)
            v = v_ref[at(j), :].astype(jnp.float32) * v_inverse
            vc_ref[at(j), :], vt_ref[:, at(j)] = _round(v), _round(v.T)

    q = q_ref[...].astype(jnp.float32)
    scale, inverse = _scale(jnp.max(jnp.abs(q), 1, keepdims=True))
    qc_ref[...] = _round(q * inverse)
    qs_ref[...] = jnp.broadcast_to(scale, (block, LANES)).T[:1]
    acc_ref[...] = jnp.zeros_like(acc_ref)
    qs = qs_ref[...] * config.exponent

    def step(masked: bool, j: Any, carry: Any) -> Any:
        top, total = carry
        z = _scores(config, kc_ref, ks_ref, qc_ref[...], qs, i, j, masked)
        new = jnp.maximum(top, jnp.max(z, 0, keepdims=True))
        p, decay = jnp.exp2(z - new), jnp.exp2(top - new)
        values = vt_ref[:, pl.ds(pl.multiple_of(j * block, block), block)]
        acc_ref[...] = acc_ref[...] * decay + _dot(values, _round(LIMIT * p), _NN)
        return new, total * decay + jnp.sum(p, 0, keepdims=True)

    carry = jnp.full((1, block), MASKED, jnp.float32), jnp.zeros((1, block), jnp.float32)
    last = i if config.causal else length // block
    carry = jax.lax.fori_loop(0, last, functools.partial(step, False), carry)
    top, total = step(True, i, carry) if config.causal else carry
    m_ref[...], l_ref[...] = top, total
    o_ref[...] = ((acc_ref[...] / (LIMIT * total)).T * vs_ref[...]).astype(o_ref.dtype)


def backward_kernel(config: Flash, *refs: Any) -> None:
    """The gradients of a block of keys and values; those of a head's queries are summed over its blocks."""
    qc_ref, g_ref, o_ref, kc_ref, vc_ref, qs_ref, ks_ref, vs_ref, m_ref, l_ref = refs[:10]
    dq_ref, dk_ref, dv_ref, gc_ref, gs_ref, gv_ref, delta_ref, dqt_ref, dk_sum, dv_sum = refs[10:]
    block, j = config.block, pl.program_id(2)
    count = qc_ref.shape[0] // block
    at = lambda i: pl.ds(pl.multiple_of(i * block, block), block)  # noqa: E731

    @pl.when(j == 0)
    def _():
        @pl.loop(0, count)
        def _(i: Any) -> None:
            columns = jnp.broadcast_to(1 / l_ref[:, at(i)], (g_ref.shape[1], block)).T
            g = g_ref[at(i), :].astype(jnp.float32) * columns
            delta = jnp.sum((g * o_ref[at(i), :].astype(jnp.float32)).T, 0, keepdims=True)
            delta_ref[:, at(i)] = delta * qs_ref[:, at(i)]
            gs_ref[i], inverse = _scale(jnp.max(jnp.abs(g), 0, keepdims=True))
            gc_ref[at(i), :] = _round(g * inverse)
            columns = jnp.broadcast_to(qs_ref[:, at(i)], (g_ref.shape[1], block)).T
            gv_ref[at(i), :] = (g * vs_ref[...] * columns).astype(jnp.bfloat16)
            dqt_ref[:, at(i)] = jnp.zeros((g.shape[1], block), jnp.float32)

    dk_sum[...], dv_sum[...] = jnp.zeros_like(dk_sum), jnp.zeros_like(dv_sum)
    values, transposed = vc_ref[...].astype(jnp.bfloat16), kc_ref[...].astype(jnp.float32).T.astype(jnp.int8)
    key_scale = ks_ref[:, :1]

    def step(masked: bool, i: Any, _: Any) -> None:
        qc = qc_ref[at(i), :]
        z = _scores(config, kc_ref, ks_ref, qc, qs_ref[:, at(i)] * config.exponent, i, j, masked, local=True)
        p = jnp.exp2(z - m_ref[:, at(i)])
        dv_sum[...] += _dot(_round(LIMIT * p), gc_ref[at(i), :], _NN) * (gs_ref[i] / LIMIT)
        ds = p * (_dot(values, gv_ref[at(i), :], _NT) - delta_ref[:, at(i)])
        size = jnp.abs(ds)
        scale, inverse = _scale(jnp.max(size, 0, keepdims=True))
        dqt_ref[:, at(i)] += _dot(transposed, _round(ds * inverse), _NN) * (scale * key_scale)
        scale, inverse = _scale(jnp.max(size, 1, keepdims=True))
        dk_sum[...] += _dot(_round(ds * inverse), qc, _NN) * scale

    if config.causal:
        step(True, j, None)
    jax.lax.fori_loop(j + 1 if config.causal else 0, count, functools.partial(step, False), None)
    dk_ref[...] = (dk_sum[...] * config.scale).astype(dk_ref.dtype)
    dv_ref[...] = dv_sum[...].astype(dv_ref.dtype)

    @pl.when(j == count - 1)
    def _():
        @pl.loop(0, count)
        def _(i: Any) -> None:
            dq_ref[at(i), :] = (dqt_ref[:, at(i)] * (config.scale / qs_ref[:, at(i)])).T.astype(dq_ref.dtype)


def _scores(config: Flash, kc: Any, ks: Any, qc: Array, qs: Array, i: Any, j: Any, masked: bool, local: bool = False):
    """The scores of a block of keys and of queries, transposed; `local` if the references hold no other keys."""
    at = pl.ds(0 if local else pl.multiple_of(j * config.block, config.block), config.block)
    z = _dot(kc[at, :], qc, _NT) * (qs * ks[:, at][:, :1])
    if masked:  # on the diagonal
        key, query = (jax.lax.broadcasted_iota(jnp.int32, z.shape, axis) for axis in (0, 1))
        z = jnp.where(key <= query, z, MASKED)
    return z


def _dot(lhs: Array, rhs: Array, numbers: Any) -> Array:
    total = jnp.int32 if lhs.dtype == jnp.int8 else jnp.float32
    return jax.lax.dot_general(lhs, rhs, numbers, preferred_element_type=total).astype(jnp.float32)


def _scale(most: Array) -> tuple[Array, Array]:
    """The scale of values of which this is the largest, and its inverse."""
    scale = jnp.where(most == 0, 1.0, most / LIMIT)
    return scale, 1 / scale


def _round(x: Array) -> Array:
    """Codes of values from -127 to 127: the last bits of a sum with 1.5 * 2**23, fewer operations than a conversion."""
    return jax.lax.bitcast_convert_type(x + 12582912.0, jnp.int32).astype(jnp.int8)
