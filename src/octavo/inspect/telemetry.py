"""Telemetry: how well the number formats of a training step fit its tensors, measured in each matmul.

The ratio `to_noise` of gradients is that of Chmiel, Fishman, Banner and Soudry, FP4 All the Way: Fully Quantized
Training of LLMs (2025): where the norm of a gradient falls below about sqrt(3) times that of its quantization noise,
training in low precision stops helping.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo._typing import PRNGKeyArray
from octavo.ops.telemetry import SUMS, measured_operands
from octavo.transform.api import Quantized, Weights, quantized
from octavo.transform.frame import Key
from octavo.transform.site import Site
from octavo.transform.state import TELEMETRY, nest_state


@dataclasses.dataclass(frozen=True)
class Stats:
    """Sums over the nonzero values of one operand, with an axis for each loop around the matmul.

    The statistics of microbatches are added by `a + b`.

    Attributes:
        count: The number of values.
        saturated: How many exceed the range of the format.
        underflowed: How many become zero.
        signal: The sum of squares of the values.
        noise: The sum of squares of the quantization errors.
        scale: The sum of the scales of all values.
        largest_scale: The largest scale.
        kind: "weight", "activation" or "gradient".
        qtype: The name of the format.
    """

    count: Any
    saturated: Any
    underflowed: Any
    signal: Any
    noise: Any
    scale: Any
    largest_scale: Any
    kind: str
    qtype: str

    def __add__(self, other: "Stats") -> "Stats":
        if (self.kind, self.qtype) != (other.kind, other.qtype):
            raise ValueError(
                f"statistics of {self.kind} in {self.qtype} and of {other.kind} in {other.qtype} cannot be added"
            )
        sums = {name: getattr(self, name) + getattr(other, name) for name in SUMS}
        return dataclasses.replace(
            self, **sums | {"largest_scale": jnp.maximum(self.largest_scale, other.largest_scale)}
        )


jax.tree_util.register_dataclass(Stats, data_fields=list(SUMS), meta_fields=["kind", "qtype"])

type SiteStats = Mapping[str, Mapping[str, Stats]]
"""Statistics by the name of the matmul (its path and id) and that of the operand."""


def telemetry(fn: Any, rules: Any = None, *, weights: Weights = None, on_unmatched: str = "error") -> "Telemetry":
    """A function that measures how well each number format fits, with the arguments of the loss `fn`.

    Args:
        fn: A loss that returns a scalar or (scalar, aux), or the result of `quantized` on one.
        rules: As for `quantized`; None if `fn` is quantized already.
        weights: As for `quantized`.
        on_unmatched: As for `quantized`.

    Returns:
        A pure function, to be jitted. It maps the name of every quantized matmul to the `Stats` of its operands: "lhs"
        and "rhs" of the forward pass, and the cotangent as "dlhs" and "drhs", as either gradient quantizes it.
        `summarize` and `by_class` reduce them.

    >>> import octavo
    >>> def loss(params, x):
    ...     return jnp.mean((x @ params["out"]["w"]) ** 2)
    >>> x, w = (jax.random.normal(jax.random.key(i), (64, 64)) for i in range(2))
    >>> stats = jax.jit(telemetry(loss, octavo.recipe("int8", exclude=None)))({"out": {"w": w}}, x)
    >>> {name: round(float(row["sqnr_db"])) for name, row in summarize(stats)["out/dot_general0"].items()}
    {'dlhs': 44, 'drhs': 43, 'lhs': 44, 'rhs': 44}
    """
    low = fn if isinstance(fn, Quantized) else quantized(fn, rules, weights=weights, on_unmatched=on_unmatched)
    if low is fn and (rules is not None or weights is not None):
        raise ValueError("a quantized function has its rules and weights already: telemetry(fn) without them")
    return Telemetry(low)


class Telemetry:
    """See `telemetry`."""

    def __init__(self, low: Quantized):
        provider = copy.copy(low.provider)
        provider.telemetry, provider.stateful, provider._used = True, True, set()
        self._low = Quantized(
            low.fn,
            provider,
            low.weights,
            low.on_unmatched,
            names=low._names,
            **low._options,  # pyrefly: ignore
        )

    def __call__(self, *args: Any, **kwargs: Any) -> SiteStats:
        return self.stateful()(*args, **kwargs)

    def stateful(
        self, state: Mapping[str, Any] | None = None, *, key: PRNGKeyArray | None = None, update: bool = True
    ) -> Callable[..., SiteStats]:
        """The same for rules that keep state or round stochastically, with the state and key of the training step.

        Ranges are those that the step would use. The new state is dropped.
        """

        def call(*args: Any, **kwargs: Any) -> SiteStats:
            traced = self._low._trace(args, kwargs)
            found, known = self._low._discover(traced)
            zeros = {k: jax.tree.map(jnp.zeros_like, x) for k, x in known.items() if k.collection == TELEMETRY}
            if not zeros:
                raise ValueError(
                    f"{_name(self._low.fn)} has no telemetry: its rules quantize no matmul of float arrays"
                )

            def loss(zeros: dict[Key, Any]) -> Any:
                out, _ = self._low._run(traced, {**(state or {}), **nest_state(zeros)}, key, update, known)
                return _scalar(out, self._low.fn)

            sites = {(site.path, site.op_id): site for site in found.values()}
            grads = jax.grad(loss)(zeros)
            return {"/".join(k.parts[1:]): _stats(sites[k.path, k.name], sums) for k, sums in grads.items()}

        return call


def summarize(stats: SiteStats) -> dict[str, dict[str, dict[str, Any]]]:
    """Ratios from sums, for each operand of each matmul: floats, or arrays with an entry for each loop iteration.

    `saturation` and `underflow` are shares of the nonzero values; `sqnr_db` is the signal-to-quantization-noise ratio
    in dB and `to_noise` that of the norms; `scale` is the mean scale and `largest_scale` the maximum. All are NaN if
    nothing was counted, and ratios to noise are infinite if all values are exact.
    """
    return {site: {name: _ratios(s) for name, s in operands.items()} for site, operands in stats.items()}


def by_class(stats: SiteStats) -> dict[str, dict[str, Any]]:
    """One row each for weights, activations and gradients: pooled shares, means, and the worst matmul.

    `saturation` and `underflow` are shares of all values of the class; `sqnr_db`, `to_noise` and `scale` are means over
    matmuls (geometric for the last two). `worst_site` has the lowest signal-to-noise ratio, `worst_sqnr_db`, and
    `worst_underflow_site` the largest share of values that became zero: outliers raise both. A name ends in the index
    of the loop iteration, if there is one, and the operand.
    """
    found: dict[str, list[tuple[str, Stats]]] = {}
    for site, operands in stats.items():
        for name, s in operands.items():
            found.setdefault(s.kind, []).append((f"{site}{{}}.{name}", s))
    return {kind: _class(found[kind]) for kind in ("weight", "activation", "gradient") if kind in found}


def _class(rows: list[tuple[str, Stats]]) -> dict[str, Any]:
    total = {name: sum(float(np.asarray(getattr(s, name), np.float64).sum()) for _, s in rows) for name in SUMS}
    each = [row for name, s in rows for row in _iterations(name, _ratios(s))]
    decibels = [row["sqnr_db"] for row in each if math.isfinite(row["sqnr_db"])]
    scales = [row["scale"] for row in each if row["scale"] > 0]
    db = float(np.mean(decibels)) if decibels else math.nan
    worst = min(each, key=lambda row: _or(row["sqnr_db"], math.inf))
    underflow = max(each, key=lambda row: _or(row["underflow"], -1.0))
    return {
        "saturation": _divide(total["saturated"], total["count"]),
        "underflow": _divide(total["underflowed"], total["count"]),
        "sqnr_db": db,
        "to_noise": 10 ** (db / 20),
        "scale": math.exp(np.mean(np.log(scales))) if scales else math.nan,
        "worst_sqnr_db": worst["sqnr_db"],
        "worst_site": worst["site"],
        "worst_underflow": underflow["underflow"],
        "worst_underflow_site": underflow["site"],
    }


def _iterations(name: str, ratios: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The ratios of each iteration of the loops around a matmul."""
    for at in np.ndindex(np.shape(ratios["scale"])):
        index = f"[{','.join(map(str, at))}]" if at else ""
        yield {"site": name.format(index), **{k: float(np.asarray(v)[at]) for k, v in ratios.items()}}


