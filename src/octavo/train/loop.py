"""A run: a trainer with a directory, checkpoints, metrics, signals and an end."""

import functools
import importlib
import json
import math
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import jax

from octavo.checkpoint import CheckpointManager, CheckpointWarning
from octavo.hlo import read_communication
from octavo.train import distributed
from octavo.train.bounds import clipping, proposal, propose
from octavo.train.config import Config
from octavo.train.directory import Say, describe, keep_config, keep_plan
from octavo.train.halt import HaltedError, explain
from octavo.train.metrics import MetricWriter, NoMetrics
from octavo.train.outcome import DONE, INTERRUPTED, TARGET, TERMINATED, Outcome, complete_text, ended, reached
from octavo.train.progress import Progress, eval_line
from octavo.train.setup import STOP
from octavo.train.state import is_reset_on_remesh
from octavo.train.stop import Stop, stopping
from octavo.train.telemetry import Telemetry
from octavo.train.trainer import Trainer


def train(config: Config, *, say: Say | None = None) -> Outcome:
    """Train in the run's directory until the end, a target or a signal; the same directory goes on where it was left.

    SIGTERM and Ctrl-C end the run after the step that is under way, with a checkpoint. A loss or a gradient that is not
    finite raises `HaltedError`, and a checkpoint that cannot be written `CheckpointError`; what was saved before stays.
    """
    began, tell = time.perf_counter(), say or functools.partial(print, flush=True)
    if not (first := distributed.is_first()):
        say = tell = _silent
    directory = Path(config.run_directory)
    if config.enable_checkpointing:
        # Only the first save would find out that it is missing.
        importlib.import_module("orbax.checkpoint")
    with CheckpointManager(
        directory / "checkpoints",
        max_to_keep=config.max_num_checkpoints_to_keep,
        keep_period=config.keep_period,
        asynchronous=config.async_checkpointing,
    ) as checkpoints:
        _check_empty(config, checkpoints)
        trainer = Trainer(config)
        past = _restore(trainer, checkpoints, tell)
        outcome = ended(config, trainer.now, past)
        if outcome is not None:
            tell(complete_text(outcome, config))
        else:
            if first:
                keep_config(config, directory, tell)
                describe(trainer, directory, tell)
            if config.calibration and trainer.rules:
                tell(proposal(propose(trainer)))
            writer = _writer(config, trainer.now) if first else NoMetrics()
            bar = Progress(config.steps, log_period=config.log_period, say=say)
            with writer, bar as progress, stopping() as stop:
                loop = _Loop(trainer, checkpoints, writer, progress, began, past)
                try:
                    outcome = loop.run(stop)
                except jax.errors.JaxRuntimeError as error:
                    if not distributed.several():
                        raise
                    raise distributed.lost(trainer.now, loop.saved, error) from error
        if outcome.complete:
            _save_quantized(trainer, tell)
    return outcome


def _writer(config: Config, start_step: int) -> MetricWriter:
    return MetricWriter(
        config.run_directory,
        run_name=config.run_name,
        tensorboard=config.enable_tensorboard,
        extra_file=config.metrics_file,
        start_step=start_step,
    )


def _silent(_: str) -> None:
    """Process 0 speaks for all."""


def _check_empty(config: Config, checkpoints: CheckpointManager) -> None:
    if not config.enable_checkpointing and (steps := checkpoints.all_steps()):
        raise ValueError(
            f"{checkpoints.directory} has a checkpoint of step {steps[-1]}, and enable_checkpointing=false would begin "
            "anew over the metrics of that run: choose another run_name, or leave checkpoints enabled to go on"
        )


