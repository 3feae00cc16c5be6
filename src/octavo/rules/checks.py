"""Checks of a rule's fields: each returns a value as it is stored, or raises the reason why it is wrong."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from octavo._names import did_you_mean
from octavo.calibration import Calibration, get_calibration
from octavo.numerics import Format, Rounding, get_format, get_rounding, type_name
from octavo.ops import Matmul, lowerings
from octavo.qarray import Quantizer
from octavo.qarray.arithmetic import ARITHMETICS
from octavo.qarray.quantizer import check_tile_size
from octavo.rules.path_match import check_bounded

OPS = ("dot_general", "einsum", "conv_general_dilated", "ragged_dot", "gmm")
"""The names of operations in rules."""
TENSOR_OPS = (
    "add", "subtract", "multiply", "truediv", "maximum", "minimum", "sum", "mean", "tanh", "gelu", "silu", "leaky_relu",
    "softmax", "call", "clip", "pad", "floor", "concatenate", "take", "rewriting_take", "resize", "max_pool",
    "avg_pool", "norm_op", "batch_norm_op", "sin", "cos", "equal",
)  # fmt: skip
"""The names of operations that only the providers for LiteRT quantize, as in Qwix; "call" is a relu."""
SYNONYMS = {"dot": "dot_general", "matmul": "dot_general"}
"""Aliases of operations."""


def check(field: str, value: Any, convert: Callable[[Any], Any]) -> Any:
    """The value of a field as it is stored; an error names the field and the value.

    >>> check("tile_size", {0: 128, 1: 128}, check_tiles)
    ((0, 128), (1, 128))
    """
    try:
        return convert(value)
    except (ValueError, TypeError) as error:
        text = str(error)
        raise ValueError(text if text.startswith(field) else f"{field}={value!r}: {text}") from None


def check_choice(*allowed: str | None) -> Callable[[Any], Any]:
    """One of these values."""

    def convert(value: Any) -> Any:
        if value not in allowed:
            hint = did_you_mean(value, [a for a in allowed if a is not None])
            raise ValueError(f"{hint}Allowed: {', '.join(map(repr, allowed))}")
        return value

    return convert


def check_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("True or False")
    return value


class TypeName(str):
    """The name of a number format in a rule: a string that also equals the dtype of that name.

    >>> import jax.numpy as jnp
    >>> TypeName("int8") == jnp.int8, TypeName("int8") == "int8", TypeName("int8") == jnp.int4
    (True, True, False)
    """

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or (not isinstance(other, str) and type_name(other) == str(self))

    def __ne__(self, other: object) -> bool:
        return not self == other


def check_qtype(value: Any) -> TypeName | Format | None:
    """A format, by its name if it has one, so that a rule prints as it was written."""
    if value is None:
        return None
    fmt = get_format(value)
    try:
        if get_format(fmt.name) == fmt:
            return TypeName(fmt.name)
    except ValueError:
        pass
    return TypeName(value.strip().lower()) if isinstance(value, str) else fmt


def check_calibration(value: Any) -> str | Calibration:
    """A calibration, kept as the string that it was given by."""
    get_calibration(value)
    return re.sub(r"\s", "", value).lower() if isinstance(value, str) else value


def check_rounding(value: Any) -> str | Rounding:
    """A rounding, kept as the string that it was given by."""
    if not isinstance(value, str | Rounding):
        raise ValueError("a string or a Rounding")
    get_rounding(value)
    return re.sub(r"\s", "", value).lower() if isinstance(value, str) else value


def check_regex(value: Any) -> str:
    """A regular expression; the error for a shell pattern says so."""
    if not isinstance(value, str):
        raise ValueError("a regular expression as a string, such as '.*/mlp/.*'")
    try:
        re.compile(value)
    except re.error as error:
        meant = re.sub(r"(^|/)\*+", r"\1.*", value)
        hint = f"did you mean {meant!r}? " if meant != value and _compiles(meant) else ""
        raise ValueError(
            f"not a regular expression ({error}). {hint}It has to match the whole path, as '.*/mlp/.*' does"
        ) from None
    check_bounded(value)
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
        raise ValueError(f"a collection of names; did you mean op_names=({value!r},)?")
    for name in value:
        if name not in (*OPS, *SYNONYMS, *TENSOR_OPS):
            hint = did_you_mean(name, (*OPS, *SYNONYMS))
            raise ValueError(f"op_names has {name!r}: {hint}Allowed: {', '.join((*OPS, *SYNONYMS))}")
    return tuple(dict.fromkeys(SYNONYMS.get(name, name) for name in value))


def check_tile(value: Any) -> Any:
    """A tile's size: a count of values, or 1/n for n tiles."""
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise ValueError("a tile is a count of values such as 128, or 1/n as a float for n tiles")
    return None if value is None else check_tile_size(-1, value)


def check_tiles(value: Any) -> Any:
    """A tile's size, or sizes by axis, as pairs so that a rule can be hashed."""
    if not isinstance(value, Mapping | tuple | list):
        return check_tile(value)
    try:
        pairs = tuple((int(axis), check_tile(size)) for axis, size in dict(value).items())
    except TypeError:
        raise ValueError("sizes by axis are a mapping such as {0: 128, 1: 128}") from None
    return pairs


def check_axes(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, int | str) or not all(isinstance(axis, int) for axis in value):
        raise ValueError("a tuple of axes such as (0,)")
    return tuple(value)


