"""What rules will do to a function, before anything runs."""

import dataclasses
import html
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from octavo._text import format_bytes, format_bytes_si, format_table
from octavo.hlo import Communication, read_communication
from octavo.inspect.plan_row import PlanRow, make_row
from octavo.rules import QuantizationRule, nearest
from octavo.transform.api import Quantized, quantized
from octavo.transform.jaxpr import KERNELS
from octavo.transform.residuals import Residuals
from octavo.transform.site import Site


class Plan:
    """What the rules do to each matmul of a function; printed as a table.

    Attributes:
        rows: One for each matmul, in the order of execution.
        rules: The rules.
        notes: Rules that match nothing, and the like.
        communication: The collectives of a compiled program, see `with_communication`.
        residuals: What other operations store for their gradients, where a rule has `residual_qtype`.
    """

    def __init__(
        self,
        rows: Sequence[PlanRow],
        rules: Sequence[QuantizationRule],
        notes: Sequence[str] = (),
        communication: Communication | None = None,
        residuals: Sequence[Residuals] = (),
    ):
        self.residuals = tuple(residuals)
        self.rows, self.rules, self.notes, self.communication = tuple(rows), tuple(rules), tuple(notes), communication

    def with_communication(self, program: Any, *, weights: str | Callable[[str], bool] = "params") -> "Plan":
        """This plan with the collective bytes of a program that contains the function, such as a training step.

        Args:
            program: The compiled program, its HLO text or its `Communication`.
            weights: Decides which arguments of the program hold weights, as for `read_communication`. Those of the
                plan are found among them by their paths.

        >>> import jax, jax.numpy as jnp, octavo
        >>> rule = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
        >>> params, x = {"w": jnp.ones((8, 8))}, jnp.ones((8, 8))
        >>> low = octavo.quantized(lambda params, x: x @ params["w"], rule)
        >>> sharded = octavo.plan(low, None, params, x).with_communication(jax.jit(low).lower(params, x).compile())
        >>> print(str(sharded).splitlines()[-1])
        a device sends 0 B
        """
        if not isinstance(program, Communication):
            program = read_communication(program if isinstance(program, str) else program.as_text(), weights=weights)
        by_argument = program.by_weight()
        names = weights_of_arguments(by_argument, [row.weight for row in self.rows if row.weight])
        sizes: dict[str | None, int] = {}
        for argument, weight in names.items():
            sizes[weight] = sizes.get(weight, 0) + by_argument[argument]
        rows = [dataclasses.replace(row, collective_bytes=sizes.pop(row.weight, None)) for row in self.rows]
        return Plan(rows, self.rules, self.notes, program, self.residuals)

    @property
    def flops(self) -> int:
        return sum(row.flops for row in self.rows)

    @property
    def share(self) -> float:
        """The share of forward FLOPs that a rule quantizes."""
        low = sum(row.flops for row in self.rows if row.reason is None)
        return low / self.flops if self.flops else 0.0

    def to_json(self) -> str:
        """The plan as a JSON text."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        plan: dict[str, Any] = {"share": self.share, "flops": self.flops, "rows": rows, "notes": list(self.notes)}
        if self.residuals:
            plan["residuals"] = [dataclasses.asdict(saved) for saved in self.residuals]
        return json.dumps(
            plan if self.communication is None else plan | {"communication": self.communication.summary()}
        )

    def __str__(self) -> str:
        lines = format_table(self._table())
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *self.notes, *self._kept(), *self._summary()])

    __repr__ = __str__

    def __rich_console__(self, console: Any, options: Any) -> Iterator[str]:
        """Printed by rich: what stays in float is dim, the summary bold."""
        summary, kept = self._summary(), self._kept()
        lines = str(self).split("\n")[: -len(summary)]
        for line, row in zip(lines, [None, None, *self.rows, *self.notes, *kept], strict=True):
            text = line.replace("[", "\\[")
            yield f"[dim]{text}[/dim]" if isinstance(row, PlanRow) and row.reason else text
        for line in summary:
            yield f"[bold]{line}[/bold]"

    def _repr_html_(self) -> str:
        """For notebooks: what stays in float is pale, and notes follow."""
        head, *body = self._table()
        cells = lambda texts, tag: "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)  # noqa: E731
        rows = "".join(
            f"<tr{' style="opacity:.65"' if row.reason else ''}>{cells(texts, 'td')}</tr>"
            for row, texts in zip(self.rows, body, strict=True)
        )
        table = f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{rows}</tbody></table>"
        return table + cells([*self.notes, *self._kept(), *self._summary()], "p")

    def _table(self) -> list[list[str]]:
        table = [list(_COLUMNS), *(_cells(row, self.flops) for row in self.rows)]
        if self.communication is not None:
            sizes = ["" if row.collective_bytes is None else format_bytes_si(row.collective_bytes) for row in self.rows]
            # Before the note column, which may be long.
            table = [
                [*line[:-1], cell, line[-1]] for line, cell in zip(table, ["collective bytes", *sizes], strict=True)
            ]
        return table

    def _kept(self) -> list[str]:
        """A line for each group of operations with residuals in low precision."""
        return [
            f"residuals at {saved.path or '(top)'}: {', '.join(saved.values)}, "
            f"{format_bytes(saved.bytes_before)} -> {format_bytes(saved.bytes_after)}"
            + (f" in {saved.times} executions" if saved.times > 1 else "")
            for saved in self.residuals
        ]

    def _summary(self) -> list[str]:
        before, after = (sum(getattr(r, f"bytes_{when}") for r in self.rows) for when in ("before", "after"))
        low, kernels = sum(row.reason is None for row in self.rows), sum(row.op in KERNELS for row in self.rows)
        saved = f"; operands {format_bytes(before)} -> {format_bytes(after)}" if before else ""
        count = len(self.rows) - kernels
        share = f"{low} of {count} matmuls quantized, {100 * self.share:.1f} % of forward FLOPs{saved}"
        if self.residuals:
            kept = [sum(getattr(r, f"bytes_{when}") for r in self.residuals) for when in ("before", "after")]
            share += f"; residuals of other operations {format_bytes(kept[0])} -> {format_bytes(kept[1])}"
        share += f"; {kernels} kernel{'s' * (kernels > 1)} not counted" if kernels else ""
        return [share] if self.communication is None else [share, self.communication.line()]


_COLUMNS = ("path", "op", "shapes", "rule", "fwd", "dlhs", "drhs", "scales", "lowering", "bytes", "FLOPs", "note")


def _cells(row: PlanRow, total: int) -> list[str]:
    share = "unknown" if row.op in KERNELS else f"{100 * row.flops / total:.1f} %" if total else ""
    size = format_bytes(row.bytes_before)
    size = size if row.reason is not None else f"{size} -> {format_bytes(row.bytes_after)}"
    shapes = row.shapes if row.times == 1 else f"{row.times} x {row.shapes}"
    rule = "" if row.rule is None else str(row.rule)
    name = row.path or row.weight or "(top)"
    kinds = [row.fwd, row.dlhs, row.drhs, row.scales, row.lowering]
    return [name, row.op, shapes, rule, *kinds, size, share, row.reason or row.note or ""]


def plan(
    fn: Callable[..., Any], rules: Any, *args: Any, weights: Any = None, on_unmatched: str = "error", **kwargs: Any
) -> Plan:
    """What the rules do to each matmul of `fn(*args, **kwargs)`, without running it.

    Args:
        fn: A function, or what `quantized` returned.
        rules: As for `quantized`; None if `fn` is quantized already.
        *args: Its arguments; only their shapes are used.
        weights: Which arguments are weights, as for `quantized`.
        on_unmatched: "error" raises for a rule that matches nothing, or only what earlier rules match, and names the
            nearest paths; "warn" and "ignore" do not raise.
        **kwargs: Its keyword arguments.

    >>> import jax, jax.numpy as jnp, octavo
    >>> rule = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
    >>> x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    >>> w = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    >>> octavo.plan(lambda params, x: x @ params["out"]["w"], rule, {"out": {"w": w}}, x).rows[0].drhs
    'int8 x int8'
    """
    low = fn if isinstance(fn, Quantized) else quantized(fn, rules, weights=weights, on_unmatched="ignore")
    sites = low.sites(*args, **kwargs)
    return plan_of(sites, low.provider.rules, on_unmatched, low.residuals(*args, **kwargs))


def plan_of(
    sites: Sequence[Site],
    rules: Sequence[QuantizationRule],
    on_unmatched: str = "error",
    residuals: Sequence[Residuals] = (),
) -> Plan:
    """The plan of sites that are known already."""
    notes = unmatched_rules(sites, rules)
    if notes and on_unmatched == "error":
        raise ValueError("\n".join(notes))
    if on_unmatched == "warn":
        for note in notes:
            warnings.warn(note, stacklevel=3)
    numbers = {id(rule): number for number, rule in enumerate(rules)}
    rows = [make_row(site, numbers.get(id(site.rule))) for site in sites]
    return Plan(rows, rules, notes, residuals=residuals)


def unmatched_rules(sites: Sequence[Site], rules: Sequence[QuantizationRule]) -> list[str]:
    """A line for every rule that matches nothing, or only matmuls that earlier rules match."""
    used = {id(site.rule) for site in sites}
    notes = []
    for number, rule in enumerate(rules):
        if id(rule) in used or rule.optional:
            continue
        met = [s for s in sites if any(rule.matches(p, s.op, weights=any(s.weights)) for p in s.rule_paths)]
        names = sorted({path for s in sites for path in s.rule_paths})
        first = next((s.rule for s in met if s.rule is not None), None)
        if first is not None:
            taken = next(n for n, r in enumerate(rules) if r is first)
            why = f"is shadowed: rule {taken} comes first and takes all {len(met)} matmuls that it matches"
        elif met and all(s.opaque for s in met):
            why = f"matches only matmuls that are not rewritten, {len(met)} of them ({met[0].reason})"
            why += "; inside_custom=True rewrites custom_jvp and custom_vjp functions" * (not rule.inside_custom)
        elif met:
            why = f"matches only matmuls with configs of their own, {len(met)} of them, to which rules do not apply"
        else:
            near = nearest(rule.module_path, names)
            hint = f"; the nearest paths are {', '.join(map(repr, near))}" if near else ""
            elsewhere = sorted({s.op for s in sites})
            wanted = f" with op_names={rule.op_names} (there are {', '.join(elsewhere)})" if rule.op_names else ""
            why = f"matches nothing: module_path={rule.module_path!r}{wanted}{hint}"
        notes.append(f"rule {number} {why}")
    return notes


_STEP = re.compile(r"\['((?:[^'\\]|\\.)*)'\]|\[(\d+)\]|\.?(\w+)")


def weights_of_arguments(arguments: Iterable[str], weights: Iterable[str]) -> dict[str, str]:
    """Which arguments of a compiled program are which weights, by name.

    All weights are below one argument, such as `state.params`: that with the most matches, so that the end of another
    name is not taken for a weight. The arrays of a QArray belong to one weight.

    >>> weights_of_arguments(["state.params['up']['w']", "state.params['down'].qvalue", "rows"], ["up/w", "down"])
    {"state.params['up']['w']": 'up/w', "state.params['down'].qvalue": 'down'}
    """
    wanted = {tuple(weight.split("/")): weight for weight in weights}
    roots: dict[tuple[str, ...], dict[str, str]] = {}
    for argument in arguments:
        steps = tuple("/".join(map("".join, _STEP.findall(argument))).split("/"))
        for path in (steps, steps[:-1]):
            for begin in range(len(path)):
                if path[begin:] in wanted:
                    roots.setdefault(path[:begin], {})[argument] = wanted[path[begin:]]
    return max(roots.values(), key=len, default={})
