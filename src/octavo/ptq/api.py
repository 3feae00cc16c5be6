"""`octavo.ptq.quantize`: the parameters of a function or a model, quantized with the help of calibration data."""

import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from octavo.frameworks.model import framework_of, quantize_model
from octavo.frameworks.serving import map_params, stored_quantizers, unboxed
from octavo.ptq.methods import QuantizedWeight, check_method, get_method, quantize_weight
from octavo.ptq.progress import ALL
from octavo.ptq.statistics import Statistics, arguments, collect_statistics, named_leaves
from octavo.qarray import QArray, Quantizer
from octavo.transform import PtqProvider

type Log = Callable[[str], None]

MEMORY = 1 << 31
"""Bytes of Hessians that are held at a time."""


def quantize(
    model: Any,
    params: Any,
    rules: Any,
    batches: Iterable[Any],
    *,
    method: str = "gptq",
    progress: Callable[[int], None] | None = None,
    log: Log | None = None,
    checkpoint: str | Path | None = None,
) -> Any:
    """Quantize the parameters of a function or a model, with the least error on calibration data.

    The rules say which weights are quantized, their number formats and group sizes, as for `octavo.convert`; the data
    determines scales and rounding. The result is used as that of `octavo.convert`: by `octavo.served(model, rules)`.

    Args:
        model: A function of parameters and inputs, a Linen model or an NNX model.
        params: The parameters; for a Linen model its variables; None for an NNX model, which holds them.
        rules: A rule or several, the name of a recipe or a file.
        batches: Batches of inputs: an array each, a tuple of arguments, or a dictionary of keyword arguments.
        method: "gptq"; "search", which only searches scales; "signed", integer scales of either sign by the largest
            weight; or "round".
        progress: Called with the number of calibration batches done.
        log: Called with a line for each weight.
        checkpoint: A directory for the statistics so far, from which an interrupted call resumes.

    Returns:
        The parameters, with a `QArray` for each that is quantized; for an NNX model, the quantized model.

    >>> import octavo, jax.numpy as jnp
    >>> def predict(params, x):
    ...     return x @ params["w"]
    >>> key = jax.random.key(0)
    >>> params, x = {"w": jax.random.normal(key, (64, 8))}, jax.random.normal(key, (256, 64))
    >>> rule = octavo.QuantizationRule(weight_qtype="int4", tile_size=32)
    >>> low = octavo.ptq.quantize(predict, params, rule, [x])
    >>> low["w"].qtype.name, jax.jit(octavo.served(predict, rule))(low, x).shape
    ('int4', (256, 8))
    """
    get_method(method)
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        raise ValueError("there is no calibration data: batches is empty")
    args, kwargs = arguments(first)
    framework = framework_of(model)
    if framework == "equinox":
        raise TypeError(
            "an Equinox model is called on one example: pass a function of its arrays, params, static = "
            "eqx.partition(model, eqx.is_array); quantize(lambda params, x: jax.vmap(eqx.combine(params, static))(x), "
            "params, rules, batches)"
        )
    batches = itertools.chain([first], batches)

    def run(fn: Callable[..., Any], params: Any, quantizers: Mapping[str, Quantizer]) -> dict[str, QArray]:
        options: dict[str, Any] = {"method": method, "strict_paths": framework is not None, "log": log}
        options |= {"progress": progress, "checkpoint": checkpoint}
        return {name: w.array for name, w in quantize_weights(fn, params, quantizers, batches, **options)}

    if framework == "nnx":
        from octavo.ptq.nnx import as_function, put, quantizers_of

        low = quantize_model(model, PtqProvider(rules), *args, **kwargs)
        return put(low, run(*as_function(model), quantizers_of(low)))
    fn = model if framework is None else _linen_function(model)
    codes = run(fn, params, stored_quantizers(model, rules, params, *args, **kwargs))
    return map_params(lambda name, leaf: codes.get(name, leaf), params)


