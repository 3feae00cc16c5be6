"""Rules for the quantization of some modules of a model, and which of them matches an operation."""

import dataclasses
import difflib
import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from octavo._config import Config
from octavo.calibration import CalibrationLike
from octavo.numerics import FormatLike, Rounding
from octavo.ops import DotConfig, Matmul
from octavo.rules import checks
from octavo.rules.compile import Configs, compile_attention, compile_matmul, compile_rule
from octavo.rules.conflicts import check_conflicts, check_learned
from octavo.rules.path_match import path_matcher


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
        tile_size: Values along the contraction that share a scale; a float 1/n means n tiles. {0: 8, 1: 8} means
            tiles by axis of each operand, of weights and activations alike, as in Qwix.
        act_static_scale: Quantize activations by a range that is averaged over steps and kept as state.
        weight_calibration_method: The calibration of weights, such as "absmax" or "minmax".
        act_calibration_method: The calibration of activations, "absmax" if None.
        act_batch_axes: Axes along which the ranges of static scales are averaged, as in Qwix. If None, a static scale
            is that of the largest value of the tensor, averaged over steps only.
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
        check_finite: Whether a non-finite value makes its group NaN where ranges are not measured. False saves a pass
            over each operand on TPUs.
        attention: Quantize attention as SageBwd does, so that it trains: keys without their mean over tokens, on which
            a softmax does not depend; the result of the softmax by the range [0, 1] if it is normalized after the
            matmul, else by the largest value of a row; its gradient in float.
        inside_custom: Rewrite the bodies of custom_jvp and custom_vjp functions too.
        gather_axes: Mesh axes, such as ("fsdp",), along which weights are all-gathered as codes and scales. Needs
            `quantized(shardings=...)`.
        dispatch_qtype: The type in which tokens are dispatched to the devices of their experts.

    >>> QuantizationRule(module_path=".*/mlp/.*", weight_qtype="int4", tile_size=128)
    QuantizationRule(module_path='.*/mlp/.*', weight_qtype='int4', tile_size=128)
    """

    adapts: ClassVar[bool] = False
    """Whether the provider's operations also replace matmuls whose weight stays in float."""

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
    check_finite: bool = True
    attention: bool = False
    inside_custom: bool = False
    gather_axes: Collection[str] = ()
    dispatch_qtype: FormatLike | None = None

    def __post_init__(self):
        for name in (field.name for field in dataclasses.fields(self) if field.name in checks.FIELDS):
            object.__setattr__(self, name, checks.check(name, getattr(self, name), checks.FIELDS[name]))
        check_conflicts(self)
        _ = self._configs, path_matcher(self.module_path)  # computed once; raises if the rule cannot be compiled
        check_learned(self)

    @functools.cached_property
    def _configs(self) -> Configs:
        """The compiled forms of this rule; see `dot_config`."""
        return compile_rule(self)

    @functools.cached_property
    def leaves_alone(self) -> bool:
        """Whether this rule quantizes nothing: on purpose, or because it names no type.

        >>> QuantizationRule(skip=True).leaves_alone, QuantizationRule(weight_qtype="int8").leaves_alone
        (True, False)
        """
        types = ("weight_qtype", "act_qtype", "kv_qtype", "fwd", "dlhs", "drhs")
        return self.skip or (not self.adapts and all(getattr(self, name, None) is None for name in types))

    @property
    def learns_scales(self) -> bool:
        """Whether the scales of its weights are trained.

        >>> QuantizationRule(weight_qtype="int4", weight_calibration_method="lsq").learns_scales
        True
        """
        config = self._configs[True, False]
        return config is not None and config.fwd.rhs is not None and config.fwd.rhs.calibration.learned

    @functools.cached_property
    def decides_residuals(self) -> bool:
        """Whether this rule says how operations other than quantized matmuls store residuals: in low precision or not.

        >>> QtRule(residual_qtype="int8").decides_residuals, QuantizationRule(skip=True).decides_residuals
        (True, True)
        """
        return getattr(self, "residual_qtype", None) is not None or (
            self.skip and self.scope == "all" and not self.op_names
        )

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
        return bool(path_matcher(self.module_path)(path))


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
            "eden" rounds cotangents and requantized residuals by MS-EDEN, which needs `bwd_rotate`, `bwd_random_signs`
            and a format with two levels of scales, such as nvfp4.
        channelwise_noise_axes: Accepted for Qwix; noise is independent for each value.
        additional_qt_config: Settings by the names of Qwix's DotGeneralQtConfig, whose lhs and rhs are the sides of
            the matmul as written.
        fwd: Replaces the config of the forward matmul.
        dlhs: Replaces that of the gradient with respect to the activation.
        drhs: Replaces that of the gradient with respect to the weight.
        residual_qtype: The type in which other operations than quantized matmuls, such as norms, activation functions,
            softmaxes and matmuls in float, store what their gradients read. Of several rules, the first applies whose
            path matches and that has this type, or skips everything; `scope` and `op_names` do not matter.
        residual: How gradients take saved operands, as in `Matmul`: "reuse" codes, "requantize" them along the
            gradient's contraction, or quantize the "original" again. None chooses by granularity.
        bwd_rotate: The block size of a Hadamard rotation of the operands of both gradients.
        bwd_random_signs: Draw a random rotation for each call.
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
    residual_qtype: FormatLike | None = None
    bwd_rotate: int | None = None
    bwd_random_signs: bool = False
    reduce_qtype: FormatLike | None = None
    reduce_axes: Collection[str | Collection[str]] = ()
    reduce_feedback: bool = False


