"""How a run ends."""

import dataclasses
from typing import Any

from octavo.train.config import Config

DONE, TARGET, TERMINATED, INTERRUPTED = "done", "target", "terminated", "interrupted"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended: after how many steps, why, and with which losses.

    `reason` is "done", "target" (target_eval_loss is reached), "terminated" (by SIGTERM) or "interrupted" (by Ctrl-C).
    """

    step: int
    reason: str
    loss: float | None = None
    eval_loss: float | None = None

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to do."""
        return self.reason in (DONE, TARGET)


def ended(config: Config, step: int, past: dict[str, Any]) -> Outcome | None:
    """The outcome of a run that has nothing left to do; `past` is what was saved beside its last state."""
    loss, eval_loss = past.get("loss"), past.get("eval_loss")
    if reached(config, eval_loss):
        return Outcome(step, TARGET, loss, eval_loss)
    return Outcome(step, DONE, loss, eval_loss) if step >= config.steps else None


def complete_text(outcome: Outcome, config: Config) -> str:
    """What to say of such a run, and how it could go on."""
    if outcome.reason == TARGET:
        reached = f"this run reached target_eval_loss={config.target_eval_loss:g} at step {outcome.step}"
        return f"{reached}, with a loss of {outcome.eval_loss:.4f}; to go on, lower target_eval_loss"
    return f"this run is complete at step {outcome.step}; to go on, raise steps={config.steps}"


def reached(config: Config, eval_loss: float | None) -> bool:
    """Whether a held-out loss is the target."""
    return eval_loss is not None and config.target_eval_loss > 0 and eval_loss <= config.target_eval_loss
