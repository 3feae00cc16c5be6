"""QEP: GPTQ in stages, in which each weight compensates for the error of the weights before it.

`octavo.ptq.quantize_weights(stages=...)` corrects within GPTQ instead (GPTAQ), for any function.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from octavo._tree import unflatten_paths
from octavo.compat.qwix.contrib import gptq_core, qep_core
from octavo.compat.qwix.contrib.calibration import (
    CalibratedQuantContext,
    CalibrationProvider,
    extract_calibrated_quant_context,
    quantize_params_with_calibration,
)
from octavo.compat.qwix.contrib.gptq import GptqRule
from octavo.frameworks import quantize_model
from octavo.frameworks import quantize_params as round_params
from octavo.frameworks.params import leaves_by_path
from octavo.ptq import Statistics, collect_statistics
from octavo.rules import QuantizationRule
from octavo.transform import PtqProvider, Quantized


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class QepRule(GptqRule):
    """A rule whose weights are quantized by QEP.

    Attributes:
        correction_factor: The share of the change of inputs that is corrected for; 0 is GPTQ.
        damping_factor: The damping of the correction's Hessian.
        apply_correction: Whether weights are corrected at all.
    """

    correction_factor: float = 0.5
    damping_factor: float = 0.01
    apply_correction: bool = True


@dataclasses.dataclass(frozen=True)
class QepStage:
    """Weights that were quantized together, since they have the same inputs.

    Attributes:
        index: The number of the stage.
        param_paths: The paths of its weights.
        module_paths: The paths of their modules, joined by slashes.
    """

    index: int
    param_paths: tuple[tuple[str, ...], ...]
    module_paths: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class QepResult:
    """A quantized model.

    Attributes:
        model: The model of a `PtqProvider`.
        params: Its parameters.
        quant_stats: The statistics that they were quantized with, as `quantize_params` takes them.
        stages: The stages, in order.
    """

    model: nn.Module
    params: Any
    quant_stats: Any
    stages: tuple[QepStage, ...]


class _InputOrder(CalibrationProvider):
    """Lists weights in the order of their matmuls, with the identity of their inputs."""

    def __init__(self, rules: Any):
        super().__init__(rules)
        self.found: dict[str, tuple[int, QepRule]] = {}

    def get_rule_type(self) -> type[QuantizationRule]:
        return QepRule

    def get_stats_suffix(self) -> str:
        return "_qep"

    def dot_general(self, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        self.kept = [*getattr(self, "kept", ()), lhs, rhs]  # an identity is that of a living object
        return super().dot_general(lhs, rhs, *args, **kwargs)

    def _collect_stats(self, lhs: jax.Array, weight_name: str, *, lhs_id: int, **operation: Any) -> None:
        site = self.operation.site
        assert site.leaf is not None
        assert isinstance(site.rule, QepRule)
        before = self.found.setdefault(site.leaf, (lhs_id, site.rule))
        if before[0] != lhs_id:
            raise ValueError(f"{site.leaf!r} has several inputs, so that it belongs to no stage: use GptqRule for it")


def quantize(
    model: nn.Module,
    calibration_data: Iterable[Any] | Callable[[], Iterable[Any]],
    rules: Sequence[QepRule],
    *,
    variables: Any = None,
    batch_adapter: Callable[[Any], tuple[Sequence[Any], Mapping[str, Any]]] | None = None,
    methods: Collection[str] = ("__call__",),
    abstract_quantized: Any = None,
    allow_extra_params: bool = False,
    gptq_block_size: int = 128,
    gptq_damping_factor: float = 0.01,
) -> QepResult:
    """Quantize a Linen model by QEP.

    Args:
        model: The model.
        calibration_data: Batches, or a function that returns them.
        rules: The rules; weights of rules other than `QepRule` are rounded.
        variables: The variables of the model.
        batch_adapter: Returns the positional and keyword arguments of a batch; a batch is one argument by default.
        methods: The methods of the model that are quantized.
        abstract_quantized: The parameters of the quantized model, as shapes, if they are known.
        allow_extra_params: As for `quantize_params`.
        gptq_block_size: Accepted for Qwix; results do not depend on it.
        gptq_damping_factor: The damping of GPTQ's Hessian.
    """
    if not isinstance(model, nn.Module):
        raise ValueError("qep.quantize takes Linen models: octavo.ptq.quantize_weights(stages=...) any function")
    if variables is None:
        raise ValueError("variables are needed: those of model.init or of a checkpoint")
    data = calibration_data() if callable(calibration_data) else calibration_data
    adapter = batch_adapter or (lambda batch: ((batch,), {}))
    batches = [tuple(adapter(batch)) for batch in data]
    if not batches:
        raise ValueError("there is no calibration data: it is empty, or an iterator that was used before")
    args, kwargs = batches[0]
    plain, others = variables["params"], {name: x for name, x in variables.items() if name != "params"}

    def forward(params: Any, args: Any, kwargs: Any) -> Any:
        return model.apply({"params": params, **others}, *args, **kwargs, mutable=True)

    order = _InputOrder(rules)
    jax.eval_shape(Quantized(forward, order, 0, "ignore", strict_paths=True).init, plain, args, kwargs)
    if not order.found:
        raise ValueError(
            "no matmul with a weight has a QepRule that matches its module: octavo.plan lists matmuls and rules"
        )
    groups = [[leaf for leaf, _ in group] for _, group in itertools.groupby(order.found.items(), lambda kv: kv[1][0])]
    low = quantize_model(model, PtqProvider(rules), methods=list(methods))
    if abstract_quantized is None:
        streams = {name: jax.random.key(0) for name in ("params", "dropout")}
        abstract_quantized = jax.eval_shape(lambda: low.init(streams, *args, **kwargs))["params"]
    floats = {"/".join(map(str, path)): x for path, x in leaves_by_path(plain).items()}
    wanted = {"/".join(map(str, path)): x for path, x in leaves_by_path(abstract_quantized).items()}
    current, done, known = dict(floats), {}, {}
    for names in groups:
        against = plain if done else None
        options: dict[str, Any] = {"only": names, "strict_paths": True, "against": against}
        found, missing = collect_statistics(forward, unflatten_paths(current), batches, **options)
        for name in names:
            if name not in found:
                raise ValueError(f"the inputs of {name!r} were not observed: {missing.get(name, 'it has no matmul')}")
            known[f"{name}_qep"] = stats = _sums(found[name], len(batches))
            context = extract_calibrated_quant_context(tuple(name.split("/")), floats[name], wanted[name], stats)
            if context is None:
                raise ValueError(f"{name!r} has more than one contracted axis: use a QuantizationRule for it")
            done[name] = _quantized(context, order.found[name][1], gptq_block_size, gptq_damping_factor)
            current[name] = done[name].dequantize().astype(floats[name].dtype)
    params = round_params(unflatten_paths(floats | done), abstract_quantized, allow_extra_params=allow_extra_params)
    stages = []
    for number, names in enumerate(groups):
        paths = tuple(tuple(name.split("/")) for name in names)
        stages.append(QepStage(number, paths, tuple("/".join(path[:-1]) for path in paths)))
    return QepResult(model=low, params=params, quant_stats=unflatten_paths(known), stages=tuple(stages))


def _sums(statistics: Statistics, count: int) -> dict[str, Any]:
    """Statistics as the sums of a `CalibrationProvider`."""
    if len(statistics.hessian) != 1:
        raise ValueError("the layers of a scan are quantized together: use octavo.ptq.quantize_weights(stages=...)")
    hessian, tokens = statistics.hessian[0], statistics.tokens[0]
    drift = jnp.zeros_like(hessian) if statistics.drift is None else statistics.drift[0]
    return {"count": jnp.int32(count), "sum_of_hessian": hessian * tokens, "sum_of_hessian_delta": drift * tokens}


def _quantized(context: CalibratedQuantContext, rule: QepRule, block: int, damping: float) -> Any:
    w, stats = context.weight, context.calibration_stats
    if rule.apply_correction:
        options = {"correction_factor": rule.correction_factor, "damping_factor": rule.damping_factor}
        w = qep_core.weight_correct(w, stats["hessian"], stats["hessian_delta"], **options)
    codes, _ = gptq_core.quantize_weight(w, stats["hessian"], context.how, block, damping)
    return context.abs_w.replace(array=context.restore_shape(codes))


def quantize_params(
    params: Any,
    abstract_quantized_params: Any,
    qep_quant_stats: Any,
    *,
    allow_extra_params: bool = False,
    gptq_block_size: int = 128,
    gptq_damping_factor: float = 0.01,
    correction_factor: float = 0.5,
    damping_factor: float = 0.01,
    apply_correction: bool = True,
) -> Any:
    """Quantize parameters by QEP where there are statistics, and others as `quantize_params` does.

    Args:
        params: As for `quantize_params`.
        abstract_quantized_params: As for `quantize_params`.
        qep_quant_stats: The statistics of a `QepResult`.
        allow_extra_params: As for `quantize_params`.
        gptq_block_size: Accepted for Qwix; results do not depend on it.
        gptq_damping_factor: The damping of GPTQ's Hessian.
        correction_factor: As for `QepRule`.
        damping_factor: As for `QepRule`.
        apply_correction: As for `QepRule`.
    """
    rule = QepRule(
        correction_factor=correction_factor, damping_factor=damping_factor, apply_correction=apply_correction
    )
    return quantize_params_with_calibration(
        params,
        abstract_quantized_params,
        qep_quant_stats,
        "_qep",
        lambda context: _quantized(context, rule, gptq_block_size, gptq_damping_factor),
        allow_extra_params=allow_extra_params,
    )
