"""The trainer, without a run's directory and checkpoints: a program with its data and its state."""

import dataclasses
import functools
import signal
from typing import Any

import jax
import jax.numpy as jnp

from octavo import _remote
from octavo._tree import path_str
from octavo.checkpoint import load
from octavo.data import make_dataset
from octavo.frameworks.serving import quantize_by_range, quantize_sharded
from octavo.inspect import Verification
from octavo.models import init_params
from octavo.qarray import dequantize, is_qarray
from octavo.rules import Schedule
from octavo.train import distributed
from octavo.train.config import Config, ConfigError
from octavo.train.config.checks import SOURCE
from octavo.train.initial import check_tokenizer, load_codes, load_params, open_source, with_architecture
from octavo.train.mesh import global_batch_size, make_mesh
from octavo.train.program import Program
from octavo.train.step import Batch, Metrics, TrainState, apply_masks, is_mask_update_step
from octavo.transform import quantized


class Trainer(Program):
    """A model in training: `step` advances `state`; everything else is fixed by the configuration.

    The step of each stage of the schedule is compiled when the stage is first reached. On several devices the state is
    sharded by `state_shardings`, and a batch has the rows of all devices.

    Args:
      config: The configuration.
      mesh: The mesh; that of the configuration on the devices that there are by default.
      schedule: The rules by stages; those of the configuration by default.
      programs: Executables by their StableHLO. Trainers that share the dict compile a program once.

    >>> from octavo.train.config import Config
    >>> trainer = Trainer(Config(num_devices=1, dataset_type="synthetic", base_emb_dim=32, base_mlp_dim=64))
    >>> trainer.now, trainer.batch(0)["inputs"].shape
    (0, (16, 128))
    """

    def __init__(
        self,
        config: Config,
        mesh: Any = None,
        schedule: Schedule | None = None,
        programs: dict[str, Any] | None = None,
    ):
        mesh = make_mesh(config) if mesh is None else mesh
        source = open_source(config)
        config = with_architecture(config, source)
        self.data = make_dataset(config, "train", batch_size=global_batch_size(config, mesh.size))
        check_tokenizer(source, self.data)
        super().__init__(config, mesh, vocab_size=self.data.vocab_size, schedule=schedule, source=source)
        self._compiled: dict[tuple[str, int], Any] = {}
        self._programs = programs
        self.resume(self._initial_state())

    @functools.cached_property
    def eval_data(self) -> Any:
        """The data of the evaluations."""
        return make_dataset(self.config, "eval", batch_size=self.batch_size)

    @functools.cached_property
    def verification(self) -> Verification:
        """The result of `verify`, computed once."""
        return self.verify()

    @property
    def flops(self) -> int:
        """The FLOPs of the matmuls of a step, on all devices."""
        return self.verification.flops()

    def _initial_state(self) -> TrainState:
        params, teacher = self._initial_params(), None
        if self.teacher_source is not None:
            out = None if self.is_single_device else self.state_shardings.teacher
            teacher = load_params(self.teacher_source, self.teacher_model, out)
        adapted = self._calibrated_adapters(params) if self.config.lora_init in ("gptq", "eora") else None
        if self.is_single_device:
            state = self.init_state(params, teacher, adapted)
            if self.config.lora_weight_qtype == SOURCE:
                self.abstract_state = jax.eval_shape(lambda: state)  # whose codes only the file knows
            return state
        return jax.jit(self.init_state, out_shardings=self.state_shardings)(params, teacher, adapted)

    def _calibrated_adapters(self, params: Any) -> tuple[Any, Any]:
        """Adapters, and their weights, quantized for the inputs that these have on the first batches."""
        assert self.adapter_loss is not None
        count = -(-self.config.lora_calibration_tokens // (self.batch_size * self.config.max_target_length))
        one = jnp.float32(1)
        batches = [(self.batch(i), one, one) for i in range(count)]
        key = jax.random.key(self.config.init_weights_seed)
        return self.adapter_loss.init_calibrated(key, params, batches, eora=self.config.lora_init == "eora")

    def _initial_params(self) -> Any:
        """Random parameters, or those at `load_parameters_path`."""
        path = _remote.pull(self.config.load_parameters_path)
        out = None if self.is_single_device else self.param_shardings
        if self.source is not None and self.config.lora_weight_qtype == SOURCE:
            if out is not None:
                raise ConfigError(["lora_weight_qtype=source is for one device: set num_devices=1, or name a format"])
            return load_codes(self.source, self.model)
        if self.source is not None:
            return load_params(self.source, self.model, out)
        init = functools.partial(init_params, self.model)
        params = jax.jit(init, **({} if out is None else {"out_shardings": out}))(
            jax.random.key(self.config.init_weights_seed)
        )
        if not self.config.load_parameters_path:
            return params
        # A checkpoint without a description of its model.
        if not self.config.checkpoint_is_quantized:
            return load(path, params, subtree="params").state
        found = load(path, subtree="params").state
        floats = jax.tree.map(lambda x: dequantize(x) if is_qarray(x) else x, found, is_leaf=is_qarray)
        return floats if out is None else distributed.shard_tree(floats, out)

    def quantized_params(self) -> Any:
        """The parameters for serving: QArrays where a rule quantizes them, sharded like the parameters."""
        low = quantized(self.loss, self.rules, weights="params") if self.rules else None
        quantizers = {} if low is None else low.stored_quantizers(*self.loss_arguments)
        ranges = {} if low is None else low.stored_ranges(self.state.quant, *self.loss_arguments)

        def convert(path: Any, leaf: Any) -> Any:
            quantizer, bounds = quantizers.get(path_str(path)), ranges.get(path_str(path))
            if quantizer is None:
                return leaf
            if self.is_single_device:
                return quantize_by_range(leaf, quantizer, bounds)
            replicate = self.config.replicate_quant_scale
            return quantize_sharded(leaf, quantizer, bounds=bounds, replicate_scale=replicate)

        return jax.tree_util.tree_map_with_path(convert, apply_masks(self.state.params, self.state.masks))

    def resume(self, state: TrainState) -> None:
        """Continue from a state."""
        self.state, self.now = state, int(state.step)

    def batch(self, index: int, split: str = "train") -> Batch:
        """A batch of either split, on the devices; a process reads the rows that its own devices need."""
        data = self.data if split == "train" else self.eval_data
        return data.batch(index) if self.is_single_device else distributed.shard_batch(data, index, self.batch_sharding)

    def compiled(self, kind: str, step: int) -> Any:
        """The compiled "train" or "evaluate" of the stage that a step is in."""
        stage = self.schedule.stage(step)
        if (kind, stage) not in self._compiled:
            if self.is_single_device:
                lowered = self.jitted(kind, step).lower(self.state, self.data.batch(0))
            else:
                lowered = self.lower(kind, step)
            self._compiled[kind, stage] = self._compile(lowered)
        return self._compiled[kind, stage]

    def _compile(self, lowered: Any) -> Any:
        if self._programs is None:
            return lowered.compile()
        text = lowered.as_text()
        if text not in self._programs:
            self._programs[text] = lowered.compile()
        return self._programs[text]

    def step(self, stop: signal.Signals | None = None) -> Metrics:
        """Take one step and return its metrics, which are still being computed.

        Args:
          stop: The stop signal that this process received, if any; the step passes it on to other processes.
        """
        now = self.now
        if is_mask_update_step(self.config, now):
            out = {} if self.is_single_device else {"out_shardings": self.state_shardings.masks}
            make = jax.jit(self.make_masks, **out) if out else self.make_masks
            self.state = dataclasses.replace(self.state, masks=make(self.state.params))
        flags = (distributed.stop_flags(stop, self.flags_sharding),) if self.syncs_stop_flag("train") else ()
        self.state, metrics = self.compiled("train", now)(self.state, self.batch(now), *flags)
        self.now = now + 1
        return metrics

    def evaluate(self) -> float:
        """The mean loss per token over the batches for evaluation."""
        evaluate = self.compiled("evaluate", max(0, self.now - 1))
        sums = [evaluate(self.state, self.batch(i, "eval")) for i in range(self.config.eval_steps)]
        return float(sum(s.lm for s in sums) / max(1.0, float(sum(s.weights for s in sums))))
