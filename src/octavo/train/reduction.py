"""Gradients all-reduced over data-parallel replicas in low precision."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from octavo import _sharding
from octavo.distributed import quantized_psum
from octavo.train.step import Losses, TrainState
from octavo.transform.state import GRADIENT_STATE

AXIS = "data"
"""The mesh axis of the data-parallel replicas."""


@dataclasses.dataclass(frozen=True)
class Reduction:
    """The all-reduce of gradients over data-parallel replicas: in `qtype`, optionally with error `feedback`.

    `specs` are the partition specs of the parameters within a replica.

    Each replica computes the gradients of its own rows, with its own ranges, under `shard_map` over the axis `data`;
    other mesh axes are left to XLA. Within a replica nothing changes.
    """

    mesh: Any
    specs: Any
    qtype: str
    feedback: bool = True

    @property
    def copies(self) -> int:
        """The number of data-parallel replicas."""
        return self.mesh.shape[AXIS]

    def errors(self, params: Any) -> dict[str, Any]:
        """The initial error feedback: zeros for each replica and gradient."""
        if not self.feedback:
            return {}
        return {"copies": jax.tree.map(lambda p: jnp.zeros((self.copies, *p.shape), jnp.float32), params)}

    def __call__(
        self, gradients: Callable[..., Any], state: TrainState, batch: Any, weights: Any
    ) -> tuple[Any, Any, Losses, Any, dict[str, Any]]:
        """(gradients, quantization state, losses, loss, error feedback) of the global batch.

        `gradients` is (state, rows, weights, share, key) -> (gradients, quantization state, losses, loss).
        """

        def copy(state: TrainState, batch: Any, weights: Any, errors: Any) -> Any:
            number = jax.lax.axis_index(AXIS)
            own = jax.random.fold_in(jax.random.wrap_key_data(state.key), number)
            state = dataclasses.replace(state, key=jax.random.key_data(own), errors={})
            found, quant, losses, loss = gradients(state, batch, weights, 1 / self.copies)
            before = jax.tree.map(lambda e: e[0], errors)
            pairs = jax.tree.map(self._summed, found, before["copies"] if self.feedback else found, self.specs)
            sums = jax.tree.map(lambda _, pair: pair[0], found, pairs)
            lost = {"copies": jax.tree.map(lambda _, pair: pair[1][None], found, pairs)} if self.feedback else {}
            return sums, _alike(quant), jax.tree.map(_added, losses), _added(loss), lost

        cut, same = PartitionSpec(AXIS), PartitionSpec()
        run = jax.shard_map(
            copy,
            mesh=self.mesh,
            in_specs=(same, cut, same, cut),
            out_specs=(same, same, same, same, cut),
            axis_names={AXIS},
            check_vma=False,
        )
        return run(dataclasses.replace(state, errors={}), batch, weights, state.errors)

    def _summed(self, gradient: Any, error: Any, spec: PartitionSpec) -> tuple[Any, Any]:
        """All-reduce a gradient with this partition spec over replicas: each device transfers its own shard."""
        names = {name for part in spec for name in _sharding.names(part)}

        def local(gradient: Any, error: Any) -> tuple[Any, Any]:
            total, lost = quantized_psum(gradient, AXIS, self.qtype, error=error if self.feedback else None)
            return total.astype(gradient.dtype), lost

        if not names:
            return local(gradient, error)
        specs = (spec, spec)
        return jax.shard_map(local, in_specs=specs, out_specs=specs, axis_names=names, check_vma=False)(gradient, error)


_added = functools.partial(jax.lax.psum, axis_name=AXIS)


def _alike(quant: dict[str, Any]) -> dict[str, Any]:
    """Quantization state that all replicas share: the maximum of absmax histories, the mean of statistics."""
    largest = functools.partial(jax.lax.pmax, axis_name=AXIS)
    mean = functools.partial(jax.lax.pmean, axis_name=AXIS)

    def shared(name: str, x: Any) -> Any:
        return largest(x) if name == GRADIENT_STATE or not jnp.issubdtype(x.dtype, jnp.floating) else mean(x)

    return {name: jax.tree.map(functools.partial(shared, name), tree) for name, tree in quant.items()}
