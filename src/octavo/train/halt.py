"""Why a run stops before its end: signals, and values that are not finite."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from octavo._tree import flatten_paths
from octavo.train.trainer import Trainer


class HaltedError(RuntimeError):
    """Training stopped at a loss or a gradient that is not finite; the state is the one before that step."""


def explain_halt(trainer: Trainer, step: int, checkpoint: int | None) -> str:
    """The step, the tensors, and the checkpoint to resume from. The trainer's state is that before the step."""
    batch = trainer.batch(step)
    compute = jax.jit(trainer.train_step.gradients, static_argnames="step")
    gradients, _, _, loss = compute(trainer.state, batch, step=trainer.stage_start(step))
    cause = _bad_gradients(gradients) or _large_update(trainer, gradients)
    last = (
        f"the last good checkpoint is {trainer.config.run_directory / 'checkpoints' / str(checkpoint)}"
        if checkpoint is not None
        else "there is no checkpoint yet"
    )
    return (
        f"step {step} has loss {float(loss)}; {cause}. Nothing was updated with it; {last}. Try a lower learning_rate, "
        "gradient_clipping_threshold=1.0, a recipe with a wider range for gradients, or more layers in high precision "
        "(quantization_first_layers, quantization_last_layers). abort_on_nan_loss=false leaves such steps out"
    )


def _bad_gradients(gradients: Any) -> str:
    """The gradients that are not finite, the worst first; empty if there is none."""
    counts = [(name, int(jnp.sum(~jnp.isfinite(leaf))), leaf.size) for name, leaf in flatten_paths(gradients).items()]
    bad = sorted((entry for entry in counts if entry[1]), key=lambda entry: -entry[1] / entry[2])
    shown = "; ".join(f"the gradient of {name} ({count} of {size} values)" for name, count, size in bad[:3])
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return f"not finite: {shown}{more}" if bad else ""


def _large_update(trainer: Trainer, gradients: Any) -> str:
    """The largest update, where all gradients are finite."""
    updates, _ = trainer.train_step.optimizer.update(gradients, trainer.state.opt_state, trainer.state.trained)
    largest = {name: float(jnp.max(jnp.abs(leaf))) for name, leaf in flatten_paths(updates).items()}
    name = max(largest, key=lambda name: largest[name])
    return f"all gradients are finite, but the update of {name} is as large as {largest[name]:.3g}"


class StopSignal:
    """The stop signal that was received, if any."""

    by: signal.Signals | None = None


@contextmanager
def stop_signals() -> Iterator[StopSignal]:
    """Record SIGTERM and the first Ctrl-C instead of exiting; a second Ctrl-C interrupts as usual.

    Has no effect outside of the main thread, which alone can handle signals.

    >>> with stop_signals() as stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     stop.by.name
    'SIGTERM'
    """
    stop = StopSignal()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: Any) -> None:
        if stop.by is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.by = signal.Signals(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            # None: a handler that was not installed from Python and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
