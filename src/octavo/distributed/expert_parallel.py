"""Expert-parallel dispatch (all-gather) and combine (reduce-scatter).

The tokens of devices that share the experts among them are all-gathered, each device sorts those that chose one of its
own experts to the front, and afterwards the rows of each token are reduce-scattered. Tokens can be dispatched in low
precision, with one scale per token; their gradient is what it would be in float.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from octavo._typing import Array
from octavo.distributed.collectives import transfer
from octavo.distributed.expert_sharding import ExpertSharding
from octavo.numerics import FormatLike
from octavo.ops.marker import mark
from octavo.ops.vjp import tangent_probe
from octavo.qarray import Quantizer


@dataclasses.dataclass(frozen=True)
class ExpertParallel:
    """The sharding of tokens [batch, length, size] and of their experts.

    Attributes:
      mesh: the (abstract) mesh.
      batch: the mesh axes of the tokens' axis batch.
      length: the mesh axes of the tokens' axis length.
      experts: the mesh axes of the experts.
      count: how many experts there are.
      k: how many experts a token has.
      qtype: the format in which tokens are dispatched; None for their own dtype.
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
        """The sharding of rows that were dispatched."""
        rows = tuple(axis for axis in (*self.batch, *self.length) if axis not in self.experts)
        return ExpertSharding(self.mesh, rows, self.experts)

    @property
    def shared(self) -> tuple[str, ...]:
        """The mesh axes along which devices have tokens of their own but share the experts."""
        return tuple(axis for axis in (*self.batch, *self.length) if axis in self.experts)

    @property
    def token_spec(self) -> PartitionSpec:
        return PartitionSpec(self.batch or None, self.length or None)

    @property
    def row_spec(self) -> PartitionSpec:
        return PartitionSpec(self.sharding.row_axes or None)

    def top_k(self, x: Array) -> tuple[Array, Array]:
        """The k largest of [batch, length, experts] and their indices, found by each device for its own tokens."""
        run = self.sharding.shard_map(lambda x: jax.lax.top_k(x, self.k)[1], (self.token_spec,), self.token_spec)
        experts = run(jax.lax.stop_gradient(x))
        # A gather with its scattered gradient would be partitioned by XLA only as far as it can be.
        chosen = one_hot(experts, x.shape[-1])
        return jnp.sum(jnp.where(chosen, x[..., None, :], jnp.zeros_like(x)[..., None, :]), axis=-1), experts

    def all_gather(self, x: Array) -> Array:
        """The tokens [batch, length, ...] of all devices that share experts with this one, as [tokens, ...]."""
        x = x.reshape(-1, *x.shape[2:])
        return jax.lax.all_gather(x, self.shared, tiled=True) if self.shared else x

    def reduce_scatter(self, x: Array, like: tuple[int, ...]) -> Array:
        """The sum of [tokens, ...] over the devices that share experts, each device with its own tokens."""
        if self.shared:
            x = jax.lax.psum_scatter(x, self.shared, tiled=True)
        if rest := tuple(axis for axis in self.experts if axis not in self.shared):
            x = jax.lax.psum(x, rest)
        return x.reshape(*like, *x.shape[1:])


def one_hot(experts: Array, count: int) -> Array:
    """Whether each of `count` experts is the one: [...] -> [..., count]."""
    return experts[..., None] == jax.lax.broadcasted_iota(experts.dtype, (*experts.shape, count), experts.ndim)


def route(experts: Array, config: ExpertParallel) -> tuple[Array, Array]:
    """The order of rows and the group sizes for tokens that chose the experts [batch, length, k].

    Returns:
      For each row of a device which of the choices it is, those of its own experts first and in their order, [rows];
      and how many rows each expert has, [shards, experts of a device].
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
    """What is static about one dispatch; a rule for the experts may set its format."""

    expert_parallel: ExpertParallel


def dispatch(x: Array, order: Array, config: ExpertParallel, *, anchor: Array | None = None) -> Array:
    """Tokens [batch, length, size] as rows [rows, size] on the devices of their experts, in the order of `route`.

    By `anchor`, a weight of the experts, a rule finds this and may set the format in which tokens are dispatched.
    """
    # Nothing of the weight but its name: it is neither saved for the gradient nor has one here.
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
    """The batch and the length of a device's own tokens."""
    return shape[0] // config.sharding.num_devices(config.batch), shape[1] // config.sharding.num_devices(config.length)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine(config: ExpertParallel, rows: Array, weights: Array, order: Array) -> Array:
    """Tokens [batch, length, size]: each the sum of its rows, which `dispatch` made, by its weights [batch, length, k].

    Rows that have no expert on their device are to be zero.
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
    """A device's rows by token, [tokens, k, size], in float32."""
    return rows[jnp.argsort(order)].reshape(-1, config.k, rows.shape[-1]).astype(jnp.float32)