def check_names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(name, str) and name for name in value):
        raise ValueError("a tuple of names such as ('fsdp',)")
    return tuple(value)


def check_rows(value: Any) -> tuple[Any, ...]:
    """Mesh axes that shard the first axis of rows, or a tuple of mesh axes for each axis of rows."""
    if not isinstance(value, str) and value and all(isinstance(names, tuple | list) for names in value):
        rows = tuple(map(check_names, value))
        return rows if len(rows) > 1 else rows[0]
    return check_names(value)


def check_residual_qtype(value: Any) -> Any:
    qtype = check_qtype(value)
    if qtype is not None:
        Quantizer(qtype)  # raises for formats that have no symmetric range
    return qtype


def check_sparsity(value: Any) -> tuple[int, int] | None:
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
        raise ValueError("(n, m) keeps n of each m weights, 0 < n < m, as (2, 4) does")
    return pair


def check_rotation(value: Any) -> int | None:
    if value is not None and (not isinstance(value, int) or value < 2 or value & (value - 1)):
        raise ValueError("a Hadamard rotation has blocks of a power of two, such as 16")
    return value


def check_matmul(value: Any) -> Matmul | None:
    if not isinstance(value, Matmul | None):
        raise ValueError("an octavo.Matmul or None")
    return value


_OPERANDS = ("lhs", "rhs", "dlhs_grad", "drhs_grad", "dlhs_residual", "drhs_residual")
_QT_CONFIG: dict[str, Callable[[Any], Any]] = {
    **{f"{operand}_qtype": check_qtype for operand in _OPERANDS},
    **{f"{operand}_calibration_method": check_calibration for operand in _OPERANDS},
    **{f"{operand}_disable_channelwise_axes": check_flag for operand in _OPERANDS},
    "tile_size": check_tiles,
    "dlhs_tile_size": check_tiles,
    "drhs_tile_size": check_tiles,
    "disable_gradient_clipping": check_flag,
    "use_original_residuals": check_flag,
    "sparsity_rule": check_sparsity,
}
_QWIX_ONLY = {
    **{f"{side}_collect_quant_stat": "act_static_scale=True" for side in ("lhs", "rhs")},
    **{f"{side}_stochastic_rounding_noise_fn": "bwd_stochastic_rounding='uniform'" for side in ("dlhs", "drhs")},
}


def check_qt_config(value: Any) -> tuple[tuple[str, Any], ...] | None:
    """Qwix's `additional_qt_config` as pairs, each checked under its own name.

    >>> check_qt_config({"drhs_grad_qtype": "fp8_e5m2"})
    (('drhs_grad_qtype', 'float8_e5m2'),)
    """
    if value is None:
        return None
    if not isinstance(value, Mapping | tuple | list):
        raise ValueError("a mapping of Qwix's DotGeneralQtConfig fields")
    pairs = []
    for key, setting in dict(value).items():
        field = f"additional_qt_config[{key!r}]"
        if key in _QWIX_ONLY:
            if setting:
                raise ValueError(f"{field} is a function of Qwix's own and has no counterpart: use {_QWIX_ONLY[key]}")
        elif key not in _QT_CONFIG:
            known = sorted((*_QT_CONFIG, *_QWIX_ONLY))
            raise ValueError(f"{field}: no such setting; {did_you_mean(key, known)}Known: {', '.join(known)}")
        elif setting is not None or _QT_CONFIG[key] not in (check_calibration, check_flag):
            pairs.append((key, check(field, setting, _QT_CONFIG[key])))
    return tuple(pairs)


def _optional(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


FIELDS: dict[str, Callable[[Any], Any]] = {
    "module_path": check_regex,
    "op_names": check_op_names,
    **dict.fromkeys(
        ("weight_qtype", "act_qtype", "kv_qtype", "dispatch_qtype", "bwd_qtype", "reduce_qtype"), check_qtype
    ),
    "tile_size": check_tiles,
    "bwd_weight_grad_tile_size": check_tile,
    "weight_calibration_method": check_calibration,
    "act_calibration_method": _optional(check_calibration),
    "bwd_calibration_method": check_calibration,
    **dict.fromkeys(("act_batch_axes", "channelwise_noise_axes"), check_axes),
    "gather_axes": check_names,
    "reduce_axes": check_rows,
    "rounding": check_rounding,
    **dict.fromkeys(("rotate", "bwd_rotate"), check_rotation),
    "sparsity": check_sparsity,
    "act_static_scale": _optional(check_flag),
    **dict.fromkeys(
        ("skip", "optional", "square_tiles", "per_tensor", "check_finite", "inside_custom", "attention"), check_flag
    ),
    **dict.fromkeys(("disable_channelwise_axes", "reduce_feedback"), check_flag),
    "scope": check_choice("all", "weights", "activations"),
    "kv_axis": check_choice("dkv", "heads_and_dkv"),
    "arithmetic": lambda value: check_choice(*ARITHMETICS)(value),
    "lowering": lambda value: check_choice(*lowerings())(value),
    "bwd_stochastic_rounding": check_choice(None, "uniform", "low_bit_uniform", "eden"),
    "bwd_weight_grad_accumulator": check_choice(None, "float32", "bfloat16", "float16"),
    "residual": check_choice(None, "reuse", "requantize", "original"),
    "residual_qtype": check_residual_qtype,
    "additional_qt_config": check_qt_config,
    **dict.fromkeys(("fwd", "dlhs", "drhs"), check_matmul),
}
"""The checks of the fields of a rule."""
