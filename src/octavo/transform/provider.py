"""Providers: the operations that replace matmuls where a rule matches; subclasses can override them."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from octavo import ops
from octavo._typing import Array
from octavo.ops import Conv, ConvDims, Dims, Dot, DotConfig, Operand, Product, Ragged
from octavo.ops.api import result_dtype
from octavo.ops.product import Call, quantized_product
from octavo.ops.products.ragged import NUMBERS as RAGGED
from octavo.qarray import QArray, Quantizer
from octavo.rules import QuantizationRule, as_rules, find
from octavo.transform.frame import Frame, Key
from octavo.transform.site import Site
from octavo.transform.state import GRADIENT_STATE, QUANT_STATS, static_ranges, telemetry_state


@dataclasses.dataclass
class Operation:
    """The operation that is being replaced."""

    site: Site
    frame: Frame


_current: contextvars.ContextVar[Operation | None] = contextvars.ContextVar("octavo_operation", default=None)


_tracing: contextvars.ContextVar["QuantizationProvider | None"] = contextvars.ContextVar("octavo_tracing", default=None)
module_path: contextvars.ContextVar[str] = contextvars.ContextVar("octavo_module", default="")
"""The path of the module whose method is being traced, where a framework sets it."""


@contextlib.contextmanager
def tracing(provider: "QuantizationProvider") -> Iterator[None]:
    """Trace a function that this provider will rewrite."""
    token = _tracing.set(provider)
    try:
        yield
    finally:
        _tracing.reset(token)


@contextlib.contextmanager
def operating(operation: Operation | None) -> Iterator[None]:
    """Make an operation the current one."""
    token = _current.set(operation)
    try:
        yield
    finally:
        _current.reset(token)


def get_current_rule(op_name: str | None = None) -> QuantizationRule | None:
    """The rule of the current operation; None outside of a quantized function, or if no rule matches.

    In an operation that a provider overrides, it is the rule of that operation. In code that quantizes by itself, such
    as a Pallas kernel, it is the rule for an operation of this name in the module that is being traced. Call it outside
    of `jax.jit`, which would cache the answer.

    >>> get_current_rule("gmm") is None
    True
    """
    operation, provider = _current.get(), _tracing.get()
    if operation is not None:
        return operation.site.rule if op_name in (None, operation.site.op) else None
    if provider is None or op_name is None:
        return None
    return find(provider.rules, module_path.get(), op_name, weights=True)


class QuantizationProvider:
    """Rules, and the operations that replace matmuls where they match.

    A subclass may override `dot_general`, `einsum`, `conv_general_dilated`, `ragged_dot` or `gmm`. Each gets the
    operation's arguments as JAX's function of that name does, and may ask for its rule and name by
    `_get_current_rule_and_op_id`, for a random key by `make_key`, and keep state under its name by `get_state` and
    `set_state`. They are not called where no rule matches, or where the rule skips the matmul.

    >>> class Halved(QuantizationProvider):
    ...     def dot_general(self, *args, **kwargs):
    ...         return super().dot_general(*args, **kwargs) / 2
    """

    telemetry: bool = False
    """Whether operations measure how well their number formats fit; see `octavo.inspect.telemetry`."""

    def __init__(self, rules: Any, *, disable_jit: bool = False):
        del disable_jit  # for Qwix, which cannot rewrite inside of jit
        self.rules: tuple[QuantizationRule, ...] = as_rules(rules)
        self._used: set[QuantizationRule] = set()

    @property
    def overrides(self) -> frozenset[str]:
        """The operations that a subclass overrides."""
        return frozenset(name for name in _OPERATIONS if getattr(type(self), name) is not _OPERATIONS[name])

    @property
    def stateful(self) -> bool:
        """Whether any operation may keep state."""
        return self.telemetry or bool(self.overrides) or any(_has_state(rule) for rule in self.rules)

    @property
    def quantizes_params(self) -> bool:
        """Whether parameters are expected in low precision already, as `quantize_params` makes them."""
        return False

    def get_unused_rules(self) -> list[QuantizationRule]:
        """The rules that no operation has used so far."""
        return [rule for rule in self.rules if rule not in self._used]

    def dot_general(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> Array:
        params = {"precision": precision, "preferred_element_type": preferred_element_type}
        params |= {"out_sharding": out_sharding, "dimension_numbers": dimension_numbers}
        return _run_current(lhs, rhs, params=params)

    def einsum(self, subscripts: str, lhs: Any, rhs: Any, **kwargs: Any) -> Array:
        def product(lhs: Any, rhs: Any, numbers: Any, *, step: int = 0, **options: Any) -> Array:
            del step
            return QuantizationProvider.dot_general(self, lhs, rhs, numbers, **options)

        return ops.pairwise(product, subscripts, lhs, rhs, **kwargs)

    def conv_general_dilated(self, lhs: Any, rhs: Any, window_strides: Any, padding: Any, **geometry: Any) -> Array:
        return _run_current(lhs, rhs, params={"window_strides": window_strides, "padding": padding} | geometry)

    def ragged_dot(
        self, lhs: Any, rhs: Any, group_sizes: Any, *, dimension_numbers: Any = None, **kwargs: Any
    ) -> Array:
        numbers = RAGGED if dimension_numbers is None else dimension_numbers
        return _run_current(lhs, rhs, group_sizes, params={"ragged_dot_dimension_numbers": numbers} | kwargs)

    def gmm(self, lhs: Any, rhs: Any, group_sizes: Any, **kwargs: Any) -> Array:
        return QuantizationProvider.ragged_dot(self, lhs, rhs, group_sizes, **kwargs)

    # For use in overriding methods.

    def _get_current_rule_and_op_id(
        self, op_name: str, *, only_rule: bool = False, repeated_call: bool = False
    ) -> tuple[QuantizationRule | None, str | None]:
        del repeated_call  # an operation has the same name in every call
        rule = get_current_rule(op_name)
        return rule, None if rule is None or only_rule else _operation().site.op_id

    def make_key(self) -> Array | None:
        """The random key of the current operation; None if the function was not given one."""
        site, frame = _operation().site, _operation().frame
        return frame.key_of(site.path, site.op_id)

    def get_state(self, name: str, init: Callable[[], Any], *, collection: str = QUANT_STATS) -> Any:
        """A pytree kept under the current operation's name."""
        site, frame = _operation().site, _operation().frame
        return frame.read(Key(collection, site.path, f"{site.op_id}_{name}"), init)

    def set_state(self, name: str, value: Any, *, collection: str = QUANT_STATS) -> None:
        """Replace the pytree kept under the current operation's name."""
        site, frame = _operation().site, _operation().frame
        if frame.context.updates(site.path):
            frame.write(Key(collection, site.path, f"{site.op_id}_{name}"), value)


