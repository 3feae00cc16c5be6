"""The trainer without a run around it: data, model, precision and step, put together from a configuration."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from octavo.data import make_dataset
from octavo.models import ModelConfig, abstract_params, init_params
from octavo.qarray import QArray, dequantize
from octavo.rules import QuantizationRule, Schedule, recipe
from octavo.train.config import Config
from octavo.train.loss import Losses, make_loss
from octavo.train.optimizer import learning_rate_schedule, make_optimizer
from octavo.train.quantization import schedule_of
from octavo.train.sparse import make_masks, masked, updates_masks
from octavo.train.state import TrainState, initial_state
from octavo.train.step import Batch, Metrics, Stepper
from octavo.transform import Plan, Verification, plan, quantized, scheduled, verify


def model_of(config: Config, vocab_size: int = 0) -> ModelConfig:
    """The model that a configuration describes; the vocabulary is the tokenizer's unless the configuration has one."""
    return ModelConfig(
        vocab_size=config.vocab_size or vocab_size,
        emb_dim=config.base_emb_dim,
        num_layers=config.base_num_decoder_layers,
        num_query_heads=config.base_num_query_heads,
        num_kv_heads=config.base_num_kv_heads,
        head_dim=config.head_dim,
        mlp_dim=config.base_mlp_dim,
        activation=config.mlp_activations[0],
        norm_eps=config.normalization_layer_epsilon,
        rope_theta=config.rope_max_timescale,
        tied_logits=config.logits_via_embedding,
        num_experts=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        shared_experts=config.shared_experts,
        moe_mlp_dim=config.base_moe_mlp_dim or config.base_mlp_dim,
        first_dense_layers=config.first_num_dense_layers,
        sparse_matmul=config.sparse_matmul,
        scan_layers=config.scan_layers,
        unscanned_first=max(config.unscanned_first_layers, config.quantization_first_layers),
        unscanned_last=max(config.unscanned_last_layers, config.quantization_last_layers),
        remat=config.remat_policy,
        dtype=config.dtype,
        weight_dtype=config.weight_dtype,
        float32_logits=config.logits_dot_in_fp32,
    )


