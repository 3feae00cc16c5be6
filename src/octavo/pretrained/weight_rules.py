"""Rules for a conversion, from a short text: a number format for weights, a recipe, or a file of rules."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo._names import unknown_name
from octavo.models import ModelConfig
from octavo.numerics import BlockFormat, formats, get_format
from octavo.rules import QuantizationRule, as_rules, recipe, recipes

TRAINED = "trained"
"""Selects the rules that a model was trained with."""

_ALIASES = {"fp8": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "fp4": "float4_e2m1fn"}
_GROUPS = {2: 32, 3: 32, 4: 32}
"""Default group size by bits; weights of more bits have one scale per channel."""

_HEAD = r"(.*/)?(token_embedder|logits_dense)(/.*)?"
_FLOAT = r"(.*/)?(router|shared_gate|position_embedder)(/.*)?"
_SPEC = re.compile(r"(?P<format>\w+)(:g(?P<group>\d+))?(:(?P<calibration>[\w.,-]+))?")


def weight_rules(
    text: str, config: ModelConfig | None = None, *, head: str = "", trained: Sequence[QuantizationRule] = ()
) -> tuple[QuantizationRule, ...]:
    """Rules for the matmuls of a model.

    Args:
      text: A number format for weights: `int8`, `int4:g64` in groups of 64, `int4:g32:mse` with another calibration; or
        `recipe:NAME`, activations included; or a .json or .yml file of rules; or `trained`.
      config: The decoder, whose routers and learned positions stay in float.
      head: The format of the embedding table and the logits: by default int8 where weights have fewer bits, else that
        of the weights; `float` keeps them.
      trained: The rules that the model was trained with.

    >>> sizes = dict(vocab_size=8, emb_dim=64, num_query_heads=1, num_kv_heads=1, head_dim=64, mlp_dim=64)
    >>> for rule in weight_rules("int4", ModelConfig(**sizes, num_layers=1)):
    ...     print(rule)
    QuantizationRule(module_path='(.*/)?(token_embedder|logits_dense)(/.*)?', weight_qtype='int8', scope='weights')
    QuantizationRule(weight_qtype='int4', tile_size=32, scope='weights')
    """
    if text == TRAINED:
        if not trained:
            raise ValueError("the model was trained in float: name a number format, such as int8 or int4")
        return tuple(trained)
    if text.startswith("recipe:"):
        return recipe(text.removeprefix("recipe:"))
    if text.endswith((".json", ".yml", ".yaml")):
        if not Path(text).is_file():
            raise FileNotFoundError(f"there is no file of rules {text}")
        return as_rules(Path(text))
    match = _SPEC.fullmatch(text)
    name = _ALIASES.get(match["format"], match["format"]) if match else text
    if match is None or name not in formats():
        if text in recipes(aliases=True):
            return recipe(text)
        known = (*_ALIASES, *formats(), TRAINED)
        raise ValueError(f"{text!r} is not a number format: {unknown_name(text, known)}; or a file of rules")
    body = _rule(name, match["group"], match["calibration"])
    rules = [QuantizationRule(module_path=_HEAD, skip=True) if head == "float" else _head(name, head)]
    if config is not None and (config.num_experts > 1 or config.learned_positions):
        rules.append(QuantizationRule(module_path=_FLOAT, skip=True))
    return (*rules, body)


def _rule(name: str, group: str | None, calibration: str | None, **fields: Any) -> QuantizationRule:
    fmt = get_format(name)
    if isinstance(fmt, BlockFormat):
        if group and int(group) != fmt.tile:
            raise ValueError(f"{name} has groups of {fmt.tile}: leave :g{group} out")
        tile = None
    else:
        tile = int(group) if group else _GROUPS.get(fmt.bits)
    if calibration:
        fields["weight_calibration_method"] = calibration
    return QuantizationRule(weight_qtype=name, tile_size=tile, scope="weights", **fields)


def _head(name: str, head: str) -> QuantizationRule:
    if not head:
        head = "int8" if get_format(name).bits < 8 else name
    match = _SPEC.fullmatch(head)
    found = _ALIASES.get(match["format"], match["format"]) if match else head
    if match is None or found not in formats():
        raise ValueError(f"{head!r} is not a number format for the head: {unknown_name(head, (*_ALIASES, *formats()))}")
    return _rule(found, match["group"], match["calibration"], module_path=_HEAD)
