"""One step of training as a pure function: state, loss, weight masks, gradients and update."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from octavo import _sharding
from octavo._tree import flatten_paths, path_str
from octavo.distributed import is_error_feedback
from octavo.models import ModelConfig, apply
from octavo.ops.sparsity import nm_mask
from octavo.ops.vjp import ERROR_FEEDBACK
from octavo.train.config import Config
from octavo.transform.learned import LEARNED
from octavo.transform.state import GRADIENT_STATE

type Batch = dict[str, Any]
type Metrics = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The parameters and everything else that the next step depends on; this is what a checkpoint holds.

    Args:
      step: The number of steps taken.
      params: The parameters.
      opt_state: The state of the optimizer.
      quant: The state of static ranges, delayed scaling and error feedback of quantized matmuls, and learned scales.
      masks: The masks of sparse weights, by path.
      key: The PRNG key data of stochastic rounding.
      halted: Set by the first step with a loss or a gradient that is not finite: such a step, and every one after it,
        changes nothing.
      errors: The error feedback of the quantized data-parallel all-reduce.
      frozen: With LoRA, the weights that are not trained; `params` are adapters then.
      teacher: With distillation, the parameters of the teacher.
    """

    # No types are checked: as a pytree, it may hold shapes, shardings or other placeholders instead of arrays.
    step: Any
    params: Any
    opt_state: Any
    quant: Any
    masks: Any
    key: Any
    halted: Any
    errors: Any = dataclasses.field(default_factory=dict)
    frozen: Any = dataclasses.field(default_factory=dict)
    teacher: Any = dataclasses.field(default_factory=dict)

    @property
    def trained(self) -> Any:
        """What the optimizer updates: the parameters, and learned scales if there are any."""
        return join_trained(self.params, self.quant.get(LEARNED))

    def operands(self, params: Any) -> Any:
        """What the loss is a function of: parameters with their masks, or adapters and frozen weights."""
        return (params, self.frozen) if self.frozen else apply_masks(params, self.masks)


def join_trained(params: Any, scales: Any) -> Any:
    """Parameters and learned scales as one tree; the parameters alone if there are no scales.

    >>> join_trained({"w": 1}, None), join_trained({"w": 1}, {"w": {"scale": 2}})
    ({'w': 1}, {'params': {'w': 1}, 'learned_scales': {'w': {'scale': 2}}})
    """
    return {"params": params, LEARNED: scales} if scales else params


def is_reset_on_remesh(path: tuple[str, ...]) -> bool:
    """Whether an array of the state is reset when a run resumes on another mesh: error feedback is per device."""
    return ERROR_FEEDBACK in path


# Loss.


class Losses(NamedTuple):
    """Sums over the tokens of a batch, to be added over microbatches; `weights` is the number of tokens."""

    lm: jax.Array
    z: jax.Array
    load_balance: jax.Array
    weights: jax.Array
    kl: jax.Array


def total_weights(batch: Batch) -> jax.Array:
    """The number of tokens that are not padding.

    >>> total_weights({"targets_segmentation": jnp.asarray([[1, 1, 2, 0]])}).item()
    3.0
    """
    return jnp.sum(batch["targets_segmentation"] != 0).astype(jnp.float32)


TEACHER = "teacher_logits"
"""The entry of a batch with the logits of a teacher."""


def make_loss(
    model: ModelConfig,
    *,
    z_loss: float = 0.0,
    load_balance: float = 0.0,
    distillation: float = 0.0,
    temperature: float = 1.0,
) -> Callable[..., Any]:
    """A function `(params, batch, weights, share) -> (loss, Losses)` for one microbatch.

    `weights` is the number of tokens in the full batch, and `share` the microbatch's fraction of it. The loss is
    normalized by them, so that gradients of microbatches have the magnitude, and the ranges, of those of the batch.
    Where a batch has a teacher's logits, `distillation` is the share of the KL divergence from the teacher in the loss.
    """

    def loss(params: Any, batch: Batch, weights: Any, share: Any) -> tuple[jax.Array, Losses]:
        logits, aux = apply(model, params, batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"])
        mask = (batch["targets_segmentation"] != 0).astype(jnp.float32)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        lm = jnp.sum((log_z - _target_logits(logits, batch["targets"])) * mask)
        z = z_loss * jnp.sum(log_z**2 * mask)
        balance = load_balance * aux.load_balance
        kl, mixed = jnp.zeros((), jnp.float32), lm
        if TEACHER in batch:
            kl = jnp.sum(kl_divergence(batch[TEACHER], logits, temperature) * mask)
            mixed = (1 - distillation) * lm + distillation * kl
        # The loss of a batch that is all padding is 0, not a division by zero.
        total = (mixed + z) / jnp.maximum(weights, 1.0) + balance * share
        return total, Losses(lm, z, balance * share, jnp.sum(mask), kl)

    return loss


def kl_divergence(teacher: jax.Array, student: jax.Array, temperature: float = 1.0) -> jax.Array:
    """The KL divergence of a student's distribution from a teacher's, for each token.

    Logits are divided by the temperature, and the result is multiplied by its square, so that gradients keep their
    magnitude (G. Hinton et al., "Distilling the Knowledge in a Neural Network", 2015).

    >>> kl_divergence(jnp.asarray([0.0, 0.0]), jnp.asarray([1.0, 1.0])).item()
    0.0
    """
    p, q = (jax.nn.log_softmax(x.astype(jnp.float32) / temperature, axis=-1) for x in (teacher, student))
    return temperature**2 * jnp.sum(jnp.exp(p) * (p - q), axis=-1)


def _target_logits(logits: jax.Array, targets: jax.Array) -> jax.Array:
    sharding = _sharding.explicit(logits)
    if sharding is None:
        return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    # JAX cannot infer the sharding of a gather along a sharded axis; that of a masked sum over the vocabulary it can.
    chosen = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]
    return jnp.sum(jnp.where(_sharding.reshard_if_explicit(chosen, sharding), logits, jnp.zeros_like(logits)), axis=-1)


