"""`octavo compile`: what a training step will be on devices that are not here.

Exit status 0: looked at; 1: it could not be compiled; 2: the topology or the configuration is wrong.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.train.ahead import Look
    from octavo.train.chips import Topology
    from octavo.train.config import Config

_HELP = """usage: octavo compile [CONFIG.yml] topology=PLATFORM:CHIP-N [key=value ...] [--json FILE]

Lowers the train step of a configuration for N devices that need not be here, cuts it into their parts, and prints what
one of them will do, in float and in the precision of the configuration side by side: the types of each matmul, memory,
bytes sent, and an estimate of the time of a step. Nothing is allocated or run. Large models take a minute or two.

  topology=tpu:v5e-256    the devices: tpu:v5e-N, tpu:v5p-N, tpu:v6e-N, tpu:7x-N, cuda:a100-N, cuda:h100-N, cuda:h200-N,
                          cuda:b200-N, cuda:N (h100), cpu:N
  key=value               everything that `octavo train --help` lists: model_name=llama-1b quantization=int8 ...
  --json FILE             write all of it as JSON too

Example: octavo compile topology=tpu:v5e-256 model_name=llama-1b quantization=int8 max_target_length=2048
Exit status 2: the topology or the configuration is wrong, as `octavo train` would find it on these devices.
"""
FAILED, USAGE, INTERRUPTED = 1, 2, 130
_REDUNDANT = 1.5  # recomputation is in both; what remains is work that devices do twice


def run(argv: Sequence[str]) -> int:
    """Look ahead as the arguments say, and return the exit status."""
    if any(word in ("-h", "--help", "help") for word in argv):
        print(_HELP, end="")
        return 0
    from octavo.train.ahead import AheadError
    from octavo.train.config import ConfigError

    try:
        return _compile(*_asked(argv))
    except (ConfigError, OSError, ValueError) as error:
        return _fail(str(error), USAGE)
    except AheadError as error:
        return _fail(str(error), FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)


def _asked(argv: Sequence[str]) -> "tuple[Config, Topology, str]":
    from octavo.train.chips import topology
    from octavo.train.config import ConfigError
    from octavo.train.quantization import schedule_of
    from octavo.train.sources import load

    words, where, out = list(argv), None, ""
    if "--json" in words:
        at = words.index("--json")
        if at + 1 == len(words):
            raise ConfigError(["--json FILE: the file is missing"])
        out = words[at + 1]
        del words[at : at + 2]
    for word in [word for word in words if word.startswith("topology=")]:
        where = topology(word.partition("=")[2])
        words.remove(word)
    if where is None:
        raise ConfigError(["topology is missing: topology=tpu:v5e-256, for example; octavo compile --help lists them"])
    config, sources = load(words)
    schedule_of(config)
    for note in sources.notes:
        print(f"note: {note}")
    return config, where, out


def _compile(config: "Config", where: "Topology", out: str) -> int:
    from octavo.train.ahead import look_ahead, sides

    names = " and ".join(sides(config))
    print(f"Compiling the step in {names} for {where}; this takes a minute or two for large models.", flush=True)
    begin, looks = time.perf_counter(), []
    for look in look_ahead(config, where):
        looks.append(look)
        print(f"{look.name}: done after {time.perf_counter() - begin:.0f} s", flush=True)
    if out:
        found = {"topology": str(where), "chip": dataclasses.asdict(where.chip), "model_name": config.model_name}
        found |= {"looks": [dataclasses.asdict(look) for look in looks]}
        Path(out).write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(render(looks, where, config.model_name))
    if len(looks) == 1:
        print("Next: the same with quantization=int8 beside it")
    return 0


# The report.


def render(looks: "Sequence[Look]", where: "Topology", model: str = "") -> str:
    """The report of a step in one precision or more."""
    last = looks[-1]
    title = f"{model or 'model'} on {where}: {last.parameters:,} parameters, mesh {last.mesh}, "
    title += f"{last.rows} rows with {last.tokens:,} tokens a step"
    low = f"low precision: {100 * last.low['forward']:.1f} % of matmul FLOPs forward, "
    low += f"{100 * last.low['backward']:.1f} % backward"
    parts = ["", title, "", _matmuls(last), low, "", _stablehlo(last, where), "", _table(looks, where), ""]
    parts += [f"most sent in {last.name}: {_collective(c)}" for c in last.largest[:3] if c["total"]]
    return "\n".join([*parts, *_notes(looks, where)])


def _matmuls(look: "Look") -> str:
    rows = [("matmul", "shapes", "times", "fwd", "dlhs", "drhs")]
    for m in look.matmuls:
        kinds = (m["fwd"], m["dlhs"] or m["fwd"], m["drhs"] or m["fwd"])
        rows.append((m["path"] or m["weight"] or "(top)", m["shapes"], str(m["times"]), *kinds))
    return _aligned(rows)


def _stablehlo(look: "Look", where: "Topology") -> str:
    found = [f"{m['count']} x {m['op']} {m['lhs']} x {m['rhs']} -> {m['out']}" for m in look.lowered]
    return "\n".join(f"StableHLO for {where.chip.platform}, as written, loop bodies once: {text}" for text in found)


def _table(looks: "Sequence[Look]", where: "Topology") -> str:
    chip = where.chip
    heads = [look.dtype if look.name == "float" else look.name for look in looks]
    rows: list[tuple[str, ...]] = [("on each device", *heads, *(["ratio"] if len(looks) > 1 else []))]

    def add(label: str, of: Callable[[Any], int | float | None], shown: Callable[[int | float], str]) -> None:
        values = [of(look) for look in looks]
        if any(values):
            first, last = values[0], values[-1]
            ratio = f"{last / first:.2f}" if len(values) > 1 and first and last and last < 100 * first else ""
            rows.append((label, *(_DASH if v is None else shown(v) for v in values), *([ratio] if ratio else [])))

    for part, label in (("params", "parameters"), ("opt_state", "optimizer"), ("quant", "ranges and histories")):
        add(label, lambda look, part=part: look.held.get(part), _size)
    add("temporaries", lambda look: look.temporaries, _size)
    of = f", of {_size(chip.memory)}" if chip.memory else ""
    add(f"memory{of}", _memory, _size)
    add("matmul FLOPs", lambda look: sum(look.flops.values()), _flops)
    for types in dict.fromkeys(name for look in looks for name in look.flops):
        add(f"  {types}", lambda look, types=types: look.flops.get(types, 0), _flops)
    add("through memory", lambda look: look.memory_traffic, _size)
    add("sent", lambda look: look.traffic["total"], _size)
    for kind in dict.fromkeys(name for look in looks for name in look.traffic["by_kind"]):
        add(f"  {kind}", lambda look, kind=kind: look.traffic["by_kind"].get(kind, 0), _size)
    add("  of it weights", lambda look: look.traffic["weights"], _size)
    for part in ("compute", "memory", "network"):
        add(f"time for {part}", lambda look, part=part: _times(look).get(part), _seconds)
    add("step, if all overlaps", lambda look: max(_times(look).values(), default=None), _seconds)
    add("step, if nothing does", lambda look: sum(_times(look).values()) or None, _seconds)
    add(
        "tokens/s, all devices", lambda look: look.tokens / max(_times(look).values()) if _times(look) else None, _count
    )
    return _aligned(rows)


def _memory(look: "Look") -> int:
    return sum(look.held.values()) + look.temporaries


def _times(look: "Look") -> dict[str, float]:
    return look.seconds or {}


def _rate(look: "Look") -> float | None:
    return look.tokens / max(look.seconds.values()) if look.seconds else None


def _notes(looks: "Sequence[Look]", where: "Topology") -> list[str]:
    notes = list(dict.fromkeys(note for look in looks for note in look.notes))
    for look in looks:
        used = _memory(look)
        if where.chip.memory and used > where.chip.memory:
            notes.append(f"{look.name} does not fit: {_size(used)} of {_size(where.chip.memory)} on each device")
        times = sum(look.flops.values()) / look.even if look.even else 1
        if times > _REDUNDANT:
            why = "the mesh has axes along which its products are not cut"
            notes.append(f"{look.name}: a device multiplies {times:.1f} times its even share, so {why}")
        if look.replicated:
            copies = f"a whole copy of {look.replicated} arrays, to cut them anew"
            notes.append(f"{look.name}: XLA gives every device {copies}")
    if where.chip.note:
        notes.append(f"{where.chip.name}: {where.chip.note}")
    if any(look.seconds for look in looks):
        notes.append("times are estimates from published peak rates, which no real step reaches")
    return [f"note: {note}" for note in notes]


def _collective(c: dict[str, Any]) -> str:
    shape = f"{c['dtype']}[{','.join(map(str, c['shape']))}]"
    return f"{_size(c['total'])} by {c['count']} x {c['kind']} {shape} among {c['group_size']}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    full = max(map(len, rows))
    padded = [[*row, *[""] * (full - len(row))] for row in rows]
    widths = [max(map(len, column)) for column in zip(*padded, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in padded)


_DASH = "–"  # noqa: RUF001


def _scaled(value: int | float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if value < 1000:
            return f"{value:.3g} {unit}".rstrip()
        value /= 1000
    return f"{value:.3g} {units[-1]}" if value < 1000 else f"{value:,.0f} {units[-1]}"


def _size(value: int | float) -> str:
    return _scaled(value, ("B", "kB", "MB", "GB", "TB"))


def _flops(value: int | float) -> str:
    return _scaled(value, ("", "k", "M", "G", "T", "P"))


def _count(value: int | float) -> str:
    return _scaled(value, ("", "k", "M", "G"))


def _seconds(value: int | float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _fail(message: str, status: int) -> int:
    print(f"octavo compile: {message}", file=sys.stderr)
    return status
