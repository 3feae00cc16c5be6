"""Draws random cases until the time is up; a failing case is shrunk and printed with the command that repeats it."""

import dataclasses
import itertools
import json
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

type Case = dict[str, Any]
"""One case, made of JSON values only, so that it can be printed and repeated."""

SHRINKING = 200
"""The number of smaller cases that are tried at each step of shrinking."""


class DefectError(AssertionError):
    """The software did something wrong in a case."""


@dataclasses.dataclass(frozen=True)
class Fuzzer:
    """One kind of case.

    Attributes:
      draw: makes a case from a random generator.
      check: runs a case and raises if the software is wrong; returns a label, by which cases are counted.
      shrink: smaller cases that may fail for the same reason.
    """

    name: str
    draw: Callable[[np.random.Generator], Case]
    check: Callable[[Case], str]
    shrink: Callable[[Case], Iterator[Case]] = lambda case: iter(())


@dataclasses.dataclass(frozen=True)
class Failure:
    """A case that fails, after shrinking."""

    fuzzer: str
    case: Case
    error: str

    def __str__(self) -> str:
        command = f"python -m tests.fuzz {self.fuzzer} --case '{json.dumps(self.case)}'"
        return f"{self.error}\nrepeat it with:\n    {command}"


def fuzz(fuzzer: Fuzzer, seconds: float, seed: int, most: int | None = None) -> tuple[Counter[str], Failure | None]:
    """Check at most `most` cases, for some seconds; returns the number of each label and the first failure."""
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds
    while time.monotonic() < end and counts.total() != most:
        case = fuzzer.draw(np.random.default_rng([seed, counts.total()]))
        error = failure(fuzzer, case)
        if isinstance(error, Exception):
            return counts, shrunk(fuzzer, case, error)
        counts[error] += 1
    return counts, None


def failure(fuzzer: Fuzzer, case: Case) -> Exception | str:
    """The exception that a case raises, or its label."""
    try:
        return fuzzer.check(case)
    except Exception as error:
        return error


def shrunk(fuzzer: Fuzzer, case: Case, error: Exception) -> Failure:
    """The smallest case found that raises the same type of exception."""
    for candidate in itertools.islice(fuzzer.shrink(case), SHRINKING):
        found = failure(fuzzer, candidate)
        if type(found) is type(error):
            return shrunk(fuzzer, candidate, found)
    return Failure(fuzzer.name, case, "".join(traceback.format_exception(error)[-4:]))
