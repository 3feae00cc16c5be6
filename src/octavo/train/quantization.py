"""Quantization rules and their schedule, from the configuration.

The values of `quantization` are recipes of one registry. With `use_qwix_quantization=true` a name means the rules
of the recipe; with `false` the names that AQT has mean its numerics: gradients of integers are rounded stochastically
and residuals are quantized again from float, and `fp8` is delayed scaling. Names that only one of them has are the
recipe under both.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from octavo import _sharding
from octavo.compat.maxtext import aqt_int, constant_bounds
from octavo.numerics import BlockFormat, get_format
from octavo.ops import DotConfig, Matmul
from octavo.rules import QtRule, QuantizationRule, Schedule, as_rules, recipe
from octavo.train.config import Config, ConfigError
from octavo.train.reduction import AXIS

_TWICE = (
    "gradient_reduce_dtype={config.gradient_reduce_dtype} reduces all gradients over {axis!r}, with error feedback, "
    "but a rule has reduce_axes={rule.reduce_axes} and reduce_feedback={rule.reduce_feedback}: leave one of them out"
)
_EXPERTS = ("ragged_dot", "gmm")
_AQT_BITS = {"int8": 8, "int4": 4}
_AQT_NAMES = {"fp8": "fp8_gpu"}
# The operands that the calibration methods of weights, activations and gradients apply to.
_SIDES = {"weight": ("fwd_rhs", "dlhs_rhs"), "act": ("fwd_lhs", "drhs_rhs"), "bwd": ("dlhs_lhs", "drhs_lhs")}
_AQT_FLOATS = ("fp8_full", "fp8_e4m3", "fp8_e5m2", "fp4")


def training_rules(config: Config) -> tuple[QuantizationRule, ...]:
    """The rules of the quantized steps of training; none for training in float.

    >>> [rule.skip for rule in training_rules(Config(quantization="int8", use_qwix_quantization=True))]
    [True, False]
    """
    try:
        if config.quantization_rules_path:
            found = as_rules(Path(config.quantization_rules_path))
        else:
            found = _recipe_rules(config) if config.quantization else ()
        rules = tuple(_with_accumulator(rule, config) for rule in found)
        if rules and config.residual_dtype:  # last: it applies where no other rule says how residuals are stored
            rules += (QtRule(residual_qtype=config.residual_dtype, optional=True),)
    except ValueError as error:  # settings that a recipe does not combine with
        raise ConfigError([str(error)]) from error
    return (*_float_layers(config), *rules) if rules else ()


def training_schedule(config: Config) -> Schedule:
    """The rules by stages of training: float before the first quantized step and after the last one.

    >>> training_schedule(Config(quantization="int8", quantization_start_step=10, steps=100)).boundaries
    (10,)
    """
    rules = training_rules(config)
    if not rules:
        return Schedule([(0, None)])
    start, stop = config.quantization_start_step, config.quantization_stop_step
    if any(rule.learns_scales for rule in rules):
        _check_learned(config)
    stages: list[tuple[int, tuple[QuantizationRule, ...] | None]] = [(start, rules)]
    if start:
        stages.insert(0, (0, None))
    if stop >= 0:
        stages.append((stop, None))
    return Schedule(stages)


def _check_learned(config: Config) -> None:
    """Raise for keys that do not combine with learned scales."""
    for key, why in (
        ("quantization_start_step", "they begin with the weights of step 0"),
        ("gradient_reduce_dtype", "their gradients are reduced in float with the others"),
        ("weight_sparsity_n", "they would be those of weights without a mask"),
    ):
        if value := getattr(config, key):
            raise ConfigError([f"{key}={value} does not combine with learned scales (lsq): {why}; leave it out"])


def with_communication(schedule: Schedule, config: Config, mesh: Any, batch: Any) -> Schedule:
    """A schedule with the quantized collectives of the configuration, unless a rule sets its own.

    Args:
      schedule: The rules by stages.
      config: Weight all-gathers, expert dispatch and gradient reduction.
      mesh: The mesh.
      batch: The partition spec of a batch.
    """
    gathers = ("fsdp",) if config.quantized_all_gather and mesh.shape.get("fsdp", 1) > 1 else ()
    # The axis of gradient_reduce_dtype is left out, so that gradients are not reduced along it twice.
    done = (AXIS,) if config.gradient_reduce_dtype else ()
    rows = tuple(tuple(a for a in _sharding.names(part) if a not in done) for part in batch)
    scatters = {
        "reduce_qtype": config.gradient_scatter_dtype,
        "reduce_axes": rows,
        "reduce_feedback": config.gradient_scatter_error_feedback,
    }

    def communicating(rule: QuantizationRule) -> QuantizationRule:
        if rule.leaves_alone:
            return rule
        if done and isinstance(rule, QtRule) and (rule.reduce_feedback or AXIS in _flat(rule.reduce_axes)):
            raise ConfigError([_TWICE.format(config=config, axis=AXIS, rule=rule)])
        own = isinstance(rule, QtRule) and rule.reduce_qtype is None and config.gradient_scatter_dtype and any(rows)
        return rule.replace(
            gather_axes=rule.gather_axes or gathers,
            dispatch_qtype=rule.dispatch_qtype or config.expert_dispatch_dtype or None,
            **(scatters if own else {}),
        )

    stages = [(start, tuple(map(communicating, rules)) or None) for start, rules in schedule.stages]
    return Schedule(stages, schedule.freeze_at)


def _flat(axes: Any) -> list[str]:
    return [name for part in axes for name in _sharding.names(part)]


def local_shards(config: Config) -> int:
    """The number of tiles of the weight gradient's contraction, each with its own scales; 0: float."""
    count = config.quantization_local_shard_count
    return jax.local_device_count() if count < 0 else count


