"""Schedules: the rules of each stage of training, and the step from which static ranges are frozen."""

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

from octavo._config import Config
from octavo.rules.io import as_rules
from octavo.rules.rule import QuantizationRule

type Stages = tuple[tuple[int, tuple[QuantizationRule, ...]], ...]


@dataclasses.dataclass(frozen=True, repr=False)
class Schedule(Config):
    """Rules by stages of training: each stage is its first step, and its rules in any form that `as_rules` takes.

    The first stage starts at step 0; None is no rules, all in float. From step `freeze_at` on, static ranges
    are no longer updated.

    >>> schedule = Schedule([(0, None), (1000, QuantizationRule(weight_qtype="int8", act_qtype="int8"))])
    >>> schedule.at(999)
    ((), True)
    >>> schedule.at(1000)[0]
    (QuantizationRule(weight_qtype='int8', act_qtype='int8'),)
    """

    stages: Stages
    freeze_at: int | None = None

    def __init__(self, stages: Sequence[Any], freeze_at: int | None = None):
        object.__setattr__(self, "stages", _stages(stages))
        object.__setattr__(self, "freeze_at", None if freeze_at is None else _step("freeze_at", freeze_at))
        self._check_calibrates()

    def _check_calibrates(self) -> None:
        """Raise for static ranges that would be frozen before any stage measures them."""
        if self.freeze_at is None:
            return
        static = [step for step, rules in self.stages if any(rule.act_static_scale for rule in rules)]
        if static and static[0] >= self.freeze_at:
            raise ValueError(
                f"ranges are frozen at step {self.freeze_at}, but the first stage with static ranges begins at step "
                f"{static[0]}: nothing would calibrate them; set freeze_at to a later step"
            )

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The steps, after the first, at which something changes.

        >>> Schedule([(0, None), (100, "int8")], freeze_at=500).boundaries
        (100, 500)
        """
        steps = {step for step, _ in self.stages[1:]} | ({self.freeze_at} if self.freeze_at else set())
        return tuple(sorted(steps))

    def stage(self, step: SupportsIndex) -> int:
        """The number of the stage, from 0, that a step is in."""
        step = _step("step", step)
        return sum(begin <= step for begin, _ in self.stages) - 1

    def at(self, step: SupportsIndex) -> tuple[tuple[QuantizationRule, ...], bool]:
        """The rules at a step, and whether static ranges are updated then."""
        return self.stages[self.stage(step)][1], self.updates(step)

    def updates(self, step: SupportsIndex) -> bool:
        """Whether static ranges are updated at a step."""
        return self.freeze_at is None or _step("step", step) < self.freeze_at


def _step(name: str, step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:  # also raised by traced integers
        raise TypeError(
            f"{name} is a Python int, got {step!r}: rules are chosen before a program is traced, so choose the stage "
            "outside jit and pass what it gives, schedule.at(step) or scheduled(...).at(step), as a static argument"
        ) from None
    if isinstance(step, bool) or number < 0:
        raise ValueError(f"{name} is a number of steps, 0 or more; got {step!r}")
    return number


def _stages(stages: Any) -> Stages:
    if isinstance(stages, str) or not isinstance(stages, Sequence) or not stages:
        raise ValueError(f"a schedule has stages, [(0, None), (1000, 'int8')] for example; got {stages!r}")
    made = []
    for number, entry in enumerate(stages, 1):
        if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) != 2:
            raise ValueError(f"stage {number} of {len(stages)} is {entry!r}; a stage is (first step, rules)")
        begin, rules = _step(f"the first step of stage {number}", entry[0]), entry[1]
        try:
            made.append((begin, () if rules is None else as_rules(rules)))
        except ValueError as error:
            raise ValueError(f"stage {number} of {len(stages)}: {error}") from None
    begins = [begin for begin, _ in made]
    if begins[0] != 0:
        raise ValueError(
            f"the first stage begins at step 0, got {begins[0]}: put (0, None) before it to begin in float"
        )
    if any(a >= b for a, b in itertools.pairwise(begins)):
        raise ValueError(f"stages begin one after the other, got the steps {begins}")
    return tuple(made)
