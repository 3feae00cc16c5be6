"""The program of a run: the model, its precision, the step, and the shapes and shardings of everything.

A `Program` allocates nothing, so that a step can be lowered for devices that are only described.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from octavo._tree import flatten_paths
from octavo.data.packing import KEYS
from octavo.inspect import Plan, Verification, plan, verify
from octavo.models import ModelConfig, abstract_params, apply
from octavo.pretrained import PretrainedModel
from octavo.rules import QtRule, QuantizationRule, Schedule, recipe
from octavo.train import distributed, sharding
from octavo.train.adapters import AdapterLoss, lora_rule
from octavo.train.config import Config
from octavo.train.initial import ARCHITECTURE, UNCONFIGURED, open_source, open_teacher, with_architecture
from octavo.train.mesh import global_batch_size, make_mesh
from octavo.train.optimizer import learning_rate_schedule, make_optimizer
from octavo.train.quantization import training_schedule, with_communication
from octavo.train.reduction import AXIS, replica_gradients, replica_reductions, with_error_shardings
from octavo.train.step import Batch, TrainState, TrainStep, join_trained, make_loss, make_masks
from octavo.transform import quantized, scheduled
from octavo.transform.learned import LEARNED

STOP = "stop"
"""The metric of multi-process runs with the stop signal that any process received."""


def model_config(config: Config, vocab_size: int = 0, source: PretrainedModel | None = None) -> ModelConfig:
    """The model of a configuration.

    Args:
      config: The configuration.
      vocab_size: The tokenizer's, for a configuration that leaves it open.
      source: The model that the run starts from, which has what no key configures.
    """
    given: dict[str, Any] = {field: getattr(config, key) for key, field in ARCHITECTURE.items()}
    given |= {"vocab_size": config.vocab_size or vocab_size, "rotary_dim": config.qk_rope_head_dim or None}
    if source is not None:
        given |= {field: getattr(source.config, field) for field in UNCONFIGURED}
    return ModelConfig(
        **given,
        activation=config.mlp_activations[0],
        moe_mlp_dim=config.base_moe_mlp_dim or config.base_mlp_dim,
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


class Program:
    """A run without arrays, on a mesh of devices: those of this machine, or others that are only described.

    Args:
      config: The configuration; with `load_parameters_path`, the architecture is that of the model there.
      mesh: The mesh; that of the configuration on the devices that there are by default.
      vocab_size: The tokenizer's, for a configuration that leaves it open.
      schedule: The rules by stages; those of the configuration by default.
      source: The model at `load_parameters_path`, if it is open already.

    Raises:
      ConfigError: Sizes that cannot be sharded over the mesh.

    >>> from octavo.train.config import Config
    >>> program = Program(Config(num_devices=1), vocab_size=256)
    >>> program.abstract_state.params["decoder"]["layers"]["mlp"]["wo"]["kernel"].shape
    (3, 1280, 320)
    """

    def __init__(
        self,
        config: Config,
        mesh: Any = None,
        *,
        vocab_size: int = 0,
        schedule: Schedule | None = None,
        source: PretrainedModel | None = None,
    ):
        self.source = open_source(config) if source is None else source
        self.config = config = with_architecture(config, self.source)
        self.mesh = make_mesh(config) if mesh is None else mesh
        self.model = model_config(config, vocab_size, self.source)
        self.batch_size = global_batch_size(config, self.mesh.size)
        self.recipe_schedule = self.schedule = schedule or training_schedule(config)
        if not self.is_single_device:
            sharding.check_fits(config, self.model, self.mesh)
            self.model = self.model.replace(placement=sharding.model_axis_rules(config, self.mesh))
            spec = sharding.batch_spec(config, self.mesh)
            self.schedule = with_communication(self.schedule, config, self.mesh, spec)
        loss = make_loss(
            self.model,
            z_loss=config.z_loss_multiplier,
            load_balance=config.load_balance_loss_weight,
            distillation=config.distillation_weight,
            temperature=config.distillation_temperature,
        )
        self.loss = loss if self.is_single_device else _with_mesh(self.mesh, loss)
        self.adapter_loss = None
        if (rule := lora_rule(config)) is not None:
            self.adapter_loss = AdapterLoss(self.loss, rule, pack=self.is_single_device)
        self.train_step = TrainStep(
            loss=self.adapter_loss
            or scheduled(self.loss, self.schedule, weights="params", shardings=self.weight_shardings),
            optimizer=make_optimizer(config),
            learning_rate=learning_rate_schedule(config),
            accumulation=config.gradient_accumulation_steps,
            clip=config.gradient_clipping_threshold,
            halts=config.abort_on_nan_loss,
            replica_gradients=self.reductions and functools.partial(replica_gradients, reductions=self.reductions),
            teacher=self._teacher_logits if config.distillation_weight else None,
        )

    @property
    def is_single_device(self) -> bool:
        """Whether there is one device, and so nothing to shard."""
        return self.mesh.size == 1

    @property
    def rules(self) -> tuple[QuantizationRule, ...]:
        """The rules of the first stage that has any."""
        return next((rules for _, rules in self.schedule.stages if rules), ())

    @property
    def quantized_step(self) -> int:
        """The first step that is quantized, or 0."""
        return next((start for start, rules in self.schedule.stages if rules), 0)

    def stage_start(self, step: int) -> int:
        """The first step of the stage that a step is in."""
        return self.schedule.stages[self.schedule.stage(step)][0]

    @functools.cached_property
    def reductions(self) -> Any:
        """The quantized all-reduce of each gradient over replicas; None if gradients are reduced in float."""
        dtype = self.config.gradient_reduce_dtype
        if not dtype or self.mesh.shape.get(AXIS, 1) == 1:
            return None
        return replica_reductions(self.mesh, self.param_specs, dtype, self.config.gradient_reduce_error_feedback)

    @functools.cached_property
    def teacher_source(self) -> PretrainedModel | None:
        """The model at `distillation_teacher`; None if the teacher is the model that the run starts from."""
        path = self.config.distillation_teacher
        tokenizer = None if self.source is None else self.source.tokenizer
        return open_teacher(path, self.model, tokenizer) if path and self.config.distillation_weight else None

    @functools.cached_property
    def teacher_model(self) -> ModelConfig:
        """The architecture of the teacher, with the scan, dtypes and sharding of the run."""
        if self.teacher_source is None:
            return self.model
        ours = {name: getattr(self.model, name) for name in ("scan_layers", "dtype", "weight_dtype", "placement")}
        return self.teacher_source.config.replace(**ours)

    def _teacher_logits(self, params: Any, batch: Batch) -> jax.Array:
        names = ("inputs", "inputs_position", "inputs_segmentation")
        run = functools.partial(apply, self.teacher_model)
        run = run if self.is_single_device else _with_mesh(self.mesh, run)
        return run(params, *(batch[name] for name in names))[0]

    # Shapes.

    @property
    def abstract_batch(self) -> Batch:
        """The shapes of a step's global batch."""
        return self._abstract_rows(self.batch_size)

    @property
    def abstract_microbatch(self) -> Batch:
        """The shapes of a microbatch."""
        return self._abstract_rows(self.batch_size // self.config.gradient_accumulation_steps)

    def _abstract_rows(self, rows: int) -> Batch:
        return {name: jax.ShapeDtypeStruct((rows, self.config.max_target_length), jnp.int32) for name in KEYS}

    @property
    def loss_arguments(self) -> tuple[Any, ...]:
        """The shapes of the loss's arguments."""
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        return (abstract_params(self.model), self.abstract_microbatch, scalar, scalar)

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """The shapes of the state."""
        return jax.eval_shape(self.init_state, abstract_params(self.model), self.abstract_teacher)

    @property
    def abstract_teacher(self) -> Any:
        """The shapes of the teacher's parameters; None if they are those of the run."""
        return None if self.teacher_source is None else abstract_params(self.teacher_model)

    def init_state(self, params: Any, teacher: Any = None, adapted: Any = None) -> TrainState:
        """The state before the first step, with these parameters; a teacher is by default what they are now.

        `adapted` has calibrated adapters, with the frozen weights that they belong to.
        """
        if teacher is None:
            teacher = jax.tree.map(jnp.copy, params) if self.config.distillation_weight else {}
        microbatch = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.abstract_microbatch)
        loss, frozen, key = self.train_step.loss, {}, jax.random.key(self.config.init_weights_seed)
        if self.adapter_loss is not None:
            arguments = microbatch, jnp.float32(1), jnp.float32(1)
            if adapted is not None:
                params, frozen = adapted
            elif self.config.lora_init != "zeros":  # calibrated ones have the shapes of LoftQ's
                params, frozen = self.adapter_loss.init_loftq(params, *arguments)
            else:
                frozen = self.adapter_loss.freeze(params, *arguments)
                params = self.adapter_loss.init_adapters(key, params, *arguments)
        quant = loss.init(params, microbatch, jnp.float32(1), jnp.float32(1)) if self.rules else {}
        return TrainState(
            step=jnp.int32(0),
            params=params,
            opt_state=jax.jit(self.train_step.optimizer.init)(join_trained(params, quant.get(LEARNED))),
            quant=quant,
            masks=jax.tree.map(jnp.ones_like, self.make_masks(params)),
            # The raw key data, an ordinary array that can be saved and compared.
            key=jax.random.key_data(key),
            halted=jnp.bool_(False),
            errors=jax.tree.map(lambda r, p: r.init_error(p.shape), self.reductions, params) if self.reductions else {},
            frozen=frozen,
            teacher=teacher,
        )

    def make_masks(self, params: Any) -> dict[str, jax.Array]:
        """The masks of sparse weights, by path."""
        n, m = self.config.weight_sparsity_n, self.config.weight_sparsity_m
        return {} if n is None or m is None else make_masks(params, self._contracted_axes, n, m)

    @functools.cached_property
    def _contracted_axes(self) -> dict[str, int]:
        """The contracted axis of each weight of a matmul, by path."""
        sites = self._sites(self.rules or recipe("int8"))
        # Kernels are [..., in, out], stacked layers and experts in front.
        return {site.leaf: -2 for site in sites if site.leaf and site.config is not None}

    def _sites(self, rules: Sequence[QuantizationRule]) -> Sequence[Any]:
        low = quantized(self.loss, rules, weights="params", shardings=self.weight_shardings)
        return low.sites(*self.loss_arguments)

    # Shardings.

    @functools.cached_property
    def param_specs(self) -> Any:
        """The PartitionSpec of each parameter, as a tree like the parameters."""
        return sharding.param_specs(self.model, self.mesh, sharding.axis_rules(self.config))

    @property
    def param_shardings(self) -> Any:
        """The sharding of each parameter of the model, as a tree."""
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec),
            self.param_specs,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )

    @property
    def weight_shardings(self) -> dict[str, NamedSharding]:
        """The sharding of each parameter, by path."""
        if self.is_single_device:
            return {}
        specs = flatten_paths(self.param_specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
        return {name: NamedSharding(self.mesh, spec) for name, spec in specs.items()}

    @functools.cached_property
    def state_shardings(self) -> TrainState:
        """The sharding of each array of the state: optimizer and masks as their parameters, the rest replicated."""
        state = self.abstract_state
        found = sharding.tree_shardings(state, abstract_params(self.model), self.param_specs, self.mesh)
        feedback = any(isinstance(rule, QtRule) and rule.reduce_feedback for rule in self.rules)
        return with_error_shardings(found, state, self.reductions, self._sites(self.rules) if feedback else ())

    @property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of a batch."""
        return NamedSharding(self.mesh, sharding.batch_spec(self.config, self.mesh))

    @property
    def replicated(self) -> NamedSharding:
        """The replicated sharding."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def flags_sharding(self) -> NamedSharding:
        """The sharding of the stop flags: one per device."""
        return NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))

    # Programs.

    def jitted(self, kind: str, step: int) -> Any:
        """The jitted "train" or "evaluate" of the stage that a step is in."""
        fn = functools.partial(getattr(self.train_step, kind), step=self.stage_start(step))
        donated = (0,) if kind == "train" else ()
        if self.is_single_device:
            return jax.jit(fn, donate_argnums=donated)
        flags = (self.flags_sharding,) if self.syncs_stop_flag(kind) else ()
        return jax.jit(
            _with_stop_flag(fn) if flags else fn,
            in_shardings=(self.state_shardings, self.batch_sharding, *flags),
            out_shardings=(self.state_shardings, self.replicated) if kind == "train" else self.replicated,
            donate_argnums=donated,
        )

    def syncs_stop_flag(self, kind: str) -> bool:
        """Whether a program also reduces the stop flag over all processes."""
        return kind == "train" and distributed.is_multiprocess()

    def lower(self, kind: str = "train", step: int = 0) -> Any:
        """A program lowered from shapes alone; `.compile()` compiles it for the mesh's devices."""
        flags = (jax.ShapeDtypeStruct((self.mesh.size,), jnp.int32),) if self.syncs_stop_flag(kind) else ()
        return self.jitted(kind, step).lower(self.abstract_state, self.abstract_batch, *flags)

    def plan(self) -> Plan:
        """The plan of the loss: what the rules do to each matmul."""
        return plan(self.loss, self.rules, *self.loss_arguments, weights="params")

    def verify(self) -> Verification:
        """The precision of every matmul of a quantized training step, optimizer included."""
        step = functools.partial(self.train_step.train, step=self.quantized_step)
        return verify(step, self.abstract_state, self.abstract_batch)


def _with_mesh(mesh: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose sharding constraints refer to a mesh."""

    @functools.wraps(fn)
    def call(params: Any, *args: Any) -> Any:
        if jax.sharding.get_abstract_mesh().manual_axes:
            return fn(params, *args)  # in a shard_map, whose mesh this is
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return fn(params, *args)

    return call


def _with_stop_flag(train: Callable[..., Any]) -> Callable[..., Any]:
    """Piggy-back the stop flag on a train step, so that it needs no program of its own."""

    def step(state: TrainState, batch: Batch, flags: jax.Array) -> Any:
        state, metrics = train(state, batch)
        return state, {**metrics, STOP: jnp.max(flags)}

    return step


def abstract_train_state(config: Config, mesh: Any = None, *, vocab_size: int = 0) -> TrainState:
    """The shapes of a run's state, each with its sharding: what a step is lowered for.

    >>> from octavo.train.config import Config
    >>> abstract_train_state(Config(num_devices=1, vocab_size=256)).params["token_embedder"]["embedding"].shape
    (256, 320)
    """
    program = Program(config, mesh, vocab_size=vocab_size)
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        program.abstract_state,
        program.state_shardings,
    )