def dot_config(
    rule: QuantizationRule, *, lhs_weight: bool, rhs_weight: bool, softmax: tuple[str, bool] | None = None
) -> DotConfig | None:
    """The config of a matmul under a rule, or None if it stays in float.

    Static ranges (`act_static_scale`) are not part of it: they are passed to the call, as bounds in its `scaling`.

    Args:
        rule: A `QuantizationRule`.
        lhs_weight: Whether the left operand is a weight. If so, dlhs and drhs are swapped.
        rhs_weight: Whether the right operand is a weight. Of two weights, the right one counts as the weight.
        softmax: Of a matmul with the result of a softmax: whether it is "exp" or "normalized", and whether it is the
            right operand.

    >>> config = dot_config(QtRule(weight_qtype="int4", act_qtype="int8"), lhs_weight=True, rhs_weight=False)
    >>> config.fwd.lhs.qtype.name, config.fwd.rhs.qtype.name, config.dlhs
    ('int4', 'int8', Matmul(residual='original'))
    """
    kind = lhs_weight or rhs_weight, lhs_weight and not rhs_weight
    configs = rule._configs
    if kind not in configs:  # a weight on the left, which some rules do not support
        configs[kind] = compile_matmul(rule, *kind)
    config = configs[kind]
    if config is None or softmax is None or kind[0] or not rule.attention:
        return config
    return compile_attention(config, *softmax)


_PARTS = "router|gate_logits?|(token_)?embed(der|dings?)?|embed_tokens|lm_head|logits(_dense)?"
SENSITIVE = rf"(?i)(.*/)?({_PARTS})(_\d+)?(/.*)?"
"""Paths of routers, embeddings and logits, which recipes leave in float. A name matches a complete component of a path.

An MLP's `gate` or `gate_proj` does not match.
"""


@functools.lru_cache(maxsize=64)
def excluding(pattern: str | None) -> tuple[QuantizationRule, ...]:
    """The rule that keeps paths in float, if there is a pattern; it may match nothing.

    >>> excluding("head")
    (QuantizationRule(module_path='head', skip=True, optional=True),)
    """
    return () if pattern is None else (QuantizationRule(module_path=pattern, skip=True, optional=True),)


def find(rules: Sequence[QuantizationRule], path: str, op: str, *, weights: bool) -> QuantizationRule | None:
    """The first rule that matches, or None.

    >>> rules = [QuantizationRule(module_path=".*/router", skip=True), QuantizationRule(weight_qtype="int8")]
    >>> find(rules, "layers/router", "dot_general", weights=True)
    QuantizationRule(module_path='.*/router', skip=True)
    """
    return next((rule for rule in rules if rule.matches(path, op, weights=weights)), None)


def nearest(pattern: str, paths: Iterable[str]) -> tuple[str, ...]:
    """Up to three paths that the author of a regular expression probably meant.

    Every word of the pattern is compared with every part of a path, so that one wrong letter in one part counts little.

    >>> nearest(".*/atention/.*", ["layers/attention/query", "layers/mlp/up"])
    ('layers/attention/query',)
    """
    words = re.findall(r"\w+", re.sub(r"\\\w|\(\?[a-zA-Z]*[:)]?|[{\[].*?[}\]]", " ", pattern))
    if not words:
        return ()
    scores = {path: _likeness(words, path) for path in dict.fromkeys(paths)}
    likely = [path for path, score in scores.items() if score >= 0.6]
    return tuple(sorted(likely, key=lambda path: -scores[path])[:3])


def _likeness(words: list[str], path: str) -> float:
    """The similarity of the words of a pattern to the components of a path, from 0 to 1."""
    parts = [part for part in re.split(r"\W+", path) if part]
    if not parts:
        return 0.0
    best = [max(difflib.SequenceMatcher(None, word.lower(), part.lower()).ratio() for part in parts) for word in words]
    return sum(best) / len(best)