class Trainer:
    """A model in training. `state` moves on by `step`; everything else is fixed by the configuration.

    The step of each stage of the schedule is compiled when the stage is first met.
    """

    def __init__(self, config: Config):
        self.config = config
        self.data = make_dataset(config, "train")
        self.model = model_of(config, self.data.vocab_size)
        self.schedule: Schedule = schedule_of(config)
        self._loss = make_loss(
            self.model, z_loss=config.z_loss_multiplier, load_balance=config.load_balance_loss_weight
        )
        self.stepper = Stepper(
            loss=scheduled(self._loss, self.schedule, weights="params"),
            optimizer=make_optimizer(config),
            learning_rate=learning_rate_schedule(config),
            accumulation=config.gradient_accumulation_steps,
            clip=config.gradient_clipping_threshold,
            halts=config.abort_on_nan_loss,
        )
        self._compiled: dict[tuple[str, int], Any] = {}
        self.resume(self._initial())

    # What the run is made of.

    @functools.cached_property
    def eval_data(self) -> Any:
        """The batches for evaluation."""
        return make_dataset(self.config, "eval")

    @property
    def rules(self) -> tuple[QuantizationRule, ...]:
        """The rules of the first stage that has any."""
        return next((rules for _, rules in self.schedule.stages if rules), ())

    @property
    def micro_shapes(self) -> Batch:
        """The shapes of a microbatch."""
        parts = self.config.gradient_accumulation_steps
        shapes = {name: x.shape for name, x in self.data.batch(0).items()}
        return {name: jax.ShapeDtypeStruct((s[0] // parts, *s[1:]), jnp.int32) for name, s in shapes.items()}

    @property
    def _loss_arguments(self) -> tuple[Any, ...]:
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        return (abstract_params(self.model), self.micro_shapes, scalar, scalar)

    def plan(self) -> Plan:
        """What becomes of each multiplication of the loss."""
        return plan(self._loss, self.rules, *self._loss_arguments, weights="params")

    def verify(self) -> Verification:
        """What the matmuls of a whole quantized step are made of, optimizer included."""
        step = functools.partial(self.stepper.train, step=self._quantized_step)
        return verify(step, jax.eval_shape(lambda x: x, self.state), self.data.batch(0))

    @functools.cached_property
    def verification(self) -> Verification:
        """`verify`, once."""
        return self.verify()

    @property
    def flops(self) -> int:
        """The FLOPs of the matmuls of a step."""
        return self.verification.flops()

    @property
    def _quantized_step(self) -> int:
        return next((begin for begin, rules in self.schedule.stages if rules), 0)

    # Where it begins.

    def _initial(self) -> TrainState:
        config = self.config
        params = jax.jit(functools.partial(init_params, self.model))(jax.random.key(config.init_weights_seed))
        if config.load_parameters_path:
            params = self._loaded(params)
        masks = jax.tree.map(jnp.ones_like, self._masks(params))
        optimizer = jax.jit(self.stepper.optimizer.init)(params)
        micro = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.micro_shapes)
        quant = self.stepper.loss.init(params, micro, jnp.float32(1), jnp.float32(1)) if self.rules else {}
        return initial_state(params, optimizer, quant, masks, config.init_weights_seed)

    def _loaded(self, params: Any) -> Any:
        """Parameters from another run's checkpoint, in float also if they are stored in low precision there."""
        from octavo.checkpoint import load

        path = self.config.load_parameters_path
        if not self.config.checkpoint_is_quantized:
            return load(path, params, part="params").state
        found = load(path, part="params").state
        return jax.tree.map(
            lambda x: dequantize(x) if isinstance(x, QArray) else x, found, is_leaf=lambda x: isinstance(x, QArray)
        )

    def quantized_params(self) -> Any:
        """The parameters as they are served: those that a rule quantizes as QArrays, the others as they are."""
        hows = quantized(self._loss, self.rules, weights="params").stored_quantizers(*self._loss_arguments)

        def convert(path: Any, leaf: jax.Array) -> Any:
            how = hows.get(jax.tree_util.keystr(path, simple=True, separator="/"))
            return leaf if how is None else how.quantize(leaf)

        return jax.tree_util.tree_map_with_path(convert, masked(self.state.params, self.state.masks))

    def _masks(self, params: Any) -> dict[str, jax.Array]:
        n, m = self.config.weight_sparsity_n, self.config.weight_sparsity_m
        return {} if n is None or m is None else make_masks(params, self._contractions, n, m)

    @functools.cached_property
    def _contractions(self) -> dict[str, int]:
        """For each weight of a product, by its name, the axis over which it is contracted."""
        rules = self.rules or recipe("int8")
        sites = quantized(self._loss, rules, weights="params").sites(*self._loss_arguments)
        # Kernels are [..., in, out], stacked layers and experts in front.
        return {site.leaf: -2 for site in sites if site.leaf and site.config is not None}

    # How it moves.

    def resume(self, state: TrainState) -> None:
        """Go on from a state."""
        self.state, self.now = state, int(state.step)

    def compiled(self, kind: str, step: int) -> Any:
        """The compiled "train" or "evaluate" of the stage that a step is in."""
        stage = self.schedule.stage(step)
        if (kind, stage) not in self._compiled:
            begin = self.schedule.stages[stage][0]
            fn = functools.partial(getattr(self.stepper, kind), step=begin)
            donated = (0,) if kind == "train" else ()
            lowered = jax.jit(fn, donate_argnums=donated).lower(self.state, self.data.batch(0))
            self._compiled[kind, stage] = lowered.compile()
        return self._compiled[kind, stage]

    def step(self) -> Metrics:
        """Take one step and return its metrics, which are still being computed."""
        now = self.now
        if updates_masks(self.config, now):
            self.state = TrainState(**{**vars(self.state), "masks": self._masks(self.state.params)})
        self.state, metrics = self.compiled("train", now)(self.state, self.data.batch(now))
        self.now = now + 1
        return metrics

    def evaluate(self) -> float:
        """The mean loss per token over the batches for evaluation."""
        sums = [self._evaluated(batch) for batch in self._eval_batches()]
        return float(sum(s.lm for s in sums) / max(1.0, float(sum(s.weights for s in sums))))

    def _evaluated(self, batch: Batch) -> Losses:
        return self.compiled("evaluate", max(0, self.now - 1))(self.state, batch)

    def _eval_batches(self) -> Iterator[Batch]:
        return (self.eval_data.batch(i) for i in range(self.config.eval_steps))
