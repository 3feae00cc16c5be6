"""Functions whose quantization follows a schedule: one quantized function for each stage."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, SupportsIndex

from octavo._typing import PRNGKeyArray
from octavo.rules.schedule import Schedule
from octavo.transform.api import Quantized, Weights, quantized
from octavo.transform.frame import Key
from octavo.transform.provider import QtProvider
from octavo.transform.state import (
    GRADIENT_STATE,
    keep_as_gradient,
    merge_state,
    nest_state,
    state_structure,
    unused_state,
)


def scheduled(
    fn: Any,
    schedule: Any,
    *,
    weights: Weights = None,
    on_unmatched: str = "error",
    shardings: Mapping[str, Any] | None = None,
) -> "Scheduled":
    """Quantize `fn` by the rules that a schedule has for each step, passed as `step`, a Python int.

    A traced step is an error, since every program would hold every stage. Under `jax.jit`, choose the stage outside and
    pass it as a static argument, which compiles once for each stage:

    Args:
        fn: The function.
        schedule: A `Schedule` of rules.
        weights: As for `quantized`.
        on_unmatched: As for `quantized`.
        shardings: As for `quantized`.

    >>> import functools, jax, octavo, jax.numpy as jnp
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
    options: Any = {"weights": weights, "shardings": shardings}
    stages = (
        quantized(fn, rules, on_unmatched=on_unmatched if rules else "ignore", **options)
        for _, rules in schedule.stages
    )
    return Scheduled(schedule, tuple(stages))


class Scheduled:
    """A function that is quantized by a schedule; see `scheduled`. `stages` are its quantized functions."""

    def __init__(self, schedule: Schedule, stages: tuple[Quantized, ...]):
        self.schedule, self.stages = schedule, stages

    def at(self, step: SupportsIndex) -> tuple[Quantized, bool]:
        """The quantized function of a step, the same object within a stage, and whether static ranges are updated."""
        return self.stages[self.schedule.stage(step)], self.schedule.updates(step)

    def __call__(self, *args: Any, step: SupportsIndex, **kwargs: Any) -> Any:
        return self.at(step)[0](*args, **kwargs)

    def init(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The initial state of all stages together, for arguments of these shapes.

        Stages share state of the same name, so that the ranges of one serve the next.
        """
        return nest_state(union_state(stage._initial(args, kwargs) for stage in self.stages))

    def stateful(
        self,
        state: Mapping[str, Any] | None = None,
        *,
        step: SupportsIndex,
        key: PRNGKeyArray | None = None,
        update: bool = True,
    ) -> Callable[..., tuple[Any, dict[str, Any]]]:
        """The function of a step with state: it returns (out, new state).

        Statistics are frozen by the schedule or by `update=False`. The state of other stages is returned unchanged, and
        is its own gradient where delayed scaling updates state by the gradient.
        """
        stage, updates = self.at(step)

        def call(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
            whole = dict(state or {})
            out, new = stage.stateful(whole, key=key, update=update and updates)(*args, **kwargs)
            unused = unused_state(whole.get(GRADIENT_STATE, {}), new.get(GRADIENT_STATE, {}))
            return keep_as_gradient(out, unused), merge_state(whole, new)

        return call


def union_state(states: Iterable[Mapping[Key, Any]]) -> dict[Key, Any]:
    """The union of the states of stages; state with the same key is shared."""
    state: dict[Key, Any] = {}
    for each in states:
        for key, new in each.items():
            if state_structure(state.setdefault(key, new)) != state_structure(new):
                raise ValueError(
                    f"a stage keeps another state for {key.name} at {key.path!r} than a stage before it: give static "
                    "ranges the same act_batch_axes in all stages"
                )
    return state


class StageProvider(QtProvider):
    """The rules of one stage of a schedule, for a model. `others` are the providers of the other stages, whose state is
    passed on; `updates` is whether static ranges are updated.
    """

    def __init__(self, schedule: Schedule, number: int, *, updates: bool = True):
        super().__init__(schedule.stages[number][1])
        self.updates = updates
        self.others = tuple(QtProvider(rules) for i, (_, rules) in enumerate(schedule.stages) if i != number)
