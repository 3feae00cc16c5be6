"""Providers: the operations that replace matmuls where a rule matches; subclasses can override them."""

import contextvars
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from octavo import ops
from octavo._typing import Array
from octavo.ops.products.ragged import NUMBERS as RAGGED
from octavo.rules import QuantizationRule, as_rules, dot_config, find
from octavo.transform.evaluate import evaluate, matmul_call, run_matmul
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
    rule = find(provider.rules, module_path.get(), op_name, weights=True)
    provider._matched |= rule is not None
    return rule


_FUNCTIONS = {
    "jax.lax.dot_general": "dot_general",
    "jax.numpy.einsum": "einsum",
    "jax.lax.conv_general_dilated": "conv_general_dilated",
    "jax.lax.ragged_dot": "ragged_dot",
}
"""The operations of a provider, by the names of the functions that they replace."""
_OPERATIONS = (*_FUNCTIONS.values(), "gmm")
_UNSUPPORTED = {
    "get_interceptors": "Override get_intercept_map or the operations themselves, such as dot_general.",
    "nn_param": "Parameters are tracked by their paths; to change how one is quantized, use a rule for its module.",
    "promote_dtype": "Layers cast quantized parameters without it: leave it out.",
    "asarray": "Layers convert quantized parameters without it: leave it out.",
}
"""Methods of Qwix's providers that have no counterpart, with what to do in their place."""


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

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name, instead in _UNSUPPORTED.items():
            if hasattr(cls, name):
                raise TypeError(f"{cls.__name__}.{name} would never be called: JAX and Flax are not patched. {instead}")

    def __init__(self, rules: Any, *, disable_jit: bool = False):
        del disable_jit  # for Qwix, which cannot rewrite inside of jit
        self.rules: tuple[QuantizationRule, ...] = tuple(map(self._init_rule, as_rules(rules)))
        self.handlers = self._handlers()
        """The functions that replace operations, by the name of the operation."""
        own = QuantizationProvider
        self.overrides = frozenset(op for op, fn in self.handlers.items() if fn != getattr(own, op).__get__(self))
        """The operations that a subclass overrides."""
        self.stateful = bool(self.overrides) or any(map(_has_state, self.rules))
        """Whether any operation may keep state."""
        self.attention = any(rule.attention for rule in self.rules)
        """Whether a rule quantizes attention, for which its softmax is looked for."""
        found = tuple(rule for rule in self.rules if rule.decides_residuals)
        self.residuals = found if any(getattr(rule, "residual_qtype", None) is not None for rule in found) else ()
        """The rules that say where residuals are stored in low precision; empty if none are."""
        self.inside_custom = any(rule.inside_custom for rule in self.rules)
        """Whether the bodies of custom_jvp and custom_vjp functions are rewritten."""
        hooks = ("process_model_inputs", "process_model_output")
        self.has_model_hooks = any(getattr(type(self), name) is not getattr(own, name) for name in hooks)
        """Whether a subclass changes the inputs or the output of a model."""
        self.traces_models = type(self).trace_model is not own.trace_model
        """Whether a subclass changes how a function is traced."""
        self._used: set[QuantizationRule] = set()
        self._matched = False  # whether a rule has matched in any call so far

    # Extension points of Qwix's providers.

    def _init_rule(self, rule: QuantizationRule) -> QuantizationRule:
        """A rule as it is used; a subclass may change it."""
        return rule

    def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
        """The functions that replace functions of JAX where a rule matches, by name, for subclasses written for Qwix.

        A subclass that overrides it names some of "jax.lax.dot_general", "jax.numpy.einsum",
        "jax.lax.conv_general_dilated" and "jax.lax.ragged_dot"; the other operations stay in float, and an einsum that
        it does not name is a dot_general. Otherwise the operations themselves are called, and the map is not needed.
        """
        return {}

    def process_model_inputs(self, model: Any, model_args: Any, model_kwargs: Any) -> tuple[Any, Any, Any]:
        """The model and its inputs before each call of a quantized method; a subclass may change them."""
        return model, model_args, model_kwargs

    def process_model_output(self, method_name: str, model_output: Any) -> Any:
        """The output of each call of a quantized method; a subclass may change it."""
        del method_name
        return model_output

    # Extension points for providers that replace more than matmuls.

    evaluate: Any = staticmethod(evaluate)  # of (jaxpr, values, frame)
    """The results of a traced function, or of the body of a loop or call in it."""

    def trace_model(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The function itself, or the method of this name of a model, while it is traced."""
        del name
        return fn(*args, **kwargs)

    def trace_method(
        self, module: Any, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A method of this name of a module of a Flax model, while it is traced."""
        del module, name
        return fn(*args, **kwargs)

    def _handlers(self) -> dict[str, Callable[..., Any]]:
        if type(self).get_intercept_map is QuantizationProvider.get_intercept_map:
            return {op: getattr(self, op) for op in _OPERATIONS}
        given = self.get_intercept_map()
        if unknown := [name for name in given if name not in _FUNCTIONS]:
            raise ValueError(
                f"{type(self).__name__}.get_intercept_map() names {unknown[0]!r}, which is not replaced: only "
                f"{', '.join(_FUNCTIONS)} are. Call a function of your own in the model in its place, which may ask "
                "octavo.get_current_rule for its rule"
            )
        handlers = {_FUNCTIONS[name]: fn for name, fn in given.items()}
        return handlers | {"gmm": self.gmm} if "ragged_dot" in handlers else handlers

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
        return self._run("dot_general", lhs, rhs, params=params)

    def einsum(self, subscripts: str, *operands: Any, **kwargs: Any) -> Array:
        if current_operation.get() is None and tracing.get() is not None:
            return jnp.einsum(subscripts, *operands, **kwargs)

        def product(lhs: Any, rhs: Any, numbers: Any, *, step: int = 0, **options: Any) -> Array:
            del step
            return self._run("einsum", lhs, rhs, params={"dimension_numbers": numbers, **options})

        return ops.pairwise(product, subscripts, *operands, **kwargs)

    def conv_general_dilated(self, lhs: Any, rhs: Any, window_strides: Any, padding: Any, **geometry: Any) -> Array:
        params = {"window_strides": window_strides, "padding": padding} | geometry
        return self._run("conv_general_dilated", lhs, rhs, params=params)

    def ragged_dot(
        self, lhs: Any, rhs: Any, group_sizes: Any, *, dimension_numbers: Any = None, **kwargs: Any
    ) -> Array:
        numbers = RAGGED if dimension_numbers is None else dimension_numbers
        return self._run("ragged_dot", lhs, rhs, group_sizes, params={"ragged_dot_dimension_numbers": numbers} | kwargs)

    def gmm(self, lhs: Any, rhs: Any, group_sizes: Any, **kwargs: Any) -> Array:
        return QuantizationProvider.ragged_dot(self, lhs, rhs, group_sizes, **kwargs)

    def _run(self, op: str, lhs: Any, rhs: Any, *rest: Any, params: dict[str, Any]) -> Array:
        """Run a matmul: the operation that is being replaced, or one that a model's author calls."""
        operation = current_operation.get()
        if operation is not None:
            return run_matmul(operation.site, operation.frame, lhs, rhs, *rest, params=params)
        call, args, options = matmul_call(params, rest)
        if tracing.get() is not None:  # in a quantized model: the matmul is replaced like every other
            return call(lhs, rhs, *args, **options)
        rule = find(self.rules, module_path.get(), op, weights=True)
        if self.stateful or rule is None:
            reason = "keeps state" if self.stateful else f"has no rule for {op} whose module_path matches ''"
            raise ValueError(
                f"{type(self).__name__}.{op} is called outside of a quantized model, where modules have no paths and "
                f"no state, and the provider {reason}: call what octavo.quantize_model(model, provider) returns"
            )
        self._used.add(rule)
        # As for a layer: an activation on the left, a weight on the right.
        return call(lhs, rhs, *args, **options, config=dot_config(rule, lhs_weight=False, rhs_weight=True))

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

    def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
        return {name: getattr(self, op) for name, op in _FUNCTIONS.items()}


class PtqProvider(QuantizationProvider):
    """Post-training quantization: the parameters themselves are low precision, made by `quantize_params`.

    >>> PtqProvider([QuantizationRule(weight_qtype="int4")]).quantizes_params
    True
    """

    quantizes_params = True

    def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
        return {name: getattr(self, op) for name, op in _FUNCTIONS.items()}


def _operation() -> Operation:
    operation = current_operation.get()
    if operation is None:
        raise RuntimeError("no operation is being replaced: this is for methods that a provider overrides")
    return operation


def _has_state(rule: QuantizationRule) -> bool:
    if rule.act_static_scale or getattr(rule, "reduce_feedback", False) or rule.learns_scales:
        return True
    matmuls = [getattr(rule, name, None) for name in ("fwd", "dlhs", "drhs")]
    return any(o is not None and o.tracker is not None for m in matmuls if m is not None for o in (m.lhs, m.rhs))
