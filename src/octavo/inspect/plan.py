"""What a set of rules will do to a function, before anything runs."""

import dataclasses
import html
import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from octavo.hlo.collectives import Traffic, read_traffic, sent_size
from octavo.inspect.unmatched import unmatched
from octavo.ops import DotConfig, Matmul, Operand, lowering_of
from octavo.qarray import QArray
from octavo.rules import QuantizationRule
from octavo.transform.api import Quantized, quantized
from octavo.transform.arguments import weights_of_arguments
from octavo.transform.site import Site, operand_axes


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """What becomes of one multiplication."""

    path: str
    op: str
    weight: str | None
    shapes: str
    rule: int | None
    """The number of the rule in the list, from 0."""
    fwd: str
    dlhs: str
    drhs: str
    scales: str
    lowering: str
    bytes_before: int
    """Of the weight, as it is in float and as the product reads it; of both operands if there is no weight."""
    bytes_after: int
    flops: int
    times: int
    reason: str | None
    sent: int | None = None
    """What a device sends of the weight, if the plan was told and some of it is; on the first row of that weight."""


class Plan:
    """Every multiplication of a function with what the rules do to it; printed as a table.

    `rows` are in the order of execution. `to_json` gives the same for programs. `traffic` is what a device sends, if
    the plan was told by `with_traffic`.
    """

    def __init__(
        self,
        rows: Sequence[PlanRow],
        rules: Sequence[QuantizationRule],
        notes: Sequence[str] = (),
        traffic: Traffic | None = None,
    ):
        self.rows, self.rules, self.notes, self.traffic = tuple(rows), tuple(rules), tuple(notes), traffic

    def with_traffic(self, program: Any, *, weights: str | Callable[[str], bool] = "params") -> "Plan":
        """This plan with what a device sends in a program that was compiled from the function, its step for example.

        `program` is that program, its HLO text or its `Traffic`; `weights` tells its arguments that hold weights, as
        for `read_traffic`. Each weight of the plan is looked for among them by its path.

        >>> import octavo
        >>> rule = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
        >>> params, x = {"w": jnp.ones((8, 8))}, jnp.ones((8, 8))
        >>> low = octavo.quantized(lambda params, x: x @ params["w"], rule)
        >>> told = octavo.plan(low, None, params, x).with_traffic(jax.jit(low).lower(params, x).compile())
        >>> print(str(told).splitlines()[-1])
        a device sends 0 B
        """
        if not isinstance(program, Traffic):
            program = read_traffic(program if isinstance(program, str) else program.as_text(), weights=weights)
        by_argument = program.by_weight()
        names = weights_of_arguments(by_argument, [row.weight for row in self.rows if row.weight])
        sent: dict[str | None, int] = {}
        for argument, weight in names.items():
            sent[weight] = sent.get(weight, 0) + by_argument[argument]
        rows = [dataclasses.replace(row, sent=sent.pop(row.weight, None)) for row in self.rows]
        return Plan(rows, self.rules, self.notes, program)

    @property
    def flops(self) -> int:
        return sum(row.flops for row in self.rows)

    @property
    def share(self) -> float:
        """The share of forward FLOPs that a rule quantizes."""
        done = sum(row.flops for row in self.rows if row.reason is None)
        return done / self.flops if self.flops else 0.0

    def to_json(self) -> str:
        """The plan as a JSON text."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        plan = {"share": self.share, "flops": self.flops, "rows": rows, "notes": list(self.notes)}
        return json.dumps(plan if self.traffic is None else plan | {"traffic": self.traffic.summary()})

    def __str__(self) -> str:
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *self.notes, *self._summary()])

    __repr__ = __str__

    def __rich_console__(self, console: Any, options: Any) -> Iterator[str]:
        """Printed by rich: what is left alone is dim, the summary bold."""
        summary = self._summary()
        lines = str(self).split("\n")[: -len(summary)]
        for line, row in zip(lines, [None, None, *self.rows, *self.notes], strict=True):
            text = line.replace("[", "\\[")
            yield f"[dim]{text}[/dim]" if isinstance(row, PlanRow) and row.reason else text
        for line in summary:
            yield f"[bold]{line}[/bold]"

    def _repr_html_(self) -> str:
        """For notebooks: what is left alone is pale, and notes follow."""
        head, *body = self._table()
        cells = lambda texts, tag: "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)  # noqa: E731
        rows = "".join(
            f"<tr{' style="opacity:.65"' if row.reason else ''}>{cells(texts, 'td')}</tr>"
            for row, texts in zip(self.rows, body, strict=True)
        )
        table = f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{rows}</tbody></table>"
        return table + cells([*self.notes, *self._summary()], "p")

    def _table(self) -> list[list[str]]:
        table = [list(_COLUMNS), *(_cells(row, self.flops) for row in self.rows)]
        if self.traffic is not None:
            sent = ["" if row.sent is None else sent_size(row.sent) for row in self.rows]
            # Before the note, which may be long.
            table = [[*line[:-1], cell, line[-1]] for line, cell in zip(table, ["sent", *sent], strict=True)]
        return table

    def _summary(self) -> list[str]:
        before, after = (sum(getattr(r, f"bytes_{when}") for r in self.rows) for when in ("before", "after"))
        done = sum(row.reason is None for row in self.rows)
        saved = f"; operands {_size(before)} -> {_size(after)}" if before else ""
        share = f"{done} of {len(self.rows)} products quantized, {100 * self.share:.1f} % of forward FLOPs{saved}"
        return [share] if self.traffic is None else [share, self.traffic.line()]


_COLUMNS = ("path", "op", "shapes", "rule", "fwd", "dlhs", "drhs", "scales", "lowering", "bytes", "FLOPs", "note")


def _cells(row: PlanRow, total: int) -> list[str]:
    share = f"{100 * row.flops / total:.1f} %" if total else ""
    size = f"{_size(row.bytes_before)} -> {_size(row.bytes_after)}" if row.reason is None else _size(row.bytes_before)
    shapes = row.shapes if row.times == 1 else f"{row.times} x {row.shapes}"
    rule = "" if row.rule is None else str(row.rule)
    name = row.path or row.weight or "(top)"
    kinds = [row.fwd, row.dlhs, row.drhs, row.scales, row.lowering]
    return [name, row.op, shapes, rule, *kinds, size, share, row.reason or ""]


def plan(
    fn: Callable[..., Any], rules: Any, *args: Any, weights: Any = None, on_unmatched: str = "error", **kwargs: Any
) -> Plan:
    """What the rules do to each multiplication of `fn(*args, **kwargs)`; only the shapes of the arguments are used.

    A rule that matches nothing, or only what earlier rules take, is an error that names the nearest paths;
    `on_unmatched="warn"` makes it a warning. `fn` may also be what `quantized` returns, with `rules=None`.

    >>> import octavo
    >>> rule = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
    >>> x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    >>> w = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    >>> octavo.plan(lambda params, x: x @ params["out"]["w"], rule, {"out": {"w": w}}, x).rows[0].drhs
    'int8 x int8'
    """
    low = fn if isinstance(fn, Quantized) else quantized(fn, rules, weights=weights, on_unmatched="ignore")
    return plan_of(low.sites(*args, **kwargs), low.provider.rules, on_unmatched, strict=low.strict_paths)


def plan_of(
    sites: Sequence[Site], rules: Sequence[QuantizationRule], on_unmatched: str = "error", *, strict: bool = False
) -> Plan:
    """The plan of sites that were found already."""
    notes = unmatched(sites, rules, strict)
    if notes and on_unmatched == "error":
        raise ValueError("\n".join(notes))
    if on_unmatched == "warn":
        for note in notes:
            warnings.warn(note, stacklevel=3)
    numbers = {id(rule): number for number, rule in enumerate(rules)}
    return Plan([_row(site, numbers) for site in sites], rules, notes)


def _row(site: Site, numbers: dict[int, int]) -> PlanRow:
    config = site.config
    lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in (site.lhs, site.rhs))
    before, after = (size * site.trips for size in _bytes(site))
    return PlanRow(
        path=site.path,
        op=site.op if site.gradient is None else f"{site.op} ({site.gradient})",
        weight=site.leaf,
        shapes=f"{_shape(lhs.shape)} x {_shape(rhs.shape)}",
        rule=None if site.rule is None else numbers.get(id(site.rule)),
        fwd=_types(config.fwd) if config else f"{site.lhs[1]} x {site.rhs[1]}",
        dlhs=_gradient(config, config.dlhs, config.fwd.rhs) if config else "",
        drhs=_gradient(config, config.drhs, config.fwd.lhs) if config else "",
        scales=_scales(site) if config else "",
        lowering=_lowering(site, lhs, rhs) if config else "float",
        bytes_before=before,
        bytes_after=after,
        flops=site.flops,
        times=site.trips,
        reason=site.reason,
    )


def _name(operand: Operand | None) -> str:
    return "float" if operand is None else operand.qtype.name


def _types(matmul: Matmul) -> str:
    return f"{_name(matmul.lhs)} x {_name(matmul.rhs)}"


def _gradient(config: DotConfig, matmul: Matmul, saved: Operand | None) -> str:
    """The types of a gradient: the incoming gradient, then the residual as the product takes it."""
    if matmul.lhs is None and matmul.rhs is None and matmul.residual == "original":
        return "float"
    residual = saved if matmul.residual == "reuse" else matmul.rhs
    return f"{_name(matmul.lhs)} x {_name(residual)}"


def _quantized(operand: Operand | None, shape: tuple[int, ...], dtype: str, axes: dict[str, Any]) -> Any:
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    if operand is None:
        return x
    how = operand.quantizer(len(shape), **axes)
    return jax.eval_shape(lambda a: how.quantize(a, key=jax.random.key(0)), x)


def _sides(site: Site) -> tuple[Any, Any]:
    assert site.config is not None
    fwd = site.config.fwd
    left = _quantized(fwd.lhs, *site.lhs, operand_axes(site, right=False))
    return left, _quantized(fwd.rhs, *site.rhs, operand_axes(site, right=True))


def _scales(site: Site) -> str:
    shapes = [_shape(x.scale.shape) if isinstance(x, QArray) else "-" for x in _sides(site)]
    return " ".join(shapes)


def _lowering(site: Site, lhs: Any, rhs: Any) -> str:
    assert site.config is not None
    if site.op not in ("dot_general", "einsum"):
        return (
            "int8" if all(isinstance(x, QArray) and x.qvalue.dtype == jnp.int8 for x in _sides(site)) else "see verify"
        )
    return lowering_of(site.config, *_sides(site), site.numbers)


def _bytes(site: Site) -> tuple[int, int]:
    """The bytes of the weight, or of both operands, before and after."""
    lhs, rhs = site.weights
    chosen = [1] if rhs else [0] if lhs else [0, 1]
    types = (site.lhs, site.rhs)
    before = sum(math.prod(types[i][0]) * jnp.dtype(types[i][1]).itemsize for i in chosen)
    if site.config is None:
        return before, before
    sides = _sides(site)
    return before, sum(_nbytes(sides[i]) for i in chosen)


def _nbytes(x: Any) -> int:
    if isinstance(x, QArray):
        packed = jax.eval_shape(lambda q: q.pack(), x) if x.qtype.bits < 8 else x
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(packed))
    return math.prod(x.shape) * x.dtype.itemsize


def _shape(shape: Sequence[int]) -> str:
    return "(" + ",".join(map(str, shape)) + ")"


def _size(count: int | float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
