"""A mixture of experts: every token passes through the few MLPs that a router picks for it.

Shazeer et al., arXiv:1701.06538; load balancing as in Fedus et al., Switch Transformers, arXiv:2101.03961, equation 4:
experts * sum over experts of (share of tokens) * (mean probability), which is 1 where both are even.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from octavo._typing import Array, Float, Shaped
from octavo.distributed import ExpertParallel, ExpertSharding, combine, dispatch, route
from octavo.distributed.expert_parallel import one_hot
from octavo.models.config import ModelConfig
from octavo.models.layers import Dense, Mlp, gated, matrix
from octavo.models.placing import ROWS, cut_axes
from octavo.models.remat import named
from octavo.ops import ragged_dot


class Experts(nnx.Module):
    """A matrix for each expert."""

    def __init__(self, count: int, inputs: int, outputs: int, dtype: str, *, rngs: nnx.Rngs, gain: float = 1.0):
        self.kernel = nnx.Param(matrix(rngs.params(), (count, inputs, outputs), dtype, gain=gain))

    def __call__(
        self, rows: Float[Array, "rows inputs"], sizes: Shaped[Array, "..."], sharding: ExpertSharding | None = None
    ) -> Float[Array, "rows outputs"]:
        """Rows sorted by expert, of which each has as many as `sizes` says; sharded over a mesh, if so."""
        kernel = self.kernel[...].astype(rows.dtype)
        if sharding is None:
            return jax.lax.ragged_dot(rows, kernel, sizes)
        return ragged_dot(rows, kernel, sizes, sharding=sharding)

    def every(self, formula: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """All of the experts for all tokens."""
        return jnp.einsum(formula, x, self.kernel[...].astype(x.dtype))


class Choice(NamedTuple):
    """Which experts each token goes to, and how much each of them counts."""

    experts: Shaped[Array, "*tokens k"]
    weights: Float[Array, "*tokens k"]
    load_balance: Float[Array, ""]


def choose(logits: Float[Array, "*tokens experts"], k: int, how: ExpertParallel | None = None) -> Choice:
    """The k likeliest experts of each token.

    Their weights sum to one. A single expert counts by its probability instead: with a constant weight of one the
    router would never learn. On a mesh each device looks at its own tokens.
    """
    probabilities = jax.nn.softmax(logits, axis=-1)
    weights, experts = jax.lax.top_k(probabilities, k) if how is None else how.top_k(probabilities)
    if k > 1:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    count, tokens = logits.shape[-1], tuple(range(logits.ndim - 1))
    # Compared rather than counted: on a mesh a sum is cut as its terms are.
    share = jnp.sum(one_hot(experts, count), axis=(*tokens, -2), dtype=jnp.int32) / experts.size
    load_balance = count * jnp.sum(share * jnp.mean(probabilities, axis=tokens))
    return Choice(experts, weights, load_balance)


class MoeBlock(nnx.Module):
    """The sum of what a token's experts make of it, by their weights, and of what the shared ones do."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, gain: float):
        size, hidden, count = config.emb_dim, config.moe_mlp_dim, config.num_experts
        dtype = config.weight_dtype
        self.router = Dense(size, count, dtype, rngs=rngs)
        self.wi_0 = Experts(count, size, hidden, dtype, rngs=rngs)
        self.wi_1 = Experts(count, size, hidden, dtype, rngs=rngs)
        self.wo = Experts(count, hidden, size, dtype, rngs=rngs, gain=gain)
        if config.shared_experts:
            wide = config.shared_experts * hidden
            self.shared_experts = Mlp(size, wide, config.activation, dtype, rngs=rngs, gain=gain, fused=config.fused)
        self.config = config

    def __call__(self, x: Float[Array, "batch length size"]) -> tuple[Float[Array, "batch length size"], Array]:
        how = dispatch_of(self.config, x.shape) if self.config.sparse_matmul else None
        choice = choose(self.router(x.astype(jnp.float32)), self.config.experts_per_token, how)
        if how is not None:
            out = self.cut(x, choice, how)
        else:
            run = self.sparse if self.config.sparse_matmul else self.dense
            tokens, k = x.reshape(-1, x.shape[-1]), self.config.experts_per_token
            flat = choice._replace(experts=choice.experts.reshape(-1, k), weights=choice.weights.reshape(-1, k))
            out = run(tokens, flat).reshape(x.shape)
        if self.config.shared_experts:
            out = out + self.shared_experts(x)
        return out, choice.load_balance

    def sparse(self, tokens: Float[Array, "tokens size"], choice: Choice) -> Float[Array, "tokens size"]:
        """Each token goes to its own experts: rows are sorted by expert, multiplied, and put back."""
        k = choice.experts.shape[1]
        flat = choice.experts.reshape(-1)
        order = jnp.argsort(flat)
        back = jnp.argsort(order)
        sizes = jnp.bincount(flat, length=self.config.num_experts)
        rows = permute(jnp.repeat(tokens, k, axis=0), order, back)
        out = permute(self.multiplied(rows, sizes), back, order)
        return weighted(out.reshape(-1, k, tokens.shape[1]), choice.weights)

    def cut(
        self, x: Float[Array, "batch length size"], choice: Choice, how: ExpertParallel
    ) -> Float[Array, "batch length size"]:
        """The same on a mesh: each token goes to the devices of its experts."""
        order, sizes = route(choice.experts, how)
        rows = dispatch(x, order, how, anchor=self.wi_0.kernel[...])
        _, wide = cut_axes(self.config, "exp", "mlp_moe")
        _, stored = cut_axes(self.config, "exp", "embed_moe")
        wide = tuple(axis for axis in wide if axis not in how.sharding.rows)
        stored = tuple(axis for axis in stored if axis in how.sharding.rows)
        into = dataclasses.replace(how.sharding, outputs=wide, scattered=(1, stored))
        out_of = dataclasses.replace(how.sharding, inputs=wide, scattered=(2, stored))
        return combine(how, self.multiplied(rows, sizes, into, out_of), choice.weights, order)

    def multiplied(
        self,
        rows: Float[Array, "rows size"],
        sizes: Shaped[Array, "..."],
        into: ExpertSharding | None = None,
        out_of: ExpertSharding | None = None,
    ) -> Float[Array, "rows size"]:
        """What the experts make of rows that are sorted by them."""
        gate, up = named(self.wi_0(rows, sizes, into), "mlpwi_0"), named(self.wi_1(rows, sizes, into), "mlpwi_1")
        return named(self.wo(gated(self.config.activation, gate, up), sizes, out_of), "mlpwo")

    def dense(self, tokens: Float[Array, "tokens size"], choice: Choice) -> Float[Array, "tokens size"]:
        """Each token goes to all experts, and most of them count nothing: the same result for more work."""
        gate = named(self.wi_0.every("td,edf->tef", tokens), "mlpwi_0")
        up = named(self.wi_1.every("td,edf->tef", tokens), "mlpwi_1")
        out = named(self.wo.every("tef,efd->ted", gated(self.config.activation, gate, up)), "mlpwo")
        picked = jax.nn.one_hot(choice.experts, self.config.num_experts, dtype=jnp.float32)
        return weighted(out, jnp.sum(picked * choice.weights[..., None], axis=1))


