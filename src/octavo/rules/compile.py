"""Compiling a rule to the DotConfig of a matmul: the quantizers of its six operands.

The functions here read a rule's fields only, so that `rule.py` may compile a rule when it is made.
"""

from typing import Any

from octavo.calibration import AbsMax
from octavo.numerics import Eden, Stochastic, get_format
from octavo.ops import DotConfig, Matmul, Operand

_FLOAT = Matmul(residual="original")
EDEN_RANGE = AbsMax(factor=17 / 16 * 0.93, headroom=448 / 256)
"""The range of MS-EDEN: it clips a little, which its scales correct, and they have room to become larger."""


type Configs = dict[tuple[bool, bool], DotConfig | None]
"""The compiled forms of a rule by (there is a weight, it is the left operand)."""


def compile_rule(rule: Any) -> Configs:
    """The forms of a rule for a weight on the right and for two activations; raises if there are none."""
    configs: Configs = {}
    for weights in (True, False):
        try:
            configs[weights, False] = compile_matmul(rule, weights, False)
        except ValueError as error:
            kind = "a matmul with a weight" if weights else "a matmul of two activations"
            raise ValueError(f"this {type(rule).__name__} does not describe {kind}: {error}") from None
    return configs


def compile_matmul(rule: Any, weights: bool, left: bool) -> DotConfig | None:
    """The config of a matmul with or without weights, with the weight as its left or right operand."""
    if rule.leaves_alone or (rule.scope != "all" and (rule.scope == "weights") != weights):
        return None
    trains = hasattr(rule, "bwd_qtype")  # whether it is a QtRule
    raw = dict(rule.additional_qt_config or ()) if trains else {}
    raw = swap_sides(raw) if left else raw

    # From here on, lhs is the activation and rhs the weight.
    replaced: tuple[Matmul | None, ...] = (None, None, None)
    if trains and (weights or rule.scope == "activations"):
        replaced = (rule.fwd, rule.dlhs, rule.drhs)
    fwd = replaced[0] or _forward(rule, weights, raw)
    if fwd.lhs is fwd.rhs is replaced[1] is replaced[2] is None:
        return None
    dlhs, drhs = replaced[1] or _FLOAT, replaced[2] or _FLOAT
    if trains:
        dlhs = replaced[1] or _gradient(rule, "dlhs", fwd, None, raw)
        drhs = replaced[2] or _gradient(rule, "drhs", fwd, rule.bwd_weight_grad_tile_size if weights else None, raw)
        if replaced[2] is None and weights and rule.bwd_weight_grad_accumulator is not None:
            drhs = drhs.replace(accumulator=rule.bwd_weight_grad_accumulator)
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


def compile_attention(config: DotConfig, step: str, right: bool) -> DotConfig:
    """The config of the matmul of a softmax with values, from that of two activations.

    Zhang et al., SageBwd, arXiv:2505.11594: with P = softmax(S) and O = P V, codes of exp(S - max S) have the scale
    1/127, and dP = dO V^T is in float: dS = P (dP - sum(P dP)) cancels, and is what rounding harms most.
    """
    fwd, dlhs, drhs = config.fwd, _FLOAT, config.drhs
    if fwd.lhs is not None and fwd.lhs.qtype.tile is None:
        # Before it is normalized it is at most 1, and the sum by which it is divided is NaN where it is.
        fixed = {"calibration": "fixed,1", "per_tensor": True, "check_finite": False}
        rows = {"calibration": "absmax", "per_tensor": False}
        fwd = fwd.replace(lhs=fwd.lhs.replace(tile=None, **(fixed if step == "exp" else rows)))
        config = config.replace(clip_gradient=config.clip_gradient and step != "exp")
    if right:
        fwd, dlhs, drhs = fwd.replace(lhs=fwd.rhs, rhs=fwd.lhs), drhs, dlhs
    return config.replace(fwd=fwd, dlhs=dlhs, drhs=drhs)


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
    tile = raw.get("tile_size", rule.tile_size)

    def operand(side: str, qtype: Any, weight: bool) -> Operand | None:
        method = rule.weight_calibration_method if weight else rule.act_calibration_method or "absmax"
        return _operand(
            rule,
            raw.get(f"{side}_qtype", qtype),
            side,
            raw,
            tile=tile,
            square=weight and rule.square_tiles,
            calibration=method,
            rounding=rule.rounding,
        )

    return Matmul(operand("lhs", first, False), operand("rhs", second, weights), rotate=rule.rotate)


