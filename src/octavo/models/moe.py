"""A mixture of experts: a router sends every token to a few of many MLPs.

Shazeer et al., arXiv:1701.06538; load balancing as in Fedus et al., Switch Transformers, arXiv:2101.03961, equation 4:
experts * sum over experts of (share of tokens) * (mean probability), which is 1 where both are even.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from octavo._typing import Array, Float, Shaped
from octavo.distributed import ExpertParallel, ExpertSharding, combine, dispatch, route
from octavo.distributed.expert_parallel import one_hot
from octavo.models.config import ModelConfig
from octavo.models.layers import Dense, Mlp, gated, init_matrix
from octavo.models.remat import name_result
from octavo.models.sharding import TOKEN_AXES, mesh_axes
from octavo.ops import ragged_dot


class Experts(nnx.Module):
    """The weights of one matmul of all experts."""

    def __init__(
        self,
        count: int,
        inputs: int,
        outputs: int,
        dtype: str,
        *,
        rngs: nnx.Rngs,
        gain: float = 1.0,
        use_bias: bool = False,
    ):
        self.kernel = nnx.Param(init_matrix(rngs.params(), (count, inputs, outputs), dtype, gain=gain))
        if use_bias:
            self.bias = nnx.Param(jnp.zeros((count, outputs), jnp.dtype(dtype)))
        self.use_bias = use_bias

    def __call__(
        self, rows: Float[Array, "rows inputs"], sizes: Shaped[Array, "..."], sharding: ExpertSharding | None = None
    ) -> Float[Array, "rows outputs"]:
        """A ragged matmul of rows sorted by expert, with `sizes` rows for each; expert parallel with a sharding."""
        kernel = self.kernel[...].astype(rows.dtype)
        if sharding is not None:
            if self.use_bias:
                raise ValueError("experts with biases (mlp_bias) are not supported on a mesh with expert parallelism")
            return ragged_dot(rows, kernel, sizes, sharding=sharding)
        out = jax.lax.ragged_dot(rows, kernel, sizes)
        if not self.use_bias:
            return out
        return out + jnp.repeat(self.bias[...].astype(out.dtype), sizes, axis=0, total_repeat_length=rows.shape[0])

    def apply_all(self, formula: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """All experts for all tokens, by einsum."""
        out = jnp.einsum(formula, x, self.kernel[...].astype(x.dtype))
        return out + self.bias[...].astype(out.dtype)[None] if self.use_bias else out


class Routing(NamedTuple):
    """The experts of each token and their weights."""

    experts: Shaped[Array, "*tokens k"]
    weights: Float[Array, "*tokens k"]
    load_balance: Float[Array, ""]


def route_top_k(
    config: ModelConfig,
    logits: Float[Array, "*tokens experts"],
    bias: Float[Array, "experts"] | None = None,
    parallel: ExpertParallel | None = None,
) -> Routing:
    """The most probable experts of each token, by probability plus a bias if there is one.

    Their weights sum to one if `normalize_router`, else they are probabilities. A single expert is weighted by its
    probability: with a constant weight the router would have no gradient. On a mesh each device routes its own tokens.
    """
    is_softmax = config.router_scores == "softmax"
    probabilities = jax.nn.softmax(logits, axis=-1) if is_softmax else jax.nn.sigmoid(logits)
    chosen_by = probabilities if bias is None else probabilities + jnp.broadcast_to(bias, probabilities.shape)
    choose = functools.partial(best_experts, config)
    if parallel is not None:
        weights, experts = parallel.choose(probabilities, chosen_by, choose)
    else:
        experts = choose(jax.lax.stop_gradient(chosen_by))
        weights = jnp.take_along_axis(probabilities, experts, axis=-1, mode="promise_in_bounds")
    if config.experts_per_token > 1 and config.normalize_router:
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights / (total if is_softmax else total + 1e-20)
    if config.router_scale != 1:
        weights = weights * config.router_scale
    if not is_softmax:
        probabilities = probabilities / (jnp.sum(probabilities, axis=-1, keepdims=True) + 1e-20)
    count, tokens = logits.shape[-1], tuple(range(logits.ndim - 1))
    # A one-hot sum rather than a bincount: on a mesh it is sharded as its terms.
    share = jnp.sum(one_hot(experts, count), axis=(*tokens, -2), dtype=jnp.int32) / experts.size
    load_balance = count * jnp.sum(share * jnp.mean(probabilities, axis=tokens))
    return Routing(experts, weights, load_balance)


def best_experts(config: ModelConfig, scores: Float[Array, "*tokens experts"]) -> Shaped[Array, "*tokens k"]:
    """The experts of each token with the highest scores, among those of its best groups."""
    if config.router_groups > 1:
        groups = scores.reshape(*scores.shape[:-1], config.router_groups, -1)
        best = jax.lax.top_k(groups, min(2, groups.shape[-1]) if config.router_bias else 1)[0]
        kept = jax.lax.top_k(jnp.sum(best, axis=-1), config.router_top_groups)[1]
        is_kept = jnp.any(one_hot(kept, config.router_groups), axis=-2)
        scores = jnp.where(is_kept[..., None], groups, -jnp.inf).reshape(scores.shape)
    return jax.lax.top_k(scores, config.experts_per_token)[1]


class MoeBlock(nnx.Module):
    """The weighted sum of each token's experts, plus the shared experts."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, gain: float):
        size, hidden, count = config.emb_dim, config.moe_mlp_dim, config.num_experts
        dtype = config.weight_dtype
        bias = config.mlp_bias
        self.router = Dense(size, count, dtype, rngs=rngs, use_bias=bias)
        self.wi_0 = Experts(count, size, hidden, dtype, rngs=rngs, use_bias=bias)
        self.wi_1 = Experts(count, size, hidden, dtype, rngs=rngs, use_bias=bias)
        self.wo = Experts(count, hidden, size, dtype, rngs=rngs, gain=gain, use_bias=bias)
        if config.shared_experts:
            wide = config.shared_experts * hidden
            self.shared_experts = Mlp(size, wide, config.activation, dtype, rngs=rngs, gain=gain, fused=config.fused)
        if config.router_bias:
            self.router_bias = nnx.Param(jnp.zeros(count, jnp.dtype(dtype)))
        if config.shared_gate:
            self.shared_gate = Dense(size, 1, dtype, rngs=rngs)
        self.config = config

    def __call__(self, x: Float[Array, "batch length size"]) -> tuple[Float[Array, "batch length size"], Array]:
        parallel = expert_parallel(self.config, x.shape) if self.config.sparse_matmul else None
        bias = self.router_bias[...].astype(jnp.float32) if self.config.router_bias else None
        routing = route_top_k(self.config, self.router(x.astype(jnp.float32)), bias, parallel)
        if parallel is not None:
            out = self.compute_sharded(x, routing, parallel)
        else:
            run = self.compute_sparse if self.config.sparse_matmul else self.compute_dense
            tokens, k = x.reshape(-1, x.shape[-1]), self.config.experts_per_token
            flat = routing._replace(experts=routing.experts.reshape(-1, k), weights=routing.weights.reshape(-1, k))
            out = run(tokens, flat).reshape(x.shape)
        if self.config.shared_experts:
            shared = self.shared_experts(x)
            out = out + (jax.nn.sigmoid(self.shared_gate(x)) * shared if self.config.shared_gate else shared)
        return out, routing.load_balance

    def compute_sparse(self, tokens: Float[Array, "tokens size"], routing: Routing) -> Float[Array, "tokens size"]:
        """Ragged matmuls of the tokens sorted by expert."""
        k = routing.experts.shape[1]
        flat = routing.experts.reshape(-1)
        order = jnp.argsort(flat)
        back = jnp.argsort(order)
        sizes = jnp.bincount(flat, length=self.config.num_experts)
        rows = permute(jnp.repeat(tokens, k, axis=0), order, back)
        out = permute(self.apply_experts(rows, sizes), back, order)
        return weighted_sum(out.reshape(-1, k, tokens.shape[1]), routing.weights)

    def compute_sharded(
        self, x: Float[Array, "batch length size"], routing: Routing, parallel: ExpertParallel
    ) -> Float[Array, "batch length size"]:
        """Expert parallel: tokens are dispatched to the devices of their experts, and combined."""
        order, sizes = route(routing.experts, parallel)
        rows = dispatch(x, order, parallel, anchor=self.wi_0.kernel[...])
        _, wide = mesh_axes(self.config.placement, "exp", "mlp_moe")
        _, stored = mesh_axes(self.config.placement, "exp", "embed_moe")
        wide = tuple(axis for axis in wide if axis not in parallel.sharding.rows)
        stored = tuple(axis for axis in stored if axis in parallel.sharding.rows)
        into = dataclasses.replace(parallel.sharding, outputs=wide, scattered=(1, stored))
        out_of = dataclasses.replace(parallel.sharding, inputs=wide, scattered=(2, stored))
        return combine(parallel, self.apply_experts(rows, sizes, into, out_of), routing.weights, order)

    def apply_experts(
        self,
        rows: Float[Array, "rows size"],
        sizes: Shaped[Array, "..."],
        into: ExpertSharding | None = None,
        out_of: ExpertSharding | None = None,
    ) -> Float[Array, "rows size"]:
        """The gated MLPs of the experts, for rows sorted by expert."""
        gate = name_result(self.wi_0(rows, sizes, into), "mlpwi_0")
        up = name_result(self.wi_1(rows, sizes, into), "mlpwi_1")
        return name_result(self.wo(gated(self.config.activation, gate, up), sizes, out_of), "mlpwo")

    def compute_dense(self, tokens: Float[Array, "tokens size"], routing: Routing) -> Float[Array, "tokens size"]:
        """All experts for all tokens, most with weight zero: the reference of `compute_sparse`."""
        gate = name_result(self.wi_0.apply_all("td,edf->tef", tokens), "mlpwi_0")
        up = name_result(self.wi_1.apply_all("td,edf->tef", tokens), "mlpwi_1")
        out = name_result(self.wo.apply_all("tef,efd->ted", gated(self.config.activation, gate, up)), "mlpwo")
        picked = jax.nn.one_hot(routing.experts, self.config.num_experts, dtype=jnp.float32)
        return weighted_sum(out, jnp.sum(picked * routing.weights[..., None], axis=1))


