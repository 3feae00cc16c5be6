"""`octavo verify`: which share of a function's or model's matmul FLOPs is really low precision."""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import octavo
from octavo.cli.target import Asked, Target, UsageError, answering, explaining
from octavo.transform import QtProvider
from octavo.transform.arguments import PARAMETERS, argument_names
from octavo.transform.jaxpr import of_arrays

# The random streams that Linen models ask for, as octavo.plan gives them.
_STREAMS = ("params", "dropout", "stochastic_rounding")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call as a function of two arguments: the weights, and everything else that it takes."""

    fn: Callable[[Any, Any], Any]
    weights: Any
    rest: Any


def run(args: argparse.Namespace) -> int:
    """Print the verification and return the exit status."""
    return answering(_verify, args)


def _verify(asked: Asked, args: argparse.Namespace) -> int:
    provider = None if asked.rules is None else QtProvider(asked.rules)
    with explaining():
        call = _CALLS[asked.target.framework](asked.target, provider, asked.inputs, asked.weights)
        fn = value_and_grad(call.fn) if args.grad else call.fn
        found = octavo.verify(fn, call.weights, call.rest, platform=args.platform)
    print(found.to_json() if args.json else found)
    if args.at_least is None:
        return 0
    shares = {"forward": found.forward, "backward": found.backward} if args.grad else {"forward": found.forward}
    low = {name: share for name, share in shares.items() if share < args.at_least}
    for name, share in low.items():
        print(
            f"{name}: {share:.2%} of matmul FLOPs in low precision, below --at-least {args.at_least}", file=sys.stderr
        )
    return int(bool(low))


def value_and_grad(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The mean of the squares of all float outputs, and its gradient by the float leaves of the weights."""

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


def _function(target: Target, provider: Any, inputs: tuple[Any, ...], weights: str | int | None) -> Call:
    place = _weights_place(target, inputs, weights)
    others = (*inputs[:place], *inputs[place + 1 :])
    if provider is None:
        return Call(lambda w, rest: target.value(*rest[:place], w, *rest[place:]), inputs[place], others)
    low = octavo.quantized(target.value, provider, weights=weights, on_unmatched="warn")
    state = _shapes(low.init, *inputs) if provider.stateful else {}

    def run(w: Any, rest: Any) -> Any:
        others, state = rest
        return low.stateful(state, key=jax.random.key(0))(*others[:place], w, *others[place:])[0]

    return Call(run, inputs[place], (others, state))


def _weights_place(target: Target, inputs: tuple[Any, ...], weights: str | int | None) -> int:
    """The number of the argument that holds the weights; the first if nothing tells."""
    if not inputs:
        raise UsageError(f"--inputs: {target.name} is verified with at least one argument, got none")
    if isinstance(weights, int):
        return weights
    names = argument_names(target.value, len(inputs))
    wanted = PARAMETERS if weights is None else (weights,)
    return next((i for i, name in enumerate(names) if name in wanted), 0)


def _linen(target: Target, provider: Any, inputs: tuple[Any, ...], _: Any) -> Call:
    model = target.value if provider is None else octavo.quantize_model(target.value, provider)
    rngs = {name: jax.random.key(0) for name in _STREAMS}
    variables = dict(_shapes(lambda *inputs: model.init(rngs, *inputs), *inputs))
    params = variables.pop("params", {})

    def run(params: Any, rest: Any) -> Any:
        others, inputs = rest
        out = model.apply({"params": params, **others}, *inputs, rngs=rngs, mutable=list(others))
        return out[0] if others else out

    return Call(run, params, (variables, inputs))


def _nnx(target: Target, provider: Any, inputs: tuple[Any, ...], _: Any) -> Call:
    from flax import nnx

    model = target.value
    if provider is not None:
        examples = inputs if provider.stateful else ()
        model = octavo.quantize_model(model, provider, *examples, rngs=nnx.Rngs(0))
    graph, params, others = nnx.split(model, nnx.Param, ...)

    def run(params: Any, rest: Any) -> Any:
        others, inputs = rest
        # Flax lets only those variables change that were made inside of the gradient's trace.
        return nnx.merge(graph, params, others, copy=True)(*inputs)

    return Call(run, params, (others, inputs))


def _equinox(target: Target, provider: Any, inputs: tuple[Any, ...], _: Any) -> Call:
    model = target.value if provider is None else octavo.quantize_model(target.value, provider)
    return Call(lambda model, inputs: model(*inputs), model, inputs)


_CALLS = {None: _function, "linen": _linen, "nnx": _nnx, "equinox": _equinox}


def _shapes(fn: Callable[..., Any], *args: Any) -> Any:
    """What a function returns, as shapes; what its arguments hold beside arrays is passed on."""
    flat, arrays = of_arrays(fn, args, {})
    return jax.eval_shape(flat, *arrays)
