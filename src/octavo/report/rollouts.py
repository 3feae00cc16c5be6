"""The page about reinforcement learning in several precisions: rewards, and the mismatch of training and rollouts."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.report.axis import smooth
from octavo.report.charts import Line, LineChart, Panel
from octavo.report.page import write_page

_TAIL = 10
"""The steps over which a mean reward is taken."""
_SMALLEST = 1e-16
"""The least mismatch that a logarithmic axis shows; 0 is drawn there."""


def rollouts_report(record: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the page about reinforcement learning in several precisions.

    Args:
      record: The name of the `task`, its `runs` by name, each a list with the `reward` and the `k3` of each step, and
        optionally `describes`, a sentence for each name, `options` and `versions`.
      path: Where to write the page.

    Returns:
      The path of the page.
    """
    named = list(record["runs"].items())
    return write_page(
        path,
        "rollouts.html",
        title=f"Rollouts: {record['task']}",
        record=record,
        chart=rewards_chart(named),
        rows=reward_rows(named),
    )


def rewards_chart(named: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> LineChart:
    """The reward and the mismatch of each run, by the step."""
    rewards, mismatches = [], []
    for color, (name, steps) in enumerate(named):
        points = [(i, step["reward"]) for i, step in enumerate(steps)]
        rewards.append(Line(name, smooth(points, 9), color, raw=points))
        mismatches.append(Line(name, [(i, max(step["k3"], _SMALLEST)) for i, step in enumerate(steps)], color))
    panels = [Panel("Mean reward", rewards, zero=True), Panel("k3", mismatches, height=170, log=True)]
    return LineChart("Reward, and mismatch of training and rollouts", "step", panels)


def reward_rows(named: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> list[list[Any]]:
    """For each run its steps, the mean reward of its first and of its last steps, and its least and largest k3."""
    rows = []
    for name, steps in named:
        ends = [[step["reward"] for step in part] for part in (steps[:_TAIL], steps[-_TAIL:])]
        mismatches = [step["k3"] for step in steps]
        rows.append(
            [name, len(steps), *(sum(end) / max(1, len(end)) for end in ends), min(mismatches), max(mismatches)]
        )
    return rows


def rollouts_together(found: Sequence[tuple[str, Mapping[str, Any]]]) -> list[list[Any]]:
    """The runs of several records as rows."""
    return [
        [f"{name}/{mode}", *rest] for name, record in found for mode, *rest in reward_rows([*record["runs"].items()])
    ]
