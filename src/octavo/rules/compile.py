"""Compiling a rule to the DotConfig of a matmul: the quantizers of its six operands.

The functions here read a rule's fields only, so that `rule.py` may compile a rule when it is made.
"""

from typing import Any

from octavo.numerics import Rounding, Stochastic, get_format
from octavo.ops import DotConfig, Matmul, Operand
from octavo.rules.checks import contraction_or_square

_FLOAT = Matmul(residual="original")


type Configs = dict[tuple[bool, bool], DotConfig | None]
"""The compiled forms of a rule by (there is a weight, it is the left operand)."""


def dot_config(rule: Any, *, lhs_weight: bool, rhs_weight: bool) -> DotConfig | None:
    """The config of a matmul under a rule, or None if it stays in float.

    Static ranges (`act_static_scale`) are not part of it: they are passed to the call, as bounds in its `scaling`.

    Args:
        rule: A `QuantizationRule`.
        lhs_weight: Whether the left operand is a weight. If so, dlhs and drhs are swapped.
        rhs_weight: Whether the right operand is a weight. Of two weights, the right one counts as the weight.

    >>> from octavo.rules import QtRule
    >>> config = dot_config(QtRule(weight_qtype="int4", act_qtype="int8"), lhs_weight=True, rhs_weight=False)
    >>> config.fwd.lhs.qtype.name, config.fwd.rhs.qtype.name, config.dlhs
    ('int4', 'int8', Matmul(residual='original'))
    """
    kind = lhs_weight or rhs_weight, lhs_weight and not rhs_weight
    configs: Configs = rule._configs
    if kind not in configs:  # a weight on the left, which some rules do not support
        configs[kind] = _compile(rule, *kind)
    return configs[kind]


def compile_rule(rule: Any) -> Configs:
    """The forms of a rule for a weight on the right and for two activations; raises if there are none."""
    configs: Configs = {}
    for weights in (True, False):
        try:
            configs[weights, False] = _compile(rule, weights, False)
        except ValueError as error:
            kind = "a matmul with a weight" if weights else "a matmul of two activations"
            raise ValueError(f"this {type(rule).__name__} does not describe {kind}: {error}") from None
    return configs


def _compile(rule: Any, weights: bool, left: bool) -> DotConfig | None:
    if rule.leaves_alone or (rule.scope != "all" and (rule.scope == "weights") != weights):
        return None
    raw = dict(getattr(rule, "additional_qt_config", None) or ())
    raw = swap_sides(raw) if left else raw

    # From here on, lhs is the activation and rhs the weight.
    replaced: tuple[Matmul | None, ...] = (None, None, None)
    if _trains(rule) and (weights or rule.scope == "activations"):
        replaced = (rule.fwd, rule.dlhs, rule.drhs)
    fwd = replaced[0] or _forward(rule, weights, raw)
    if fwd.lhs is fwd.rhs is replaced[1] is replaced[2] is None:
        return None
    tile = rule.bwd_weight_grad_tile_size if _trains(rule) and weights else None
    dlhs = replaced[1] or _gradient(rule, "dlhs", fwd, fwd.rhs, None, raw)
    drhs = replaced[2] or _accumulated(_gradient(rule, "drhs", fwd, fwd.lhs, tile, raw), rule, weights)
    sparsity = raw.get("sparsity_rule") or rule.sparsity if weights else None
    if left:
        if sparsity is not None:
            raise ValueError(
                f"sparsity={sparsity} prunes the right operand of a matmul, and here the weight is the left one: "
                "swap the operands, or exempt this matmul by an earlier rule"
            )
        fwd, dlhs, drhs = fwd.replace(lhs=fwd.rhs, rhs=fwd.lhs), drhs, dlhs
    clip = not raw.get("disable_gradient_clipping", False)
    return DotConfig(fwd, dlhs, drhs, clip_gradient=clip, sparsity=sparsity, lowering=rule.lowering)


def _trains(rule: Any) -> bool:
    """Whether it is a QtRule."""
    return hasattr(rule, "bwd_qtype")


def swap_sides(settings: dict[str, Any]) -> dict[str, Any]:
    """Qwix's settings for a matmul with its operands swapped.

    >>> swap_sides({"lhs_qtype": "int8", "drhs_tile_size": 128})
    {'rhs_qtype': 'int8', 'dlhs_tile_size': 128}
    """
    other = {"lhs": "rhs", "rhs": "lhs", "dlhs": "drhs", "drhs": "dlhs"}
    swapped = {}
    for key, value in settings.items():
        side, _, rest = key.partition("_")
        swapped[f"{other[side]}_{rest}" if side in other else key] = value
    return swapped


def _forward(rule: Any, weights: bool, raw: dict[str, Any]) -> Matmul:
    second = rule.weight_qtype if weights else rule.kv_qtype or rule.act_qtype
    # A matmul whose weight has no type stays in float, whatever the activation's type.
    first = rule.act_qtype if not weights or second is not None else None
    lhs_qtype, rhs_qtype = raw.get("lhs_qtype", first), raw.get("rhs_qtype", second)
    lhs = _operand(rule, "lhs", lhs_qtype, raw, weight=False)
    rhs = _operand(rule, "rhs", rhs_qtype, raw, weight=weights)
    return Matmul(lhs, rhs, rotate=rule.rotate)


