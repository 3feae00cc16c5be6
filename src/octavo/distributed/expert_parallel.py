"""Expert-parallel dispatch (all-gather) and combine (reduce-scatter).

Tokens are all-gathered along the mesh axes of the experts, each device sorts the tokens routed to its own experts to
the front, and afterwards the rows of each token are reduce-scattered. Tokens can be dispatched in low precision, with
one scale per token; the gradient is straight-through.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from octavo._typing import Array
from octavo.distributed.collectives import transfer
from octavo.distributed.expert_sharding import ExpertSharding
from octavo.numerics import FormatLike
from octavo.ops.product import mark
from octavo.ops.vjp import tangent_probe
from octavo.qarray import Quantizer


@dataclasses.dataclass(frozen=True)
class ExpertParallel:
    """The sharding of tokens [batch, length, size] and of their experts.

    Attributes:
      mesh: the (abstract) mesh.
      batch: the mesh axes along which the tokens' batch axis is sharded.
      length: the mesh axes along which the tokens' length axis is sharded.
      experts: the mesh axes along which experts are sharded.
      count: the number of experts.
      k: the number of experts per token.
      qtype: the format in which tokens are dispatched; None for the tokens' dtype.
    """

    mesh: Any
    batch: tuple[str, ...]
    length: tuple[str, ...]
    experts: tuple[str, ...]
    count: int
    k: int
    qtype: FormatLike | None = None

    def __post_init__(self):
        devices = self.sharding.num_devices(self.experts)
        if self.count % devices or not 0 < self.k <= self.count:
            raise ValueError(
                f"{self.count} experts of which a token has {self.k} cannot be shared by {devices} devices"
            )

    @property
    def sharding(self) -> ExpertSharding:
        """The sharding of dispatched rows."""
        rows = tuple(axis for axis in (*self.batch, *self.length) if axis not in self.experts)
        return ExpertSharding(self.mesh, rows, self.experts)

    @property
    def shared(self) -> tuple[str, ...]:
        """The mesh axes along which both tokens and experts are sharded."""
        return tuple(axis for axis in (*self.batch, *self.length) if axis in self.experts)

    @property
    def token_spec(self) -> PartitionSpec:
        return PartitionSpec(self.batch or None, self.length or None)

    @property
    def row_spec(self) -> PartitionSpec:
        return PartitionSpec(self.sharding.row_axes or None)

    def choose(self, x: Array, by: Array, fn: Callable[[Array], Array]) -> tuple[Array, Array]:
        """The experts `fn(by)` of [batch, length, experts], computed by each device for its tokens, and `x` of them."""
        experts = self.sharding.shard_map(fn, (self.token_spec,), self.token_spec)(jax.lax.stop_gradient(by))
        # XLA would partition a gather and its gradient, a scatter, only partially.
        chosen = one_hot(experts, x.shape[-1])
        return jnp.sum(jnp.where(chosen, x[..., None, :], jnp.zeros_like(x)[..., None, :]), axis=-1), experts

    def all_gather(self, x: Array) -> Array:
        """All-gather tokens [batch, length, ...] along the `shared` mesh axes, as [tokens, ...]."""
        x = x.reshape(-1, *x.shape[2:])
        return jax.lax.all_gather(x, self.shared, tiled=True) if self.shared else x

    def reduce_scatter(self, x: Array, like: tuple[int, ...]) -> Array:
        """Sum [tokens, ...] over the mesh axes of the experts, scattered to the devices of the tokens."""
        if self.shared:
            x = jax.lax.psum_scatter(x, self.shared, tiled=True)
        if rest := tuple(axis for axis in self.experts if axis not in self.shared):
            x = jax.lax.psum(x, rest)
        return x.reshape(*like, *x.shape[1:])


def one_hot(experts: Array, count: int) -> Array:
    """A boolean one-hot encoding of expert indices: [...] -> [..., count]."""
    return experts[..., None] == jax.lax.broadcasted_iota(experts.dtype, (*experts.shape, count), experts.ndim)


def route(experts: Array, config: ExpertParallel) -> tuple[Array, Array]:
    """The row order and group sizes of an expert-parallel dispatch.

    Args:
      experts: the expert indices of each token, [batch, length, k].
      config: the sharding of tokens and experts.

    Returns:
      The order [rows]: for each row of a device, the index of its (token, choice) pair, sorted by expert with the
      device's own experts first; and the group sizes, [shards, experts of a device].
    """

    def local(experts: Array) -> tuple[Array, Array]:
        chosen = config.all_gather(experts).reshape(-1)
        own = config.count // config.sharding.num_devices(config.experts)
        first = jax.lax.axis_index(config.experts) * own if config.experts else jnp.int32(0)
        turned = (chosen - first) % config.count
        sizes = jnp.sum(one_hot(turned, own), axis=0, dtype=jnp.int32)
        return jnp.argsort(turned, stable=True).astype(jnp.int32), sizes[None]

    rows = config.row_spec
    return config.sharding.shard_map(local, (config.token_spec,), (rows, rows))(experts)


@dataclasses.dataclass(frozen=True)
class DispatchCall:
    """The static arguments of a dispatch; a rule that matches the experts may set its format."""

    expert_parallel: ExpertParallel


def dispatch(x: Array, order: Array, config: ExpertParallel, *, anchor: Array | None = None) -> Array:
    """All-gather tokens to the devices of their experts, in the row order of `route`.

    Args:
      x: the tokens, [batch, length, size].
      order: the order that `route` returns.
      config: the sharding of tokens and experts.
      anchor: a weight of the experts: a rule that matches it may set the format in which tokens are dispatched.

    Returns:
      The rows, [rows, size].
    """
    # Only the weight's path matters: it is no residual and gets no gradient here.
    args = (x, order) if anchor is None else (x, order, jax.lax.stop_gradient(tangent_probe(anchor)))
    return _dispatch(DispatchCall(config), *args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch(call: DispatchCall, x: Array, order: Array, anchor: Array | None = None) -> Array:
    config = call.expert_parallel

    def local(x: Array, order: Array) -> Array:
        return _gather_codes(config, x)[order // config.k]

    run = config.sharding.shard_map(local, (config.token_spec, config.row_spec), config.row_spec)
    return mark(run(x, order), call, (x, order, anchor))


def _dispatch_fwd(call: DispatchCall, x: Array, order: Array, anchor: Array | None = None):
    return _dispatch(call, x, order, anchor), (order, x[..., :0])


def _dispatch_bwd(call: DispatchCall, saved: Any, g: Array):
    config, (order, like) = call.expert_parallel, saved
    shape = _local_shape(config, like.shape)

    def local(g: Array, order: Array) -> Array:
        parts = g[jnp.argsort(order)].reshape(-1, config.k, g.shape[-1])
        return config.reduce_scatter(jnp.sum(parts.astype(jnp.float32), axis=1).astype(g.dtype), shape)

    dx = config.sharding.shard_map(local, (config.row_spec, config.row_spec), config.token_spec)(g, order)
    return dx, None, None


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


def _gather_codes(config: ExpertParallel, x: Array) -> Array:
    if config.qtype is None or not config.shared:
        return config.all_gather(x)
    codes = Quantizer(config.qtype, channelwise_axes=(0, 1)).quantize(x)
    return codes._map(lambda part: transfer(part, config.all_gather)).dequantize(x.dtype)


def _local_shape(config: ExpertParallel, shape: tuple[int, ...]) -> tuple[int, int]:
    """The batch and length of a device's shard of the tokens."""
    return shape[0] // config.sharding.num_devices(config.batch), shape[1] // config.sharding.num_devices(config.length)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine(config: ExpertParallel, rows: Array, weights: Array, order: Array) -> Array:
    """Reduce-scatter rows to tokens: each token is the weighted sum of its rows.

    Args:
      config: the sharding of tokens and experts.
      rows: one row per dispatched row, [rows, size]; rows without an expert on their device must be zero.
      weights: the routing weights, [batch, length, k].
      order: the order that `route` returns.

    Returns:
      The tokens, [batch, length, size].
    """
    shape = _local_shape(config, weights.shape[:2])

    def local(rows: Array, weights: Array, order: Array) -> Array:
        parts = _by_token(config, rows, order) * config.all_gather(weights)[..., None]
        return config.reduce_scatter(jnp.sum(parts, axis=1).astype(rows.dtype), shape)

    specs = (config.row_spec, config.token_spec, config.row_spec)
    return config.sharding.shard_map(local, specs, config.token_spec)(rows, weights, order)


