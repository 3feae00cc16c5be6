"""Progress of a run: a live bar in a terminal, log lines anywhere else."""

import builtins
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

_STEP = "perf/step_time_seconds"
_TOKENS = "perf/per_device_tokens_per_sec"
_LOSS = "learning/loss"

# In MaxText's order and words, so that scripts that read its logs read these.
_COLUMNS = (
    (_STEP, "seconds: {:.3f}"),
    ("perf/per_device_tflops_per_sec", "TFLOP/s/device: {:.3f}"),
    (_TOKENS, "Tokens/s/device: {:.3f}"),
    ("learning/total_weights", "total_weights: {:.0f}"),
    (_LOSS, "loss: {:.3f}"),
    ("learning/lm_loss", "lm_loss: {:.3f}"),
    ("learning/perplexity", "perplexity: {:.3f}"),
    ("learning/moe_lb_loss", "moe_lb_loss: {:.3f}"),
)
_EVAL_COLUMNS = (
    ("eval/avg_loss", "loss={:.3f}"),
    ("eval/avg_perplexity", "perplexity={:.3f}"),
    ("eval/total_weights", "total_weights={:.0f}"),
)
_BAR_COLUMNS = ((_LOSS, "loss {:.3f}"), (_STEP, "{:.3g} s/step"), (_TOKENS, "{:,.0f} tokens/s"))


def log_line(step: int, metrics: Mapping[str, Any]) -> str:
    """A step in one line, as MaxText logs it; metrics that are not given are left out.

    >>> log_line(3, {"perf/step_time_seconds": 5.4019, "learning/total_weights": 196608, "learning/loss": 11.3788})
    'completed step: 3, seconds: 5.402, total_weights: 196608, loss: 11.379'
    """
    return ", ".join([f"completed step: {step}", *_format(_COLUMNS, metrics)])


def eval_line(step: int, metrics: Mapping[str, Any]) -> str:
    """An evaluation in one line, as MaxText logs it.

    >>> eval_line(99, {"eval/avg_loss": 3.25, "eval/avg_perplexity": 25.7903})
    'Completed eval after train step 99, loss=3.250, perplexity=25.790'
    """
    return ", ".join([f"Completed eval after train step {step}", *_format(_EVAL_COLUMNS, metrics)])


def _format(columns: tuple[tuple[str, str], ...], metrics: Mapping[str, Any]) -> list[str]:
    return [form.format(float(metrics[name])) for name, form in columns if metrics.get(name) is not None]


class Progress:
    """Shows how far a run of `total` steps is; use it with `with`, call `update` after every step.

    In a terminal, with the package rich, that is a bar with the step, the loss, the time per step, tokens per second
    and the time left. Anywhere else it is MaxText's log line every `log_period` steps and for the last step.

    Args:
      total: The number of steps.
      log_period: Steps between two log lines.
      log: Takes each line instead of stdout; there is no bar then.

    >>> with Progress(3, log_period=2) as progress:
    ...     progress.update(0, {"learning/loss": 4.0})
    ...     progress.log("saved a checkpoint")
    ...     progress.update(1, {"learning/loss": 3.75})
    ...     progress.update(2, {"learning/loss": 3.5})
    completed step: 0, loss: 4.000
    saved a checkpoint
    completed step: 2, loss: 3.500
    """

    def __init__(self, total: int, *, log_period: int = 1, log: Callable[[str], None] | None = None):
        self._total, self._period = total, log_period
        stdout = log is None or log is builtins.print
        # Flushed: a log is often a file that someone follows.
        self._log = functools.partial(print, flush=True) if stdout else log
        self._bar: Any = _make_bar() if stdout and sys.stdout.isatty() else None
        if self._bar is not None:
            self._task = self._bar.add_task("starting", total=total)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show that a step, counted from 0, is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step + 1, description="  ".join(_format(_BAR_COLUMNS, metrics)))
        elif step % self._period == 0 or step == self._total - 1:
            self.log(log_line(step, metrics))

    def log(self, message: str) -> None:
        """Print a message without breaking the bar."""
        if self._bar is not None:
            self._bar.console.print(message, markup=False, highlight=False, soft_wrap=True)
        else:
            self._log(message)

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _make_bar() -> Any:
    """A bar drawn by rich, or None if it is not installed."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ModuleNotFoundError:
        return None
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    return Bar(*columns, TimeRemainingColumn(), TextColumn("left"), refresh_per_second=4)
