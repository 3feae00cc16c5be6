"""Attention in int8 as a flash kernel for TPUs, forward and backward, under the conditions of SageBwd.

SageAttention3, arXiv:2505.11594. With codes in int8 (hats), scales s, and rows i of queries, j of keys:

    S = s_i s_J Q^ K^',   P = exp(S - max S),   O = s_v P^ V^ / (127 sum P)      P^ = round(127 P)
    dV = P^' dO^ s_d / 127,   dP = dO V',   dS = P (dP - D),   dQ = dS^ K^,   dK = dS^' Q^      dO divided by sum P

Q has a scale for each row, K (minus its mean over tokens) for each block J, V for each channel, dO for each channel of
a block. dP is multiplied in bfloat16. dS, times s_i, is rounded twice: for dQ with a scale for each row of a block, for
dK with one for each column, where SageBwd has one for the block. In causal attention the first rows are much larger
than the last, whose codes are zero if they share a scale.

The kernels (`flash_blocks.py`) read and write [batch, length, heads * dim], the layout of linear layers around them.
`flash_reference.py` is their specification.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from octavo._typing import Array, Float
from octavo.kernels.flash_blocks import LANES, Flash, backward_kernel, forward_kernel

_BLOCKS, _VMEM = (512, 256, LANES), 48 * 2**20


def block_size(length: int) -> int:
    """The number of queries, and of keys, in a block of scores."""
    return next((size for size in _BLOCKS if length % size == 0), 0)


def missing_device() -> str | None:
    """Why what is traced is not for a TPU that multiplies int8; None if it is."""
    if not pltpu.is_tpu_device():
        return "the kernel is for TPUs"
    info = pltpu.get_tpu_info()
    return None if info.int8_ops_per_second else f"TPU {info.chip_version} does not multiply int8"


def unsupported(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> str | None:
    """Why the kernel does not take queries, keys and values of these shapes; None if it does."""
    _, length, heads, dim = q
    if k != v or (k[0], k[1], k[3]) != (q[0], length, dim):
        return f"queries of {q}, keys of {k} and values of {v} differ in length or head size"
    if heads % k[2]:
        return f"{heads} heads are no multiple of {k[2]} heads of keys"
    if dim % LANES:
        return f"the head size of {dim} is no multiple of {LANES}"
    if not block_size(length):
        return f"the length of {length} is no multiple of {LANES}"
    if _backward_bytes(length, dim) > _VMEM:
        return f"a head of {length} x {dim} queries and their gradients does not fit on the chip"
    return None


def flash_attention(
    q: Float[Array, "batch length heads dim"],
    k: Float[Array, "batch kv_length kv_heads dim"],
    v: Float[Array, "batch kv_length kv_heads dim"],
    *,
    causal: bool = False,
    scale: float | None = None,
    interpret: bool = False,
) -> Float[Array, "batch length heads dim"]:
    """Attention multiplied in int8 on a TPU, with gradients.

    Args:
        q: Queries. The length is a multiple of 128, as is the head size.
        k: Keys; their heads divide those of the queries.
        v: Values.
        causal: Whether a query attends to the keys before it and its own only.
        scale: What scores are multiplied by, by default the inverse root of the head size.
        interpret: Whether to interpret the kernels, which runs on any device.

    Returns:
        The context of each query, in its dtype.
    """
    if (reason := unsupported(q.shape, k.shape, v.shape)) is not None:
        raise ValueError(f"flash_attention: {reason}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _attend(Flash(causal, scale, block_size(q.shape[1]), interpret), q, k, v)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(config: Flash, q: Array, k: Array, v: Array) -> Array:
    return _forward(config, q, k, v)[0]


def _forward(config: Flash, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
    (batch, length, heads, dim), kv, block = q.shape, k.shape[2], config.block
    group = heads // kv
    shape = jax.ShapeDtypeStruct
    rows = pl.BlockSpec((None, block, dim), lambda b, h, i: (b, i, h))
    whole = pl.BlockSpec((None, length, dim), lambda b, h, i: (b, 0, jax.lax.div(h, group)))
    row = pl.BlockSpec((None, None, 1, block), lambda b, h, i: (b, h, 0, i))
    of_head = lambda n: pl.BlockSpec((None, None, 1, n), lambda b, h, i: (b, jax.lax.div(h, group), 0, 0))  # noqa: E731
    flat = lambda x: x.reshape(batch, length, -1)  # noqa: E731
    per_query, per_key = (batch, heads, 1, length), (batch, kv, 1, length)
    out, codes, scales, (top, total) = (
        shape((batch, length, heads * dim), q.dtype),
        [shape((batch, length, n * dim), jnp.int8) for n in (heads, kv, kv)],
        [shape(s, jnp.float32) for s in (per_query, per_key, (batch, kv, 1, dim))],
        [shape(per_query, jnp.float32)] * 2,
    )
    results = pl.pallas_call(
        functools.partial(forward_kernel, config),
        [out, *codes, *scales, top, total],
        grid=(batch, heads, length // block),
        in_specs=[rows, whole, whole],
        out_specs=[rows, rows, whole, whole, row, of_head(length), of_head(dim), row, row],
        scratch_shapes=[pltpu.VMEM((dim, length), jnp.int8), pltpu.VMEM((dim, block), jnp.float32)],
        compiler_params=_params(("parallel", "parallel", "arbitrary"), 16 * length * dim),
        cost_estimate=_cost(config, q, matmuls=2, arrays=(q, k, v, out, *codes)),
        interpret=config.interpret,
        name="int8_flash_forward",
    )(flat(q), flat(k), flat(v))
    return results[0].reshape(q.shape), results


def _backward(config: Flash, residuals: Any, g: Array) -> tuple[Array, Array, Array]:
    out, qc, kc, vc, qs, ks, vs, top, total = residuals
    shape, kv, block = g.shape, ks.shape[1], config.block
    batch, length, heads, dim = shape
    group = heads // kv
    g = g.reshape(batch, length, -1)
    whole = pl.BlockSpec((None, length, dim), lambda b, h, j: (b, 0, h))
    keys = pl.BlockSpec((None, block, dim), lambda b, h, j: (b, j, jax.lax.div(h, group)))
    row = pl.BlockSpec((None, None, 1, length), lambda b, h, j: (b, h, 0, 0))
    key_row = pl.BlockSpec((None, None, 1, block), lambda b, h, j: (b, jax.lax.div(h, group), 0, j))
    channels = pl.BlockSpec((None, None, 1, dim), lambda b, h, j: (b, jax.lax.div(h, group), 0, 0))
    own = pl.BlockSpec((None, block, dim), lambda b, h, j: (b, j, h))
    grad = jax.ShapeDtypeStruct((batch, length, heads * dim), out.dtype)
    wide_grad = jax.ShapeDtypeStruct(grad.shape, jnp.float32 if group > 1 else out.dtype)  # summed over a group
    dq, dk, dv = pl.pallas_call(
        functools.partial(backward_kernel, config),
        [grad, wide_grad, wide_grad],
        grid=(batch, heads, length // block),
        in_specs=[whole, whole, whole, keys, keys, row, key_row, channels, row, row],
        out_specs=[whole, own, own],
        scratch_shapes=[
            pltpu.VMEM((length, dim), jnp.int8),
            pltpu.VMEM((length // block, 1, dim), jnp.float32),
            pltpu.VMEM((length, dim), jnp.bfloat16),
            pltpu.VMEM((1, length), jnp.float32),
            pltpu.VMEM((dim, length), jnp.float32),
            *[pltpu.VMEM((block, dim), jnp.float32)] * 2,
        ],
        compiler_params=_params(("parallel", "parallel", "arbitrary"), _backward_bytes(length, dim)),
        cost_estimate=_cost(config, g.reshape(shape), 5, (qc, kc, vc, g, out, grad, wide_grad, wide_grad)),
        interpret=config.interpret,
        name="int8_flash_backward",
    )(qc, g, out, kc, vc, qs, ks, vs, top, total)
    grads = [x.reshape(batch, length, kv, group, dim).sum(3, dtype=jnp.float32).astype(out.dtype) for x in (dk, dv)]
    return dq.reshape(shape), *grads


_attend.defvjp(_forward, _backward)


def _params(semantics: tuple[Any, ...], bytes_held: int) -> Any:
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=bytes_held + 16 * 2**20)


def _backward_bytes(length: int, dim: int) -> int:
    """On the chip: codes, cotangent, context and gradient of queries, twice so that copies overlap; scratch memory."""
    return length * dim * (2 * (1 + 4 + 4 + 4) + 1 + 2 + 4)


def _cost(config: Flash, q: Any, matmuls: int, arrays: Any) -> pl.CostEstimate:
    batch, length, heads, dim = q.shape
    blocks = length // config.block
    scores = batch * heads * config.block**2 * (blocks * (blocks + 1) // 2 if config.causal else blocks**2)
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
    return pl.CostEstimate(flops=2 * matmuls * scores * dim, transcendentals=scores, bytes_accessed=moved)
