"""A run: a trainer with a directory, checkpoints, metrics, telemetry, signals and stopping conditions.

`train` is the outline; `_Run` has the loop, and what happens between its steps; `directory` has the files.
"""

import dataclasses
import functools
import importlib
import math
import signal
import time
from collections.abc import Callable
from typing import Any

import jax

from octavo import _remote
from octavo.checkpoint import CheckpointError, CheckpointManager, PeerLostError
from octavo.hlo import read_communication
from octavo.rules import Schedule
from octavo.train import distributed
from octavo.train.config import Config
from octavo.train.directory import (
    Log,
    check_no_overwrite,
    describe,
    description,
    restore,
    save_adapter,
    save_quantized,
    write_config,
    write_plan,
)
from octavo.train.halt import HaltedError, StopSignal, explain_halt, stop_signals
from octavo.train.metrics import MetricWriter, import_wandb
from octavo.train.program import STOP
from octavo.train.progress import Progress, eval_line
from octavo.train.telemetry import Telemetry, format_bounds, largest_magnitudes, range_warnings
from octavo.train.trainer import Trainer

DONE, TARGET, TERMINATED, INTERRUPTED = "done", "target", "terminated", "interrupted"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Args:
      step: The number of steps taken.
      reason: "done", "target" (target_eval_loss is reached), "terminated" (by SIGTERM) or "interrupted" (by Ctrl-C).
      loss: The last training loss.
      eval_loss: The last evaluation loss.
    """

    step: int
    reason: str
    loss: float | None = None
    eval_loss: float | None = None

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to do."""
        return self.reason in (DONE, TARGET)


def train(config: Config, *, log: Log | None = None, mesh: Any = None, schedule: Schedule | None = None) -> Outcome:
    """Train in the run's directory until the end, a target or a signal; resumes from the newest checkpoint there.

    SIGTERM and Ctrl-C end the run after the current step, with a checkpoint.

    Args:
      config: The configuration.
      log: Takes each line of the log; printed by default, with a progress bar in a terminal.
      mesh: The mesh, if it is made already.
      schedule: The rules by stages, if they are made already.

    Raises:
      HaltedError: A loss or a gradient is not finite. Checkpoints that were saved before stay.
      CheckpointError: A checkpoint could not be written or read.
    """
    start_time, print_line = time.perf_counter(), log or functools.partial(print, flush=True)
    if not (main := distributed.is_main_process()):
        log = print_line = lambda _: None  # process 0 writes for all
    for key in ("base_output_directory", "save_quantized_params_path"):
        if _remote.is_remote(path := getattr(config, key)) and distributed.is_multiprocess():
            raise ValueError(
                f"{key}={path}: several processes write one directory, which must be a file system that all of them "
                "see: mount the bucket, or run as one process"
            )
    _remote.pull(config.run_path)
    try:
        return _train(config, log, print_line, main, start_time, mesh, schedule)
    finally:
        _remote.push(config.run_path)


def _train(
    config: Config,
    log: Log | None,
    print_line: Log,
    main: bool,
    start_time: float,
    mesh: Any,
    schedule: Schedule | None,
) -> Outcome:
    if config.enable_checkpointing:
        # Fail now if it is missing, not at the first save.
        importlib.import_module("orbax.checkpoint")
    if config.wandb_project_name:
        import_wandb(config.wandb_project_name)
    with CheckpointManager(
        config.run_directory / "checkpoints",
        max_to_keep=config.max_num_checkpoints_to_keep,
        keep_period=config.keep_period,
        asynchronous=config.async_checkpointing,
    ) as checkpoints:
        check_no_overwrite(config, checkpoints)
        trainer = Trainer(config, mesh, schedule)
        config = trainer.config  # with the architecture of load_parameters_path
        extra = restore(trainer, checkpoints, print_line)
        outcome = _finished(trainer, extra)
        if outcome is not None:
            print_line(_finished_line(outcome, config))
        else:
            if main:
                write_config(config, print_line)
                describe(trainer, print_line)
            if config.calibration and trainer.rules:
                print_line(format_bounds(largest_magnitudes(trainer)))
            writer = MetricWriter(
                config.run_directory if main else None,
                run_name=config.run_name,
                tensorboard=config.enable_tensorboard,
                wandb_project=config.wandb_project_name,
                extra_file=str(_remote.local(config.metrics_file)) if config.metrics_file else "",
                start_step=trainer.now,
            )
            bar = Progress(config.steps, log_period=config.log_period, log=log)
            with writer, bar as progress, stop_signals() as stop:
                outcome = _Run(trainer, checkpoints, writer, progress, start_time, extra).loop(stop)
            _remote.push(config.metrics_file)
        if outcome.complete and config.lora_rank and main:
            save_adapter(trainer, print_line)
        if outcome.complete and config.save_quantized_params_path:
            save_quantized(trainer, print_line)
    return outcome


