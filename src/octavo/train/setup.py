"""All of a run that needs no array: the model, its precision, the step, the shape of everything and where it lies.

A `Setup` allocates nothing, so that a step can be lowered for devices that are not here.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from octavo.data.packing import KEYS
from octavo.inspect import Plan, Verification, plan, verify
from octavo.models import ModelConfig, abstract_params
from octavo.ops.training import ERROR_FEEDBACK
from octavo.rules import QtRule, QuantizationRule, Schedule, recipe
from octavo.train import distributed, sharding
from octavo.train.config import Config
from octavo.train.loss import make_loss
from octavo.train.mesh import batch_rows, make_mesh
from octavo.train.optimizer import learning_rate_schedule, make_optimizer
from octavo.train.quantization import schedule_of, sending
from octavo.train.reduction import Reduction
from octavo.train.sparse import make_masks
from octavo.train.state import TrainState, initial_state
from octavo.train.step import Batch, Stepper
from octavo.transform import quantized, scheduled

STOP = "stop"
"""The metric that says by which signal a process was asked to stop, where there are several."""


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
        batch_split=config.batch_split_factor if config.use_batch_split_schedule else 1,
        dtype=config.dtype,
        weight_dtype=config.weight_dtype,
        float32_logits=config.logits_dot_in_fp32,
    )


class Setup:
    """A run before it has arrays, on a mesh of devices: those that are here, or others that are only described.

    Refuses, as a `ConfigError`, what cannot be cut as the mesh says. `vocab_size` is the tokenizer's, for a
    configuration that leaves it open.

    >>> from octavo.train.config import Config
    >>> setup = Setup(Config(num_devices=1), vocab_size=256)
    >>> setup.state.params["decoder"]["layers"]["mlp"]["wo"]["kernel"].shape
    (3, 1280, 320)
    """

    def __init__(self, config: Config, mesh: Any = None, *, vocab_size: int = 0):
        self.config = config
        self.mesh = make_mesh(config) if mesh is None else mesh
        self.model = model_of(config, vocab_size)
        self.rows = batch_rows(config, self.mesh.size)
        if not self.is_single:
            sharding.check_fits(config, self.model, self.mesh)
            self.model = self.model.replace(placement=sharding.placement(config, self.mesh))
        self.schedule: Schedule = schedule_of(config)
        if not self.is_single:
            self.schedule = sending(self.schedule, config, self.mesh, sharding.batch_spec(config, self.mesh))
        loss = make_loss(self.model, z_loss=config.z_loss_multiplier, load_balance=config.load_balance_loss_weight)
        self.loss = loss if self.is_single else _on(self.mesh, loss)
        self.stepper = Stepper(
            loss=scheduled(self.loss, self.schedule, weights="params", shardings=self.weight_shardings),
            optimizer=make_optimizer(config),
            learning_rate=learning_rate_schedule(config),
            accumulation=config.gradient_accumulation_steps,
            clip=config.gradient_clipping_threshold,
            halts=config.abort_on_nan_loss,
            reduction=self.reduction,
        )

    @property
    def reduction(self) -> Reduction | None:
        """How the gradients of copies are added up, if not in float."""
        dtype = self.config.gradient_reduce_dtype
        if not dtype or self.mesh.shape.get("data", 1) == 1:
            return None
        return Reduction(self.mesh, self.specs, dtype, self.config.gradient_reduce_error_feedback)

    @property
    def weight_shardings(self) -> dict[str, NamedSharding]:
        """Where each parameter lies, by its name."""
        if self.is_single:
            return {}
        leaves = jax.tree_util.tree_leaves_with_path(self.specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
        named = {jax.tree_util.keystr(path, simple=True, separator="/"): spec for path, spec in leaves}
        return {name: NamedSharding(self.mesh, spec) for name, spec in named.items()}

    @property
    def is_single(self) -> bool:
        """Whether there is one device, and so nothing to place."""
        return self.mesh.size == 1

    @property
    def rules(self) -> tuple[QuantizationRule, ...]:
        """The rules of the first stage that has any."""
        return next((rules for _, rules in self.schedule.stages if rules), ())

    # Shapes.

    @property
    def batch(self) -> Batch:
        """The shapes of a step's batch, of all devices together."""
        shape = (self.rows, self.config.max_target_length)
        return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in KEYS}

    @property
    def micro(self) -> Batch:
        """The shapes of a microbatch."""
        shape = (self.rows // self.config.gradient_accumulation_steps, self.config.max_target_length)
        return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in KEYS}

    @property
    def loss_arguments(self) -> tuple[Any, ...]:
        """The shapes of what the loss takes."""
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        return (abstract_params(self.model), self.micro, scalar, scalar)

    @functools.cached_property
    def state(self) -> TrainState:
        """The shapes of the state."""
        return jax.eval_shape(self.around, abstract_params(self.model))

    def around(self, params: Any) -> TrainState:
        """The first state with these parameters."""
        masks = jax.tree.map(jnp.ones_like, self.masks(params))
        micro = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.micro)
        quant = self.stepper.loss.init(params, micro, jnp.float32(1), jnp.float32(1)) if self.rules else {}
        optimizer = jax.jit(self.stepper.optimizer.init)(params)
        errors = self.reduction.errors(params) if self.reduction is not None else {}
        return initial_state(params, optimizer, quant, masks, self.config.init_weights_seed, errors)

    def masks(self, params: Any) -> dict[str, jax.Array]:
        """The masks of sparse weights, by name."""
        n, m = self.config.weight_sparsity_n, self.config.weight_sparsity_m
        return {} if n is None or m is None else make_masks(params, self._contractions, n, m)

    @functools.cached_property
    def _contractions(self) -> dict[str, int]:
        """For each weight of a product, by its name, the axis over which it is contracted."""
        rules = self.rules or recipe("int8")
        sites = quantized(self.loss, rules, weights="params").sites(*self.loss_arguments)
        # Kernels are [..., in, out], stacked layers and experts in front.
        return {site.leaf: -2 for site in sites if site.leaf and site.config is not None}

    # Places.

    @functools.cached_property
    def specs(self) -> Any:
        """The PartitionSpec of each parameter, as a tree like the parameters."""
        return sharding.param_specs(self.model, self.mesh, sharding.rules_of(self.config))

    @functools.cached_property
    def shardings(self) -> TrainState:
        """Where each array of the state lies: optimizer and masks with their parameters, the rest on every device."""
        found = sharding.tree_shardings(self.state, self.state.params, self.specs, self.mesh)
        copies = jax.tree.map(
            lambda _, spec: NamedSharding(self.mesh, PartitionSpec("data", *spec)), self.state.params, self.specs
        )
        found = dataclasses.replace(found, errors={"copies": copies}) if self.state.errors else found
        return dataclasses.replace(found, quant=self._with_losses(found.quant))

    def _with_losses(self, quant: Any) -> Any:
        """The places of the quantization's state, of which each device has what it lost of a weight's gradient."""
        if not any(isinstance(rule, QtRule) and rule.reduce_feedback for rule in self.rules):
            return quant
        low = quantized(self.loss, self.rules, weights="params", shardings=self.weight_shardings)
        sites = {f"{site.path}/{site.op_id}/{ERROR_FEEDBACK}/error": site for site in low.sites(*self.loss_arguments)}

        def place(path: Any, leaf: Any, where: NamedSharding) -> NamedSharding:
            site = sites.get(jax.tree_util.keystr(path[1:], simple=True, separator="/"))
            if site is None or site.placement.reduction is None:
                return where
            reduction = site.placement.reduction
            weight = site.lhs if reduction.left else site.rhs
            stacked = (None,) * (leaf.ndim - 1 - len(weight[0]))
            return NamedSharding(self.mesh, PartitionSpec(*stacked, *reduction.error_spec))

        return jax.tree_util.tree_map_with_path(place, self.state.quant, quant)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Where a batch lies."""
        return NamedSharding(self.mesh, sharding.batch_spec(self.config, self.mesh))

    @property
    def everywhere(self) -> NamedSharding:
        """A copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    # Programs.

    def begin(self, step: int) -> int:
        """The first step of the stage that a step is in."""
        return self.schedule.stages[self.schedule.stage(step)][0]

    def program(self, kind: str, step: int) -> Any:
        """The jitted "train" or "evaluate" of a stage."""
        fn = functools.partial(getattr(self.stepper, kind), step=self.begin(step))
        donated = (0,) if kind == "train" else ()
        if self.is_single:
            return jax.jit(fn, donate_argnums=donated)
        signals = (self.flags_sharding,) if self.agrees(kind) else ()
        return jax.jit(
            _agreeing(fn) if signals else fn,
            in_shardings=(self.shardings, self.batch_sharding, *signals),
            out_shardings=(self.shardings, self.everywhere) if kind == "train" else self.everywhere,
            donate_argnums=donated,
        )

    def agrees(self, kind: str) -> bool:
        """Whether a program is also how processes tell each other that they were asked to stop."""
        return kind == "train" and distributed.several()

    @property
    def flags_sharding(self) -> NamedSharding:
        """Where those flags lie: one on each device."""
        return NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))

    def lowered(self, kind: str = "train", step: int = 0) -> Any:
        """A program lowered from shapes alone; `.compile()` compiles it for the mesh's devices."""
        flags = (jax.ShapeDtypeStruct((self.mesh.size,), jnp.int32),) if self.agrees(kind) else ()
        return self.program(kind, step).lower(self.state, self.batch, *flags)

    # What it does.

    @property
    def quantized_step(self) -> int:
        """The first step that is quantized, or 0."""
        return next((begin for begin, rules in self.schedule.stages if rules), 0)

    def plan(self) -> Plan:
        """What becomes of each multiplication of the loss."""
        return plan(self.loss, self.rules, *self.loss_arguments, weights="params")

    def verify(self) -> Verification:
        """What the matmuls of a whole quantized step are made of, optimizer included."""
        step = functools.partial(self.stepper.train, step=self.quantized_step)
        return verify(step, self.state, self.batch)


def _on(mesh: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose constraints are about a mesh."""

    @functools.wraps(fn)
    def placed(params: Any, *args: Any) -> Any:
        if jax.sharding.get_abstract_mesh().manual_axes:
            return fn(params, *args)  # in a shard_map, whose mesh this is
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return fn(params, *args)

    return placed


def _agreeing(train: Callable[..., Any]) -> Callable[..., Any]:
    """A step that also finds the largest of some flags, without a collective of its own program."""

    def agreeing(state: TrainState, batch: Batch, flags: jax.Array) -> Any:
        state, metrics = train(state, batch)
        return state, {**metrics, STOP: jnp.max(flags)}

    return agreeing


def abstract_train_state(config: Config, mesh: Any = None, *, vocab_size: int = 0) -> TrainState:
    """The shapes of a run's state, each with its sharding: what a step is lowered for.

    >>> from octavo.train.config import Config
    >>> abstract_train_state(Config(num_devices=1, vocab_size=256)).params["token_embedder"]["embedding"].shape
    (256, 320)
    """
    setup = Setup(config, mesh, vocab_size=vocab_size)
    return jax.tree.map(
        lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), setup.state, setup.shardings
    )
