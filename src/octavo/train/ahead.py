"""A train step for devices that are not here: lowered for their platform, cut into parts for as many, and looked at.

XLA cuts a program into parts in the same way on every backend, so host devices stand for the others. Each precision is
looked at in a process of its own, since the number of host devices is fixed when a process first uses JAX.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from octavo.train.chips import Topology, topology
from octavo.train.config import Config
from octavo.train.keys import ConfigError, Problem

FLOAT = "float"
# Code that is never run need not be optimized; what is read is decided before.
_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_REPLICATED = "Involuntary full rematerialization"


class AheadError(RuntimeError):
    """A step that could not be looked at."""


@dataclasses.dataclass(frozen=True)
class Look:
    """What a step is on one of the devices, as plain values: bytes, FLOPs, seconds.

    `even` are the FLOPs of a device if no two did the same, and `low` the shares of all FLOPs in low precision.
    `replicated` counts arrays that XLA could only lay out anew by giving each device a whole copy.
    """

    name: str
    dtype: str
    mesh: str
    parameters: int
    rows: int
    tokens: int
    held: dict[str, int]
    temporaries: int
    flops: dict[str, int]
    memory_traffic: int
    traffic: dict[str, Any]
    largest: list[dict[str, Any]]
    seconds: dict[str, float] | None
    low: dict[str, float]
    even: float
    matmuls: list[dict[str, Any]]
    lowered: list[dict[str, Any]]
    notes: list[str]
    took: float
    replicated: int = 0


def sides(config: Config) -> dict[str, Config]:
    """The configuration in float and, if it has one, in its own precision, by name."""
    rules = config.quantization_rules_path
    name = config.quantization or (Path(rules).stem if rules else "")
    plain = config.replace(quantization="", quantization_rules_path="")
    return {FLOAT: plain, name: config} if name else {FLOAT: plain}


def look_ahead(config: Config, where: Topology) -> Iterator[Look]:
    """Look at a configuration in float and in its precision, as each is done.

    Raises a `ConfigError` for what `octavo train` would refuse on these devices.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        running = {}
        for name, side in sides(config).items():
            running[name] = _Child(name, side, where, Path(folder))
            stack.callback(running[name].stop)
        for child in running.values():
            yield child.result()