# N:M sparsity of weights.


def is_mask_update_step(config: Config, step: int) -> bool:
    """Whether the masks are computed before a step.

    >>> config = Config(weight_sparsity_n=2, weight_sparsity_m=4, weight_sparsity_start_step=5)
    >>> [step for step in range(30) if is_mask_update_step(config, step)]
    [5, 15, 25]
    """
    since = step - config.weight_sparsity_start_step
    return config.weight_sparsity_n is not None and since >= 0 and since % config.weight_sparsity_update_step == 0


def make_masks(params: Any, axes: dict[str, int], n: int, m: int) -> dict[str, jax.Array]:
    """The n largest of every m values along the contracted axis of each weight, by path.

    >>> make_masks({"w": jnp.asarray([[1.0], [3.0], [2.0], [0.0]])}, {"w": 0}, 2, 4)["w"][:, 0].tolist()
    [False, True, True, False]
    """
    return {name: nm_mask(leaf, n, m, axis=axes[name]) for name, leaf in flatten_paths(params).items() if name in axes}


def apply_masks(params: Any, masks: dict[str, jax.Array]) -> Any:
    """The parameters with masked values set to zero. Gradients are straight-through: masked values keep training."""
    if not masks:
        return params

    def mask_leaf(path: Any, leaf: jax.Array) -> jax.Array:
        mask = masks.get(path_str(path))
        return leaf if mask is None else leaf + jax.lax.stop_gradient(leaf * mask.astype(leaf.dtype) - leaf)

    return jax.tree_util.tree_map_with_path(mask_leaf, params)


