"""A function whose precision changes over training: one quantized function for each stage of a schedule."""

from collections.abc import Callable, Mapping
from typing import Any, SupportsIndex

import jax

from octavo._typing import PRNGKeyArray
from octavo.rules.schedule import Schedule
from octavo.transform.frame import Key
from octavo.transform.paths import Weights
from octavo.transform.provider import OVERWRITE
from octavo.transform.quantized import Quantized, quantized
from octavo.transform.state import nested


def scheduled(fn: Any, schedule: Any, *, weights: Weights = None, on_unmatched: str = "error") -> "Scheduled":
    """`fn` in the precision that a schedule has for each step, which goes in as `step`, a Python int.

    A step that is traced is an error: it would have every stage in every program. Under `jax.jit`, choose the stage
    outside and pass it as a static argument, which compiles once for each stage:

    >>> import functools, octavo, jax.numpy as jnp
    >>> def predict(params, x):
    ...     return x @ params["w"]
    >>> low = scheduled(predict, Schedule([(0, None), (100, octavo.recipe("int8", exclude=None))]))
    >>> params, x = {"w": jnp.eye(4)}, jnp.ones((2, 4))
    >>> low(params, x, step=7)[0].tolist(), low(params, x, step=100)[0, 0].item() < 1
    ([1.0, 1.0, 1.0, 1.0], True)
    >>> @functools.partial(jax.jit, static_argnums=0)
    ... def gradient(low, params, x):
    ...     return jax.grad(lambda params: jnp.sum(low(params, x)))(params)
    >>> gradient(low.at(100)[0], params, x)["w"].shape
    (4, 4)
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(f"scheduled takes a Schedule, got {schedule!r}; for the same rules at every step use quantized")
    stages = (quantized(fn, rules, weights=weights, on_unmatched=on_unmatched) for _, rules in schedule.stages)
    return Scheduled(schedule, tuple(stages))


class Scheduled:
    """A function in the precision of each step; see `scheduled`. `stages` are its quantized functions."""

    def __init__(self, schedule: Schedule, stages: tuple[Quantized, ...]):
        self.schedule, self.stages = schedule, stages

    def at(self, step: SupportsIndex) -> tuple[Quantized, bool]:
        """The quantized function of a step, one object for all of its stage, and whether ranges are updated then."""
        return self.stages[self.schedule.stage(step)], self.schedule.updates(step)

    def __call__(self, *args: Any, step: SupportsIndex, **kwargs: Any) -> Any:
        return self.at(step)[0](*args, **kwargs)

    def init(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The first state for arguments like these, that of all stages together.

        What two stages keep under one name they share, so that the ranges seen in one serve the next.
        """
        state: dict[Key, Any] = {}
        for number, stage in enumerate(self.stages):
            for key, new in stage._initial(args, kwargs).items():
                if _kind(state.setdefault(key, new)) != _kind(new):
                    raise ValueError(
                        f"stage {number} keeps another state for {key.name} at {key.path!r} than a stage before it: "
                        "give static ranges the same act_batch_axes in all stages"
                    )
        return nested(state)

    def stateful(
        self,
        state: Mapping[str, Any] | None = None,
        *,
        step: SupportsIndex,
        key: PRNGKeyArray | None = None,
        update: bool = True,
    ) -> Callable[..., tuple[Any, dict[str, Any]]]:
        """The function of a step with state: its result is (out, new state).

        Statistics are frozen where the schedule or `update=False` says so. The state of other stages comes out as it
        went in; the gradient of what delayed scaling keeps for them is that very state, as for an update.
        """
        stage, updates = self.at(step)

        def call(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
            whole = dict(state or {})
            out, new = stage.stateful(whole, key=key, update=update and updates)(*args, **kwargs)
            unused = _without(whole.get(OVERWRITE, {}), new.get(OVERWRITE, {}))
            return (_keeping(out, unused) if jax.tree.leaves(unused) else out), _merged(whole, new)

        return call


def _kind(state: Any) -> Any:
    return jax.tree.structure(state), [(x.shape, x.dtype) for x in jax.tree.leaves(state)]


def _merged(old: Any, new: Any) -> Any:
    """Nested dictionaries, the new over the old."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    return {**old, **{name: _merged(old[name], new[name]) if name in old else new[name] for name in new}}


def _without(old: Any, new: Any) -> Any:
    """Of nested dictionaries, what the new ones have not."""
    if not isinstance(new, Mapping):
        return {}
    kept = {name: _without(value, new[name]) if name in new else value for name, value in old.items()}
    return {name: value for name, value in kept.items() if name not in new or value}


@jax.custom_vjp
def _keeping(out: Any, state: Any) -> Any:
    """What a function returns, with a gradient for state that it has not used: itself, so that it is kept."""
    return out


_keeping.defvjp(lambda out, state: (out, state), lambda state, g: (g, state))
