"""The built-in recipes."""

from octavo.calibration import AmaxHistory
from octavo.numerics import Eden
from octavo.ops import Matmul, Operand
from octavo.rules.compile import EDEN_RANGE
from octavo.rules.intmp import MIXED
from octavo.rules.registry import Recipe, register_alias, register_recipe
from octavo.rules.rule import QtRule, QuantizationRule

_MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext"
_QWIX = "https://github.com/google/qwix"
_TE = "https://github.com/NVIDIA/TransformerEngine, transformer_engine/common/recipe"
_MICIKEVICIUS = "Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433"
_NOUNE = "Noune et al., 8-bit Numerical Formats for Deep Neural Networks, arXiv:2206.02915"
_OCP = "OCP Microscaling Formats (MX) Specification v1.0"
_NVFP4 = "NVIDIA, Pretraining Large Language Models with NVFP4, arXiv:2509.25149"

_E4M3, _E5M2 = "float8_e4m3fn", "float8_e5m2"
_EXPERTS = ("ragged_dot", "gmm")
_MATMULS = ("dot_general", "einsum", *_EXPERTS)  # convolutions have no tiles


def _training(forward: str, backward: str, **fields) -> QtRule:
    return QtRule(weight_qtype=forward, act_qtype=forward, bwd_qtype=backward, scope="weights", **fields)


def _forward_only(weight: str, act: str | None = None) -> QuantizationRule:
    return QuantizationRule(weight_qtype=weight, act_qtype=act, scope="weights")


def _delayed(forward: str, backward: str) -> QtRule:
    """One scale per tensor, from the largest magnitudes of the last 1024 steps."""
    operand = Operand(forward, per_tensor=True, tracker=AmaxHistory(length=1024))
    gradient = Matmul(Operand(backward, per_tensor=True, tracker=AmaxHistory(length=1024)))
    return _training(forward, backward, fwd=Matmul(operand, operand), dlhs=gradient, drhs=gradient)


def _aqt_fp8() -> QtRule:
    """AQT's bits of a gradient are those of both its operands, so residuals are in E5M2 too."""
    residuals = {"dlhs_residual_qtype": _E5M2, "drhs_residual_qtype": _E5M2}
    return _training(_E4M3, _E5M2, per_tensor=True, residual="original", additional_qt_config=residuals)


def _deepseek() -> QtRule:
    # Codes of 128 x 128 tiles can be reused for the transposed weight. The activation's 1 x 128 tiles become 128 x 1 in
    # the weight's gradient: quantized again from the saved codes (section 3.3 of the report).
    act, weight = Operand(_E4M3, tile=128), Operand(_E4M3, tile=128, square=True)
    return _training(
        _E4M3,
        _E4M3,
        op_names=_MATMULS,
        fwd=Matmul(act, weight),
        dlhs=Matmul(act),
        drhs=Matmul(act, act, residual="requantize"),
    )


def _switchback() -> QtRule:
    rows, whole = Operand("int8"), Operand("int8", per_tensor=True)
    return _training("int8", "int8", fwd=Matmul(rows, whole), dlhs=Matmul(rows), drhs=Matmul(residual="original"))


def _blocks(qtype: str) -> QtRule:
    return _training(qtype, qtype, op_names=_MATMULS)


def _nvfp4(rotate: int | None = None, **fields) -> QtRule:
    """Square blocks of weights, so that both passes have the same codes; gradients rounded stochastically."""
    block, square = Operand("nvfp4"), Operand("nvfp4", square=True)
    gradient = Operand("nvfp4", rounding="stochastic")
    return _training(
        "nvfp4",
        "nvfp4",
        fwd=Matmul(block, square),
        dlhs=Matmul(gradient, square, residual="original"),
        drhs=Matmul(gradient, block, residual="original", rotate=rotate),
        **fields,
    )