class QtProvider(QuantizationProvider):
    """Quantized training and quantization-aware training: float parameters, low-precision matmuls.

    >>> QtProvider([QuantizationRule(weight_qtype="int8", act_qtype="int8")]).quantizes_params
    False
    """


class PtqProvider(QuantizationProvider):
    """Post-training quantization: the parameters themselves are low precision, made by `quantize_params`.

    >>> PtqProvider([QuantizationRule(weight_qtype="int4")]).quantizes_params
    True
    """

    @property
    def quantizes_params(self) -> bool:
        return True


_OPERATIONS = {
    name: getattr(QuantizationProvider, name)
    for name in ("dot_general", "einsum", "conv_general_dilated", "ragged_dot", "gmm")
}
GEOMETRY = ("lhs_dilation", "rhs_dilation", "dimension_numbers", "feature_group_count", "batch_group_count")
_OPTIONS = ("precision", "preferred_element_type", "out_sharding", "sharding")


def _operation() -> Operation:
    operation = _current.get()
    if operation is None:
        raise RuntimeError("no operation is being replaced: this is for methods that a provider overrides")
    return operation


def _has_state(rule: QuantizationRule) -> bool:
    if rule.act_static_scale or getattr(rule, "reduce_feedback", False):
        return True
    matmuls = [getattr(rule, name, None) for name in ("fwd", "dlhs", "drhs")]
    return any(o is not None and o.tracker is not None for m in matmuls if m is not None for o in (m.lhs, m.rhs))


