"""The registry of recipes: rules with a name, a summary and a source."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo._config import Config
from octavo._names import did_you_mean, unknown_name
from octavo.rules.checks import check, check_op_names, check_regex
from octavo.rules.intmp import MIXED, mixed_precision
from octavo.rules.rule import SENSITIVE, QuantizationRule, excluding


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Recipe(Config):
    """Rules under a name.

    Attributes:
        name: The name by which `recipe` finds it.
        summary: What it does, in one sentence.
        source: A paper or a repository.
        rules: Its rules; the first that matches an operation applies.
        exclude: A regular expression of module paths that stay in float, or None.
        alias_of: The recipe of which this is another name.

    >>> from octavo.rules import QtRule
    >>> mine = Recipe(name="mine", summary="Int8 weights.", source="-", rules=(QtRule(weight_qtype="int8"),))
    >>> mine.replace(exclude=None).rules[0].weight_qtype
    'int8'
    """

    name: str
    summary: str
    source: str
    rules: tuple[QuantizationRule, ...] = ()
    exclude: str | None = SENSITIVE
    alias_of: str | None = None

    def __post_init__(self):
        object.__setattr__(self, "rules", tuple(self.rules))
        if self.exclude is not None:
            check("exclude", self.exclude, check_regex)


_recipes: dict[str, Recipe] = {}


def register_recipe(new: Recipe, *, replace: bool = False) -> Recipe:
    """Register a recipe.

    >>> from octavo.rules import QtRule
    >>> mine = Recipe(name="mine", summary="Int8 weights.", source="-", rules=(QtRule(weight_qtype="int8"),))
    >>> register_recipe(mine, replace=True).name, recipe("mine", exclude=None)
    ('mine', (QtRule(weight_qtype='int8'),))
    """
    if new.name in _recipes and not replace:
        raise ValueError(f"a recipe named {new.name!r} exists; choose another name or pass replace=True")
    _recipes[new.name] = new
    return new


def register_alias(name: str, target: str, summary: str, source: str) -> Recipe:
    """Register an alias of a recipe."""
    known = get_recipe(target)
    return register_recipe(known.replace(name=name, summary=summary, source=source, alias_of=target))


def recipes(*, aliases: bool = False) -> tuple[str, ...]:
    """The names of all recipes, sorted; with `aliases`, also the other names that some of them have.

    >>> "deepseek_fp8" in recipes(), "te_mxfp8" in recipes(), "te_mxfp8" in recipes(aliases=True)
    (True, False, True)
    """
    return tuple(sorted(name for name, found in _recipes.items() if aliases or found.alias_of is None))


def get_recipe(name: str) -> Recipe:
    """A recipe by its name or an alias.

    >>> get_recipe("int8").summary
    'Int8 in all three matmuls, a scale for each channel.'
    """
    if name not in _recipes:
        raise ValueError(f"unknown recipe {name!r}: {unknown_name(name, recipes(aliases=True))}")
    return _recipes[name]


def recipe(
    name: str,
    module_path: str = ".*",
    *,
    exclude: str | None = "default",
    config: Mapping[str, Any] | str | Path | None = None,
    **overrides: Any,
) -> tuple[QuantizationRule, ...]:
    """The rules of a recipe, with some fields changed.

    Args:
        name: The recipe's name; `recipes()` lists them.
        module_path: A regular expression of the module paths that it applies to.
        exclude: A regular expression of modules that stay in float, by default routers, embeddings and logits; None
            leaves nothing out.
        config: The table of bits by layer that "intmp" needs, or its JSON file.
        **overrides: Fields of the rules, see `QtRule`. `op_names` narrows the recipe to some of its operations.

    >>> recipe("int8w", ".*/mlp/.*", exclude=None, tile_size=128)
    (QuantizationRule(module_path='.*/mlp/.*', weight_qtype='int8', tile_size=128, scope='weights'),)
    """
    found = get_recipe(name)
    exclude = found.exclude if exclude == "default" else exclude
    if name == MIXED:
        return mixed_precision(config, module_path, exclude=exclude, **overrides)
    if config is not None:
        raise ValueError(f"config= is for the recipe {MIXED!r}; {name!r} takes fields of its rules as keywords")
    changes, rules = {"module_path": module_path, **overrides}, found.rules
    if "op_names" in overrides:
        rules = _narrowed(rules, name, check("op_names", changes.pop("op_names"), check_op_names))
    return (*excluding(exclude), *(_changed(rule, name, changes) for rule in rules))


def _narrowed(rules: tuple[QuantizationRule, ...], name: str, ops: tuple[str, ...]) -> tuple[QuantizationRule, ...]:
    """The rules restricted to these operations."""
    for op in ops:
        if not any(not rule.op_names or op in rule.op_names for rule in rules):
            covered = sorted({o for rule in rules for o in rule.op_names})
            raise ValueError(f"recipe({name!r}) is not for {op!r}; it is for {', '.join(covered)}")
    shares = [(rule, tuple(op for op in ops if not rule.op_names or op in rule.op_names)) for rule in rules]
    return tuple(rule.replace(op_names=share) for rule, share in shares if share or not ops)


def _changed(rule: QuantizationRule, name: str, changes: dict[str, Any]) -> QuantizationRule:
    known = [field.name for field in dataclasses.fields(rule)]
    if unknown := [field for field in changes if field not in known]:
        kind = type(rule).__name__
        raise ValueError(
            f"recipe({name!r}): {kind} has no field {unknown[0]!r}; {did_you_mean(unknown[0], known)}"
            f"Known: {', '.join(known)}"
        )
    if all(getattr(rule, field) is value or getattr(rule, field) == value for field, value in changes.items()):
        return rule
    try:
        return rule.replace(**changes)
    except ValueError as error:
        raise ValueError(f"recipe({name!r}): {error}") from None