# Step.


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """A loss whose precision follows a schedule, the optimizer, and how gradients are treated.

    Args:
      loss: The loss of `make_loss`, quantized by stages (`Scheduled`), or of adapters (`AdapterLoss`).
      optimizer: The optimizer.
      learning_rate: The learning rate by step, for the metrics.
      accumulation: The number of microbatches of a batch.
      clip: The bound on the global norm of the gradients; 0: none.
      halts: Whether all updates stop after a step that is not finite. Such a step itself never updates anything.
      replica_gradients: Computes the gradients of data-parallel replicas and all-reduces them in low precision.
      teacher: The logits of the teacher, as a function of its parameters and a batch; in float.
    """

    loss: Any
    optimizer: optax.GradientTransformation
    learning_rate: Callable[[Any], jax.Array]
    accumulation: int = 1
    clip: float = 0.0
    halts: bool = True
    replica_gradients: Callable[..., Any] | None = None
    teacher: Callable[[Any, Batch], jax.Array] | None = None

    def _with_teacher(self, state: TrainState, batch: Batch) -> Batch:
        return batch if self.teacher is None else {**batch, TEACHER: self.teacher(state.teacher, batch)}

    def gradients(
        self, state: TrainState, batch: Batch, *, step: int, weights: Any = None, share: float = 1.0
    ) -> tuple[Any, dict[str, Any], Losses, jax.Array]:
        """(gradients, new quantization state, losses, loss) of a batch, or of rows of one; `step` chooses the stage.

        Gradients are those of `state.trained`.

        Microbatches count as one batch: losses are divided by the number of tokens in the batch. Each microbatch starts
        from the delayed-scaling histories of the previous step, and histories are combined by their maximum. Statistics
        of static ranges and error feedback are carried from one microbatch to the next. Of the rows of a replica,
        `weights` is the number of tokens in the global batch, and `share` their fraction of it.
        """
        weights, share = total_weights(batch) if weights is None else weights, share / self.accumulation
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        overwrite, learns = state.quant.get(GRADIENT_STATE, {}), bool(state.quant.get(LEARNED))

        def value(trained: Any, overwrite: Any, stats: Any, microbatch: Batch, key: jax.Array):
            params, scales = (trained["params"], {LEARNED: trained[LEARNED]}) if learns else (trained, {})
            call = self.loss.stateful({**stats, **scales, GRADIENT_STATE: overwrite}, step=step, key=key)
            (loss, losses), new = call(state.operands(params), microbatch, weights, share)
            return loss, (losses, _ranges(new))

        differentiate = jax.value_and_grad(value, argnums=(0, 1), has_aux=True)

        def one(overwrite: Any, stats: Any, microbatch: Batch, key: jax.Array):
            microbatch = self._with_teacher(state, microbatch)
            (loss, (losses, stats)), (gradients, new) = differentiate(state.trained, overwrite, stats, microbatch, key)
            return (gradients, losses, loss), new, stats

        stats = _ranges(state.quant)
        if self.accumulation == 1:
            (gradients, losses, loss), new, stats = one(overwrite, stats, batch, key)
        else:
            microbatches = jax.tree.map(lambda x: x.reshape(self.accumulation, -1, *x.shape[1:]), batch)
            keys = jax.random.split(key, self.accumulation)
            shapes = jax.eval_shape(one, overwrite, stats, jax.tree.map(lambda x: x[0], microbatches), keys[0])
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[0])
            largest = jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), shapes[1])
            largest = _with_error_feedback(largest, overwrite)

            def body(carry: Any, inputs: Any):
                summed, largest, stats = carry
                sums, new, stats = one(_with_error_feedback(overwrite, largest), stats, *inputs)
                largest = _with_error_feedback(jax.tree.map(jnp.maximum, largest, new), new)
                return (jax.tree.map(jnp.add, summed, sums), largest, stats), None

            (sums, new, stats), _ = jax.lax.scan(body, (zeros, largest, stats), (microbatches, keys))
            gradients, losses, loss = sums
        quant = {**stats, GRADIENT_STATE: new} if new else stats
        return gradients, quant, losses, loss

    def train(self, state: TrainState, batch: Batch, *, step: int) -> tuple[TrainState, Metrics]:
        """The state after a step, and its metrics."""
        errors = state.errors
        if self.replica_gradients is None:
            gradients, quant, losses, loss = self.gradients(state, batch, step=step)
        else:
            local = functools.partial(self.gradients, step=step)
            gradients, quant, losses, loss, errors = self.replica_gradients(local, state, batch, total_weights(batch))
        raw = optax.tree.norm(gradients)
        if self.clip > 0:
            gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, self.clip / jnp.maximum(raw, 1e-30)), gradients)
        updates, opt_state = self.optimizer.update(gradients, state.opt_state, state.trained)
        params: Any = optax.apply_updates(state.trained, updates)
        size = optax.tree.norm(params)
        if state.quant.get(LEARNED):
            params, quant = params["params"], {**quant, LEARNED: params[LEARNED]}
        bad = state.halted | ~(jnp.isfinite(loss) & jnp.isfinite(raw) & jnp.isfinite(size))
        halted = bad if self.halts else state.halted
        new = TrainState(state.step + 1, params, opt_state, quant, state.masks, state.key, halted, errors)
        old = dataclasses.replace(state, step=state.step + (1 - halted.astype(jnp.int32)), halted=halted)
        old = dataclasses.replace(old, frozen={}, teacher={})
        new = jax.tree.map(lambda a, b: jnp.where(bad, a, b), old, new)
        new = dataclasses.replace(new, frozen=state.frozen, teacher=state.teacher)
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
        if self.teacher is not None:
            metrics["learning/kl_loss"] = losses.kl / weights
        return new, metrics

    def evaluate(self, state: TrainState, batch: Batch, *, step: int) -> Losses:
        """The losses of a batch in the precision of a step; nothing changes."""
        call = self.loss.stateful(state.quant, step=step, key=jax.random.wrap_key_data(state.key), update=False)
        return call(state.operands(state.params), batch, total_weights(batch), 1.0)[0][1]


def _with_error_feedback(state: Any, feedback: Any) -> Any:
    """State of matmuls with the error-feedback leaves of another."""
    return jax.tree_util.tree_map_with_path(lambda path, a, b: b if is_error_feedback(path) else a, state, feedback)


def _ranges(quant: dict[str, Any]) -> dict[str, Any]:
    """The state that a call returns: without that which is updated by gradients or the optimizer."""
    return {name: tree for name, tree in quant.items() if name not in (GRADIENT_STATE, LEARNED)}
