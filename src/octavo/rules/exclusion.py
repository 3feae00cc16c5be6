"""What recipes leave in float unless told otherwise."""

from octavo.rules.rule import QuantizationRule

_PARTS = "router|gate_logits?|(token_)?embed(der|dings?)?|embed_tokens|lm_head|logits(_dense)?"
SENSITIVE = rf"(?i)(.*/)?({_PARTS})(_\d+)?(/.*)?"
"""Paths of routers, embeddings and logits, which recipes leave in float: their names as whole parts of a path.

An MLP's `gate` or `gate_proj` is none of them.
"""


def excluding(pattern: str | None) -> tuple[QuantizationRule, ...]:
    """The rule that leaves paths alone, if there is a pattern; it may match nothing.

    >>> excluding("head")
    (QuantizationRule(module_path='head', skip=True, optional=True),)
    """
    return () if pattern is None else (QuantizationRule(module_path=pattern, skip=True, optional=True),)
