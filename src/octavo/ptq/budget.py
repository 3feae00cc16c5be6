"""Mixed precision under a budget: for each group of weights the format such that all fit and the cost is least.

    minimize  sum_i kl[i, f_i]        subject to  sum_i bytes[i, f_i] <= budget

By dynamic programming over the Pareto frontier of (bytes, cost): exact while that has at most 4096 points; of more, the
cheapest of each 4096th of the budget is kept.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from octavo.ptq.sensitivity import Option

_POINTS = 1 << 12


def assign(
    options: Mapping[str, Mapping[str, Option]], budget: int, *, groups: Iterable[Sequence[str]] = ()
) -> dict[str, str]:
    """The name of the option of each weight, such that all weights need at most `budget` bytes.

    Args:
        options: The options of each weight by name, as `sensitivity` gives them.
        budget: Bytes.
        groups: Weights that must have the same option, such as query, key and value.

    Returns:
        The chosen option by weight.

    >>> robust = {"int4": Option(0.1, 10), "int8": Option(0.0, 20)}
    >>> sensitive = {"int4": Option(0.3, 10), "int8": Option(0.0, 20)}
    >>> assign({"a": robust, "b": sensitive, "c": robust}, 40)
    {'a': 'int4', 'b': 'int8', 'c': 'int4'}
    """
    for weight, own in options.items():
        for name, option in own.items():
            if not np.isfinite(option.kl):
                raise ValueError(f"the predicted divergence of {weight!r} in {name} is {option.kl}: leave {name} out")
    members = _members(options, groups)
    sizes, costs = np.zeros(1, np.int64), np.zeros(1)
    steps = []
    for group in members:
        names = [name for name in options[group[0]] if all(name in options[weight] for weight in group)]
        if not names:
            raise ValueError(f"the weights {', '.join(group)} have to agree, but have no option in common")
        more = np.asarray([sum(options[weight][name].nbytes for weight in group) for name in names])
        extra = np.asarray([sum(options[weight][name].kl for weight in group) for name in names])
        sizes, costs = (sizes[:, None] + more).ravel(), (costs[:, None] + extra).ravel()
        kept = _frontier(sizes, costs, budget)
        if not len(kept):
            least = sum(min(sum(options[w][n].nbytes for w in g) for n in options[g[0]]) for g in members)
            raise ValueError(f"the smallest formats need {least} bytes, more than the budget of {budget}")
        steps.append((kept, names))
        sizes, costs = sizes[kept], costs[kept]
    place, chosen = len(sizes) - 1, {}
    for group, (kept, names) in zip(reversed(members), reversed(steps), strict=True):
        place, choice = divmod(int(kept[place]), len(names))
        chosen.update(dict.fromkeys(group, names[choice]))
    return {weight: chosen[weight] for weight in options}


def _frontier(sizes: np.ndarray, costs: np.ndarray, budget: int) -> np.ndarray:
    """The points within the budget that cost less than every smaller one, by size; of too many, some of each size."""
    order = np.lexsort((costs, sizes))
    order = order[sizes[order] <= budget]
    before = np.minimum.accumulate(np.concatenate([[np.inf], costs[order]]))[:-1]
    kept = order[costs[order] < before]
    if len(kept) <= _POINTS:
        return kept
    bucket = sizes[kept] * _POINTS // max(budget, 1)
    return kept[np.append(bucket[1:] != bucket[:-1], True)]


def _members(options: Mapping[str, object], groups: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    grouped = [tuple(group) for group in groups]
    for weight in (weight for group in grouped for weight in group):
        if weight not in options:
            raise ValueError(f"a group has the weight {weight!r}, which has no options")
    inside = {weight for group in grouped for weight in group}
    return [*grouped, *((weight,) for weight in options if weight not in inside)]
