"""Models by a schedule: one quantized model for each stage of training."""

from collections.abc import Sequence
from typing import Any, SupportsIndex

from octavo.rules.schedule import Schedule
from octavo.transform.schedule import StageProvider


class ScheduledModel:
    """A model whose rules follow a schedule: `at(step)` is the quantized model of a step, a Python int.

    There is one model for each stage, so that `jax.jit` and `nnx.jit` compile once per stage. From
    `Schedule.freeze_at` on, static ranges are no longer updated.

    >>> import flax.linen as nn, jax, octavo
    >>> low = octavo.quantize_model(nn.Dense(4), Schedule([(0, None), (100, "int8")]))
    >>> variables = low.init(jax.random.key(0), jax.numpy.ones((2, 8)))
    >>> low.at(100).apply(variables, jax.numpy.ones((2, 8))).shape, low.at(100) is low.at(200)
    ((2, 4), True)
    """

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self._made: dict[tuple[int, bool], Any] = {}

    def at(self, step: SupportsIndex) -> Any:
        """The quantized model of a step."""
        which = self.schedule.stage(step), self.schedule.updates(step)
        if which not in self._made:
            self._made[which] = self._make(StageProvider(self.schedule, which[0], updates=which[1]))
        return self._made[which]

    def _make(self, provider: StageProvider) -> Any:
        raise NotImplementedError


class ScheduledLinen(ScheduledModel):
    """A Flax Linen model by a schedule. All stages share the variables that `init` makes."""

    def __init__(self, model: Any, schedule: Schedule, methods: Sequence[str] | None):
        super().__init__(schedule)
        self.model, self._methods = model, methods

    def _make(self, provider: StageProvider) -> Any:
        from octavo.frameworks.linen import quantize_linen

        return quantize_linen(self.model, provider, methods=self._methods)

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The model's parameters and the initial state of all stages; stages share state of the same name."""
        return self.at(0).init(rngs, *args, **kwargs)


class ScheduledNnx(ScheduledModel):
    """A Flax NNX model by a schedule. All stages share their variables: training one trains them all."""

    def __init__(
        self, model: Any, schedule: Schedule, inputs: tuple[Any, ...], methods: Sequence[str] | None, **kwargs: Any
    ):
        from octavo.frameworks.nnx import quantize_nnx

        super().__init__(schedule)
        self._methods = methods
        self.model = model
        for number in range(len(schedule.stages)):
            provider = StageProvider(schedule, number)
            self.model = quantize_nnx(self.model, provider, *inputs, methods=methods, **kwargs)

    def _make(self, provider: StageProvider) -> Any:
        from octavo.frameworks.nnx import staged

        return staged(self.model, provider, self._methods)
