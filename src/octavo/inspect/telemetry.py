"""How well the number formats of a training step fit its tensors, product by product, measured while it trains.

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
from octavo.transform.api import Quantized, quantized
from octavo.transform.arguments import Weights
from octavo.transform.frame import Key
from octavo.transform.site import Site
from octavo.transform.state import TELEMETRY, nested


@dataclasses.dataclass(frozen=True)
class Stats:
    """Sums over the values of one operand that are not zero; arrays with an axis for each loop around the product.

    `count` values, of which `saturated` lie beyond the end of the format and `underflowed` became zero; `signal` and
    `noise`, the squares of the values and of their quantization errors; `scale`, the sum of every value's scale, and
    `largest_scale`. `kind` is "weight", "activation" or "gradient". Statistics of microbatches add up: `a + b`.
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
                f"statistics of {self.kind} in {self.qtype} and of {other.kind} in {other.qtype} do not add up"
            )
        sums = {name: getattr(self, name) + getattr(other, name) for name in SUMS}
        return dataclasses.replace(
            self, **sums | {"largest_scale": jnp.maximum(self.largest_scale, other.largest_scale)}
        )


jax.tree_util.register_dataclass(Stats, data_fields=list(SUMS), meta_fields=["kind", "qtype"])

type Fits = Mapping[str, Mapping[str, Stats]]
"""Statistics by the name of the product (its path and its operation) and the name of the operand."""


def probe(fn: Any, rules: Any = None, *, weights: Weights = None, on_unmatched: str = "error") -> "Probe":
    """A function with the arguments of `fn`, a loss, that tells how well each number format fits what it is given.

    `fn` returns a scalar, or a pair of which the first is one; `rules` and `weights` are those of `quantized`, and `fn`
    may also be what `quantized` made, without rules. The result maps the name of every quantized product to the Stats
    of its operands: "lhs" and "rhs" of the forward, and the incoming gradient as "dlhs" and as "drhs", as each of these
    two products quantizes it. It is pure, and meant for `jax.jit`; `summarize` and `by_class` read it.

    >>> import octavo
    >>> def loss(params, x):
    ...     return jnp.mean((x @ params["out"]["w"]) ** 2)
    >>> x, w = (jax.random.normal(jax.random.key(i), (64, 64)) for i in range(2))
    >>> stats = jax.jit(probe(loss, octavo.recipe("int8", exclude=None)))({"out": {"w": w}}, x)
    >>> {name: round(float(row["sqnr_db"])) for name, row in summarize(stats)["out/dot_general0"].items()}
    {'dlhs': 44, 'drhs': 43, 'lhs': 44, 'rhs': 44}
    """
    low = fn if isinstance(fn, Quantized) else quantized(fn, rules, weights=weights, on_unmatched=on_unmatched)
    if low is fn and (rules is not None or weights is not None):
        raise ValueError("a quantized function has its rules and weights already: probe(fn) without them")
    return Probe(low)


