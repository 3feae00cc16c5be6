"""Rules that select and configure quantized matmuls, the configs that they compile to, and recipes by name."""

from octavo.rules import builtin as builtin  # registers the recipes
from octavo.rules.intmp import mixed_precision
from octavo.rules.io import RulesLike, as_rules, rules_from_json, rules_from_yaml, rules_to_json, rules_to_yaml
from octavo.rules.registry import Recipe, get_recipe, recipe, recipes, register_recipe
from octavo.rules.rule import SENSITIVE, QtRule, QuantizationRule, dot_config, find, nearest
from octavo.rules.schedule import Schedule

__all__ = [
    "SENSITIVE",
    "QtRule",
    "QuantizationRule",
    "Recipe",
    "RulesLike",
    "Schedule",
    "as_rules",
    "dot_config",
    "find",
    "get_recipe",
    "mixed_precision",
    "nearest",
    "recipe",
    "recipes",
    "register_recipe",
    "rules_from_json",
    "rules_from_yaml",
    "rules_to_json",
    "rules_to_yaml",
]
