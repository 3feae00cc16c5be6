"""Gradients of data-parallel replicas, all-reduced in low precision; the shardings of error feedback."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from octavo._tree import path_str
from octavo.distributed import GradReduce
from octavo.ops.vjp import ERROR_FEEDBACK
from octavo.train.step import Losses, TrainState
from octavo.transform.state import GRADIENT_STATE

AXIS = "data"
"""The mesh axis of the data-parallel replicas."""


def replica_reductions(mesh: Any, specs: Any, qtype: str, feedback: bool) -> Any:
    """The all-reduce over replicas of each parameter's gradient, given the partition specs of the parameters."""
    return jax.tree.map(
        lambda spec: GradReduce(NamedSharding(mesh, spec), ((AXIS,),), qtype, feedback),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def replica_gradients(
    gradients: Callable[..., Any], state: TrainState, batch: Any, weights: Any, *, reductions: Any
) -> tuple[Any, Any, Losses, Any, Any]:
    """The gradients of the global batch, as the reduced gradients of data-parallel replicas.

    Each replica computes the gradients of its own rows, with its own ranges, under `shard_map` over the axis `data`;
    other mesh axes are left to XLA. Within a replica nothing changes.

    Args:
      gradients: (state, rows, weights=, share=) -> (gradients, quantization state, losses, loss).
      state: The state; `state.errors` is the error feedback.
      batch: The global batch.
      weights: Its number of tokens.
      reductions: The `GradReduce` of each parameter.

    Returns:
      (gradients, quantization state, losses, loss, error feedback) of the global batch.
    """
    mesh = jax.tree.leaves(reductions)[0].stored.mesh

    def replica(state: TrainState, batch: Any, weights: Any, errors: Any) -> Any:
        own = jax.random.fold_in(jax.random.wrap_key_data(state.key), jax.lax.axis_index(AXIS))
        state = dataclasses.replace(state, key=jax.random.key_data(own))
        found, quant, losses, loss = gradients(state, batch, weights=weights, share=1 / mesh.shape[AXIS])
        pairs = jax.tree.map(lambda reduction, *args: reduction.reduce_replicas(*args), reductions, found, errors)
        sums = jax.tree.map(lambda g, pair: pair[0].astype(g.dtype), found, pairs)
        errors = jax.tree.map(lambda _, pair: pair[1], reductions, pairs)
        return sums, _shared(quant), jax.lax.psum(losses, AXIS), jax.lax.psum(loss, AXIS), errors

    sharded, replicated = PartitionSpec(AXIS), PartitionSpec()
    run = jax.shard_map(
        replica,
        mesh=mesh,
        in_specs=(replicated, sharded, replicated, sharded),
        out_specs=(replicated, replicated, replicated, replicated, sharded),
        axis_names={AXIS},
        check_vma=False,
    )
    return run(dataclasses.replace(state, errors={}), batch, weights, state.errors)


def _shared(quant: dict[str, Any]) -> dict[str, Any]:
    """Quantization state that all replicas share: the maximum of absmax histories, the mean of statistics."""

    def shared(name: str, x: Any) -> Any:
        largest = name == GRADIENT_STATE or not jnp.issubdtype(x.dtype, jnp.floating)
        return jax.lax.pmax(x, AXIS) if largest else jax.lax.pmean(x, AXIS)

    return {name: jax.tree.map(functools.partial(shared, name), tree) for name, tree in quant.items()}


def with_error_shardings(shardings: TrainState, state: TrainState, reductions: Any, sites: Sequence[Any]) -> TrainState:
    """The shardings of a state, where error feedback is sharded as in its reduction.

    Args:
      shardings: The shardings of everything else.
      state: The state, or its shapes.
      reductions: The `GradReduce` over replicas of each parameter, or None.
      sites: The matmuls, if some of their gradients are reduced with error feedback.
    """

    def sharding(reduction: GradReduce, stacked: int = 0) -> NamedSharding:
        return NamedSharding(reduction.stored.mesh, PartitionSpec(*(None,) * stacked, *reduction.error_spec))

    if reductions:
        errors = jax.tree.map(lambda r, error: jax.tree.map(lambda _: sharding(r), error), reductions, state.errors)
        shardings = dataclasses.replace(shardings, errors=errors)
    if not sites:
        return shardings
    by_path = {f"{site.path}/{site.op_id}/{ERROR_FEEDBACK}/error": site for site in sites}

    def site_sharding(path: Any, leaf: Any, replicated: NamedSharding) -> NamedSharding:
        site = by_path.get(path_str(path[1:]))
        if site is None or site.placement.reduction is None:
            return replicated
        reduction = site.placement.reduction
        weight, _ = site.lhs if reduction.left else site.rhs
        return sharding(reduction, leaf.ndim - 1 - len(weight))

    quant = jax.tree_util.tree_map_with_path(site_sharding, state.quant, shardings.quant)
    return dataclasses.replace(shardings, quant=quant)
