"""Schedules: which rules hold at which step, and what a schedule refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo._config import Config
from octavo.rules import QtRule, QuantizationRule, recipe
from octavo.rules.schedule import Schedule

INT8 = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
STATIC = QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)


def test_each_step_has_the_rules_of_its_stage():
    schedule = Schedule([(0, None), (10, INT8), (20, "fp8")])
    assert [schedule.at(step)[0] for step in (0, 9)] == [(), ()]
    assert [schedule.at(step)[0] for step in (10, 19)] == [(INT8,), (INT8,)]
    assert schedule.at(20)[0] == schedule.at(10**9)[0] == recipe("fp8")
    assert [schedule.stage(np.int32(step)) for step in (0, 10, 25)] == [0, 1, 2]
    assert schedule.boundaries == (10, 20)


def test_ranges_are_updated_until_they_are_frozen():
    schedule = Schedule([(0, STATIC)], freeze_at=5)
    assert [schedule.at(step)[1] for step in (0, 4, 5, 6)] == [True, True, False, False]
    assert schedule.boundaries == (5,)
    assert Schedule([(0, STATIC)]).at(10**6)[1]


def test_a_schedule_goes_to_json_and_back():
    tiled = QtRule(module_path=".*/mlp", weight_qtype="int4", tile_size=32, op_names=("einsum",))
    schedule = Schedule([(0, ()), (10, [INT8, tiled]), (20, "int8")], freeze_at=30)
    assert Config.from_json(schedule.to_json()) == schedule
    assert hash(Config.from_json(schedule.to_json())) == hash(schedule)
    assert eval(repr(schedule)) == schedule
    assert schedule.replace(freeze_at=None).boundaries == (10, 20)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], r"a schedule has stages.*got \[\]"),
        ("int8", "a schedule has stages"),
        ([(5, INT8)], r"begins at step 0, got 5: put \(0, None\) before it"),
        ([(0, None), (10, INT8), (10, None)], r"one after the other, got the steps \[0, 10, 10\]"),
        ([(0, None), INT8], r"stage 2 of 2 is QtRule.*a stage is \(first step, rules\)"),
        ([(0, "int9")], "stage 1 of 1: unknown recipe 'int9'"),
        ([(0, [INT8, "int8"])], r"stage 1 of 1: rule 2 of 2 is 'int8'.*did you mean recipe\('int8'\)"),
        ([(0, None), (-3, INT8)], "the first step of stage 2 is a number of steps, 0 or more; got -3"),
    ],
)
def test_what_is_no_schedule_raises(stages, message):
    with pytest.raises(ValueError, match=message):
        Schedule(stages)


def test_ranges_frozen_before_they_are_measured_raise():
    with pytest.raises(ValueError, match=r"frozen at step 5, but the first stage with static ranges begins at step 10"):
        Schedule([(0, None), (10, STATIC)], freeze_at=5)
    with pytest.raises(ValueError, match="freeze_at is a number of steps, 0 or more; got -1"):
        Schedule([(0, None)], freeze_at=-1)
    Schedule([(0, None), (10, INT8)], freeze_at=5)  # nothing to freeze


def test_a_traced_step_names_the_fix():
    schedule = Schedule([(0, None), (10, INT8)])
    with pytest.raises(TypeError, match=r"step is a Python int, got .*choose the stage outside jit"):
        jax.jit(lambda step: jnp.asarray(schedule.stage(step)))(3)
    with pytest.raises(TypeError, match="freeze_at"):
        Schedule([(0, None)], freeze_at=1.5)  # pyrefly: ignore
    with pytest.raises(ValueError, match="0 or more; got True"):
        schedule.at(True)
