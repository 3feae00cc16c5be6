"""Paired runs: the same seeds and batches in float and in each recipe, steps interleaved."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from octavo._io import atomic_write
from octavo._text import format_table
from octavo.checkpoint import CheckpointManager
from octavo.train.config import Config
from octavo.train.halt import StopSignal, stop_signals
from octavo.train.paired import block_gaps, interval, interval_by_batch, mean_curve, steps_to, target_of
from octavo.train.telemetry import Telemetry, worst_weights
from octavo.train.trainer import Trainer

FLOAT = "float"


@dataclasses.dataclass
class Result:
    """The result of one run: losses as [step, loss], seconds of each step, memory, and the share of quantized FLOPs.

    `float_seconds` are those of the float run whose steps were interleaved with these: only times of one process
    compare. The first seed of a recipe also has the plan, the telemetry at the end, and histograms of the weights with
    the lowest signal to noise.
    """

    name: str
    seed: int
    memory_bytes: int
    state_bytes: int
    forward_share: float
    backward_share: float
    share: float
    loss: list[list[Any]] = dataclasses.field(default_factory=list)
    eval_loss: list[list[Any]] = dataclasses.field(default_factory=list)
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    float_seconds: list[float] = dataclasses.field(default_factory=list)
    diverged: bool = False
    plan: dict[str, Any] | None = None
    telemetry: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    histograms: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def final_loss(self) -> float:
        """The loss on held-out text at the end."""
        return self.eval_loss[-1][1]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"final_loss": self.final_loss}


class StoppedError(Exception):
    """A signal ended a comparison before its last step.

    Args:
      seed: The seed whose runs were stopped.
      step: The number of steps that they have taken.
      by: The signal.
      run_name: The name by which the next comparison resumes from there; None if nothing is saved.
    """

    def __init__(self, seed: int, step: int, by: signal.Signals, *, run_name: str | None):
        self.by = by
        what = "Ctrl-C" if by == signal.SIGINT else by.name
        rest = f"saved; the same command with run_name={run_name} resumes"
        if run_name is None:
            rest = "not saved, because of enable_checkpointing=false"
        super().__init__(f"stopped by {what} after {step} steps of seed {seed}, {rest}")


@dataclasses.dataclass(frozen=True)
class Row:
    """A recipe against float: the loss, the relative gap with its 95 % interval, and ratios to float.

    `gap` is that of the held-out loss at the end, over seeds; `batch_gap` that of the training loss, over the batches
    of the last quarter of the steps. `target_steps` and `target_time` are the steps and the time to the held-out loss
    that float has after three quarters of its steps, as ratios to float's; NaN if a recipe does not reach it.
    """

    name: str
    loss: float
    gap: float
    gap_low: float
    gap_high: float
    step_ratio: float
    memory_ratio: float
    share: float
    batch_gap: float = math.nan
    batch_low: float = math.nan
    batch_high: float = math.nan
    target_steps: float = math.nan
    target_time: float = math.nan


class Comparison:
    """Runs in float and in recipes over seeds.

    Args:
      config: The configuration of all runs.
      recipes: Values of `quantization`.
      seeds: The number of seeds.
      eval_points: The number of evaluations of a run.
      directory: Keeps results, so that finished runs are not run again, and checkpoints of unfinished ones.
      fresh: Whether all runs are run again from their first step.
      log: Takes each line of the log.
    """

    def __init__(
        self,
        config: Config,
        recipes: Sequence[str],
        *,
        seeds: int = 1,
        eval_points: int = 10,
        directory: Path | None = None,
        fresh: bool = False,
        log: Callable[[str], None] = print,
    ):
        self.config, self.recipes, self.seeds = config, tuple(recipes), tuple(range(seeds))
        self.eval_points, self.directory, self.fresh, self.log = eval_points, directory, fresh, log
        self.results: list[Result] = []
        self._programs: dict[str, Any] = {}  # seeds are arguments of a step, so all of them run the same programs

    def run(self) -> list[Result]:
        """All runs, seed by seed; resumes a seed from its checkpoint.

        Raises:
          StoppedError: SIGTERM or Ctrl-C was received. The runs of this seed are saved.
        """
        with stop_signals() as stop:
            for seed in self.seeds:
                found = {name: self._load(name, seed) for name in (FLOAT, *self.recipes)}
                if missing := [name for name, known in found.items() if known is None]:
                    # Float is run again with the missing recipes: its losses are the same, and step times comparable.
                    names = tuple(dict.fromkeys([FLOAT, *missing]))
                    found |= {result.name: result for result in self._paired(names, seed, stop)}
                self.results += [result for result in found.values() if result is not None]
        return self.results

    def _config(self, name: str, seed: int) -> Config:
        precision = {"quantization": "", "quantization_rules_path": ""} if name == FLOAT else {"quantization": name}
        base = self.config.init_weights_seed
        return self.config.replace(init_weights_seed=base + seed, data_shuffle_seed=base + seed, **precision)

    def _paired(self, names: Sequence[str], seed: int, stop: StopSignal) -> list[Result]:
        """The runs of a seed, a step of each in turn."""
        self.log(f"seed {seed}: {', '.join(names)}")
        trainers = {name: Trainer(self._config(name, seed), programs=self._programs) for name in names}
        results = {name: _empty(name, seed, trainer) for name, trainer in trainers.items()}
        steps = self.config.steps
        with self._checkpoints(names, seed) as checkpoints:
            start = 0
            if checkpoints is not None:
                start, results = _restore(checkpoints, trainers, results)
            if start:
                self.log(f"resuming at step {start} of {steps}")
            for step in range(start, steps):
                self._round(step, trainers, results)
                if step + 1 == steps or (stop.by is None and (step + 1) % self.config.checkpoint_period):
                    continue
                if checkpoints is not None:
                    saved = {"results": {name: dataclasses.asdict(result) for name, result in results.items()}}
                    checkpoints.save(step + 1, {name: trainer.state for name, trainer in trainers.items()}, saved)
                if stop.by is not None:
                    run_name = None if checkpoints is None else self.config.run_name
                    raise StoppedError(seed, step + 1, stop.by, run_name=run_name)
        for name, trainer in trainers.items():
            if name != FLOAT and seed == self.seeds[0] and not results[name].diverged:
                results[name].plan = json.loads(trainer.plan().to_json())
                results[name].telemetry = [{"step": steps - 1, **Telemetry(trainer).measure(steps - 1)}]
                results[name].histograms = worst_weights(trainer)
        for result in results.values():
            result.float_seconds = results[FLOAT].step_seconds
            self._save(result)
        if self.directory is not None:
            shutil.rmtree(self._checkpoint_path(names, seed), ignore_errors=True)
        return list(results.values())

    def _round(self, step: int, trainers: dict[str, Trainer], results: dict[str, Result]) -> None:
        """One step of every run that has not diverged, and its evaluation where one is due."""
        every = max(1, self.config.steps // self.eval_points)
        is_due = (step + 1) % every == 0
        for name, trainer in trainers.items():
            result = results[name]
            if result.diverged:
                continue
            before = time.perf_counter()
            metrics = jax.block_until_ready(trainer.step())
            result.step_seconds.append(time.perf_counter() - before)
            result.loss.append([step, float(metrics["learning/lm_loss"])])
            if bool(metrics["halted"]):
                self.log(f"{name}: the loss of step {step} is not finite; this run ends here")
                result.eval_loss.append([step + 1, math.nan])
                result.diverged = True
            elif is_due or step + 1 == self.config.steps:
                result.eval_loss.append([step + 1, trainer.evaluate()])
        if is_due:
            seconds = {name: statistics.median(result.step_seconds) for name, result in results.items()}
            each = (f"{name} {result.final_loss:.4f} ({seconds[name]:.2f} s)" for name, result in results.items())
            self.log(f"step {step + 1} of {self.config.steps}: {', '.join(each)}")

    def _checkpoint_path(self, names: Sequence[str], seed: int) -> Path:
        assert self.directory is not None
        digests = "".join(self._digest(name, seed) for name in names)
        return self.directory / "checkpoints" / f"seed{seed}-{hashlib.sha256(digests.encode()).hexdigest()[:12]}"

    def _checkpoints(self, names: Sequence[str], seed: int) -> AbstractContextManager[CheckpointManager | None]:
        """The checkpoints of the runs of a seed; None where nothing is kept."""
        if self.directory is None or not self.config.enable_checkpointing:
            return contextlib.nullcontext()
        path = self._checkpoint_path(names, seed)
        if self.fresh:
            shutil.rmtree(path, ignore_errors=True)
        return CheckpointManager(path, max_to_keep=1, asynchronous=False)

    # Results on disk, by a digest of the configuration.

    def _path(self, name: str, seed: int) -> Path | None:
        if self.directory is None:
            return None
        return self.directory / "runs" / f"{name}-seed{seed}-{self._digest(name, seed)}.json"

    def _digest(self, name: str, seed: int) -> str:
        settings = self._config(name, seed).to_dict() | {"run_name": "", "base_output_directory": ""}
        return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:12]

    def _load(self, name: str, seed: int) -> Result | None:
        path = self._path(name, seed)
        if path is None or self.fresh or not path.exists():
            return None
        saved = json.loads(path.read_text(encoding="utf8"))
        saved.pop("final_loss")
        return Result(**saved)

    def _save(self, result: Result) -> None:
        path = self._path(result.name, result.seed)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, json.dumps(result.to_dict()))

    def table(self) -> list[Row]:
        """A row for float and for each recipe."""
        by_name = {name: [r for r in self.results if r.name == name] for name in (FLOAT, *self.recipes)}
        return [_row(name, runs, by_name[FLOAT]) for name, runs in by_name.items()]

    def to_dict(self) -> dict[str, Any]:
        """All of it, for a report or a program."""
        return {
            "steps": self.config.steps,
            "seeds": list(self.seeds),
            "runs": [result.to_dict() for result in self.results],
            "table": [dataclasses.asdict(row) for row in self.table()],
            "config": self.config.to_dict(),
            "versions": {name: importlib.metadata.version(name) for name in ("octavo", "jax", "flax", "optax")},
        }

    def __str__(self) -> str:
        head = ("recipe", "loss", "gap %", "95 % interval", "step time", "memory", "low-precision FLOPs")
        rows, paired = [head], [("recipe", "gap by batch %", "95 % interval", "steps to target", "time to target")]
        for row in self.table():
            ratio = f"{row.step_ratio:.2f}x"  # of float's, as on the page
            between, batches = _percents(row.gap_low, row.gap_high), _percents(row.batch_low, row.batch_high)
            if row.name == FLOAT:
                between, batches, ratio = "-", "-", "1"
            gap, memory, share = f"{100 * row.gap:+.2f}", f"{row.memory_ratio:.2f}x", f"{100 * row.share:.1f} %"
            rows.append((row.name, f"{row.loss:.4f}", gap, between, ratio, memory, share))
            target = (_or_dash(row.target_steps, "{:.2f}x"), _or_dash(row.target_time, "{:.2f}x"))
            paired.append((row.name, _or_dash(100 * row.batch_gap, "{:+.2f}"), batches, *target))
        both = [format_table(table) for table in (rows, paired)]
        return "\n\n".join("\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]]) for lines in both)


def _restore(
    checkpoints: CheckpointManager, trainers: dict[str, Trainer], results: dict[str, Result]
) -> tuple[int, dict[str, Result]]:
    """Resume all runs of a seed from the newest intact checkpoint; returns its step and the results until then."""
    found = checkpoints.restore({name: trainer.state for name, trainer in trainers.items()})
    if found is None:
        return 0, results
    for name, trainer in trainers.items():
        trainer.resume(found.state[name])
    return found.step, {name: Result(**saved) for name, saved in found.extra["results"].items()}


def _empty(name: str, seed: int, trainer: Any) -> Result:
    sizes = trainer.compiled("train", 0).memory_analysis()
    verification = trainer.verification
    return Result(
        name=name,
        seed=seed,
        memory_bytes=sizes.temp_size_in_bytes if sizes else 0,
        state_bytes=sizes.argument_size_in_bytes if sizes else 0,
        forward_share=verification.forward,
        backward_share=verification.backward,
        share=verification.share(),
    )


def _row(name: str, runs: list[Result], floats: list[Result]) -> Row:
    gaps = [(run.final_loss - base.final_loss) / base.final_loss for run, base in zip(runs, floats, strict=True)]
    # In each round the two steps ran one after the other, so the load of the machine hardly affects their ratio.
    # The first rounds are left out, because caches are cold.
    ratios = [a / b for run in runs for a, b in list(zip(run.step_seconds, run.float_seconds, strict=False))[2:]]
    low, high = interval(gaps)
    step_ratio = statistics.median(ratios) if ratios else math.nan
    blocks = [block_gaps(run.loss, base.loss) for run, base in zip(runs, floats, strict=True) if not run.diverged]
    batch_gap, batch_low, batch_high = interval_by_batch(blocks)
    curve, float_curve = mean_curve([run.eval_loss for run in runs]), mean_curve([run.eval_loss for run in floats])
    target = target_of(float_curve)
    target_steps = steps_to(curve, target) / steps_to(float_curve, target) if float_curve else math.nan
    return Row(
        name=name,
        loss=statistics.fmean(run.final_loss for run in runs),
        gap=statistics.fmean(gaps),
        gap_low=low,
        gap_high=high,
        step_ratio=step_ratio,
        memory_ratio=runs[0].memory_bytes / floats[0].memory_bytes if floats[0].memory_bytes else math.nan,
        share=runs[0].share,
        batch_gap=batch_gap,
        batch_low=batch_low,
        batch_high=batch_high,
        target_steps=target_steps,
        target_time=target_steps * step_ratio,
    )


def _percents(low: float, high: float) -> str:
    return "-" if math.isnan(low) else f"{100 * low:+.2f} .. {100 * high:+.2f}"


def _or_dash(value: float, text: str) -> str:
    return "-" if math.isnan(value) else text.format(value)