def dispatch_of(config: ModelConfig, shape: tuple[int, ...]) -> ExpertParallel | None:
    """How tokens of this shape go to their experts on JAX's current mesh; None on one device, and for numbers of rows
    that do not divide among devices, which XLA lays out as it can."""
    if not config.placement:
        return None
    (batch, length), (experts,) = cut_axes(config, *ROWS), cut_axes(config, "exp")
    mesh = jax.sharding.get_abstract_mesh()
    ways = [math.prod(mesh.shape[axis] for axis in axes) for axes in (batch, length, experts)]
    sizes = (*shape[:2], config.num_experts)
    if not (batch or length or experts) or any(size % count for size, count in zip(sizes, ways, strict=True)):
        return None
    return ExpertParallel(mesh, batch, length, experts, config.num_experts, config.experts_per_token)


def weighted(parts: Float[Array, "tokens k size"], weights: Float[Array, "tokens k"]) -> Float[Array, "tokens size"]:
    """The sum of the parts by weight, in float32."""
    return jnp.sum(parts.astype(jnp.float32) * weights[..., None], axis=1).astype(parts.dtype)


@jax.custom_vjp
def permute(
    x: Float[Array, "rows size"], order: Shaped[Array, "rows"], back: Shaped[Array, "rows"]
) -> Float[Array, "rows size"]:
    """The rows of `x` in another order, which `back` undoes: the gradient is a lookup too, and not a scattered sum."""
    return x[order]


permute.defvjp(
    lambda x, order, back: (x[order], (order, back)), lambda saved, g: (permute(g, *saved[::-1]), None, None)
)
