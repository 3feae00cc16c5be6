"""Which rule is for which operation, and which rules are for none."""

import difflib
import re
from collections.abc import Iterable, Sequence

from octavo.rules.rule import QuantizationRule

type Site = tuple[str, str, bool]
"""A path, the name of an operation there, and whether one of its operands is a weight."""


def find(rules: Sequence[QuantizationRule], path: str, op: str, *, weights: bool) -> QuantizationRule | None:
    """The first rule that matches, or None.

    >>> rules = [QuantizationRule(module_path=".*/router", skip=True), QuantizationRule(weight_qtype="int8")]
    >>> find(rules, "layers/router", "dot_general", weights=True)
    QuantizationRule(module_path='.*/router', skip=True)
    """
    return next((rule for rule in rules if rule.matches(path, op, weights=weights)), None)


def unused(rules: Sequence[QuantizationRule], sites: Iterable[Site]) -> tuple[QuantizationRule, ...]:
    """The rules that match no site, also those that may (`optional`): what to make of them is the caller's choice.

    >>> unused([QuantizationRule(module_path="mpl")], [("mlp", "dot_general", True)])
    (QuantizationRule(module_path='mpl'),)
    """
    sites = list(sites)
    return tuple(rule for rule in rules if not any(rule.matches(p, op, weights=w) for p, op, w in sites))


def shadowed(rules: Sequence[QuantizationRule], sites: Iterable[Site]) -> tuple[QuantizationRule, ...]:
    """The rules that match some sites, but none of them first.

    >>> rules = [QuantizationRule(), QuantizationRule(module_path="mlp", weight_qtype="int8")]
    >>> shadowed(rules, [("mlp", "dot_general", True)])
    (QuantizationRule(module_path='mlp', weight_qtype='int8'),)
    """
    matching, first = set[int](), set[int]()
    for path, op, weights in sites:
        hits = [i for i, rule in enumerate(rules) if rule.matches(path, op, weights=weights)]
        matching.update(hits)
        first.update(hits[:1])
    return tuple(rule for i, rule in enumerate(rules) if i in matching - first)


def nearest(pattern: str, paths: Iterable[str]) -> tuple[str, ...]:
    """Up to three paths that the author of a regular expression probably meant.

    Every word of the pattern is compared with every part of a path, so that one wrong letter in one part counts little.

    >>> nearest(".*/atention/.*", ["layers/attention/query", "layers/mlp/up"])
    ('layers/attention/query',)
    """
    words = re.findall(r"\w+", re.sub(r"\\\w|\(\?[a-zA-Z]*[:)]?|[{\[].*?[}\]]", " ", pattern))
    if not words:
        return ()
    scores = {path: _likeness(words, path) for path in dict.fromkeys(paths)}
    likely = [path for path, score in scores.items() if score >= 0.6]
    return tuple(sorted(likely, key=lambda path: -scores[path])[:3])


def _likeness(words: list[str], path: str) -> float:
    """How well the words of a pattern are found among the parts of a path, from 0 to 1."""
    parts = [part for part in re.split(r"\W+", path) if part]
    if not parts:
        return 0.0
    best = [max(difflib.SequenceMatcher(None, word.lower(), part.lower()).ratio() for part in parts) for word in words]
    return sum(best) / len(best)