def _finished(trainer: Trainer, extra: dict[str, Any]) -> Outcome | None:
    """The outcome of a run that has nothing left to do."""
    loss, eval_loss = extra.get("loss"), extra.get("eval_loss")
    if _reached_target(trainer.config, eval_loss):
        return Outcome(trainer.now, TARGET, loss, eval_loss)
    return Outcome(trainer.now, DONE, loss, eval_loss) if trainer.now >= trainer.config.steps else None


def _finished_line(outcome: Outcome, config: Config) -> str:
    if outcome.reason == TARGET:
        reached = f"this run reached target_eval_loss={config.target_eval_loss:g} at step {outcome.step}"
        return f"{reached}, with a loss of {outcome.eval_loss:.4f}; to continue, lower target_eval_loss"
    return f"this run is complete at step {outcome.step}; to continue, raise steps={config.steps}"


def _reached_target(config: Config, eval_loss: float | None) -> bool:
    return eval_loss is not None and config.target_eval_loss > 0 and eval_loss <= config.target_eval_loss


class _Run:
    """The loop of a run, and what happens between its steps."""

    def __init__(
        self,
        trainer: Trainer,
        checkpoints: CheckpointManager,
        writer: MetricWriter,
        progress: Progress,
        start_time: float,
        extra: dict[str, Any],
    ):
        self.trainer, self.config, self.checkpoints = trainer, trainer.config, checkpoints
        self.writer, self.progress = writer, progress
        self.telemetry = Telemetry(trainer, extra.get("scales"))
        self.tokens_per_device = trainer.batch_size * self.config.max_target_length / trainer.mesh.size
        self.memory_bytes: int | None = None
        # The start time, as if the run had never been interrupted, and the total duration of its steps.
        self.start_time = start_time - extra.get("seconds", 0.0)
        self.training_seconds = extra.get("training_seconds", 0.0)
        self.loss, self.eval_loss = extra.get("loss"), extra.get("eval_loss")
        self.saved_step = trainer.now if extra else None
        self.pending: tuple[int, Any] | None = None
        # Several processes stop when the metrics of a step have a stop signal; a single process stops at the signal.
        self.multiprocess = distributed.is_multiprocess()
        self.stop_signal: signal.Signals | None = None
        self.last_time = time.perf_counter()

    def loop(self, stop: StopSignal) -> Outcome:
        """Train until the last step, a target or a signal."""
        try:
            reason = self.steps(stop)
        except (jax.errors.JaxRuntimeError, PeerLostError) as error:
            if not self.multiprocess:
                raise
            raise distributed.connection_lost(self.trainer.now, self.checkpoints.resume_step(), error) from error
        except CheckpointError as error:
            back = distributed.resume_point(self.checkpoints.resume_step())
            raise CheckpointError(f"{error}. The same command resumes from {back}") from error
        return Outcome(self.trainer.now, reason, self.loss, self.eval_loss)

    def steps(self, stop: StopSignal) -> str:
        config, trainer = self.config, self.trainer
        stage, reason = None, DONE
        for step in range(trainer.now, config.steps):
            if (next_stage := trainer.schedule.stage(step)) != stage:
                stage = next_stage
                self.report()
                self.compile(step)
            metrics = trainer.step(stop.by)
            # Metrics are read one step late, so that a device never waits for the host.
            self.report()
            self.pending = (step, metrics)
            if due := self.due(step):
                self.report()
                for task in due:
                    task(step)
                self.last_time = time.perf_counter()  # not included in step times
            if _reached_target(config, self.eval_loss):
                reason = TARGET
            elif (by := self.stop_signal if self.multiprocess else stop.by) is not None and step + 1 < config.steps:
                self.progress.log(f"{by.name}: stopping after step {step}")
                reason = INTERRUPTED if by == signal.SIGINT else TERMINATED
            if reason != DONE:
                break
        self.report()
        if self.saved_step != trainer.now:
            self.save()
        self.checkpoints.wait_until_finished()
        return reason

    def due(self, step: int) -> list[Callable[[int], None]]:
        """The telemetry, evaluation and checkpoint that follow a step."""
        config = self.config
        tasks = (
            (self.measure, self.telemetry.is_due(step)),
            (self.evaluate, config.eval_interval > 0 and (step + 1) % config.eval_interval == 0),
            (lambda _: self.save(), (step + 1) % config.checkpoint_period == 0),
        )
        return [task for task, is_due in tasks if is_due]

    def compile(self, step: int) -> None:
        """Compile the step of a stage before it is timed."""
        started = time.perf_counter()
        program = self.trainer.compiled("train", step)
        sizes = program.memory_analysis()
        text = f"compiled in {time.perf_counter() - started:.1f} seconds"
        if sizes is not None:
            held, temporary = sizes.argument_size_in_bytes, sizes.temp_size_in_bytes
            self.memory_bytes = held + temporary
            text += f"; memory: {held / 2**20:.1f} MiB of state and batch, {temporary / 2**20:.1f} MiB temporary"
        self.progress.log(text)
        if not self.trainer.is_single_device:
            communication = read_communication(program.as_text())
            self.progress.log(f"in a step, {communication.line()}")
            if self.trainer.schedule.at(step)[0] and distributed.is_main_process():
                write_plan(self.trainer.plan().with_communication(communication), self.config.run_directory)
        self.last_time = time.perf_counter()

    def report(self) -> None:
        """Read, write and show the metrics of the step before, if that has not been done."""
        if self.pending is None:
            return
        (step, metrics), self.pending = self.pending, None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if number := int(values.pop(STOP, 0)):
            self.stop_signal = signal.Signals(number)
        now = time.perf_counter()
        seconds, self.last_time = now - self.last_time, now
        if values.pop("halted"):
            self.checkpoints.wait_until_finished()
            raise HaltedError(explain_halt(self.trainer, step, self.checkpoints.latest_step()))
        for name, used in (("z_loss", self.config.z_loss_multiplier), ("moe_lb_loss", self.config.num_experts > 1)):
            if not used:
                del values[f"learning/{name}"]
        tflops = self.trainer.flops / self.trainer.mesh.size / 1e12
        values["learning/perplexity"] = _exp(values["learning/lm_loss"])
        values["perf/step_time_seconds"] = seconds
        values["perf/per_device_tokens"] = self.tokens_per_device
        values["perf/per_device_tokens_per_sec"] = self.tokens_per_device / seconds
        values["perf/per_device_tflops"] = tflops
        values["perf/per_device_tflops_per_sec"] = tflops / seconds
        if self.memory_bytes is not None:
            values["perf/memory_bytes"] = self.memory_bytes
        self.training_seconds += seconds
        self.loss = values["learning/loss"]
        self.writer.write(step, values)
        self.progress.update(step, values)

    def measure(self, step: int) -> None:
        started = time.perf_counter()
        found = self.telemetry.measure(step)
        self.writer.write_telemetry(step, found)
        ratios = [f"{name} {row['sqnr_db']:.1f} dB" for name, row in found.items() if name != "sites"]
        self.progress.log(
            f"signal to quantization noise after step {step}: {', '.join(ratios)} "
            f"(measured in {time.perf_counter() - started:.1f} seconds)"
        )
        learned = any(rule.learns_scales for rule in self.trainer.rules)
        for text in range_warnings(found, learned=learned):
            self.progress.log(text)

    def evaluate(self, step: int) -> None:
        self.eval_loss = loss = self.trainer.evaluate()
        seconds = time.perf_counter() - self.start_time
        values = {"eval/avg_loss": loss, "eval/avg_perplexity": _exp(loss), "eval/seconds": seconds}
        self.writer.write(step, {**values, "eval/training_seconds": self.training_seconds})
        self.progress.log(eval_line(step, values))
        if _reached_target(self.config, loss):
            at = f"target_eval_loss={self.config.target_eval_loss:g} reached after {step + 1} steps"
            self.progress.log(f"{at}: {self.training_seconds:.1f} seconds of training, {seconds:.1f} in all")

    def save(self) -> None:
        if not self.config.enable_checkpointing:
            return
        times = {"seconds": time.perf_counter() - self.start_time, "training_seconds": self.training_seconds}
        losses = {"loss": self.loss, "eval_loss": self.eval_loss}
        data = {"data": self.trainer.data.describe(), "scales": self.telemetry.scales}
        extra = {**times, **losses, **data, **description(self.trainer)}
        self.checkpoints.save(self.trainer.now, self.trainer.state, extra)
        _remote.push(self.config.run_path)  # what is complete; an asynchronous save is uploaded with the next
        self.saved_step = self.trainer.now


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))