def quantize_weights(
    fn: Callable[..., Any],
    params: Any,
    quantizers: Mapping[str, Quantizer],
    batches: Iterable[Any],
    *,
    method: str = "gptq",
    strict_paths: bool = False,
    memory: int = MEMORY,
    statistics: Mapping[str, Statistics] | None = None,
    stages: Sequence[Collection[str]] = (),
    progress: Callable[[int], None] | None = None,
    log: Log | None = None,
    checkpoint: str | Path | None = None,
) -> Iterator[tuple[str, QuantizedWeight]]:
    """Quantize the weights that have a quantizer, one after the other.

    Args:
        fn: A function of parameters and inputs.
        params: The parameters.
        quantizers: The quantizers of weights, by name.
        batches: Batches of inputs, as for `quantize`.
        method: As for `quantize`.
        strict_paths: As for `Quantized`.
        memory: Bytes of Hessians that are held at a time. If those of all weights need more, there are several passes
            over the data.
        statistics: Statistics of some weights, from an earlier run: these need no data.
        stages: The names of all weights in the order in which the function uses them, in groups. Each group has a pass
            over the data with the weights of the groups before it quantized, and corrects for the change of its inputs
            ("gptaq").
        progress: Called with the number of calibration batches done, in each pass.
        log: Called with a line for each weight.
        checkpoint: As for `quantize`.

    Returns:
        An iterator of names and quantized weights. A weight whose inputs cannot be observed is rounded, with a warning
        that says why.
    """
    check_method(method, quantizers)
    plain = unboxed(params)
    leaves = named_leaves(plain)
    width = max(map(len, quantizers), default=0)
    if stages and statistics:
        raise ValueError("stages have statistics of their own, of quantized inputs: leave statistics out")
    if stages:
        _check_stages(stages, quantizers)
    given = dict(statistics or {})
    for name in given.keys() & quantizers.keys():
        given[name].view.check(name, leaves[name].shape)
    unknown = {name: q for name, q in quantizers.items() if name not in given}
    passes = [tuple(names) for names in stages] or passes_over(
        unknown, {name: leaves[name].shape for name in unknown}, memory
    )
    if given and not stages:
        passes = [tuple(name for name in quantizers if name in given), *passes]
    batches = list(batches) if len(passes) > 1 else batches
    current, now = plain, {}
    for number, names in enumerate(passes):
        if now:
            current = map_params(lambda name, leaf: now.get(name, leaf), current)
        options: dict[str, Any] = {"only": names, "strict_paths": strict_paths, "progress": progress}
        part = f"pass-{number}.npz" if len(passes) > 1 else ALL
        options["checkpoint"] = None if checkpoint is None else Path(checkpoint) / part
        if given and not stages and all(name in given for name in names):
            found, missing = {name: given[name] for name in names}, {}
        else:
            found, missing = collect_statistics(fn, current, batches, against=plain if now else None, **options)
        for name in names:
            if name in found:
                done = quantize_weight(leaves[name], quantizers[name], found.pop(name), method=method)
            else:
                reason = missing.get(name, "it is not an operand of a matmul in float")
                warnings.warn(f"{name} is rounded without calibration: {reason}", stacklevel=3)
                codes = jax.jit(quantizers[name].quantize)(leaves[name])
                done = QuantizedWeight(codes, float("nan"), float("nan"))
            if stages:
                now[name] = done.array.dequantize(leaves[name].dtype)
            if log is not None:
                log(f"{name:<{width}}  error of the outputs {done.error:.3%} (rounding {done.rounding_error:.3%})")
            yield name, done


def _check_stages(stages: Sequence[Collection[str]], quantizers: Collection[str]) -> None:
    named = [name for names in stages for name in names]
    wrong = {*named} ^ {*quantizers} or {name for name in named if named.count(name) > 1}
    if wrong:
        raise ValueError(
            f"stages have every quantized weight once; {min(wrong)!r} is missing, repeated or not quantized"
        )


def passes_over(
    quantizers: Mapping[str, Quantizer], shapes: Mapping[str, tuple[int, ...]], memory: int
) -> list[tuple[str, ...]]:
    """The weights of each pass over the data: as many as have Hessians of at most `memory` bytes together."""
    passes: list[list[str]] = [[]]
    used = 0
    for name, quantizer in quantizers.items():
        shape = shapes[name]
        kept = [n for axis, n in enumerate(shape) if axis in {a % len(shape) for a in quantizer.channelwise_axes}]
        # Inputs are the axes that share scales. A stack of layers is channelwise, as the outputs are.
        inputs = math.prod(shape) // max(1, math.prod(kept))
        size = 4 * inputs * inputs * (kept[0] if len(kept) > 1 else 1)
        if passes[-1] and used + size > memory:
            passes.append([])
            used = 0
        passes[-1].append(name)
        used += size
    return [tuple(names) for names in passes if names]


def _linen_function(model: Any) -> Callable[..., Any]:
    streams = {name: jax.random.key(0) for name in ("dropout", "params")}
    return lambda params, *args, **kwargs: model.apply(params, *args, **kwargs, rngs=streams, mutable=True)