def _quartet2(**fields) -> QtRule:
    """The codes of the forward are the residuals; gradients are unbiased estimates for these."""
    block = Operand("nvfp4", calibration="four_over_six")
    eden = Operand("nvfp4", calibration=EDEN_RANGE, rounding=Eden(32))
    gradient = Matmul(eden, eden, residual="requantize", rotate=32, random_signs=True)
    return _training("nvfp4", "nvfp4", fwd=Matmul(block, block), dlhs=gradient, drhs=gradient, **fields)


def _tetrajet2(**fields) -> QtRule:
    """The codes of the forward are the residuals; both gradients are rotated and rounded stochastically, unbiased."""
    block, noisy = Operand("nvfp4"), Operand("nvfp4", rounding="stochastic")
    gradient = Matmul(noisy, noisy, residual="requantize", rotate=16, random_signs=True)
    return _training("nvfp4", "nvfp4", fwd=Matmul(block, block), dlhs=gradient, drhs=gradient, **fields)


def _mxfp4_hadamard(**fields) -> QtRule:
    block = Operand("mxfp4")
    drhs = Matmul(block, block, residual="original", rotate=32)
    return _training("mxfp4", "mxfp4", op_names=("dot_general", "einsum"), drhs=drhs, **fields)


def _bitnet() -> QtRule:
    weight = Operand("ternary", per_tensor=True, calibration="absmean")
    straight = {"disable_gradient_clipping": True}
    return QtRule(
        weight_qtype="ternary",
        act_qtype="int8",
        scope="weights",
        fwd=Matmul(Operand("int8"), weight),
        additional_qt_config=straight,
    )


def _add(name: str, rules: QuantizationRule | tuple[QuantizationRule, ...], summary: str, source: str) -> None:
    rules = rules if isinstance(rules, tuple) else (rules,)
    register_recipe(Recipe(name=name, summary=summary, source=source, rules=rules))


