"""A call of a function or model as a function of its weights, so that it can be differentiated."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import octavo
from octavo.cli.target import TargetCall, UsageError
from octavo.transform import QtProvider
from octavo.transform.api import PARAMETERS, argument_names
from octavo.transform.jaxpr import as_array_function

# The PRNG streams of Linen models, the same as in octavo.plan.
_STREAMS = ("params", "dropout", "stochastic_rounding")


@dataclasses.dataclass(frozen=True)
class SplitCall:
    """A call as a function of two arguments: the weights, and everything else that it takes."""

    fn: Callable[[Any, Any], Any]
    weights: Any
    rest: Any


def split_weights(call: TargetCall) -> SplitCall:
    """Separate the weights of a call, quantized by the rules if there are any, from its other arguments."""
    provider = None if call.rules is None else QtProvider(call.rules)
    return _SPLITS[call.target.framework](call, provider)


def value_and_grad(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The mean of the squares of all float outputs, and its gradient with respect to the float weights."""

    def both(weights: Any, rest: Any) -> Any:
        leaves, tree = jax.tree.flatten(weights)
        floats = {i: leaf for i, leaf in enumerate(leaves) if _is_float(leaf)}
        if not floats:
            raise ValueError("--grad: the weights hold no float arrays to differentiate with respect to")

        def loss(floats: dict[int, Any]) -> Any:
            out = fn(jax.tree.unflatten(tree, [floats.get(i, leaf) for i, leaf in enumerate(leaves)]), rest)
            outputs = [leaf for leaf in jax.tree.leaves(out) if _is_float(leaf)]
            if not outputs:
                raise ValueError("--grad: there are no float outputs to take a gradient of")
            squares = sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in outputs)
            return squares / max(1, sum(x.size for x in outputs))

        return jax.value_and_grad(loss)(floats)

    return both


def _is_float(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _function(call: TargetCall, provider: Any) -> SplitCall:
    fn, inputs, index = call.target.value, call.inputs, _weights_index(call)
    others = (*inputs[:index], *inputs[index + 1 :])
    if provider is None:
        return SplitCall(lambda w, rest: fn(*rest[:index], w, *rest[index:]), inputs[index], others)
    low = octavo.quantized(fn, provider, weights=call.weights, on_unmatched="warn")
    state = _shapes(low.init, *inputs) if provider.stateful else {}

    def run(w: Any, rest: Any) -> Any:
        others, state = rest
        return low.stateful(state, key=jax.random.key(0))(*others[:index], w, *others[index:])[0]

    return SplitCall(run, inputs[index], (others, state))


def _weights_index(call: TargetCall) -> int:
    """The index of the argument that holds the weights, by default the first."""
    if not call.inputs:
        raise UsageError(f"--inputs: {call.target.name} is verified with at least one argument, got none")
    if isinstance(call.weights, int):
        return call.weights
    names = argument_names(call.target.value, len(call.inputs))
    wanted = PARAMETERS if call.weights is None else (call.weights,)
    return next((i for i, name in enumerate(names) if name in wanted), 0)


def _model(call: TargetCall, provider: Any) -> Any:
    return call.target.value if provider is None else octavo.quantize_model(call.target.value, provider)


def _linen(call: TargetCall, provider: Any) -> SplitCall:
    model = _model(call, provider)
    rngs = {name: jax.random.key(0) for name in _STREAMS}
    variables = dict(_shapes(lambda *inputs: model.init(rngs, *inputs), *call.inputs))
    params = variables.pop("params", {})

    def run(params: Any, rest: Any) -> Any:
        others, inputs = rest
        out = model.apply({"params": params, **others}, *inputs, rngs=rngs, mutable=list(others))
        return out[0] if others else out

    return SplitCall(run, params, (variables, call.inputs))


def _nnx(call: TargetCall, provider: Any) -> SplitCall:
    from flax import nnx

    model = call.target.value
    if provider is not None:
        examples = call.inputs if provider.stateful else ()
        model = octavo.quantize_model(model, provider, *examples, rngs=nnx.Rngs(0))
    graph, params, others = nnx.split(model, nnx.Param, ...)

    def run(params: Any, rest: Any) -> Any:
        others, inputs = rest
        # Flax allows changes only to variables that were created inside the trace of the gradient.
        return nnx.merge(graph, params, others, copy=True)(*inputs)

    return SplitCall(run, params, (others, call.inputs))


def _equinox(call: TargetCall, provider: Any) -> SplitCall:
    return SplitCall(lambda model, inputs: model(*inputs), _model(call, provider), call.inputs)


_SPLITS = {None: _function, "linen": _linen, "nnx": _nnx, "equinox": _equinox}


def _shapes(fn: Callable[..., Any], *args: Any) -> Any:
    """The shapes that a function returns; leaves of its arguments that are no arrays are passed through."""
    flat, arrays = as_array_function(fn, args, {})
    return jax.eval_shape(flat, *arrays)
