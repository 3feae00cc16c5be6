"""Checks of a rule's fields: each returns the value as it is stored, or raises an error that names the field."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from octavo._names import did_you_mean
from octavo.calibration import Calibration, get_calibration
from octavo.numerics import Format, Rounding, get_format, get_rounding
from octavo.ops import Matmul
from octavo.qarray.tiles import check_tile_size

OPS = ("dot_general", "einsum", "conv_general_dilated", "ragged_dot", "gmm")
"""The names of operations in rules."""
SYNONYMS = {"dot": "dot_general", "matmul": "dot_general"}
"""Aliases of operations."""


def check_choice(field: str, value: Any, allowed: Collection[str | None]) -> Any:
    """One of a few values."""
    if value not in allowed:
        hint = did_you_mean(value, [a for a in allowed if a is not None])
        raise ValueError(f"{field}={value!r}: {hint}Allowed: {', '.join(map(repr, allowed))}")
    return value


def check_flag(field: str, value: Any) -> Any:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{field}={value!r}: True or False")
    return value


def check_qtype(field: str, value: Any) -> str | Format | None:
    """A format, by its name if it has one, so that a rule prints as it was written."""
    if value is None:
        return None
    try:
        fmt = get_format(value)
    except ValueError as error:
        raise ValueError(f"{field}={value!r}: {error}") from None
    try:
        if get_format(fmt.name) == fmt:
            return fmt.name
    except ValueError:
        pass
    return value.strip().lower() if isinstance(value, str) else fmt


def check_calibration(field: str, value: Any) -> str | Calibration:
    """A calibration, kept as the string that it was given by."""
    try:
        get_calibration(value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{field}={value!r}: {error}") from None
    return re.sub(r"\s", "", value).lower() if isinstance(value, str) else value


def check_rounding(field: str, value: Any) -> str | Rounding:
    """A rounding, kept as the string that it was given by."""
    try:
        if not isinstance(value, str | Rounding):
            raise ValueError("a string or a Rounding")
        get_rounding(value)
    except ValueError as error:
        raise ValueError(f"{field}={value!r}: {error}") from None
    return re.sub(r"\s", "", value).lower() if isinstance(value, str) else value


def check_regex(field: str, value: Any) -> str:
    """A regular expression; the error for a shell pattern says so."""
    if not isinstance(value, str):
        raise ValueError(f"{field}={value!r}: a regular expression as a string, such as '.*/mlp/.*'")
    try:
        re.compile(value)
    except re.error as error:
        hint = ""
        meant = re.sub(r"(^|/)\*+", r"\1.*", value)
        if meant != value and _compiles(meant):
            hint = f"did you mean {meant!r}? "
        raise ValueError(
            f"{field}={value!r}: not a regular expression ({error}). {hint}"
            "It has to match the whole path, as '.*/mlp/.*' does"
        ) from None
    return value


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def check_op_names(value: Any) -> tuple[str, ...]:
    """Names of operations, with aliases resolved."""
    if isinstance(value, str):
        raise ValueError(f"op_names={value!r}: a collection of names; did you mean op_names=({value!r},)?")
    names = tuple(value)
    for name in names:
        if name not in (*OPS, *SYNONYMS):
            hint = did_you_mean(name, (*OPS, *SYNONYMS))
            raise ValueError(f"op_names has {name!r}: {hint}Allowed: {', '.join((*OPS, *SYNONYMS))}")
    return tuple(dict.fromkeys(SYNONYMS.get(name, name) for name in names))


def check_tile(field: str, value: Any) -> Any:
    """A tile's size: a count of values, or 1/n for n tiles."""
    if value is None:
        return None
    try:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError("a tile is a count of values such as 128, or 1/n as a float for n tiles")
        return check_tile_size(-1, value)
    except ValueError as error:
        raise ValueError(f"{field}={value!r}: {error}") from None


def check_tiles(field: str, value: Any) -> Any:
    """A tile's size, or sizes by axis, as pairs so that a rule can be hashed."""
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if not isinstance(value, tuple | list):
        return check_tile(field, value)
    try:
        pairs = tuple((int(axis), check_tile(field, size)) for axis, size in value)
    except TypeError:
        raise ValueError(f"{field}={value!r}: sizes by axis are a mapping such as {{0: 128, 1: 128}}") from None
    contraction_or_square(field, pairs)
    return pairs


def contraction_or_square(field: str, tiles: Any) -> tuple[int | float | None, bool]:
    """The tile size along the contraction, and whether the other axis of a weight is tiled as well.

    A rule is made before the axes of its matmuls are known. So a mapping must have one of the two forms that apply to
    all of them: one size along the contraction, {-1: 128} (or {0: 128}, a kernel's contracted axis), and
    square tiles of a weight, {0: 128, 1: 128}.

    >>> contraction_or_square("tile_size", ((0, 128), (1, 128)))
    (128, True)
    """
    if not isinstance(tiles, tuple):
        return tiles, False
    sizes = {size for _, size in tiles}
    axes = {axis for axis, _ in tiles}
    if len(tiles) == 1 and axes <= {0, -1}:
        return sizes.pop(), False
    if len(tiles) == len(axes) == 2 and len(sizes) == 1:
        return sizes.pop(), True
    raise ValueError(
        f"{field}={dict(tiles)}: tiles run along the contraction, {{-1: 128}}, or are square, {{0: 128, 1: 128}}. "
        "For other granularities quantize with octavo.Quantizer(tiled_axes=...)"
    )


