"""A frozen rule for the quantization of some modules of a model."""

import dataclasses
import functools
import re
from collections.abc import Collection, Mapping
from typing import Any

from octavo._config import Config
from octavo.calibration import CalibrationLike
from octavo.numerics import FormatLike, Rounding
from octavo.ops import Matmul, lowerings
from octavo.qarray.arithmetic import ARITHMETICS
from octavo.rules import checks
from octavo.rules.compile import Configs, compile_rule
from octavo.rules.conflicts import check_backward, check_forward


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class QuantizationRule(Config):
    """How the matmuls of some modules run forward, while their gradients stay in float.

    Of several rules, the first that matches an operation applies. A type is a name, a dtype or a `Format`; None is
    float.

    Attributes:
        module_path: A regular expression that matches the full path of a module.
        op_names: Operations that the rule applies to, such as ("dot_general", "einsum"); all of them if empty.
        weight_qtype: The type of weights.
        act_qtype: The type of activations.
        tile_size: Values along the contraction that share a scale; a float 1/n means n tiles. {0: 128, 1: 128} means
            square tiles of the weight.
        act_static_scale: Quantize activations by a range that is averaged over steps and kept as state.
        weight_calibration_method: The calibration of weights, such as "absmax" or "minmax".
        act_calibration_method: The calibration of activations, "absmax" if None.
        act_batch_axes: Axes that share a static scale; all axes if None.
        scope: "weights" for matmuls with a weight, "activations" for those of two activations, or "all".
        skip: Leave what the rule matches in float.
        optional: The rule may match nothing without an error.
        kv_qtype: The type of keys and values: the second operand of a matmul of two activations, and the KV cache.
        kv_axis: What shares a scale in the KV cache: "dkv" for the values of one head and token, "heads_and_dkv" for
            those of all heads.
        rounding: "nearest", "stochastic" or a `Rounding`, for the forward operands.
        rotate: The block size of a Hadamard rotation of both forward operands.
        sparsity: (n, m) keeps the n largest of each m weights.
        arithmetic: The arithmetic of scales, "float32" or "qwix" for bit-equality with Qwix.
        lowering: How the matmul is lowered; "auto" chooses.
        square_tiles: Tile the other axis of a weight as well, by `tile_size`.
        per_tensor: One scale per operand.
        inside_custom: Rewrite the bodies of custom_jvp and custom_vjp functions too.
        gather_axes: Mesh axes, such as ("fsdp",), along which weights are all-gathered as codes and scales. Needs
            `quantized(shardings=...)`.
        dispatch_qtype: The type in which tokens are dispatched to the devices of their experts.

    >>> QuantizationRule(module_path=".*/mlp/.*", weight_qtype="int4", tile_size=128)
    QuantizationRule(module_path='.*/mlp/.*', weight_qtype='int4', tile_size=128)
    """

    module_path: str = ".*"
    op_names: Collection[str] = ()
    weight_qtype: FormatLike | None = None
    act_qtype: FormatLike | None = None
    tile_size: int | float | Mapping[int, int | float] | tuple[tuple[int, int | float], ...] | None = None
    act_static_scale: bool | None = None
    weight_calibration_method: CalibrationLike = "absmax"
    act_calibration_method: CalibrationLike | None = None
    act_batch_axes: Collection[int] | None = None
    scope: str = "all"
    skip: bool = False
    optional: bool = False
    kv_qtype: FormatLike | None = None
    kv_axis: str = "dkv"
    rounding: Rounding | str = "nearest"
    rotate: int | None = None
    sparsity: tuple[int, int] | None = None
    arithmetic: str = "float32"
    lowering: str = "auto"
    square_tiles: bool = False
    per_tensor: bool = False
    inside_custom: bool = False
    gather_axes: Collection[str] = ()
    dispatch_qtype: FormatLike | None = None

    def __post_init__(self):
        self._normalize()
        self._check()
        _ = self._configs  # raises if the rule cannot be compiled

    @functools.cached_property
    def _configs(self) -> Configs:
        """The compiled forms of this rule; see `dot_config`."""
        return compile_rule(self)

    def _put(self, check: Any, *fields: str) -> None:
        for field in fields:
            object.__setattr__(self, field, check(field, getattr(self, field)))

    def _normalize(self) -> None:
        object.__setattr__(self, "op_names", checks.check_op_names(self.op_names))
        self._put(checks.check_regex, "module_path")
        self._put(checks.check_qtype, "weight_qtype", "act_qtype", "kv_qtype", "dispatch_qtype")
        self._put(checks.check_tiles, "tile_size")
        self._put(checks.check_calibration, "weight_calibration_method")
        if self.act_calibration_method is not None:
            self._put(checks.check_calibration, "act_calibration_method")
        self._put(checks.check_axes, "act_batch_axes")
        self._put(checks.check_names, "gather_axes")
        self._put(checks.check_rounding, "rounding")
        self._put(checks.check_rotation, "rotate")
        self._put(checks.check_sparsity, "sparsity")
        self._put(checks.check_flag, "skip", "optional", "square_tiles", "per_tensor", "inside_custom")
        if self.act_static_scale is not None:
            self._put(checks.check_flag, "act_static_scale")
        checks.check_choice("scope", self.scope, ("all", "weights", "activations"))
        checks.check_choice("kv_axis", self.kv_axis, ("dkv", "heads_and_dkv"))
        checks.check_choice("arithmetic", self.arithmetic, tuple(ARITHMETICS))
        checks.check_choice("lowering", self.lowering, lowerings())

    def _check(self) -> None:
        check_forward(self)

    @property
    def leaves_alone(self) -> bool:
        """Whether this rule quantizes nothing: on purpose, or because it names no type.

        >>> QuantizationRule(skip=True).leaves_alone, QuantizationRule(weight_qtype="int8").leaves_alone
        (True, False)
        """
        return self.skip or (self.weight_qtype is self.act_qtype is self.kv_qtype is None)

    def matches(self, path: str, op: str, *, weights: bool) -> bool:
        """Whether this rule matches an operation at a path; `weights` is whether one of its operands is a weight.

        >>> rule = QuantizationRule(module_path=".*/mlp", op_names=("dot",), scope="weights")
        >>> rule.matches("layer0/mlp", "dot_general", weights=True), rule.matches("mlp/up", "einsum", weights=True)
        (True, False)
        """
        if self.scope != "all" and (self.scope == "weights") != weights:
            return False
        if self.op_names and checks.SYNONYMS.get(op, op) not in self.op_names:
            return False
        return re.fullmatch(self.module_path, path) is not None


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class QtRule(QuantizationRule):
    """A rule for training: with `bwd_qtype`, the two gradients run in low precision as well.

    Has the attributes of `QuantizationRule`, and these. In `fwd`, `dlhs` and `drhs`, `lhs` is the activation (or the
    cotangent) and `rhs` the weight (or the residual), on whichever side of the matmul the weight stands; they apply to
    matmuls with a weight, unless the scope is "activations".

    Attributes:
        bwd_qtype: The type of cotangents in both gradients.
        bwd_calibration_method: The calibration of cotangents.
        bwd_weight_grad_tile_size: Tiles along the contraction of the weight gradient, which runs over the batch.
        bwd_weight_grad_accumulator: The dtype in which the weight gradient is summed, across devices too: "float32",
            "bfloat16" or "float16".
        disable_channelwise_axes: Qwix's name for `per_tensor`.
        bwd_stochastic_rounding: "uniform" rounds cotangents stochastically, "low_bit_uniform" with 8 bits of noise.
        channelwise_noise_axes: Accepted for Qwix; noise is independent for each value.
        additional_qt_config: Settings by the names of Qwix's DotGeneralQtConfig, whose lhs and rhs are the sides of
            the matmul as written.
        fwd: Replaces the config of the forward matmul.
        dlhs: Replaces that of the gradient with respect to the activation.
        drhs: Replaces that of the gradient with respect to the weight.
        residual: How gradients take saved operands, as in `Matmul`: "reuse" codes, "requantize" them along the
            gradient's contraction, or quantize the "original" again. None chooses by granularity.
        bwd_rotate: The block size of a Hadamard rotation of the operands of both gradients.
        reduce_qtype: The type in which weight gradients are reduced across devices. Needs `quantized(shardings=...)`.
        reduce_axes: Mesh axes along which rows are sharded, such as ("data", "fsdp"); a tuple of them for each axis of
            rows if several are sharded.
        reduce_feedback: Add the rounding error of a reduction to the next step's gradient (error feedback).

    >>> QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", bwd_stochastic_rounding="uniform")
    QtRule(weight_qtype='int8', act_qtype='int8', bwd_qtype='int8', bwd_stochastic_rounding='uniform')
    """

    bwd_qtype: FormatLike | None = None
    bwd_calibration_method: CalibrationLike = "absmax"
    bwd_weight_grad_tile_size: int | float | None = None
    bwd_weight_grad_accumulator: str | None = None
    disable_channelwise_axes: bool = False
    bwd_stochastic_rounding: str | None = None
    channelwise_noise_axes: Collection[int] = (0,)
    additional_qt_config: Mapping[str, Any] | tuple[tuple[str, Any], ...] | None = None
    fwd: Matmul | None = None
    dlhs: Matmul | None = None
    drhs: Matmul | None = None
    residual: str | None = None
    bwd_rotate: int | None = None
    reduce_qtype: FormatLike | None = None
    reduce_axes: Collection[str | Collection[str]] = ()
    reduce_feedback: bool = False

    def _normalize(self) -> None:
        super()._normalize()
        self._put(checks.check_qtype, "bwd_qtype", "reduce_qtype")
        self._put(checks.check_rows, "reduce_axes")
        self._put(checks.check_calibration, "bwd_calibration_method")
        self._put(checks.check_tile, "bwd_weight_grad_tile_size")
        self._put(checks.check_flag, "disable_channelwise_axes", "reduce_feedback")
        self._put(checks.check_axes, "channelwise_noise_axes")
        self._put(checks.check_qt_config, "additional_qt_config")
        self._put(checks.check_rotation, "bwd_rotate")
        checks.check_choice(
            "bwd_stochastic_rounding", self.bwd_stochastic_rounding, (None, "uniform", "low_bit_uniform")
        )
        checks.check_choice(
            "bwd_weight_grad_accumulator", self.bwd_weight_grad_accumulator, (None, "float32", "bfloat16", "float16")
        )
        checks.check_choice("residual", self.residual, (None, "reuse", "requantize", "original"))
        self._put(checks.check_matmul, "fwd", "dlhs", "drhs")

    def _check(self) -> None:
        super()._check()
        check_backward(self)

    @property
    def leaves_alone(self) -> bool:
        """Whether this rule quantizes nothing: on purpose, or because it names no type."""
        return super().leaves_alone and (self.skip or (self.fwd is self.dlhs is self.drhs is None))
