"""Whether a regular expression matches a whole path, in bounded time.

`re` backtracks: `(a+)+` takes exponential time on a path that it does not match. Patterns in which several repetitions
can share the characters of a path are matched by sets of positions, in time polynomial in the lengths of pattern and
path.
"""

import functools
import re
from collections.abc import Callable
from re import _constants as sre  # pyrefly: ignore
from re import _parser as parser  # pyrefly: ignore
from typing import Any

_SAFE_REPEATS = 3
"""As many repetitions as `re` tries without a noticeable delay on a path, if none is within another."""
_REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT)
_CATEGORIES = {
    sre.CATEGORY_DIGIT: str.isdecimal,
    sre.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    sre.CATEGORY_SPACE: str.isspace,
    sre.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    sre.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
    sre.CATEGORY_NOT_WORD: lambda c: not (c.isalnum() or c == "_"),
}


@functools.lru_cache(1 << 10)
def path_matcher(pattern: str) -> Callable[[str], Any]:
    """A function that is true for the paths that the pattern matches as a whole.

    >>> bool(path_matcher(".*/mlp")("layers/mlp")), bool(path_matcher("(a+)+$")("a" * 100 + "b"))
    (True, False)
    """
    tree = _ambiguous(pattern)
    if tree is None:
        return re.compile(pattern).fullmatch
    ignore_case = bool(tree.state.flags & re.IGNORECASE)
    return functools.lru_cache(1 << 16)(lambda path: len(path) in _ends(tree, {0}, path, ignore_case))


def check_bounded(pattern: str) -> None:
    """Raise for a pattern that can be matched only by backtracking, and might take forever."""
    tree = _ambiguous(pattern)
    if tree is not None and (name := _unsupported(tree)):
        raise ValueError(
            f"a regular expression with a {name} and repetitions within others, or more than {_SAFE_REPEATS} of them, "
            "can take forever to match: write it without, or as several rules"
        )


@functools.lru_cache(1 << 10)
def _ambiguous(pattern: str) -> Any:
    """The parsed pattern if `re` might take long to match it, else None."""
    tree = parser.parse(pattern)
    return tree if _repeats(tree) > _SAFE_REPEATS else None


def _repeats(tree: Any, within: bool = False) -> int:
    """The number of repetitions in a pattern; too many if one is, or alternatives are, within another."""
    total = 0
    for op, value in tree:
        repeated = op in _REPEATS and value[1] > 1
        total += sum(_repeats(part, within or repeated) for part in _parts(op, value)) + repeated
        total += (_SAFE_REPEATS + 1) * (within and (repeated or op is sre.BRANCH))
    return total


def _parts(op: Any, value: Any) -> list[Any]:
    if op in (*_REPEATS, sre.POSSESSIVE_REPEAT):
        return [value[2]]
    if op is sre.SUBPATTERN:
        return [value[3]]
    if op is sre.BRANCH:
        return value[1]
    if op in (sre.ASSERT, sre.ASSERT_NOT):
        return [value[1]]
    return [value] if op is sre.ATOMIC_GROUP else []


def _unsupported(tree: Any) -> str | None:
    names = {
        sre.GROUPREF: "backreference",
        sre.GROUPREF_EXISTS: "condition",
        sre.ATOMIC_GROUP: "atomic group",
        sre.POSSESSIVE_REPEAT: "possessive repetition",
    }
    for op, value in tree:
        if op in names:
            return names[op]
        if op is sre.SUBPATTERN and (value[1] or value[2]):
            return "group with flags"
        if op in (sre.ASSERT, sre.ASSERT_NOT) and value[0] < 0:
            return "lookbehind"
        for part in _parts(op, value):
            if (found := _unsupported(part)) is not None:
                return found
    return None


def _ends(tree: Any, starts: set[int], text: str, ignore_case: bool) -> set[int]:
    """All positions where a match of the pattern that begins at one of `starts` can end."""
    for op, value in tree:
        starts = _step(op, value, starts, text, ignore_case)
    return starts


def _step(op: Any, value: Any, starts: set[int], text: str, ignore_case: bool) -> set[int]:
    if op is sre.BRANCH:
        return set().union(*(_ends(part, starts, text, ignore_case) for part in value[1]))
    if op is sre.SUBPATTERN:
        return _ends(value[3], starts, text, ignore_case)
    if op in _REPEATS:
        low, high, part = value
        count, found = 0, starts if low == 0 else set()
        while starts and count < high:
            count, starts = count + 1, _ends(part, starts, text, ignore_case)
            if count < low:
                continue
            if starts <= found:
                break
            found = found | starts
        return found
    if op in (sre.ASSERT, sre.ASSERT_NOT):
        return {i for i in starts if bool(_ends(value[1], {i}, text, ignore_case)) == (op is sre.ASSERT)}
    if op is sre.AT:
        return {i for i in starts if _is_at(value, i, text)}
    return {i + 1 for i in starts if i < len(text) and _is_one(op, value, text[i], ignore_case)}


def _is_at(anchor: Any, i: int, text: str) -> bool:
    if anchor in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
        return i == 0
    if anchor in (sre.AT_END, sre.AT_END_STRING):
        return i == len(text) or (anchor is sre.AT_END and text[i:] == "\n")
    word = _CATEGORIES[sre.CATEGORY_WORD]
    boundary = (i > 0 and word(text[i - 1])) != (i < len(text) and word(text[i]))
    return boundary == (anchor is sre.AT_BOUNDARY)


def _is_one(op: Any, value: Any, c: str, ignore_case: bool) -> bool:
    if op is sre.ANY:
        return c != "\n"
    if op is sre.NOT_LITERAL:
        return not _is_one(sre.LITERAL, value, c, ignore_case)
    if op is sre.IN:
        negated = value[0][0] is sre.NEGATE
        return negated != any(_is_one(op, own, c, ignore_case) for op, own in value[negated:])
    if op is sre.CATEGORY:
        return _CATEGORIES[value](c)
    low, high = value if op is sre.RANGE else (value, value)
    return any(low <= ord(x) <= high for x in ({c, c.lower(), c.upper()} if ignore_case else {c}) if len(x) == 1)
