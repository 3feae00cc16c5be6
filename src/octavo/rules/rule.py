"""Who is quantized, and how: one frozen rule for a part of a model."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from octavo._config import Config
from octavo.calibration import CalibrationLike
from octavo.numerics import FormatLike, Rounding
from octavo.ops import Matmul, lowerings
from octavo.qarray.arithmetic import ARITHMETICS
from octavo.rules import checks
from octavo.rules.conflicts import check_backward, check_forward
from octavo.rules.qwix_config import check_overrides


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class QuantizationRule(Config):
    """How the products of the modules that `module_path` matches run forward; their gradients stay in float.

    `module_path` is a regular expression that has to match the whole path; `op_names` narrows a rule to some operations
    (none: all of them), and `scope` to products with a weight ("weights") or of two activations ("activations").
    Of several rules the first that matches counts. One with `skip=True` leaves what it matches in float, and one
    that may match nothing at all says so with `optional=True`.

    Types are names, dtypes or formats; None stays in float. `tile_size` cuts the contraction into tiles with scales of
    their own, `square_tiles` the other axis of a weight too, and `per_tensor` gives one scale to a whole operand.
    `act_static_scale` remembers the range of activations over steps: one per tensor, unless `act_batch_axes` names the
    axes that share it. `kv_qtype` is the type of keys and values, the second operand of a product of two activations
    and what the KV cache stores; `kv_axis` says what shares a scale in the cache: one head's values for a token, or
    those of all heads. `rotate` and `sparsity` are those of `Matmul` and `DotConfig`. Bodies with derivatives of their
    own are rewritten only with `inside_custom=True`. `gather_axes` are axes of the mesh, such as "fsdp": a weight that
    is cut along them is brought together as codes and scales, where `quantized(shardings=...)` is told how it lies.
    `dispatch_qtype` is the type in which tokens are sent to the devices of the experts that a rule is for.

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
        # Not at the top: compile.py needs this class.
        from octavo.rules.compile import check_compiles

        check_compiles(self)

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
        """Whether this rule is for an operation at a path; `weights` says if one of its operands is a weight.

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

    `bwd_weight_grad_tile_size` cuts the contraction of the weight's gradient, which runs over the batch, into tiles.
    `bwd_weight_grad_accumulator` is the dtype in which that product's floats and tiles are summed, over devices too:
    "bfloat16" sends half of float32, and rounds as a step in bfloat16 does.
    `disable_channelwise_axes` is `per_tensor` by Qwix's name. `bwd_stochastic_rounding` rounds gradients "uniform"ly at
    random, or with 8 bits of noise each ("low_bit_uniform"). `residual` is how the gradients take what the forward
    pass saved, as in `Matmul`: by default its codes, or where tiles run the other way values that are quantized again
    along the gradient's contraction. `bwd_rotate` rotates the operands of both gradients. `reduce_qtype` is the type in
    which devices add up the gradients of weights, over the axes `reduce_axes` of the mesh along which rows are cut (a
    tuple for each axis of rows where several are, as (("data", "fsdp"), ("context",)) of sequences in parts). That is
    where `quantized(shardings=...)` is told how weights lie; with `reduce_feedback` what rounding loses is added in the
    next step.

    `fwd`, `dlhs` and `drhs` replace a whole matmul. There, `lhs` is the activation (or the incoming gradient) and `rhs`
    the weight (or what was saved); `dlhs` is the gradient of the activation and `drhs` that of the weight, on
    whichever side of the product the weight stands. They speak of products with a weight, unless the scope is
    "activations". `additional_qt_config` takes raw settings by the names of Qwix's DotGeneralQtConfig, where lhs and
    rhs are the sides as they stand.

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
        self._put(check_overrides, "additional_qt_config")
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