def _operand(rule: Any, side: str, qtype: Any, raw: dict[str, Any], *, weight: bool) -> Operand | None:
    """An operand of the forward matmul."""
    if qtype is None:
        return None
    tile, square = contraction_or_square("tile_size", raw.get("tile_size", rule.tile_size))
    per_tensor = raw.get(f"{side}_disable_channelwise_axes", _per_tensor(rule))
    method = rule.weight_calibration_method if weight else rule.act_calibration_method or "absmax"
    _check_block(qtype, tile, per_tensor)
    return Operand(
        qtype,
        tile=tile,
        square=weight and (square or rule.square_tiles),
        per_tensor=per_tensor,
        calibration=raw.get(f"{side}_calibration_method", method),
        rounding=rule.rounding,
        arithmetic=rule.arithmetic,
    )


def _gradient(rule: Any, name: str, fwd: Matmul, saved: Operand | None, tile: Any, raw: dict[str, Any]) -> Matmul:
    """One of the two gradients; `saved` is the forward operand that is its residual."""
    if not _trains(rule):
        return _FLOAT
    # Where the residual has no type, quantizing the gradient alone would add noise to a matmul that runs in float.
    qtype = raw.get(f"{name}_grad_qtype", None if saved is None else rule.bwd_qtype)
    if qtype is None:
        reuse = rule.residual == "reuse" or raw.get("use_original_residuals") is False
        return Matmul(residual="reuse" if reuse and saved is not None else "original")
    tile = raw.get(f"{name}_tile_size", tile)
    per_tensor = raw.get(f"{name}_grad_disable_channelwise_axes", _per_tensor(rule))
    _check_block(qtype, tile, per_tensor)
    gradient = Operand(
        qtype,
        tile=tile,
        per_tensor=per_tensor,
        calibration=raw.get(f"{name}_grad_calibration_method", rule.bwd_calibration_method),
        rounding=_noise(rule),
        arithmetic=rule.arithmetic,
    )
    residual = _residual_operand(saved, name, tile, raw)
    residual_kind = rule.residual or _residual(rule, name, fwd, saved, raw)
    if residual is None:
        return Matmul(gradient, residual="original")
    return Matmul(
        gradient, None if residual_kind == "reuse" else residual, residual=residual_kind, rotate=rule.bwd_rotate
    )


def _accumulated(drhs: Matmul, rule: Any, weights: bool) -> Matmul:
    """The gradient of a weight in the rule's accumulator."""
    accumulator = rule.bwd_weight_grad_accumulator if _trains(rule) and weights else None
    return drhs if accumulator is None else drhs.replace(accumulator=accumulator)


def _residual(rule: Any, name: str, fwd: Matmul, saved: Operand | None, raw: dict[str, Any]) -> str:
    """The default `residual` of a gradient: an operand that the forward quantizes is never used in float.

    Tiles along the forward's contraction do not fit the gradient's. Plain tiles are quantized again from the saved
    codes. Block formats are quantized along both contractions from the same float, as Transformer Engine does: four
    bits rounded twice lose too much precision. Codes of square tiles fit both contractions.
    """
    asked = raw.get("use_original_residuals") or any(key.startswith(f"{name}_residual_") for key in raw)
    moved = any(o is not None and o.dequant == "other" for o in (fwd.lhs, fwd.rhs))
    if saved is None or asked or moved or fwd.rotate or rule.bwd_rotate or saved.qtype.tile is not None:
        return "original"
    return "reuse" if saved.tile is None or saved.square else "requantize"


def _residual_operand(saved: Operand | None, name: str, tile: Any, raw: dict[str, Any]) -> Operand | None:
    qtype = raw.get(f"{name}_residual_qtype", None if saved is None else saved.qtype)
    if qtype is None:
        return None
    like = saved or Operand(qtype)
    own = like.tile if like.qtype.tile is None else None
    return Operand(
        qtype,
        # Both operands need the same tiles along the contraction.
        tile=own if like.square or tile is None or get_format(qtype).tile is not None else tile,
        square=like.square,
        per_tensor=raw.get(f"{name}_residual_disable_channelwise_axes", like.per_tensor),
        calibration=raw.get(f"{name}_residual_calibration_method", like.calibration),
        rounding=like.rounding,
        arithmetic=like.arithmetic,
    )


def _check_block(qtype: Any, tile: Any, per_tensor: bool) -> None:
    fmt = get_format(qtype)
    if fmt.tile is not None and tile not in (None, fmt.tile):
        raise ValueError(
            f"tiles of {tile} with {fmt.name}, which has tiles of {fmt.tile} of its own: leave the size out"
        )
    if fmt.tile is not None and per_tensor:
        raise ValueError(f"one scale per tensor with {fmt.name}, which has one for each {fmt.tile} values: choose one")


def _per_tensor(rule: Any) -> bool:
    return rule.per_tensor or (_trains(rule) and rule.disable_channelwise_axes)


def _noise(rule: Any) -> Rounding | str:
    # One random number for each value. Qwix draws one for each row (channelwise_noise_axes), which rounds a row's
    # values up or down together; independent noise is as cheap to use and its errors cancel in the matmul.
    if rule.bwd_stochastic_rounding is None:
        return "nearest"
    return Stochastic(bits=8) if rule.bwd_stochastic_rounding == "low_bit_uniform" else Stochastic()