class Probe:
    """See `probe`."""

    def __init__(self, low: Quantized):
        provider = copy.copy(low.provider)
        provider.telemetry, provider._seen = True, set()
        self._low = Quantized(
            low.fn,
            provider,
            low.weights,
            low.on_unmatched,
            names=low._names,
            **low._options,  # pyrefly: ignore
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Fits:
        return self.stateful()(*args, **kwargs)

    def stateful(
        self, state: Mapping[str, Any] | None = None, *, key: PRNGKeyArray | None = None, update: bool = True
    ) -> Callable[..., Fits]:
        """The probe of rules that keep state or round stochastically, given what the training step is given.

        Ranges are those that the step would use. The state is read, and what becomes of it is dropped.
        """

        def call(*args: Any, **kwargs: Any) -> Fits:
            context, known = self._low._discover(args, kwargs)
            zeros = {k: jax.tree.map(_zeros, x) for k, x in known.items() if k.collection == TELEMETRY}
            if not zeros:
                raise ValueError(
                    f"there is nothing to probe in {_name(self._low.fn)}: its rules quantize no product of float arrays"
                )

            def loss(zeros: dict[Key, Any]) -> Any:
                out, _ = self._low._run(args, kwargs, {**(state or {}), **nested(zeros)}, key, update)
                return _scalar(out, self._low.fn)

            sites = {(site.path, site.op_id): site for site in context.sites.values()}
            seen = jax.grad(loss)(zeros)
            return {_site_name(k): _stats(sites[k.path, k.name], sums) for k, sums in seen.items()}

        return call


def summarize(stats: Fits) -> dict[str, dict[str, dict[str, Any]]]:
    """Ratios from sums, for each operand of each product: floats, or arrays with an entry for each turn of a loop.

    `saturation` and `underflow` are shares of the values that are not zero; `sqnr_db` is the ratio of signal to
    quantization noise in dB and `to_noise` that of their norms; `scale` is the mean of the scale and `largest_scale`
    its maximum. Where nothing was counted, all are NaN; where nothing was lost, the ratios to noise are infinite.
    """
    return {site: {name: _ratios(s) for name, s in operands.items()} for site, operands in stats.items()}


def by_class(stats: Fits) -> dict[str, dict[str, Any]]:
    """For weights, activations and gradients one row each, for a log: pooled shares, means, and the worst product.

    `saturation` and `underflow` are shares of all values of the class; `sqnr_db`, `to_noise` and `scale` are means over
    products in which each counts alike (geometric ones of the last two). `worst_site` has the lowest signal-to-noise
    ratio, `worst_sqnr_db`, and `worst_underflow_site` the largest share of values that became zero: outliers make the
    second worse and the first better. A name ends in the turn of the loop, if there is one, and the operand.
    """
    found: dict[str, list[tuple[str, Stats]]] = {}
    for site, operands in stats.items():
        for name, s in operands.items():
            found.setdefault(s.kind, []).append((f"{site}{{}}.{name}", s))
    return {kind: _class(found[kind]) for kind in ("weight", "activation", "gradient") if kind in found}


def _class(rows: list[tuple[str, Stats]]) -> dict[str, Any]:
    total = {name: sum(_sum(getattr(s, name)) for _, s in rows) for name in SUMS}
    turns = [turn for name, s in rows for turn in _turns(name, _ratios(s))]
    decibels = [turn["sqnr_db"] for turn in turns if math.isfinite(turn["sqnr_db"])]
    scales = [turn["scale"] for turn in turns if turn["scale"] > 0]
    db = float(np.mean(decibels)) if decibels else math.nan
    worst = min(turns, key=lambda turn: _or(turn["sqnr_db"], math.inf))
    lost = max(turns, key=lambda turn: _or(turn["underflow"], -1.0))
    return {
        "saturation": _divide(total["saturated"], total["count"]),
        "underflow": _divide(total["underflowed"], total["count"]),
        "sqnr_db": db,
        "to_noise": 10 ** (db / 20),
        "scale": math.exp(np.mean(np.log(scales))) if scales else math.nan,
        "worst_sqnr_db": worst["sqnr_db"],
        "worst_site": worst["site"],
        "worst_underflow": lost["underflow"],
        "worst_underflow_site": lost["site"],
    }


def _turns(name: str, ratios: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The ratios of each turn of the loops around a product."""
    for at in np.ndindex(np.shape(ratios["scale"])):
        turn = f"[{','.join(map(str, at))}]" if at else ""
        yield {"site": name.format(turn), **{k: float(np.asarray(v)[at]) for k, v in ratios.items()}}


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


def _sum(value: Any) -> float:
    return float(np.sum(np.asarray(value, np.float64)))


def _stats(site: Site, sums: Mapping[str, Any]) -> dict[str, Stats]:
    assert site.config is not None
    kinds = {side: "weight" if w else "activation" for side, w in zip(("lhs", "rhs"), site.weights, strict=True)}
    operands = measured_operands(site.config)
    return {
        name: Stats(**sums[name], kind=kinds.get(name, "gradient"), qtype=operand.qtype.name)
        for name, operand in operands.items()
    }


def _site_name(key: Key) -> str:
    return "/".join(part for part in (key.path, key.name) if part)


def _zeros(x: Any) -> Any:
    return jnp.zeros(x.shape, x.dtype)


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", "the function")


def _scalar(out: Any, fn: Any) -> Any:
    loss = out[0] if isinstance(out, tuple) and out else out
    if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        kind = f"an array {loss.dtype}{list(loss.shape)}" if hasattr(loss, "shape") else f"a {type(loss).__name__}"
        raise TypeError(
            f"a probe follows gradients: {_name(fn)} has to return a scalar loss, or (loss, aux), not {kind}"
        )
    return loss