_add("int8", _training("int8", "int8"), "Int8 in all three matmuls, a scale for each channel.", _QWIX)
_add("int4", _training("int4", "int4"), "Int4 in all three matmuls, a scale for each channel.", _QWIX)
_add("fp4", _training("float4_e2m1fn", "float4_e2m1fn"), "E2M1 in all three matmuls, a scale for each channel.", _QWIX)
_add("fp8", _training(_E4M3, _E4M3), "E4M3 in all three matmuls, a scale for each channel.", _MAXTEXT)
register_alias("fp8_e4m3", "fp8", "Alias of fp8.", _MAXTEXT)
_add("fp8_e5m2", _training(_E5M2, _E5M2), "E5M2 in all three matmuls, a scale for each channel.", _MAXTEXT)
_add("fp8_full", _training(_E4M3, _E5M2), "E4M3 forward and E5M2 gradients, a scale for each channel.", _MAXTEXT)
_add("fp8_gpu", _delayed(_E4M3, _E5M2), "E4M3 forward, E5M2 gradients, delayed scaling per tensor.", _MICIKEVICIUS)
register_alias(
    "te_fp8_delayedscaling", "fp8_gpu", "Alias of fp8_gpu, as Transformer Engine's DelayedScaling(length=1024).", _TE
)
_add(
    "fp8_nanoo",
    _delayed("float8_e4m3fnuz", "float8_e5m2fnuz"),
    "Delayed scaling per tensor in the fnuz formats of AMD's MI300.",
    _NOUNE,
)
register_alias("nanoo_fp8", "fp8_nanoo", "Alias of fp8_nanoo.", _NOUNE)
_add("int8w", _forward_only("int8"), "Int8 weights, activations and gradients in float.", _MAXTEXT)
_add("int4w", _forward_only("int4"), "Int4 weights, activations and gradients in float.", _MAXTEXT)
_add(MIXED, (), "Bits of weights and activations by layer, from the table passed as config=.", _MAXTEXT)
_add("aqt_fp8", _forward_only(_E4M3, _E4M3), "E4M3 forward, gradients in float.", "https://github.com/google/aqt")
_add(
    "aqt_fp8_full",
    _aqt_fp8(),
    "E4M3 forward, E5M2 gradients and residuals, one scale per tensor, residuals quantized again from float.",
    "https://github.com/google/aqt",
)
_add(
    "te_fp8_currentscaling",
    _training(_E4M3, _E5M2, per_tensor=True),
    "Transformer Engine's Float8CurrentScaling: E4M3 forward, E5M2 gradients, the tensor's own range.",
    _TE,
)
_add(
    "te_nvfp4",
    # The weight gradient of experts contracts groups of rows that change from step to step: no fixed blocks.
    (_nvfp4(op_names=_EXPERTS, optional=True), _nvfp4(16, op_names=("dot_general", "einsum"))),
    "NVFP4 with square weight blocks, stochastic and (but for experts) rotated weight gradients.",
    _NVFP4,
)
_add("te_nvfp4_no_rht", _nvfp4(op_names=_MATMULS), "The recipe te_nvfp4 without its Hadamard rotation.", _NVFP4)
_add("qat_int8", _forward_only("int8", "int8"), "Int8 forward, gradients in float.", "Jacob et al., arXiv:1712.05877")
_add(
    "qat_int4",
    _forward_only("int4", "int8"),
    "Int4 weights and int8 activations forward, gradients in float.",
    "https://pytorch.org/blog/quantization-aware-training/",
)
_add(
    "mxfp8",
    _blocks("mxfp8"),
    "E4M3 in blocks of 32 in all three matmuls, block scales rounded up.",
    "Mishra et al., Recipes for Pre-training LLMs with MXFP8, arXiv:2506.08027",
)
register_alias("te_mxfp8", "mxfp8", "Alias of mxfp8, as Transformer Engine's MXFP8BlockScaling.", _TE)
_add("mxfp4", _blocks("mxfp4"), "E2M1 in blocks of 32 in all three matmuls, rounded to nearest.", _OCP)
_add("nvfp4", _blocks("nvfp4"), "NVFP4 in all three matmuls, rounded to nearest, nothing rotated.", _NVFP4)
_add(
    "deepseek_fp8",
    _deepseek(),
    "E4M3 throughout: activations and gradients in tiles of 1 x 128, weights of 128 x 128.",
    "DeepSeek-V3 Technical Report, arXiv:2412.19437",
)
_add(
    "switchback",
    _switchback(),
    "Int8 forward and activation gradient, weights with one scale, weight gradient in float.",
    "Wortsman et al., Stable and low-precision training for large-scale vision-language models, arXiv:2304.13013",
)
_add(
    "quartet2",
    # As in te_nvfp4: the weight gradient of experts cannot be rotated.
    (_nvfp4(op_names=_EXPERTS, optional=True), _quartet2(op_names=("dot_general", "einsum"))),
    "NVFP4 with four-over-six forward; gradients rotated at random and rounded by MS-EDEN.",
    "Panferov et al., Quartet II, arXiv:2601.22813",
)
_add(
    "tetrajet2",
    (_nvfp4(op_names=_EXPERTS, optional=True), _tetrajet2(op_names=("dot_general", "einsum"))),
    "NVFP4 to nearest forward; gradients of the rounded operands, rotated at random, rounded stochastically.",
    "Chen et al., TetraJet-v2, arXiv:2510.27527, without its OsciReset and OutControl",
)
_add(
    "mxfp4_hadamard",
    (_blocks("mxfp4").replace(op_names=_EXPERTS, optional=True), _mxfp4_hadamard()),
    "The recipe mxfp4 with weight gradients that (but for experts) are rotated.",
    "arXiv:2605.09825",
)
_add(
    "bitnet",
    _bitnet(),
    "BitNet b1.58: ternary weights with one scale, int8 activations, gradients in float.",
    "Ma et al., The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits, arXiv:2402.17764",
)
