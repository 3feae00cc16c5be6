"""Providers: the operations that replace matmuls where a rule matches; subclasses can override them."""

import contextvars
from collections.abc import Callable
from typing import Any

from octavo import ops
from octavo._typing import Array
from octavo.ops.products.ragged import NUMBERS as RAGGED
from octavo.rules import QuantizationRule, as_rules, find
from octavo.transform.evaluate import run_matmul
from octavo.transform.frame import Key, Operation, current_operation
from octavo.transform.state import QUANT_STATS

tracing: contextvars.ContextVar["QuantizationProvider | None"] = contextvars.ContextVar("octavo_tracing", default=None)
"""The provider that will rewrite the function that is being traced."""
module_path: contextvars.ContextVar[str] = contextvars.ContextVar("octavo_module", default="")
"""The path of the module whose method is being traced, where a framework sets it."""


def get_current_rule(op_name: str | None = None) -> QuantizationRule | None:
    """The rule of the current operation; None outside of a quantized function, or if no rule matches.

    In an operation that a provider overrides, it is the rule of that operation. In code that quantizes by itself, such
    as a Pallas kernel, it is the rule for an operation of this name in the module that is being traced. Call it outside
    of `jax.jit`, which would cache the answer.

    >>> get_current_rule("gmm") is None
    True
    """
    operation, provider = current_operation.get(), tracing.get()
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

    quantizes_params: bool = False
    """Whether parameters are expected in low precision already, as `quantize_params` makes them."""
    rng_stream: str = "stochastic_rounding"
    """The stream of a Flax model's random keys."""
    overrides: frozenset[str] = frozenset()
    """The operations that a subclass overrides."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        own, names = QuantizationProvider, ("dot_general", "einsum", "conv_general_dilated", "ragged_dot", "gmm")
        cls.overrides = frozenset(name for name in names if getattr(cls, name) is not getattr(own, name))

    def __init__(self, rules: Any, *, disable_jit: bool = False):
        del disable_jit  # for Qwix, which cannot rewrite inside of jit
        self.rules: tuple[QuantizationRule, ...] = as_rules(rules)
        self.stateful = bool(self.overrides) or any(map(_has_state, self.rules))
        """Whether any operation may keep state."""
        self.inside_custom = any(rule.inside_custom for rule in self.rules)
        """Whether the bodies of custom_jvp and custom_vjp functions are rewritten."""
        self._used: set[QuantizationRule] = set()

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

    @property
    def operation(self) -> Operation:
        """The operation that is being replaced."""
        return _operation()

    def _get_current_rule_and_op_id(
        self, op_name: str, *, only_rule: bool = False, repeated_call: bool = False
    ) -> tuple[QuantizationRule | None, str | None]:
        del repeated_call  # an operation has the same name in every call
        rule = get_current_rule(op_name)
        return rule, None if rule is None or only_rule else _operation().site.op_id

    def make_key(self) -> Array | None:
        """The random key of the current operation; None if the function was not given one."""
        site, frame = _operation()
        return frame.key_of(site.path, site.op_id)

    def get_state(self, name: str, init: Callable[[], Any], *, collection: str = QUANT_STATS) -> Any:
        """A pytree kept under the current operation's name."""
        site, frame = _operation()
        return frame.read(Key(collection, site.path, f"{site.op_id}_{name}"), init)

    def set_state(self, name: str, value: Any, *, collection: str = QUANT_STATS) -> None:
        """Replace the pytree kept under the current operation's name."""
        site, frame = _operation()
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

    quantizes_params = True


def _operation() -> Operation:
    operation = current_operation.get()
    if operation is None:
        raise RuntimeError("no operation is being replaced: this is for methods that a provider overrides")
    return operation


def _has_state(rule: QuantizationRule) -> bool:
    if rule.act_static_scale or getattr(rule, "reduce_feedback", False):
        return True
    matmuls = [getattr(rule, name, None) for name in ("fwd", "dlhs", "drhs")]
    return any(o is not None and o.tracker is not None for m in matmuls if m is not None for o in (m.lhs, m.rhs))


def _run_current(lhs: Any, rhs: Any, *rest: Any, params: dict[str, Any]) -> Array:
    operation = _operation()
    return run_matmul(operation.site, operation.frame, lhs, rhs, *rest, params=params)