def _recipe_rules(config: Config) -> tuple[QuantizationRule, ...]:
    name, methods = config.quantization, _methods(config)
    exclude = None if config.quantization_exclude == "none" else config.quantization_exclude
    if methods and (name == "intmp" or config.constant_bound_config):
        source = "quant_cfg_path (w_scale, a_scale, g_scale)" if name == "intmp" else "constant_bound_config"
        raise ValueError(f"quantization={name} has its ranges from {source}: leave the calibration methods out")
    if name == "intmp":
        rules = recipe(name, exclude=exclude, config=config.quant_cfg_path)
    elif not config.use_qwix_quantization and name in _AQT_BITS:
        changes = {side: {"calibration": method} for name, method in methods.items() for side in _SIDES[name]}
        aqt = aqt_int(_AQT_BITS[name], local_shards(config)).with_operands(**changes)
        rules = (*recipe(name, exclude=exclude)[:-1], _rule(aqt))
    elif name == "aqt_fp8_full" and config.constant_bound_config:
        rules = (*recipe(name, exclude=exclude)[:-1], _rule(constant_bounds(config.constant_bound_config)))
    else:
        aqt = not config.use_qwix_quantization
        rules = recipe(_AQT_NAMES.get(name, name) if aqt else name, exclude=exclude)
        rules = tuple(_with_local_shards(_with_methods(rule, methods), config) for rule in rules)
        if aqt and name in _AQT_FLOATS:
            rules = tuple(rule if rule.skip else rule.replace(residual="original") for rule in rules)
    if config.use_manual_quantization:
        rules = tuple(rule if rule.skip else rule.replace(op_names=_EXPERTS) for rule in rules)
    return rules


def _rule(config: DotConfig) -> QtRule:
    return QtRule(fwd=config.fwd, dlhs=config.dlhs, drhs=config.drhs, scope="weights")


def _methods(config: Config) -> dict[str, str]:
    """The calibration methods of weights, activations and gradients that are not the default."""
    methods = {
        "weight": config.weight_quantization_calibration_method,
        "act": config.act_quantization_calibration_method,
        "bwd": config.bwd_quantization_calibration_method,
    }
    if config.quantization_calibration_method:
        methods = dict.fromkeys(methods, config.quantization_calibration_method)
    return {name: method for name, method in methods.items() if method != "absmax"}


def _with_methods(rule: QuantizationRule, methods: dict[str, str]) -> QuantizationRule:
    """A rule with the methods of the operands that it quantizes."""
    if rule.skip:
        return rule
    formats = {"weight": rule.weight_qtype, "act": rule.act_qtype, "bwd": getattr(rule, "bwd_qtype", None)}
    found = {name: method for name, method in methods.items() if name == "weight" or formats[name] is not None}
    return rule.replace(**{f"{name}_calibration_method": method for name, method in found.items()})


def _with_local_shards(rule: QuantizationRule, config: Config) -> QuantizationRule:
    """A rule whose weight gradient contracts in local shards, or stays in float."""
    if rule.skip or not isinstance(rule, QtRule) or rule.bwd_qtype is None or rule.drhs is not None:
        return rule
    if isinstance(get_format(rule.bwd_qtype), BlockFormat):
        return rule  # blocks are tiles already
    shards = local_shards(config)
    if shards == 0:
        return rule.replace(drhs=Matmul(residual="original"))
    return rule if shards == 1 else rule.replace(bwd_weight_grad_tile_size=1 / shards)


def _with_accumulator(rule: QuantizationRule, config: Config) -> QuantizationRule:
    """A rule with the configured accumulator of weight gradients."""
    accumulator = config.weight_gradient_accumulator
    if not accumulator or rule.skip or not isinstance(rule, QtRule):
        return rule
    if rule.drhs is not None:
        return rule.replace(drhs=rule.drhs.replace(accumulator=accumulator))
    return rule if rule.bwd_qtype is None else rule.replace(bwd_weight_grad_accumulator=accumulator)


def _float_layers(config: Config) -> Iterable[QuantizationRule]:
    """Rules that keep the first and the last layers in float, which are outside of the scan and so have names."""
    first, last = config.quantization_first_layers, config.quantization_last_layers
    apart = max(config.unscanned_last_layers, last)
    groups = (("first_layers", range(first)), ("last_layers", range(apart - last, apart)))
    return tuple(
        QuantizationRule(module_path=rf"(.*/)?{name}_({'|'.join(map(str, numbers))})(/.*)?", skip=True)
        for name, numbers in groups
        if numbers
    )