def product_options(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a matmul other than its axes."""
    return {name: params[name] for name in _OPTIONS if params.get(name) is not None}


def _run_current(lhs: Any, rhs: Any, *rest: Any, params: dict[str, Any]) -> Array:
    operation = _operation()
    return run_product(operation.site, operation.frame, lhs, rhs, *rest, params=params)


def run_product(site: Site, frame: Frame, lhs: Any, rhs: Any, *rest: Any, params: Mapping[str, Any]) -> Array:
    """Run the matmul of an equation with these parameters, quantized by the rule of its site."""
    options = product_options(params)
    if "window_strides" in params:
        geometry = {name: params[name] for name in GEOMETRY if name in params}
        args = (params["window_strides"], params["padding"])
        product = Conv(ConvDims.of(lhs.shape, rhs.shape, *args, **geometry))
        op = functools.partial(ops.conv_general_dilated, **geometry, **options)
        return _quantized(site, frame, op, product, product.dims, lhs, rhs, *args, options=options)
    if "ragged_dot_dimension_numbers" in params:
        numbers, (sizes, *offset) = params["ragged_dot_dimension_numbers"], rest
        if offset or params.get("group_offset") is not None:
            options["group_offset"] = offset[0] if offset else jnp.asarray(params["group_offset"])
        dims = Dims.of(numbers.dot_dimension_numbers, lhs.ndim, rhs.ndim)
        op = functools.partial(ops.ragged_dot_general, **options)
        return _quantized(site, frame, op, Ragged(), dims, lhs, rhs, sizes, numbers)
    product = Dot.of(params["dimension_numbers"], lhs.ndim, rhs.ndim)
    op = functools.partial(ops.dot_general, **options)
    return _quantized(site, frame, op, product, product.axes, lhs, rhs, params["dimension_numbers"], options=options)


def _quantized(
    site: Site,
    frame: Frame,
    op: Callable[..., Array],
    product: Product,
    dims: Dims,
    lhs: Any,
    rhs: Any,
    *args: Any,
    options: Mapping[str, Any] | None = None,
) -> Array:
    """`op(lhs, rhs, *args)` with the config of a site; with `options`, `product` is run directly."""
    config, operands = site.config, (lhs, rhs)
    if config is None:
        return op(lhs, rhs, *args)
    axes = (dims.lhs_contract, dims.lhs_batch), (dims.rhs_contract, dims.rhs_batch)

    def quantizer(operand: Operand, x: Any, side: int) -> Quantizer:
        contract, batch = axes[side]
        return operand.quantizer(x.ndim, contracting=contract, batch=batch)

    scaling = static_ranges(site, frame, config, operands, quantizer)
    if any(isinstance(x, QArray) for x in operands):
        sides = zip((config.fwd.lhs, config.fwd.rhs), operands, ("lhs", "rhs"), strict=True)
        codes = [
            x
            if isinstance(x, QArray) or operand is None
            else quantizer(operand, x, side == "rhs").quantize(x, bounds=scaling.get(side))
            for operand, x, side in sides
        ]
        return op(*codes, *args)
    placement = {"placement": site.placement} if product.has_placement else {}
    reduction = site.placement.reduction
    if ops.trackers_of(config) or (reduction is not None and reduction.feedback):
        key = Key(GRADIENT_STATE, site.path, site.op_id)
        scaling |= frame.read(key, lambda: ops.init_scaling(config, lhs, rhs, product, **placement))
    if frame.context.provider.telemetry:
        scaling |= telemetry_state(site, frame, config, operands)
    key = _rounding_key(site, frame, config)
    if options is None:
        return op(lhs, rhs, *args, config=config, key=key, scaling=scaling, **placement)
    dtype = result_dtype(lhs, rhs, options.get("preferred_element_type"))
    call = Call(product, config, dtype, options.get("precision"), options.get("out_sharding"), **placement)
    return quantized_product(call, lhs, rhs, key=key, scaling=scaling)


def _rounding_key(site: Site, frame: Frame, config: DotConfig) -> Array | None:
    matmuls = (config.fwd, config.dlhs, config.drhs)
    if not any(o is not None and o.rounding.stochastic for m in matmuls for o in (m.lhs, m.rhs)):
        return None
    key = frame.key_of(site.path, site.op_id)
    if key is None and frame.context.init:
        return jax.random.key(0)
    if key is None:
        raise ValueError(
            f"{site.op_id} at {site.path!r} rounds stochastically and needs a random key: call "
            "octavo.quantized(fn, rules).stateful(key=key)(...), or in a Flax model give the rng stream "
            "'stochastic_rounding'"
        )
    return key
