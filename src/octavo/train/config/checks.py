"""Checks of single values beyond a range or a choice, and the names of mesh axes. Each raises a ValueError.

JAX is imported by checks that need it, so that `octavo train --help` is instant.
"""

import re
from collections.abc import Sequence

from octavo import _remote
from octavo._names import did_you_mean

AXES = ("data", "stage", "fsdp", "context", "tensor", "expert")
"""Mesh axes in their default order, from the slowest links to the fastest."""

DEFAULT_RULES: dict[str, tuple[str, ...]] = {
    "activation_batch": ("data", "fsdp", "expert"),
    "activation_length": ("context",),
    "activation_kv_length": (),
    "activation_embed": (),
    "activation_heads": ("tensor",),
    "activation_kv_heads": ("tensor",),
    "activation_mlp": ("tensor",),
    "activation_vocab": ("tensor",),
    "layers": ("stage",),
    "vocab": ("tensor",),
    "embed": ("fsdp", "context", "expert"),
    "embed_moe": ("fsdp", "context"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "kv": (),
    "mlp": ("tensor",),
    "mlp_moe": ("tensor",),
    "exp": ("expert",),
    "norm": ("fsdp", "context", "expert"),
}
"""The mesh axes that each logical axis is sharded along. Names as in MaxText."""


def split_axes(text: str) -> tuple[str, ...]:
    """The mesh axes of a rule, which are separated by +.

    >>> split_axes("fsdp+expert"), split_axes("")
    (('fsdp', 'expert'), ())
    """
    return tuple(axis.strip() for axis in text.split("+") if axis.strip())


def check_name(value: str) -> None:
    """Directories below the output directory."""
    part = r"[\w=+@,-][\w.=+@,-]*"
    if value and not re.fullmatch(rf"{part}(/{part})*", value):
        raise ValueError("a name is made of letters, digits and _ - . = + @, and does not begin with a dot")


def check_path(value: str) -> None:
    """A local path, or a URL of an object store whose package is installed."""
    try:
        _remote.check(value)
    except ValueError as error:
        raise ValueError(str(error).removeprefix(f"{value}: ")) from None


def check_not_empty(value: str) -> None:
    """Any text but the empty one."""
    if not value:
        raise ValueError("must not be empty")


def check_known(value: str, known: Sequence[str]) -> None:
    """One of some names."""
    if value not in known:
        raise ValueError(f"{did_you_mean(value, known)}Known: {', '.join(known)}")


def check_recipe(value: str) -> None:
    """A registered recipe, or none."""
    if value:
        from octavo.rules import recipes

        check_known(value, recipes(aliases=True))


def check_format(value: str) -> None:
    """A number format, or none."""
    if value:
        from octavo.numerics import get_format

        get_format(value)


SOURCE = "source"
"""The value of `lora_weight_qtype` that keeps the codes of the model at `load_parameters_path`."""


def check_frozen_format(value: str) -> None:
    """A number format, or `source`, or none."""
    if value != SOURCE:
        check_format(value)


def check_method(value: str) -> None:
    """A calibration method."""
    from octavo.calibration import get_calibration

    get_calibration(value)


def check_bounds(value: tuple[float, ...]) -> None:
    """Six bounds, one per operand, or none."""
    if value and (len(value) != 6 or min(value) <= 0):
        raise ValueError("six numbers above 0: the bounds of lhs and rhs in fwd, dlhs and drhs")


def check_pattern(value: str) -> None:
    """A regular expression, `default` or `none`."""
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"no regular expression ({error}); write one, or default, or none") from None
    if not value:
        raise ValueError("none excludes nothing; an empty expression would match no path")


def check_size(value: int, open_size: str) -> None:
    """A positive size, or -1 for one that is inferred."""
    if value != -1 and value < 1:
        raise ValueError(f"-1 for {open_size}, or at least 1")


def check_axis_rules(value: tuple[str, ...]) -> None:
    """Rules from logical axes to mesh axes."""
    for rule in value:
        name, colon, axes = rule.partition(":")
        if not colon:
            raise ValueError(f"{rule!r} is no rule: write embed:fsdp+expert, or embed: for a replicated axis")
        check_known(name.strip(), tuple(DEFAULT_RULES))
        for axis in split_axes(axes):
            check_known(axis, AXES)
