"""Where a value that is not finite came from."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from octavo.train.trainer import Trainer


class HaltedError(RuntimeError):
    """Training met a loss or a gradient that is not finite, and stopped with the state before it."""


def explain(trainer: Trainer, step: int, checkpoint: int | None, directory: Path) -> str:
    """Which step, which tensors, and what to go back to. The trainer's state is the last good one."""
    batch = trainer.batch(step)
    gradients, _, losses, loss = jax.jit(trainer.stepper.gradients, static_argnames="step")(
        trainer.state, batch, step=trainer.schedule.stages[trainer.schedule.stage(step)][0]
    )
    del losses
    where = _gradients(gradients) or _parameters(trainer, gradients)
    last = (
        f"the last good checkpoint is {directory / 'checkpoints' / str(checkpoint)}"
        if checkpoint is not None
        else "there is no checkpoint yet"
    )
    return (
        f"step {step} has loss {float(loss)}; {where}. Nothing was updated with it; {last}. Try a lower learning_rate, "
        "gradient_clipping_threshold=1.0, a recipe with a wider range for gradients, or more layers in high precision "
        "(quantization_first_layers, quantization_last_layers). abort_on_nan_loss=false leaves such steps out"
    )


def _gradients(gradients: Any) -> str:
    """Which gradients are not finite, in words; nothing if all are."""
    bad = _not_finite(gradients)
    shown = "; ".join(f"the gradient of {name} ({count} of {size} values)" for name, count, size in bad[:3])
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return f"not finite: {shown}{more}" if bad else ""


def _parameters(trainer: Trainer, gradients: Any) -> str:
    """Which parameter an update with finite gradients makes too large, in words."""
    updates, _ = trainer.stepper.optimizer.update(gradients, trainer.state.opt_state, trainer.state.params)
    largest = {
        jax.tree_util.keystr(path, simple=True, separator="/"): float(jnp.max(jnp.abs(leaf)))
        for path, leaf in jax.tree_util.tree_leaves_with_path(updates)
    }
    name = max(largest, key=lambda name: largest[name])
    return f"all gradients are finite, but the update of {name} is as large as {largest[name]:.3g}"


def _not_finite(tree: Any) -> list[tuple[str, int, int]]:
    """The leaves that have values that are not finite: name, how many, of how many; the worst first."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        count = int(jnp.sum(~jnp.isfinite(leaf)))
        if count:
            found.append((jax.tree_util.keystr(path, simple=True, separator="/"), count, leaf.size))
    return sorted(found, key=lambda entry: -entry[1] / entry[2])
