"""State of operations as a plain pytree: collection, module path, name."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from octavo.transform.frame import Key


def nested(state: Mapping[Key, Any]) -> dict[str, Any]:
    """State by its keys, as nested dictionaries."""
    tree: dict[str, Any] = {}
    for key, value in state.items():
        place = tree.setdefault(key.collection, {})
        for part in key.path.split("/") if key.path else ():
            place = place.setdefault(part, {})
        place[key.name] = value
    return tree


def flat(tree: Mapping[str, Any], known: Mapping[Key, Any]) -> dict[Key, Any]:
    """The inverse of `nested`, for the keys that are known; what is missing raises."""
    state = {}
    for key in known:
        place: Any = tree.get(key.collection, {})
        for part in (*(key.path.split("/") if key.path else ()), key.name):
            place = place.get(part) if isinstance(place, Mapping) else None
            if place is None:
                raise ValueError(
                    f"the state has no {key.collection}/{'/'.join(p for p in (key.path, key.name) if p)}: it was made "
                    "for other rules or another function; initialize it again"
                )
        state[key] = place
    return state


def check_calibrated(state: Mapping[Key, Any]) -> None:
    """Refuse statistics that nothing was counted in, as far as that can be seen before anything runs."""
    for key, value in state.items():
        count = value.get("count") if isinstance(value, Mapping) else None
        if count is None or isinstance(count, jax.core.Tracer):
            continue
        if np.any(np.asarray(count) == 0):
            raise ValueError(
                f"{key.name} at {key.path!r} has a static scale that was never calibrated: run on calibration data "
                "with statistics being updated first"
            )


def merged(old: Any, new: Any) -> Any:
    """Nested dictionaries, the new over the old."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    return {**old, **{name: merged(old[name], new[name]) if name in old else new[name] for name in new}}


def without(old: Any, new: Any) -> Any:
    """Of nested dictionaries, what the new ones have not."""
    if not isinstance(new, Mapping):
        return {}
    kept = {name: without(value, new[name]) if name in new else value for name, value in old.items()}
    return {name: value for name, value in kept.items() if name not in new or value}


def keeping(out: Any, state: Any) -> Any:
    """What a function returns, with a gradient for state that it has not used: itself, so that it is kept."""
    return _keeping(out, state) if jax.tree.leaves(state) else out


@jax.custom_vjp
def _keeping(out: Any, state: Any) -> Any:
    return out


_keeping.defvjp(lambda out, state: (out, state), lambda state, g: (g, state))


def kind_of(state: Any) -> Any:
    """What has to be alike for one state to be used as another."""
    return jax.tree.structure(state), [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