def expert_parallel(config: ModelConfig, shape: tuple[int, ...]) -> ExpertParallel | None:
    """Expert parallelism on JAX's current mesh; None on one device, and where shards would be uneven."""
    if not config.placement:
        return None
    (batch, length), (experts,) = mesh_axes(config.placement, *TOKEN_AXES), mesh_axes(config.placement, "exp")
    mesh = jax.sharding.get_abstract_mesh()
    num_shards = [math.prod(mesh.shape[axis] for axis in axes) for axes in (batch, length, experts)]
    sizes = (*shape[:2], config.num_experts)
    if not (batch or length or experts) or any(size % count for size, count in zip(sizes, num_shards, strict=True)):
        return None
    return ExpertParallel(mesh, batch, length, experts, config.num_experts, config.experts_per_token)


def weighted_sum(
    parts: Float[Array, "tokens k size"], weights: Float[Array, "tokens k"]
) -> Float[Array, "tokens size"]:
    """The weighted sum over k, accumulated in float32."""
    return jnp.sum(parts.astype(jnp.float32) * weights[..., None], axis=1).astype(parts.dtype)


@jax.custom_vjp
def permute(
    x: Float[Array, "rows size"], order: Shaped[Array, "rows"], back: Shaped[Array, "rows"]
) -> Float[Array, "rows size"]:
    """`x[order]`, where `back` is the inverse permutation: the gradient is a gather too, not a scatter-add."""
    return x[order]


permute.defvjp(
    lambda x, order, back: (x[order], (order, back)), lambda saved, g: (permute(g, *saved[::-1]), None, None)
)