class _Child:
    """One precision in a process of its own."""

    def __init__(self, name: str, config: Config, where: Topology, folder: Path):
        self.name, self.out, self.log, self.dump = name, folder / f"{name}.out", folder / f"{name}.log", folder / name
        self.dump.mkdir()
        asked = {"name": name, "config": dataclasses.asdict(config), "topology": str(where)}
        self.asked = asked | {"out": str(self.out), "dump": str(self.dump)}
        self.request = folder / f"{name}.json"
        flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_OWN)]
        count = f"--xla_force_host_platform_device_count={where.devices}"
        self.environment = os.environ | {"XLA_FLAGS": " ".join([*flags, _FLAGS, count]), "JAX_PLATFORMS": "cpu"}
        self.environment.pop("JAX_NUM_CPU_DEVICES", None)
        self.start(crashed=False)

    def start(self, *, crashed: bool) -> None:
        """Begin; `crashed` is for the second time, after the compiler took the process down with it."""
        self.request.write_text(json.dumps(self.asked | {"crashed": crashed}), encoding="utf-8")
        command = [sys.executable, "-m", "octavo.train.ahead", str(self.request)]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=subprocess.STDOUT)

    def result(self) -> Look:
        """What it found, once it is done."""
        from octavo.hlo.collectives import partitioned_text

        status = self.process.wait()
        if status < 0 and partitioned_text(self.dump) is not None:
            self.start(crashed=True)
            status = self.process.wait()
        found = json.loads(self.out.read_text(encoding="utf-8")) if self.out.exists() else {}
        if "problems" in found:
            raise ConfigError([Problem((), text) for text in found["problems"]])
        log = self.log.read_text(encoding="utf-8", errors="replace")
        if status or "look" not in found:
            tail = "\n".join(log.strip().splitlines()[-15:])
            raise AheadError(f"the step in {self.name} could not be compiled (status {status}):\n{tail}")
        return dataclasses.replace(Look(**found["look"]), replicated=log.count(_REPLICATED))

    def stop(self) -> None:
        """End it, if it is not."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


_OWN = ("--xla_force_host_platform_device_count", "--xla_backend_optimization_level")


def look(name: str, config: Config, where: Topology, *, dump: str | None = None, crashed: bool = False) -> Look:
    """Look at a configuration as it is, with the host devices of this process in the place of others.

    XLA's texts go to the directory `dump`; after a compilation that `crashed`, they are taken from there.
    """
    from octavo.data import make_dataset
    from octavo.hlo import text as hlo
    from octavo.hlo.collectives import compile_partitioned, partitioned_text, read_traffic
    from octavo.hlo.work import products
    from octavo.train.mesh import make_mesh, sizes_of
    from octavo.train.roofline import estimate, flops_by_type, memory_bytes
    from octavo.train.setup import Setup

    begin = time.perf_counter()
    mesh = make_mesh(config, _devices(where.devices))
    vocabulary = config.vocab_size or make_dataset(config, "train", batch_size=1).vocab_size
    setup = Setup(config, mesh, vocab_size=vocabulary)
    step = setup.quantized_step
    lowered = setup.program("train", step).trace(setup.state, setup.batch)
    lowered = lowered.lower(lowering_platforms=(where.chip.platform,))
    before = partitioned_text(dump) if dump and crashed else None
    text, compiled = (before, AheadError("it crashed")) if before else compile_partitioned(lowered, dump)
    module = hlo.read(text)
    traffic, work = read_traffic(module), products(module)
    if where.chip.platform != "cpu":
        traffic = traffic.scattered()
    held, verified = _held(setup), setup.verify()
    times = estimate(work, traffic, sum(held.values()), where.chip)
    temporaries, notes = _temporaries(compiled, module)
    return Look(
        name=name,
        dtype=config.dtype,
        mesh=str(sizes_of(config, mesh.size)),
        parameters=sum(leaf.size for leaf in _leaves(setup.state.params)),
        rows=setup.rows,
        tokens=setup.rows * config.max_target_length,
        held=held,
        temporaries=temporaries,
        flops=flops_by_type(work),
        memory_traffic=memory_bytes(work, traffic, sum(held.values())),
        traffic=traffic.to_dict(),
        largest=_largest(traffic),
        seconds=None if times is None else dataclasses.asdict(times),
        low={"forward": verified.forward, "backward": verified.backward},
        even=verified.flops() / mesh.size,
        matmuls=_matmuls(setup),
        lowered=multiplied(lowered.as_text()),
        notes=[*notes, *(f"counted once, unknown trip count: {loop}" for loop in traffic.unknown_loops)],
        took=time.perf_counter() - begin,
    )


def _largest(traffic: Any) -> list[dict[str, Any]]:
    """The collectives that send most, alike ones together."""
    found: dict[tuple[Any, ...], Any] = {}
    for c in traffic.collectives:
        key = (c.kind, c.dtype, c.shape, c.group_size)
        if (old := found.get(key)) is not None:
            weights = tuple(dict.fromkeys((*old.weights, *c.weights)))
            c = dataclasses.replace(old, count=old.count + c.count, weights=weights)
        found[key] = c
    most = sorted(found.values(), key=lambda c: -c.total)[:5]
    return [dataclasses.asdict(c) | {"shape": list(c.shape), "total": c.total} for c in most]


def _devices(count: int) -> Sequence[Any]:
    import jax

    found = jax.devices("cpu")
    if len(found) < count:
        raise AheadError(f"{count} host devices are needed to stand for others, and there are {len(found)}")
    return found[:count]


def _leaves(tree: Any) -> list[Any]:
    import jax

    return jax.tree.leaves(tree)


def _held(setup: Any) -> dict[str, int]:
    """The bytes of the state on one device, by part of the state."""
    import jax
    import numpy as np

    found: dict[str, int] = {}
    shapes = jax.tree_util.tree_leaves_with_path(setup.state)
    for (path, leaf), where in zip(shapes, jax.tree.leaves(setup.shardings), strict=True):
        part = jax.tree_util.keystr(path[:1], simple=True)
        size = int(np.prod(where.shard_shape(leaf.shape), dtype=np.int64)) * leaf.dtype.itemsize
        found[part] = found.get(part, 0) + size
    return {part: size for part, size in found.items() if size > 64}


def _temporaries(compiled: Any, module: Any) -> tuple[int, list[str]]:
    """The bytes of a device beside its state: as this machine's compiler lays them out, or else as an estimate."""
    from octavo.hlo.live import peak_bytes

    stats = None if isinstance(compiled, Exception) else compiled.memory_analysis()
    if stats is not None:
        return stats.temp_size_in_bytes, []
    reason = str(compiled).split("\n")[0].partition(". ")[0][:160]
    return peak_bytes(module), [f"temporaries are estimated, since the compiler of this machine stopped: {reason}"]


def _matmuls(setup: Any) -> list[dict[str, Any]]:
    """Each multiplication of the loss with the types of its three products."""
    plan = setup.plan()
    fields = ("path", "weight", "op", "shapes", "times", "fwd", "dlhs", "drhs", "scales", "flops", "reason")
    return [{name: getattr(row, name) for name in fields} for row in plan.rows]


def multiplied(text: str) -> list[dict[str, Any]]:
    """How often each type is multiplied in a StableHLO text, as written there.

    >>> multiplied("%0 = stablehlo.dot_general %a, %b : (tensor<8x4xi8>, tensor<4x2xi8>) -> tensor<8x2xi32>")
    [{'op': 'dot_general', 'lhs': 'i8', 'rhs': 'i8', 'out': 'i32', 'count': 1}]
    """
    from octavo.inspect.verify import read_stablehlo

    found: dict[tuple[str, ...], int] = {}
    for row in read_stablehlo(text):
        key = (row.op, *(tensor.split("x")[-1] for tensor in (row.lhs, row.rhs, row.out)))
        found[key] = found.get(key, 0) + row.count
    return [dict(zip(("op", "lhs", "rhs", "out", "count"), (*key, n), strict=True)) for key, n in found.items()]


def _main(request: str) -> int:
    asked = json.loads(Path(request).read_text(encoding="utf-8"))
    out = Path(asked["out"])
    try:
        where, more = topology(asked["topology"]), {"dump": asked["dump"], "crashed": asked["crashed"]}
        found = look(asked["name"], Config(**asked["config"]), where, **more)
    except ConfigError as error:
        out.write_text(json.dumps({"problems": [problem.text for problem in error.problems]}), encoding="utf-8")
        return 2
    out.write_text(json.dumps({"look": dataclasses.asdict(found)}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