def _ratios(s: Stats) -> dict[str, Any]:
    sums = {name: np.asarray(getattr(s, name), np.float64) for name in SUMS}
    ratio = _divide(sums["signal"], sums["noise"])
    with np.errstate(divide="ignore"):
        db = 10 * np.log10(ratio)
    found = {
        "saturation": _divide(sums["saturated"], sums["count"]),
        "underflow": _divide(sums["underflowed"], sums["count"]),
        "sqnr_db": db,
        "to_noise": np.sqrt(ratio),
        "scale": _divide(sums["scale"], sums["count"]),
        "largest_scale": np.where(sums["count"] > 0, sums["largest_scale"], np.nan),
    }
    return {name: float(value) if np.ndim(value) == 0 else value for name, value in found.items()}


def _divide(a: Any, b: Any) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.divide(np.asarray(a, np.float64), b)
    return float(out) if out.ndim == 0 else out


def _or(value: float, other: float) -> float:
    return other if math.isnan(value) else value


def _stats(site: Site, sums: Mapping[str, Any]) -> dict[str, Stats]:
    assert site.config is not None
    kinds = {side: "weight" if w else "activation" for side, w in zip(("lhs", "rhs"), site.weights, strict=True)}
    operands = measured_operands(site.config)
    return {
        name: Stats(**sums[name], kind=kinds.get(name, "gradient"), qtype=operand.qtype.name)
        for name, operand in operands.items()
    }


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", "the function")


def _scalar(out: Any, fn: Any) -> Any:
    loss = out[0] if isinstance(out, tuple) and out else out
    if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        kind = f"an array {loss.dtype}{list(loss.shape)}" if hasattr(loss, "shape") else f"a {type(loss).__name__}"
        raise TypeError(
            f"telemetry follows gradients: {_name(fn)} has to return a scalar loss, or (loss, aux), not {kind}"
        )
    return loss
