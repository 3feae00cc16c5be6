"""`quantized`: a function in low precision, made from one in float."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from octavo._typing import PRNGKeyArray
from octavo.qarray import QArray, Quantizer, is_qarray
from octavo.transform import jaxpr
from octavo.transform.arguments import PARAMETERS, Weights, argument_names, leaf_paths, weight_names
from octavo.transform.evaluate import evaluate
from octavo.transform.frame import Context, Frame, Host, Key, Value
from octavo.transform.provider import QtProvider, QuantizationProvider, tracing
from octavo.transform.rearrange import as_array
from octavo.transform.site import Site, site_quantizer
from octavo.transform.state import check_calibrated, flatten_state, nest_state
from octavo.transform.weights import ACTIVATION, Origin, parameter_origin

_ON_UNMATCHED = ("error", "warn", "ignore")


def quantized(
    fn: Any,
    rules: Any,
    *,
    weights: Weights = None,
    on_unmatched: str = "error",
    shardings: Mapping[str, Any] | None = None,
) -> "Quantized":
    """Quantize the matmuls of `fn` that the rules match, and their gradients.

    The result composes with every transformation of JAX, before and after. Where the rules keep state (static ranges,
    delayed scaling) or round stochastically, see `Quantized.init` and `Quantized.stateful`.

    Args:
        fn: A function of arrays or QArrays.
        rules: The name of a recipe, a rule, a sequence of rules or a `QuantizationProvider`.
        weights: Which arguments hold weights: the name or the number of one, several of them, or a predicate of a
            leaf's name and value. By default those named `params`, `variables`, `model` and the like.
        on_unmatched: "error" raises if no rule matches any matmul; "warn" or "ignore".
        shardings: NamedShardings of weights by name, for rules with `gather_axes` or `reduce_axes`.

    Returns:
        A function with the signature of `fn`.

    >>> import jax.numpy as jnp, octavo
    >>> def predict(params, x):
    ...     return x @ params["w"]
    >>> low = octavo.quantized(predict, octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8"))
    >>> low({"w": jnp.eye(4)}, jnp.ones((2, 4))).shape
    (2, 4)
    """
    if on_unmatched not in _ON_UNMATCHED:
        raise ValueError(f"on_unmatched is one of {_ON_UNMATCHED}, got {on_unmatched!r}")
    if not callable(fn):
        raise TypeError(f"quantized takes a function, got {type(fn).__name__}; for a model use octavo.quantize_model")
    provider = rules if isinstance(rules, QuantizationProvider) else QtProvider(rules)
    return Quantized(fn, provider, weights, on_unmatched, shardings=shardings)


class Inputs(NamedTuple):
    """The flattened arguments of a call: arrays, which are traced, and static leaves."""

    leaves: list[Any]
    tree: Any
    names: list[str | None]
    dynamic: list[bool]

    @property
    def arrays(self) -> list[Any]:
        return [leaf for leaf, moves in zip(self.leaves, self.dynamic, strict=True) if moves]

    @property
    def abstract(self) -> list[Any]:
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, QArray) else x for x in self.arrays]

    def origins(self) -> list[Origin]:
        found = []
        for leaf, name, moves in zip(self.leaves, self.names, self.dynamic, strict=True):
            if moves:
                found.append(ACTIVATION if name is None else parameter_origin(name, leaf.shape))
        return found

    def fill(self, arrays: list[Any]) -> Any:
        """(args, kwargs) with these arrays."""
        moving = iter(arrays)
        full = [next(moving) if moves else leaf for leaf, moves in zip(self.leaves, self.dynamic, strict=True)]
        return jax.tree.unflatten(self.tree, full)


class Quantized:
    """A function in low precision; see `quantized`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        provider: QuantizationProvider,
        weights: Weights = None,
        on_unmatched: str = "error",
        *,
        strict_paths: bool = False,
        root: str | None = None,
        modules: frozenset[str] | None = None,
        host: Host | None = None,
        names: Callable[[tuple[Any, ...], dict[str, Any]], list[str | None]] | None = None,
        shardings: Mapping[str, Any] | None = None,
    ):
        self.fn, self.provider, self.weights, self.on_unmatched = fn, provider, weights, on_unmatched
        self._options: dict[str, Any] = {"strict_paths": strict_paths, "root": root, "modules": modules, "host": host}
        self._options["shardings"] = dict(shardings or {})
        self._names = names
        self._cache: dict[Any, Any] = {}
        if hasattr(fn, "__name__"):
            functools.update_wrapper(self, fn, updated=())

    @property
    def strict_paths(self) -> bool:
        """Whether rules match the path of a module only, and not the name of a weight."""
        return bool(self._options["strict_paths"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.provider.stateful:
            state = self._discover(args, kwargs)[1]
            if state:
                some = next(iter(state))
                raise ValueError(
                    f"{some.name} at {some.path!r} keeps state ({some.collection}), which goes in and comes out: "
                    "state = q.init(*args); out, state = q.stateful(state)(*args)"
                )
        return self._run(args, kwargs, {}, None, True)[0]

    def init(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The initial state for arguments of these shapes, as nested dictionaries: collection, module path, name.

        >>> import jax.numpy as jnp, octavo
        >>> rule = octavo.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
        >>> low = octavo.quantized(lambda params, x: x @ params["layer"]["w"], rule)
        >>> state = low.init({"layer": {"w": jnp.eye(4)}}, jnp.ones((2, 4)))
        >>> list(state["quant_stats"]["layer"]["dot_general0_lhs"])
        ['count', 'sum_of_absmax']
        """
        return nest_state(self._initial(args, kwargs))

    def stateful(
        self, state: Mapping[str, Any] | None = None, *, key: PRNGKeyArray | None = None, update: bool = True
    ) -> Callable[..., tuple[Any, dict[str, Any]]]:
        """The function with state: it returns (out, new state).

        Delayed scaling updates its state by the gradient: that of the state is its new value.

        Args:
            state: The state, as `init` made it.
            key: The PRNG key of stochastic rounding.
            update: Whether statistics are updated. A static range that was never calibrated is an error if not.
        """

        def call(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
            return self._run(args, kwargs, dict(state or {}), key, update)

        return call

    def sites(self, *args: Any, **kwargs: Any) -> list[Site]:
        """Every matmul of the function for arguments of these shapes."""
        return list(self._discover(args, kwargs)[0].sites.values())

    def stored_quantizers(self, *args: Any, **kwargs: Any) -> dict[str, Quantizer]:
        """The quantizers of parameters, by name, for storing them in low precision."""
        inputs = self._inputs(args, kwargs)
        shapes = {n: leaf.shape for n, leaf in zip(inputs.names, inputs.leaves, strict=True) if n is not None}
        found: dict[str, Quantizer] = {}
        for site in self.sites(*args, **kwargs):
            quantizer = site_quantizer(site, shapes)
            if quantizer is not None:
                found.setdefault(site.leaf or "", quantizer)
        return found

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_qarray)
        if self._names is not None:
            names = self._names(args, kwargs)
        else:
            paths = leaf_paths(self.fn, args, kwargs)
            arguments = [*argument_names(self.fn, len(args)), *kwargs]
            names = weight_names(paths, leaves, self.weights, arguments)
        dynamic = [isinstance(x, jax.Array | np.ndarray | QArray | jax.ShapeDtypeStruct) for x in leaves]
        return Inputs(leaves, tree, names, dynamic)

    def _trace(self, inputs: Inputs) -> jaxpr.Traced:
        def fn(*arrays):
            args, kwargs = inputs.fill(list(arrays))
            return self.fn(*args, **kwargs)

        leaves, tree = jax.tree.flatten((tuple(inputs.abstract), {}))
        with tracing(self.provider):
            return jaxpr.trace(fn, leaves, tree)

    def _context(self, **changes: Any) -> Context:
        return Context(self.provider, evaluate, **self._options, cache=self._cache, **changes)

    def _discover(self, args: tuple[Any, ...], kwargs: dict[str, Any], concrete: bool = False):
        """The sites and the initial state: as shapes, or if `concrete` as arrays."""
        inputs = self._inputs(args, kwargs)
        traced = self._trace(inputs)
        context = dataclasses.replace(self._context(init=True, update=False), cache={})

        def run(arrays):
            frame = Frame(context)
            evaluate(traced.jaxpr, _values(arrays, inputs.origins()), frame)
            return frame.new

        state = jax.jit(run)(inputs.arrays) if concrete else jax.eval_shape(run, inputs.arrays)
        self._check(context, traced)
        return context, state

    def _initial(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Key, Any]:
        return self._discover(args, kwargs, concrete=True)[1]

    def _run(
        self, args, kwargs, state: Mapping[str, Any], key: Any, update: bool | frozenset[str]
    ) -> tuple[Any, dict[str, Any]]:
        inputs = self._inputs(args, kwargs)
        known = self._discover(args, kwargs)[1] if self.provider.stateful else {}
        before = flatten_state(state, known)
        context = self._context(update=update)
        check_calibrated({k: v for k, v in before.items() if not context.updates(k.path)})
        traced = self._trace(inputs)
        frame = Frame(context, state=before, key=key)
        outs = evaluate(traced.jaxpr, _values(inputs.arrays, inputs.origins()), frame)
        self._check(context, traced)
        out = jax.tree.unflatten(traced.out_tree, [as_array(v.data) for v in outs])
        return out, nest_state({**before, **frame.new})

    def _check(self, context: Context, traced: jaxpr.Traced) -> None:
        """Raise if nothing would be quantized."""
        sites = list(context.sites.values())
        if not self.provider.rules:
            return
        if self.weights is None and self._names is None and sites and not any(any(s.weights) for s in sites):
            raise ValueError(
                f"no matmul of {getattr(self.fn, '__name__', 'the function')} has a weight: say which argument "
                f"holds the weights, by naming it one of {', '.join(PARAMETERS[:6])} or by quantized(..., weights='its "
                "name'); weights=() if there are none"
            )
        if self.on_unmatched == "ignore" or context.cache:
            return
        if any(site.rule is not None or any(site.quantized) for site in sites):
            return
        if not sites:
            reason = "it has no matmul (dot_general, convolution or ragged_dot)"
        else:
            paths = sorted({site.leaf or site.path for site in sites})
            reason = f"no rule matches any of its {len(sites)} matmuls, at {', '.join(map(repr, paths[:5]))}"
        message = f"quantizing {getattr(self.fn, '__name__', 'the function')} would change nothing: {reason}"
        if self.on_unmatched == "error":
            raise ValueError(message)
        warnings.warn(message, stacklevel=4)


def _values(arrays: list[Any], origins: list[Origin]) -> list[Value]:
    return [Value(x, o) for x, o in zip(arrays, origins, strict=True)]