def _restore(trainer: Trainer, checkpoints: CheckpointManager, say: Say) -> dict[str, Any]:
    """Go on from the newest whole checkpoint, if there is one; what was saved beside its state."""
    if not trainer.config.enable_checkpointing:
        return {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        found = checkpoints.restore(trainer.state, reinit=is_reset_on_remesh)
    for warning in caught:
        say(f"warning: {warning.message}")
    if found is None:
        return {}
    trainer.resume(found.state)
    say(f"resuming at step {found.step} of {trainer.config.steps}")
    data = json.loads(json.dumps(trainer.data.describe()))
    before = found.extra.get("data", data)
    if changed := [name for name in {**before, **data} if before.get(name) != data.get(name)]:
        say(f"warning: the data is not what it was, so the run will not go on as it would have: {', '.join(changed)}")
    return found.extra


class _Loop:
    """The steps of a run, with what happens between them."""

    def __init__(
        self,
        trainer: Trainer,
        checkpoints: CheckpointManager,
        writer: MetricWriter | NoMetrics,
        progress: Progress,
        began: float,
        past: dict[str, Any],
    ):
        self.trainer, self.config, self.checkpoints = trainer, trainer.config, checkpoints
        self.writer, self.progress, self.telemetry = writer, progress, Telemetry(trainer)
        self.tokens = trainer.setup.rows * self.config.max_target_length / trainer.devices
        self.memory: int | None = None
        # When the run would have begun had it never been left, and how long its steps took.
        self.began, self.training = began - past.get("seconds", 0.0), past.get("training_seconds", 0.0)
        self.loss, self.eval_loss = past.get("loss"), past.get("eval_loss")
        self.saved = trainer.now if past else None
        self.pending: tuple[int, Any] | None = None
        # Several processes stop when a step says that one was asked to; alone, when the signal is there.
        self.several = distributed.several()
        self.stopped: signal.Signals | None = None
        self.last = time.perf_counter()

    def run(self, stop: Stop) -> Outcome:
        """Train until something ends it."""
        config, trainer = self.config, self.trainer
        stage, reason = None, DONE
        for step in range(trainer.now, config.steps):
            if (next_stage := trainer.schedule.stage(step)) != stage:
                stage = next_stage
                self.report()
                self.compile(step)
            metrics = self.step(stop)
            # Metrics are read one step late, so that a device never waits for the host.
            self.report()
            self.pending = (step, metrics)
            if self.due(step):
                self.report()
                self.pause(step)
            if reached(config, self.eval_loss):
                reason = TARGET
            elif (by := self.stopped if self.several else stop.by) is not None and step + 1 < config.steps:
                self.progress.say(f"{by.name}: stopping after step {step}")
                reason = INTERRUPTED if by == signal.SIGINT else TERMINATED
            if reason != DONE:
                break
        self.report()
        if self.saved != trainer.now:
            self.save()
        self.checkpoints.wait_until_finished()
        return Outcome(trainer.now, reason, self.loss, self.eval_loss)

    def step(self, stop: Stop) -> Any:
        return self.trainer.step(stop.by)

    def compile(self, step: int) -> None:
        """Compile the step of a stage before it is timed."""
        started = time.perf_counter()
        program = self.trainer.compiled("train", step)
        sizes = program.memory_analysis()
        self.last = time.perf_counter()
        text = f"compiled in {self.last - started:.1f} seconds"
        if sizes is not None:
            held, temporary = sizes.argument_size_in_bytes, sizes.temp_size_in_bytes
            self.memory = held + temporary
            text += f"; memory: {held / 2**20:.1f} MiB of state and batch, {temporary / 2**20:.1f} MiB temporary"
        self.progress.say(text)
        if self.trainer.devices > 1:
            traffic, schedule = read_communication(program.as_text()), self.trainer.schedule
            self.progress.say(f"in a step, {traffic.line()}")
            if schedule.stages[schedule.stage(step)][1] and distributed.is_first():
                keep_plan(self.trainer.plan().with_communication(traffic), Path(self.config.run_directory))
            self.last = time.perf_counter()

    def report(self) -> None:
        """Read, write and show the metrics of the step before, if that has not been done."""
        if self.pending is None:
            return
        (step, metrics), self.pending = self.pending, None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if number := int(values.pop(STOP, 0)):
            self.stopped = signal.Signals(number)
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        if values.pop("halted"):
            self.checkpoints.wait_until_finished()
            raise HaltedError(
                explain(self.trainer, step, self.checkpoints.latest_step(), Path(self.config.run_directory))
            )
        for name, used in (("z_loss", self.config.z_loss_multiplier), ("moe_lb_loss", self.config.num_experts > 1)):
            if not used:
                del values[f"learning/{name}"]
        tflops = self.trainer.flops / self.trainer.devices / 1e12
        values["learning/perplexity"] = _exp(values["learning/lm_loss"])
        values["perf/step_time_seconds"] = seconds
        values["perf/per_device_tokens"] = self.tokens
        values["perf/per_device_tokens_per_sec"] = self.tokens / seconds
        values["perf/per_device_tflops"] = tflops
        values["perf/per_device_tflops_per_sec"] = tflops / seconds
        if self.memory is not None:
            values["perf/memory_bytes"] = self.memory
        self.training += seconds
        self.loss = values["learning/loss"]
        self.writer.write(step, values)
        self.progress.update(step, values)

    def due(self, step: int) -> bool:
        """Whether something happens after a step that takes time of its own."""
        done = step + 1
        return self.telemetry.due(step) or self.evaluates(done) or done % self.config.checkpoint_period == 0

    def evaluates(self, done: int) -> bool:
        return self.config.eval_interval > 0 and done % self.config.eval_interval == 0

    def pause(self, step: int) -> None:
        """Measure, evaluate and save, whichever is due; no step's time includes it."""
        if self.telemetry.due(step):
            self.measure(step)
        if self.evaluates(step + 1):
            self.evaluate(step)
        if (step + 1) % self.config.checkpoint_period == 0:
            self.save()
        self.last = time.perf_counter()

    def measure(self, step: int) -> None:
        started = time.perf_counter()
        found = self.telemetry.measure(step)
        self.writer.write_telemetry(step, found)
        ratios = [f"{name} {row['sqnr_db']:.1f} dB" for name, row in found.items() if name != "sites"]
        self.progress.say(
            f"signal to quantization noise after step {step}: {', '.join(ratios)} "
            f"(measured in {time.perf_counter() - started:.1f} seconds)"
        )
        for text in clipping(found):
            self.progress.say(text)

    def evaluate(self, step: int) -> None:
        self.eval_loss = loss = self.trainer.evaluate()
        seconds = time.perf_counter() - self.began
        values = {"eval/avg_loss": loss, "eval/avg_perplexity": _exp(loss), "eval/seconds": seconds}
        self.writer.write(step, {**values, "eval/training_seconds": self.training})
        self.progress.say(eval_line(step, values))
        if reached(self.config, loss):
            at = f"target_eval_loss={self.config.target_eval_loss:g} reached after {step + 1} steps"
            self.progress.say(f"{at}: {self.training:.1f} seconds of training, {seconds:.1f} in all")

    def save(self) -> None:
        if not self.config.enable_checkpointing:
            return
        extra = {
            "seconds": time.perf_counter() - self.began,
            "training_seconds": self.training,
            "loss": self.loss,
            "eval_loss": self.eval_loss,
            "data": self.trainer.data.describe(),
            "config": self.config.to_dict(),
        }
        self.checkpoints.save(self.trainer.now, self.trainer.state, extra)
        self.saved = self.trainer.now


def _save_quantized(trainer: Trainer, say: Say) -> None:
    path = trainer.config.save_quantized_params_path
    if not path:
        return
    params = trainer.quantized_params()
    before, after = (sum(x.nbytes for x in jax.tree.leaves(p)) for p in (trainer.state.params, params))
    with CheckpointManager(Path(path), asynchronous=False) as there:
        there.save(trainer.now, {"params": params}, {"config": trainer.config.to_dict()}, force=True)
    say(f"quantized parameters: {before / 2**20:.1f} MiB -> {after / 2**20:.1f} MiB, in {path}")


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))
