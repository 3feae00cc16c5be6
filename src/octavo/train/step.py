"""One step of training as a pure function, for each stage of the schedule of precisions."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from octavo.distributed import is_error_feedback
from octavo.train.loss import Losses, total_weights
from octavo.train.reduction import Reduction
from octavo.train.sparse import masked
from octavo.train.state import TrainState
from octavo.transform import Scheduled
from octavo.transform.state import GRADIENT_STATE

type Batch = dict[str, Any]
type Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Stepper:
    """What a step is made of: a loss whose precision follows a schedule, the optimizer, and how gradients are treated.

    `clip` bounds the norm of the gradients (0: no bound). `accumulation` is the number of microbatches of a batch. A
    step that is not finite updates nothing; with `halts` none after it does either. `reduction` adds up the gradients
    of copies of the model in low precision.
    """

    loss: Scheduled
    optimizer: optax.GradientTransformation
    learning_rate: Callable[[Any], jax.Array]
    accumulation: int = 1
    clip: float = 0.0
    halts: bool = True
    reduction: Reduction | None = None

    def gradients(self, state: TrainState, batch: Batch, *, step: int) -> tuple[Any, dict[str, Any], Losses, jax.Array]:
        """(gradients, new quantization state, losses, loss) of a batch; `step` chooses the stage.

        Microbatches are as one batch: the losses are divided by the weights of the whole; histories of delayed
        scaling are those of the step before for each of them, and of what they add the largest magnitudes count; the
        statistics of static ranges, and what was lost of gradients, pass from one to the next.
        """
        return self._gradients(state, batch, total_weights(batch), 1.0, step=step)

    def _gradients(self, state: TrainState, batch: Batch, weights: Any, share: float, *, step: int) -> Any:
        """The same of some of a batch's rows, where `weights` are those of all, and `share` is theirs in it."""
        share = share / self.accumulation
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        overwrite = state.quant.get(GRADIENT_STATE, {})

        def value(params: Any, overwrite: Any, stats: Any, micro: Batch, key: jax.Array):
            call = self.loss.stateful({**stats, GRADIENT_STATE: overwrite}, step=step, key=key)
            (loss, losses), new = call(masked(params, state.masks), micro, weights, share)
            return loss, (losses, _without_overwrite(new))

        differentiate = jax.value_and_grad(value, argnums=(0, 1), has_aux=True)

        def one(overwrite: Any, stats: Any, micro: Batch, key: jax.Array):
            (loss, (losses, stats)), (gradients, new) = differentiate(state.params, overwrite, stats, micro, key)
            return (gradients, losses, loss), new, stats

        stats = _without_overwrite(state.quant)
        if self.accumulation == 1:
            (gradients, losses, loss), new, stats = one(overwrite, stats, batch, key)
        else:
            micros = jax.tree.map(lambda x: x.reshape(self.accumulation, -1, *x.shape[1:]), batch)
            keys = jax.random.split(key, self.accumulation)
            shapes = jax.eval_shape(one, overwrite, stats, jax.tree.map(lambda x: x[0], micros), keys[0])
            summed = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[0])
            widest = jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), shapes[1])
            widest = _where_lost(overwrite, widest)

            def body(carry: Any, inputs: Any):
                summed, widest, stats = carry
                begin = _where_lost(widest, overwrite)
                sums, new, stats = one(begin, stats, *inputs)
                widest = _where_lost(new, jax.tree.map(jnp.maximum, widest, new))
                return (jax.tree.map(jnp.add, summed, sums), widest, stats), None

            (sums, new, stats), _ = jax.lax.scan(body, (summed, widest, stats), (micros, keys))
            gradients, losses, loss = sums
        quant = {**stats, GRADIENT_STATE: new} if new else stats
        return gradients, quant, losses, loss

    def train(self, state: TrainState, batch: Batch, *, step: int) -> tuple[TrainState, Metrics]:
        """The state after a step, and what to log of it."""
        errors = state.errors
        if self.reduction is None:
            gradients, quant, losses, loss = self.gradients(state, batch, step=step)
        else:
            part = functools.partial(self._gradients, step=step)
            gradients, quant, losses, loss, errors = self.reduction(part, state, batch, total_weights(batch))
        raw = optax.tree.norm(gradients)
        if self.clip > 0:
            gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, self.clip / jnp.maximum(raw, 1e-30)), gradients)
        updates, opt_state = self.optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        size = optax.tree.norm(params)
        bad = state.halted | ~(jnp.isfinite(loss) & jnp.isfinite(raw) & jnp.isfinite(size))
        halted = bad if self.halts else state.halted
        new = TrainState(state.step + 1, params, opt_state, quant, state.masks, state.key, halted, errors)
        old = dataclasses.replace(state, step=state.step + (1 - halted.astype(jnp.int32)), halted=halted)
        new = jax.tree.map(lambda a, b: jnp.where(bad, a, b), old, new)
        weights = jnp.maximum(losses.weights, 1.0)
        metrics = {
            "learning/loss": loss,
            "learning/lm_loss": losses.lm / weights,
            "learning/z_loss": losses.z / weights,
            "learning/moe_lb_loss": losses.load_balance,
            "learning/total_weights": losses.weights,
            "learning/raw_grad_norm": raw,
            "learning/grad_norm": jnp.minimum(raw, self.clip) if self.clip > 0 else raw,
            "learning/param_norm": size,
            "learning/current_learning_rate": self.learning_rate(state.step),
            "halted": halted,
        }
        return new, metrics

    def evaluate(self, state: TrainState, batch: Batch, *, step: int) -> Losses:
        """The losses of a batch in the precision of a step; nothing changes."""
        call = self.loss.stateful(state.quant, step=step, key=jax.random.wrap_key_data(state.key), update=False)
        return call(masked(state.params, state.masks), batch, total_weights(batch), 1.0)[0][1]


def _where_lost(lost: Any, rest: Any) -> Any:
    """State of products: of what gradients lost as in the first, of all else as in the second."""
    return jax.tree_util.tree_map_with_path(lambda path, a, b: a if is_error_feedback(path) else b, lost, rest)


def _without_overwrite(quant: dict[str, Any]) -> dict[str, Any]:
    return {name: tree for name, tree in quant.items() if name != GRADIENT_STATE}
