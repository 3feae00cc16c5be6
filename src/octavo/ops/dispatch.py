"""Tokens sent to the devices of their experts, and what those make of them sent back and added up.

The tokens of devices that share the experts among them are brought together (all-gather), each device sorts those that
chose one of its own experts to the front, and afterwards the parts of each token are summed where it came from
(reduce-scatter). A token can be sent in low precision, with a scale of its own; its gradient is what it would be in
float.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from octavo._typing import Array
from octavo.numerics import FormatLike
from octavo.ops.calls import call_known
from octavo.ops.gather import sent_as_it_is
from octavo.ops.parts import Parts
from octavo.ops.training import trace_of
from octavo.qarray import Quantizer


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """How tokens [batch, length, size] lie on a mesh, and what their experts are.

    `batch` and `length` are the axes of the mesh that cut tokens, `experts` those that cut experts, of which there are
    `count`; a token has `k` of them. `qtype` is the format in which tokens are sent to experts (None: as they are).
    """

    mesh: Any
    batch: tuple[str, ...]
    length: tuple[str, ...]
    experts: tuple[str, ...]
    count: int
    k: int
    qtype: FormatLike | None = None

    def __post_init__(self):
        ways = self.parts.ways(self.experts)
        if self.count % ways or not 0 < self.k <= self.count:
            raise ValueError(f"{self.count} experts of which a token has {self.k} cannot be shared by {ways} devices")

    @property
    def parts(self) -> Parts:
        """How rows lie that were sent to the devices of their experts."""
        rows = tuple(axis for axis in (*self.batch, *self.length) if axis not in self.experts)
        return Parts(self.mesh, rows, self.experts)

    @property
    def shared(self) -> tuple[str, ...]:
        """The axes along which devices have tokens of their own but share the experts."""
        return tuple(axis for axis in (*self.batch, *self.length) if axis in self.experts)

    @property
    def tokens(self) -> PartitionSpec:
        """How tokens are cut."""
        return PartitionSpec(self.batch or None, self.length or None)

    @property
    def rows(self) -> PartitionSpec:
        """How rows are cut, and what is known about them."""
        return PartitionSpec(self.parts.every or None)

    def top(self, x: Array) -> tuple[Array, Array]:
        """The k largest of [batch, length, experts] and which they are, found by each device for its own tokens."""
        run = self.parts.run(lambda x: jax.lax.top_k(x, self.k)[1], (self.tokens,), self.tokens)
        experts = run(jax.lax.stop_gradient(x))
        # A gather with its scattered gradient would be cut by XLA only as far as it can be.
        chosen = one_hot(experts, x.shape[-1])
        return jnp.sum(jnp.where(chosen, x[..., None, :], jnp.zeros_like(x)[..., None, :]), axis=-1), experts

    def gathered(self, x: Array) -> Array:
        """The tokens [batch, length, ...] of all devices that share experts with this one, as [tokens, ...]."""
        x = x.reshape(-1, *x.shape[2:])
        return jax.lax.all_gather(x, self.shared, tiled=True) if self.shared else x

    def scattered(self, x: Array, like: tuple[int, ...]) -> Array:
        """The sum of [tokens, ...] over the devices that share experts, each with its own tokens again."""
        if self.shared:
            x = jax.lax.psum_scatter(x, self.shared, tiled=True)
        if rest := tuple(axis for axis in self.experts if axis not in self.shared):
            x = jax.lax.psum(x, rest)
        return x.reshape(*like, *x.shape[1:])


def one_hot(experts: Array, count: int) -> Array:
    """Whether each of `count` experts is the one: [...] -> [..., count]."""
    return experts[..., None] == jax.lax.broadcasted_iota(experts.dtype, (*experts.shape, count), experts.ndim)


def route(experts: Array, how: Dispatch) -> tuple[Array, Array]:
    """For tokens that chose the experts [batch, length, k]: which of a device's choices each of its rows is, those of
    its own experts first and in their order, [rows]; and how many each of them has, [parts, experts of a device]."""

    def local(experts: Array) -> tuple[Array, Array]:
        chosen = how.gathered(experts).reshape(-1)
        own = how.count // how.parts.ways(how.experts)
        first = jax.lax.axis_index(how.experts) * own if how.experts else jnp.int32(0)
        turned = (chosen - first) % how.count
        sizes = jnp.sum(one_hot(turned, own), axis=0, dtype=jnp.int32)
        return jnp.argsort(turned, stable=True).astype(jnp.int32), sizes[None]

    return how.parts.run(local, (how.tokens,), (how.rows, how.rows))(experts)


def spread(x: Array, order: Array, how: Dispatch, *, anchor: Array | None = None) -> Array:
    """Tokens [batch, length, size] as rows [rows, size] on the devices of their experts, in the order of `route`.

    By `anchor`, a weight of the experts, a rule finds this and may set the format in which tokens are sent.
    """
    # Nothing of the weight but whose it is: it is neither saved for the gradient nor has one here.
    args = (x, order) if anchor is None else (x, order, jax.lax.stop_gradient(trace_of(anchor)))
    return call_known(
        _spread, how, args, op=DISPATCH, primitive=DISPATCH, params={"how": how}, config=None, run=_spread
    )


DISPATCH = "dispatch"
"""The name that rules call it by."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(how: Dispatch, x: Array, order: Array, anchor: Array | None = None) -> Array:
    def local(x: Array, order: Array) -> Array:
        return _sent(how, x)[order // how.k]

    return how.parts.run(local, (how.tokens, how.rows), how.rows)(x, order)


def _spread_fwd(how: Dispatch, x: Array, order: Array, anchor: Array | None = None):
    return _spread(how, x, order, anchor), (order, x[..., :0])


def _spread_bwd(how: Dispatch, saved: Any, g: Array):
    order, like = saved
    pieces = _pieces(how, like.shape)

    def local(g: Array, order: Array) -> Array:
        parts = g[jnp.argsort(order)].reshape(-1, how.k, g.shape[-1])
        return how.scattered(jnp.sum(parts.astype(jnp.float32), axis=1).astype(g.dtype), pieces)

    dx = how.parts.run(local, (how.rows, how.rows), how.tokens)(g, order)
    return dx, None, None


_spread.defvjp(_spread_fwd, _spread_bwd)


def _sent(how: Dispatch, x: Array) -> Array:
    if how.qtype is None or not how.shared:
        return how.gathered(x)
    codes = Quantizer(how.qtype, channelwise_axes=(0, 1)).quantize(x)
    return codes._map(lambda part: sent_as_it_is(part, how.gathered)).dequantize(x.dtype)


def _pieces(how: Dispatch, shape: tuple[int, ...]) -> tuple[int, int]:
    """The rows and the length of a device's own tokens."""
    return shape[0] // how.parts.ways(how.batch), shape[1] // how.parts.ways(how.length)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def collect(how: Dispatch, rows: Array, weights: Array, order: Array) -> Array:
    """Tokens [batch, length, size]: each the sum of its rows, which `spread` made of it, by its weights
    [batch, length, k]. Rows that have no expert on their device are to be zero."""
    pieces = _pieces(how, weights.shape[:2])

    def local(rows: Array, weights: Array, order: Array) -> Array:
        parts = _parts(how, rows, order) * how.gathered(weights)[..., None]
        return how.scattered(jnp.sum(parts, axis=1).astype(rows.dtype), pieces)

    return how.parts.run(local, (how.rows, how.tokens, how.rows), how.tokens)(rows, weights, order)


def _collect_fwd(how: Dispatch, rows: Array, weights: Array, order: Array):
    return collect(how, rows, weights, order), (rows, weights, order)


def _collect_bwd(how: Dispatch, saved: Any, g: Array):
    rows, weights, order = saved
    pieces = _pieces(how, weights.shape[:2])

    def local(rows: Array, weights: Array, order: Array, g: Array) -> tuple[Array, Array]:
        whole = how.gathered(g)[:, None].astype(jnp.float32)
        spread = (whole * how.gathered(weights)[..., None]).reshape(-1, rows.shape[-1])
        shares = jnp.sum(_parts(how, rows, order) * whole, axis=-1)
        return spread[order].astype(rows.dtype), how.scattered(shares, pieces)

    run = how.parts.run(local, (how.rows, how.tokens, how.rows, how.tokens), (how.rows, how.tokens))
    return *run(rows, weights, order, g), None


collect.defvjp(_collect_fwd, _collect_bwd)


def _parts(how: Dispatch, rows: Array, order: Array) -> Array:
    """A device's rows by token, [tokens, k, size], in float32."""
    return rows[jnp.argsort(order)].reshape(-1, how.k, rows.shape[-1]).astype(jnp.float32)