def check_axes(field: str, value: Any) -> tuple[int, ...] | None:
    """Axes as a tuple of integers."""
    if value is None:
        return None
    if isinstance(value, int | str) or not all(isinstance(axis, int) for axis in value):
        raise ValueError(f"{field}={value!r}: a tuple of axes such as (0,)")
    return tuple(value)


def check_names(field: str, value: Any) -> tuple[str, ...]:
    """Names as a tuple of texts."""
    if isinstance(value, str) or not all(isinstance(name, str) and name for name in value):
        raise ValueError(f"{field}={value!r}: a tuple of names such as ('fsdp',)")
    return tuple(value)


def check_rows(field: str, value: Any) -> tuple[Any, ...]:
    """Mesh axes that shard the first axis of rows, or a tuple of mesh axes for each axis of rows."""
    if not isinstance(value, str) and value and all(isinstance(names, tuple | list) for names in value):
        rows = tuple(check_names(field, names) for names in value)
        return rows if len(rows) > 1 else rows[0]
    return check_names(field, value)


def check_sparsity(field: str, value: Any) -> tuple[int, int] | None:
    """(n, m), n of each m weights kept; also from an object with Qwix's weight_sparsity_n and weight_sparsity_m."""
    if value is None:
        return None
    if hasattr(value, "weight_sparsity_n"):
        value = (value.weight_sparsity_n, value.weight_sparsity_m)
    if isinstance(value, Mapping):
        value = (value.get("weight_sparsity_n"), value.get("weight_sparsity_m"))
    pair = tuple(value) if isinstance(value, tuple | list) else ()
    if pair == (0, 0):  # Qwix's value for no sparsity
        return None
    if len(pair) != 2 or not all(isinstance(v, int) for v in pair) or not 0 < pair[0] < pair[1]:
        raise ValueError(f"{field}={value!r}: (n, m) keeps n of each m weights, 0 < n < m, as (2, 4) does")
    return pair


def check_rotation(field: str, value: Any) -> int | None:
    """The block of a Hadamard rotation."""
    if value is not None and (not isinstance(value, int) or value < 2 or value & (value - 1)):
        raise ValueError(f"{field}={value!r}: a Hadamard rotation has blocks of a power of two, such as 16")
    return value


def check_matmul(field: str, value: Any) -> Matmul | None:
    """A `Matmul`, or None."""
    if not isinstance(value, Matmul | None):
        raise ValueError(f"{field}={value!r}: an octavo.Matmul or None")
    return value


_OPERANDS = ("lhs", "rhs", "dlhs_grad", "drhs_grad", "dlhs_residual", "drhs_residual")
_QT_CONFIG = {
    **{f"{operand}_qtype": check_qtype for operand in _OPERANDS},
    **{f"{operand}_calibration_method": check_calibration for operand in _OPERANDS},
    **{f"{operand}_disable_channelwise_axes": check_flag for operand in _OPERANDS},
    "tile_size": check_tiles,
    "dlhs_tile_size": check_tile,
    "drhs_tile_size": check_tile,
    "disable_gradient_clipping": check_flag,
    "use_original_residuals": check_flag,
    "sparsity_rule": check_sparsity,
}
_QWIX_ONLY = {
    **{f"{side}_collect_quant_stat": "act_static_scale=True" for side in ("lhs", "rhs")},
    **{f"{side}_stochastic_rounding_noise_fn": "bwd_stochastic_rounding='uniform'" for side in ("dlhs", "drhs")},
}


def check_qt_config(field: str, value: Any) -> tuple[tuple[str, Any], ...] | None:
    """Qwix's `additional_qt_config` as pairs, each checked under its own name.

    >>> check_qt_config("additional_qt_config", {"drhs_grad_qtype": "fp8_e5m2"})
    (('drhs_grad_qtype', 'float8_e5m2'),)
    """
    if value is None:
        return None
    if not isinstance(value, Mapping | tuple | list):
        raise ValueError(f"{field}={value!r}: a mapping of Qwix's DotGeneralQtConfig fields")
    pairs = []
    for key, setting in dict(value).items():
        where = f"{field}[{key!r}]"
        if key in _QWIX_ONLY:
            if setting:
                raise ValueError(f"{where} is a function of Qwix's own and has no counterpart: use {_QWIX_ONLY[key]}")
            continue
        if key not in _QT_CONFIG:
            known = sorted((*_QT_CONFIG, *_QWIX_ONLY))
            raise ValueError(f"{where}: no such setting; {did_you_mean(key, known)}Known: {', '.join(known)}")
        check = _QT_CONFIG[key]
        optional = setting is None and check in (check_calibration, check_flag)
        if not optional:
            pairs.append((key, check(where, setting)))
    return tuple(pairs)
