"""`quantized`: a function in low precision, made from one in float."""

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from octavo._typing import PRNGKeyArray
from octavo.qarray import QArray, Quantizer, is_qarray
from octavo.transform.frame import Context, Frame, Host, Key, Programs, Value
from octavo.transform.jaxpr import KERNELS, Jaxpr
from octavo.transform.provider import QtProvider, QuantizationProvider, tracing
from octavo.transform.residuals import Residuals
from octavo.transform.site import Site, float_note, site_quantizer
from octavo.transform.state import (
    GRADIENT_STATE,
    QUANT_STATS,
    check_calibrated,
    empty_histories,
    flatten_state,
    nest_state,
    remembered_range,
)
from octavo.transform.weights import ACTIVATION, parameter_origin

PARAMETERS = (
    "params", "param", "parameters", "variables", "weights", "model", "module", "net", "network", "theta", "self",
)  # fmt: skip
"""Arguments with these names hold weights."""

type Weights = str | int | Sequence[str | int] | Callable[[str, Any], bool] | None

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

    The result composes with jit, grad, vmap, scan, remat, shard_map and export, before and after. Forward-mode
    differentiation (`jax.jvp`, `jax.linearize`, `jax.jacfwd`) and second derivatives are not supported. Where the rules
    keep state (static ranges, delayed scaling) or round stochastically, see `Quantized.init` and `Quantized.stateful`.

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
    if not provider.rules and on_unmatched == "error":
        raise ValueError(
            "there are no rules, so nothing would be quantized: give the name of a recipe, such as 'int8', or rules; "
            "on_unmatched='ignore' leaves the function in float"
        )
    return Quantized(fn, provider, weights, on_unmatched, shardings=shardings)


