"""Checks of single values beyond a range or a choice: each raises a ValueError that says what is allowed."""

import re
from collections.abc import Sequence

from octavo._names import did_you_mean
from octavo.calibration import get_calibration
from octavo.data import datasets, tokenizers
from octavo.rules import recipes
from octavo.train.axes import AXES, DEFAULT_RULES, split_axes


def check_name(value: str) -> None:
    """A run's name is one or more directories below the output's."""
    part = r"[\w=+@,-][\w.=+@,-]*"
    if value and not re.fullmatch(rf"{part}(/{part})*", value):
        raise ValueError("a name is made of letters, digits and _ - . = + @, and does not begin with a dot")


def check_given(value: str) -> None:
    """Not empty."""
    if not value:
        raise ValueError("must not be empty")


def check_recipe(value: str) -> None:
    """A recipe that is registered, or none."""
    _check_known(value, ("", *recipes(aliases=True)))


def check_dataset(value: str) -> None:
    """A data set that is registered."""
    _check_known(value, datasets())


def check_tokenizer(value: str) -> None:
    """A tokenizer that is registered."""
    _check_known(value, tokenizers())


def _check_known(value: str, known: Sequence[str]) -> None:
    if value not in known:
        names = [name for name in known if name]
        raise ValueError(f"{did_you_mean(value, names)}Known: {', '.join(names)}")


def check_method(value: str) -> None:
    """A calibration method."""
    get_calibration(value)


def check_method_if_any(value: str) -> None:
    """A calibration method or nothing."""
    if value:
        get_calibration(value)


def check_bounds(value: tuple[float, ...]) -> None:
    """Six bounds, one for each operand, or none."""
    if value and (len(value) != 6 or min(value) <= 0):
        raise ValueError("six numbers above 0: the bounds of lhs and rhs in fwd, dlhs and drhs")


def check_pattern(value: str) -> None:
    """A regular expression, or one of two words."""
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"no regular expression ({error}); write one, or default, or none") from None
    if not value:
        raise ValueError("none leaves nothing out; an empty expression would match no path")


def check_schedule_steps(value: int) -> None:
    """A length, or -1 for that of the run."""
    if value != -1 and value < 1:
        raise ValueError("-1 for the run's steps, or at least 1")


def check_axis_size(value: int) -> None:
    """How long an axis of the mesh is, or -1 for what the others leave."""
    if value != -1 and value < 1:
        raise ValueError("-1 for what the other sizes leave, or at least 1")


def check_axis_rules(value: tuple[str, ...]) -> None:
    """Rules for logical axes."""
    for rule in value:
        name, colon, axes = rule.partition(":")
        if not colon:
            raise ValueError(f"{rule!r} is no rule: write embed:fsdp+expert, or embed: for an axis that is not cut")
        _check_known(name.strip(), tuple(DEFAULT_RULES))
        for axis in split_axes(axes):
            _check_known(axis, AXES)