def _combine_fwd(config: ExpertParallel, rows: Array, weights: Array, order: Array):
    return combine(config, rows, weights, order), (rows, weights, order)


def _combine_bwd(config: ExpertParallel, saved: Any, g: Array):
    rows, weights, order = saved
    shape = _local_shape(config, weights.shape[:2])

    def local(rows: Array, weights: Array, order: Array, g: Array) -> tuple[Array, Array]:
        whole = config.all_gather(g)[:, None].astype(jnp.float32)
        spread = (whole * config.all_gather(weights)[..., None]).reshape(-1, rows.shape[-1])
        shares = jnp.sum(_by_token(config, rows, order) * whole, axis=-1)
        return spread[order].astype(rows.dtype), config.reduce_scatter(shares, shape)

    specs = (config.row_spec, config.token_spec, config.row_spec, config.token_spec)
    run = config.sharding.shard_map(local, specs, (config.row_spec, config.token_spec))
    return *run(rows, weights, order, g), None


combine.defvjp(_combine_fwd, _combine_bwd)


def _by_token(config: ExpertParallel, rows: Array, order: Array) -> Array:
    """A device's rows in token order, [tokens, k, size], in float32."""
    return rows[jnp.argsort(order)].reshape(-1, config.k, rows.shape[-1]).astype(jnp.float32)