def _operand(rule: Any, qtype: Any, name: str, raw: dict[str, Any], **fields: Any) -> Operand | None:
    """An operand with these fields, of which Qwix's settings for its name replace some."""
    if qtype is None:
        return None
    per_tensor = rule.per_tensor or getattr(rule, "disable_channelwise_axes", False)
    per_tensor = raw.get(f"{name}_disable_channelwise_axes", per_tensor)
    fmt, tile = get_format(qtype), fields["tile"]
    if fmt.tile is not None and tile not in (None, fmt.tile):
        raise ValueError(
            f"tiles of {tile} with {fmt.name}, which has tiles of {fmt.tile} of its own: leave the size out"
        )
    if fmt.tile is not None and per_tensor:
        raise ValueError(f"one scale per tensor with {fmt.name}, which has one for each {fmt.tile} values: choose one")
    fields["calibration"] = raw.get(f"{name}_calibration_method", fields["calibration"])
    return Operand(qtype, per_tensor=per_tensor, arithmetic=rule.arithmetic, check_finite=rule.check_finite, **fields)


def _gradient(rule: Any, name: str, fwd: Matmul, tile: Any, raw: dict[str, Any]) -> Matmul:
    """One of the two gradients of a QtRule."""
    saved = fwd.rhs if name == "dlhs" else fwd.lhs  # the forward operand that is its residual
    # Where the residual has no type, quantizing the gradient alone would add noise to a matmul that runs in float.
    qtype = raw.get(f"{name}_grad_qtype", None if saved is None else rule.bwd_qtype)
    if qtype is None:
        reuse = rule.residual == "reuse" or raw.get("use_original_residuals") is False
        return Matmul(residual="reuse" if reuse and saved is not None else "original")
    # One random number for each value. Qwix draws one for each row (channelwise_noise_axes), which rounds a row's
    # values up or down together; independent noise is as cheap to use and its errors cancel in the matmul.
    noise = {None: "nearest", "uniform": Stochastic(), "low_bit_uniform": Stochastic(bits=8)}
    eden = rule.bwd_stochastic_rounding == "eden"
    if eden and not (rule.bwd_rotate and rule.bwd_random_signs):
        raise ValueError("MS-EDEN is unbiased over random rotations: give bwd_rotate=32, bwd_random_signs=True")
    tile = raw.get(f"{name}_tile_size", tile)
    gradient = _operand(
        rule,
        qtype,
        f"{name}_grad",
        raw,
        tile=tile,
        calibration=EDEN_RANGE if eden else rule.bwd_calibration_method,
        rounding=Eden(rule.bwd_rotate) if eden else noise[rule.bwd_stochastic_rounding],
    )
    residual = _residual_operand(saved, name, tile, raw)
    if eden and residual is not None and gradient is not None:
        residual = residual.replace(calibration=gradient.calibration, rounding=gradient.rounding)
    if residual is None:
        return Matmul(gradient, residual="original")
    kind = rule.residual or _residual(rule, name, fwd, saved, raw)
    return Matmul(
        gradient,
        None if kind == "reuse" else residual,
        residual=kind,
        rotate=rule.bwd_rotate,
        random_signs=rule.bwd_random_signs,
    )


def _residual(rule: Any, name: str, fwd: Matmul, saved: Operand | None, raw: dict[str, Any]) -> str:
    """The default `residual` of a gradient: an operand that the forward quantizes is never used in float.

    Tiles along the forward's contraction do not fit the gradient's. Plain tiles are quantized again from the saved
    codes. Block formats are quantized along both contractions from the same float, as Transformer Engine does: four
    bits rounded twice lose too much precision. Codes of square tiles, or of tiles by axis, fit both contractions.
    """
    asked = raw.get("use_original_residuals") or any(key.startswith(f"{name}_residual_") for key in raw)
    moved = any(o is not None and o.dequant == "other" for o in (fwd.lhs, fwd.rhs))
    if saved is None or asked or moved or fwd.rotate or rule.bwd_rotate or saved.qtype.tile is not None:
        return "original"
    return "reuse" if saved.tile is None or saved.square or isinstance(saved.tile, tuple) else "requantize"


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
        check_finite=like.check_finite,
    )