class Traced(NamedTuple):
    """A function as a jaxpr of the arrays among its arguments, and the values of those."""

    jaxpr: Jaxpr
    values: list[Value]
    out_tree: Any
    dtypes: dict[str, Any]
    """The dtypes of the parameters, by name."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters, by name."""
        return {v.origin.leaves[0]: v.data.shape for v in self.values if v.origin.leaves}


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
        self._cache = Programs()
        if hasattr(fn, "__name__"):
            functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(args, kwargs, None, None, True)[0]

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], *options: Any) -> tuple[Any, dict[str, Any]]:
        """A call by a user, with the provider's own changes of inputs and output."""
        if not self.provider.has_model_hooks:
            return self._run(self._trace(args, kwargs), *options)
        _, args, kwargs = self.provider.process_model_inputs(self.fn, args, kwargs)
        out, new = self._run(self._trace(tuple(args), kwargs), *options)
        return self.provider.process_model_output(getattr(self.fn, "__name__", "__call__"), out), new

    def __repr__(self) -> str:
        return f"<{getattr(self.fn, '__name__', self.fn)} quantized by {list(self.provider.rules)}>"

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

    def init_random(self, key: PRNGKeyArray, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """`init` for a provider whose state is random, such as the adapters of `octavo.lora`."""
        return nest_state(self._initial(args, kwargs, key))

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
            return self._call(args, kwargs, state or {}, key, update)

        return call

    def sites(self, *args: Any, **kwargs: Any) -> list[Site]:
        """Every matmul of the function for arguments of these shapes."""
        traced = self._trace(args, kwargs)
        sites = self._discover(traced)[0].values()
        if not self.provider.quantizes_params:
            return list(sites)
        return [dataclasses.replace(site, note=float_note(site, traced.shapes)) for site in sites]

    def residuals(self, *args: Any, **kwargs: Any) -> list[Residuals]:
        """What operations other than quantized matmuls store for the gradient of the weights, where a rule compresses.

        >>> import jax.numpy as jnp, octavo
        >>> rule = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", residual_qtype="int8")
        >>> low = octavo.quantized(lambda params, x: jnp.sin(x @ params["w"]), rule)
        >>> low.residuals({"w": jnp.ones((64, 64))}, jnp.ones((64, 64)))[0].values
        ('int8 64x64',)
        """
        if not self.provider.residuals:
            return []
        traced = self._trace(args, kwargs)
        state = self._discover(traced)[1] if self.provider.stateful else {}
        context = Context(self.provider, self.provider.evaluate, **self._options, dtypes=traced.dtypes)
        arrays = [v.data for v in traced.values]
        weights = [
            n for n, v in enumerate(traced.values) if v.origin.leaves and jnp.issubdtype(v.data.dtype, jnp.inexact)
        ]

        def differentiate(arrays, state, key):
            def run(*given):
                full = arrays | dict(zip(weights, given, strict=True))
                values = [v._replace(data=full[n]) for n, v in enumerate(traced.values)]
                outs = self.provider.evaluate(traced.jaxpr, values, Frame(context, state=state, key=key))
                return [v.data for v in outs if jnp.issubdtype(v.data.dtype, jnp.inexact)]

            return jax.vjp(run, *(arrays[n] for n in weights))[0]

        jax.eval_shape(differentiate, dict(enumerate(arrays)), state, jax.random.key(0))
        return [saved for saved in context.residuals.values() if saved.values]

    def stored_quantizers(self, *args: Any, **kwargs: Any) -> dict[str, Quantizer]:
        """The quantizers of parameters, by name, for storing them in low precision."""
        traced = self._trace(args, kwargs)
        found: dict[str, Quantizer] = {}
        notes: dict[str | None, str] = {}
        for site in self._discover(traced)[0].values():
            if (quantizer := site_quantizer(site, traced.shapes)) is not None:
                found.setdefault(site.leaf or "", quantizer)
            elif (note := float_note(site, traced.shapes)) is not None:
                notes.setdefault(site.leaf, note)
        if self.provider.quantizes_params and (left := [notes[leaf] for leaf in notes if leaf not in found]):
            rest = f"; and {len(left) - 3} more" if len(left) > 3 else ""
            warnings.warn(f"not all weights are stored in low precision: {'; '.join(left[:3])}{rest}", stacklevel=3)
        return found

    def stored_ranges(self, state: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The ranges by which training quantized parameters, by name, as far as they are remembered in the state."""
        learned = any(rule.learns_scales for rule in self.provider.rules)
        if not learned and not any(state.get(collection) for collection in (QUANT_STATS, GRADIENT_STATE)):
            return {}
        traced = self._trace(args, kwargs)
        found: dict[str, Any] = {}
        for site in self._discover(traced)[0].values():
            if site_quantizer(site, traced.shapes) is not None:
                found.setdefault(site.leaf or "", remembered_range(site, state, len(traced.shapes[site.leaf or ""])))
        return {name: bounds for name, bounds in found.items() if bounds is not None}

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_qarray)
        named = weight_names(self.fn, args, kwargs, self.weights) if self._names is None else self._names(args, kwargs)
        values = {
            i: Value(x, ACTIVATION if name is None else parameter_origin(name, x.shape))
            for i, (x, name) in enumerate(zip(leaves, named, strict=True))
            if isinstance(x, jax.Array | np.ndarray | QArray | jax.ShapeDtypeStruct)
        }
        out_tree: Any = None
        name = getattr(self.fn, "__name__", "__call__")

        def fn(*arrays):
            nonlocal out_tree
            given = dict(zip(values, arrays, strict=True))
            args, kwargs = jax.tree.unflatten(tree, [given.get(i, x) for i, x in enumerate(leaves)])
            # A framework's call of a model holds its variables too, so it calls `trace_model` itself.
            if self._names is None and self.provider.traces_models:
                out = self.provider.trace_model(name, self.fn, *args, **kwargs)
            else:
                out = self.fn(*args, **kwargs)
            out, out_tree = jax.tree.flatten(out)
            return out

        arrays = [v.data for v in values.values()]
        abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, QArray) else x for x in arrays]
        dtypes = {v.origin.leaves[0]: v.data.dtype for v in values.values() if v.origin.leaves}
        token = tracing.set(self.provider)
        try:
            return Traced(jax.make_jaxpr(fn)(*abstract), list(values.values()), out_tree, dtypes)
        finally:
            tracing.reset(token)

    def _discover(
        self, traced: Traced, concrete: bool = False, key: Any = None
    ) -> tuple[dict[Any, Site], dict[Key, Any]]:
        """The sites and the initial state: as shapes, or if `concrete` as arrays; `key` is for random state."""
        evaluate = self.provider.evaluate
        context = Context(self.provider, evaluate, **self._options, dtypes=traced.dtypes, init=True, update=False)

        def run(arrays):
            frame = Frame(context, key=key)
            evaluate(traced.jaxpr, [v._replace(data=x) for v, x in zip(traced.values, arrays, strict=True)], frame)
            return frame.new

        state = (jax.jit(run) if concrete else functools.partial(jax.eval_shape, run))([v.data for v in traced.values])
        self._check(context)
        return context.sites, state

    def _initial(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any = None) -> dict[Key, Any]:
        return self._discover(self._trace(args, kwargs), concrete=True, key=key)[1]

    def _run(
        self,
        traced: Traced,
        state: Mapping[str, Any] | None,
        key: Any,
        update: bool | frozenset[str],
        known: Mapping[Key, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """The result and the new state; `known` is the state that `_discover` found, if it was called."""
        evaluate = self.provider.evaluate
        context = Context(
            self.provider, evaluate, **self._options, dtypes=traced.dtypes, cache=self._cache, update=update
        )
        before: dict[Key, Any] = {}
        if self.provider.stateful:
            known = self._discover(traced)[1] if known is None else known
            served = self.provider.quantizes_params
            if state is None and known:
                some = next(iter(known))
                way = "state = q.init(*args); out, state = q.stateful(state)(*args)"
                if served:
                    way = "q.stateful(state)(*args)[0], with the state of training"
                    if some.collection == GRADIENT_STATE:
                        way += "; with {} for the ranges of each input"
                raise ValueError(
                    f"{some.name} at {some.path!r} keeps state ({some.collection}), which goes in and comes out: {way}"
                )
            before = flatten_state(state or {}, known, empty_histories(known) if served else None)
            check_calibrated({k: v for k, v in before.items() if not context.updates(k.path)})
        frame = Frame(context, state=before, key=key)
        outs = evaluate(traced.jaxpr, traced.values, frame)
        self._check(context, traced)
        if self.provider.quantizes_params and self._names is not None:
            # Of a model; a function may be served with the float parameters of a training run.
            _check_quantized(context, traced.shapes)
        arrays = [v.data.dequantize() if isinstance(v.data, QArray) else v.data for v in outs]
        new = nest_state({**before, **frame.new}) if self.provider.stateful else {}
        return jax.tree.unflatten(traced.out_tree, arrays), new

    def _check(self, context: Context, traced: Traced | None = None) -> None:
        """Raise if nothing would be quantized; if `traced`, opaque matmuls are not among the sites yet."""
        name = getattr(self.fn, "__name__", "the function")
        every = list(context.sites.values())
        sites = [site for site in every if not site.opaque]
        if not self.provider.rules:
            return
        if self.weights is None and self._names is None and sites and not any(any(s.weights) for s in sites):
            raise ValueError(
                f"no matmul of {name} has a weight: say which argument holds the weights, by naming it one of "
                f"{', '.join(PARAMETERS[:6])} or by quantized(..., weights='its name'); weights=() if there are none"
            )
        skipped = any(site.rule is not None and site.rule.leaves_alone for site in sites)
        matched = any(site.config is not None or site.is_adapted or any(site.quantized) for site in sites)
        self.provider._matched |= matched or skipped
        if matched or skipped or self.on_unmatched == "ignore":
            return
        if traced is not None:
            return self._discover(traced) and None
        reason = "it has no matmul (dot_general, convolution or ragged_dot)"
        if every:
            paths = sorted({site.leaf or site.path for site in sites or every})
            at = f"{len(sites or every)} {'matmuls' if sites else 'calls'}, at {', '.join(map(repr, paths[:5]))}"
            why = sorted({site.reason for site in sites or every if site.reason})
            reason = f"no rule matches any of its {at}" if why == ["no rule matches"] else f"{'; '.join(why)}: {at}"
        if not sites and any(site.op not in KERNELS for site in every):
            reason += ". Rules with inside_custom=True rewrite the bodies of custom_jvp and custom_vjp functions"
        if self._names is not None and self.provider._matched | (self.on_unmatched == "warn" and not every):
            return  # another method of the model is quantized, or this one has nothing to quantize
        message = f"quantizing {name} would change nothing: {reason}"
        if self.on_unmatched == "error":
            raise ValueError(message)
        warnings.warn(message, stacklevel=4)


def _check_quantized(context: Context, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise for a parameter in float that should be codes: quantized in each call, it would save nothing."""
    for site in context.sites.values():
        if site.rule is None or any(site.quantized) or (quantizer := site_quantizer(site, shapes)) is None:
            continue
        raise ValueError(
            f"the parameter {site.leaf!r} is in float, but this model takes it as {quantizer.qtype.name}: convert it "
            "by octavo.quantize_params(params, abstract_quantized_params) or octavo.convert(model, params, *inputs, "
            "rules=rules). To quantize it in each call, use octavo.QtProvider"
        )


def argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    """The names of positional arguments, from the signature where there is one."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}{i}" for i in range(count)]
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            names.append(parameter.name)
    return (names + [f"arg{i}" for i in range(len(names), count)])[:count]


def weight_names(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], weights: Weights = None
) -> list[str | None]:
    """The name of each leaf of (args, kwargs) that is a weight; None for the others.

    In an argument with a "params" collection only the leaves of that collection are weights, not batch statistics or
    optimizer state, and their names begin below it.
    """
    arguments = argument_names(fn, len(args))
    leaves = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=is_qarray):
        path = [jax.tree_util.keystr((key,), simple=True) for key in keys]
        leaves.append(((arguments[int(path[1])] if path[0] == "0" else path[1], *path[2:]), leaf))
    chosen = None if weights is None or callable(weights) else _chosen(weights, [*arguments, *kwargs])
    collections = {path[0] for path, _ in leaves if "params" in path[1:3]}
    names: list[str | None] = []
    for path, leaf in leaves:
        in_params = "params" in path[1:3]
        own = path[path.index("params", 1) + 1 if in_params else 1 :]
        own = own[:-1] if own[-1:] in (("value",), ("raw_value",)) else own  # the content of boxes and NNX variables
        name = "/".join(own) or path[0]
        if not hasattr(leaf, "shape"):
            is_weight = False
        elif callable(weights):
            is_weight = bool(weights(name, leaf))
        elif chosen is not None:
            is_weight = path[0] in chosen
        else:
            is_weight = in_params if path[0] in collections else path[0] in PARAMETERS or isinstance(leaf, QArray)
        names.append(name if is_weight else None)
    return names


def _chosen(weights: str | int | Sequence[str | int], arguments: Sequence[str]) -> set[str]:
    """The names of the arguments that hold weights."""
    chosen = set()
    for argument in [weights] if isinstance(weights, str | int) else weights:
        if isinstance(argument, int) and not -len(arguments) <= argument < len(arguments):
            raise ValueError(f"weights={argument} names no argument: there are {len(arguments)}")
        chosen.add(arguments[argument] if isinstance(argument, int) else argument)
    return chosen
