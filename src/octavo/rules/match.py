"""Matching of rules to operations, and the paths that recipes leave in float."""

import difflib
import re
from collections.abc import Iterable, Sequence

from octavo.rules.rule import QuantizationRule

_PARTS = "router|gate_logits?|(token_)?embed(der|dings?)?|embed_tokens|lm_head|logits(_dense)?"
SENSITIVE = rf"(?i)(.*/)?({_PARTS})(_\d+)?(/.*)?"
"""Paths of routers, embeddings and logits, which recipes leave in float. A name matches a complete component of a path.

An MLP's `gate` or `gate_proj` does not match.
"""


def excluding(pattern: str | None) -> tuple[QuantizationRule, ...]:
    """The rule that keeps paths in float, if there is a pattern; it may match nothing.

    >>> excluding("head")
    (QuantizationRule(module_path='head', skip=True, optional=True),)
    """
    return () if pattern is None else (QuantizationRule(module_path=pattern, skip=True, optional=True),)


def find(rules: Sequence[QuantizationRule], path: str, op: str, *, weights: bool) -> QuantizationRule | None:
    """The first rule that matches, or None.

    >>> rules = [QuantizationRule(module_path=".*/router", skip=True), QuantizationRule(weight_qtype="int8")]
    >>> find(rules, "layers/router", "dot_general", weights=True)
    QuantizationRule(module_path='.*/router', skip=True)
    """
    return next((rule for rule in rules if rule.matches(path, op, weights=weights)), None)


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
    """The similarity of the words of a pattern to the components of a path, from 0 to 1."""
    parts = [part for part in re.split(r"\W+", path) if part]
    if not parts:
        return 0.0
    best = [max(difflib.SequenceMatcher(None, word.lower(), part.lower()).ratio() for part in parts) for word in words]
    return sum(best) / len(best)
