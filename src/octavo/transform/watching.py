"""The state through which a product tells how well its number formats fit: zeros whose gradient is what was seen."""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from octavo._typing import Array
from octavo.ops import DotConfig
from octavo.ops.watch import init_watch, watched
from octavo.transform.frame import Frame, Key
from octavo.transform.site import Site

FITS = "quant_fits"
"""The collection of these zeros."""


def watch(site: Site, frame: Frame, config: DotConfig, operands: Sequence[Any]) -> dict[str, dict[str, Array]]:
    """What to add to the scaling of a product so that the gradient of the state is what the product saw."""
    state = frame.read(Key(FITS, site.path, site.op_id), lambda: init_watch(config))
    varying = [getattr(getattr(jax.typeof(x), "mat", None), "varying", frozenset()) for x in operands]
    axes = tuple(sorted(frozenset().union(*varying)))
    return {watched(name): _per_device(axes, zeros) if axes else zeros for name, zeros in state.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _per_device(axes: tuple[str, ...], zeros: dict[str, Array]) -> dict[str, Array]:
    """Zeros for each device of a shard_map, which together see what all of them see."""
    return {name: jax.lax.pcast(x, axes, to="varying") for name, x in zeros.items()}


def _together(axes: tuple[str, ...], _: None, sums: dict[str, Array]) -> tuple[dict[str, Array]]:
    reduce = {"largest_scale": jax.lax.pmax}
    return ({name: reduce.get(name, jax.lax.psum)(x, axes) for name, x in sums.items()},)


_per_device.defvjp(lambda axes, zeros: (_per_device(axes, zeros), None), _together)
