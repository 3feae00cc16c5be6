"""The trainer without a run around it: data, model, precision and step, put together from a configuration."""

import functools
import signal
from collections.abc import Iterator
from typing import Any

import jax

from octavo.data import make_dataset
from octavo.inspect import Plan, Verification
from octavo.models import init_params
from octavo.qarray import QArray, dequantize, is_qarray, shardings
from octavo.rules import QuantizationRule
from octavo.train import distributed
from octavo.train.config import Config
from octavo.train.loss import Losses
from octavo.train.mesh import batch_rows, make_mesh
from octavo.train.setup import Setup, model_of
from octavo.train.sparse import masked, updates_masks
from octavo.train.state import TrainState
from octavo.train.step import Batch, Metrics
from octavo.transform import quantized

__all__ = ["Trainer", "model_of"]


class Trainer:
    """A model in training. `state` moves on by `step`; everything else is fixed by the configuration.

    The step of each stage of the schedule is compiled when the stage is first met. On several devices the state lies as
    `setup.shardings` says, and a batch is of the rows of all devices.
    """

    def __init__(self, config: Config):
        self.config = config
        mesh = make_mesh(config)
        self.data = make_dataset(config, "train", batch_size=batch_rows(config, mesh.size))
        self.setup = Setup(config, mesh, vocab_size=self.data.vocab_size)
        self.model, self.schedule, self.stepper = self.setup.model, self.setup.schedule, self.setup.stepper
        self._compiled: dict[tuple[str, int], Any] = {}
        self.resume(self._initial())

    # What the run is made of.

    @functools.cached_property
    def eval_data(self) -> Any:
        """The batches for evaluation."""
        return make_dataset(self.config, "eval", batch_size=self.setup.rows)

    @property
    def rules(self) -> tuple[QuantizationRule, ...]:
        """The rules of the first stage that has any."""
        return self.setup.rules

    def plan(self) -> Plan:
        """What becomes of each multiplication of the loss."""
        return self.setup.plan()

    def verify(self) -> Verification:
        """What the matmuls of a whole quantized step are made of, optimizer included."""
        return self.setup.verify()

    @functools.cached_property
    def verification(self) -> Verification:
        """`verify`, once."""
        return self.verify()

    @property
    def flops(self) -> int:
        """The FLOPs of the matmuls of a step, on all devices."""
        return self.verification.flops()

    @property
    def devices(self) -> int:
        """How many devices share a step."""
        return self.setup.mesh.size

    # Where it begins.

    def _initial(self) -> TrainState:
        key, setup = jax.random.key(self.config.init_weights_seed), self.setup
        init = functools.partial(init_params, self.model)
        places = {} if setup.is_single else {"out_shardings": setup.shardings.params}
        params = jax.jit(init, **places)(key)
        if self.config.load_parameters_path:
            params = self._loaded(params)
        if setup.is_single:
            return setup.around(params)
        return jax.jit(setup.around, out_shardings=setup.shardings)(params)

    def _loaded(self, params: Any) -> Any:
        """Parameters from another run's checkpoint, in float also if they are stored in low precision there."""
        from octavo.checkpoint import load

        path = self.config.load_parameters_path
        if not self.config.checkpoint_is_quantized:
            return load(path, params, subtree="params").state
        found = load(path, subtree="params").state
        floats = jax.tree.map(lambda x: dequantize(x) if isinstance(x, QArray) else x, found, is_leaf=is_qarray)
        return floats if self.setup.is_single else distributed.spread(floats, self.setup.shardings.params)

    def quantized_params(self) -> Any:
        """The parameters as they are served: those that a rule quantizes as QArrays, the others as they are.

        On a mesh, codes and scales are cut as the parameters are.
        """
        how = quantized(self.setup.loss, self.rules, weights="params").stored_quantizers(*self.setup.loss_arguments)

        def convert(path: Any, leaf: Any) -> Any:
            quantizer = how.get(jax.tree_util.keystr(path, simple=True, separator="/"))
            if quantizer is None or self.setup.is_single:
                return leaf if quantizer is None else quantizer.quantize(leaf)
            places = shardings(jax.eval_shape(quantizer.quantize, leaf), leaf.sharding)
            return jax.jit(quantizer.quantize, out_shardings=places)(leaf)

        return jax.tree_util.tree_map_with_path(convert, masked(self.state.params, self.state.masks))

    # How it moves.

    def resume(self, state: TrainState) -> None:
        """Go on from a state."""
        self.state, self.now = state, int(state.step)

    def batch(self, index: int, split: str = "train") -> Batch:
        """A batch of either split, on the devices; a process reads the rows that its own devices need."""
        data = self.data if split == "train" else self.eval_data
        if self.setup.is_single:
            return data.batch(index)
        return distributed.placed_batch(data, index, self.setup.batch_sharding)

    def compiled(self, kind: str, step: int) -> Any:
        """The compiled "train" or "evaluate" of the stage that a step is in."""
        stage = self.schedule.stage(step)
        if (kind, stage) not in self._compiled:
            if self.setup.is_single:
                lowered = self.setup.program(kind, step).lower(self.state, self.data.batch(0))
            else:
                lowered = self.setup.lowered(kind, step)
            self._compiled[kind, stage] = lowered.compile()
        return self._compiled[kind, stage]

    def step(self, stop: signal.Signals | None = None) -> Metrics:
        """Take one step and return its metrics, which are still being computed.

        With several processes, `stop` tells the others that this one was asked to end.
        """
        now = self.now
        if updates_masks(self.config, now):
            self.state = TrainState(**{**vars(self.state), "masks": self._masks()})
        self.state, metrics = self.compiled("train", now)(self.state, self.batch(now), *self._flags(stop))
        self.now = now + 1
        return metrics

    def _flags(self, stop: signal.Signals | None) -> tuple[jax.Array, ...]:
        return (distributed.stop_flags(stop, self.setup.flags_sharding),) if self.setup.agrees("train") else ()

    def _masks(self) -> Any:
        if self.setup.is_single:
            return self.setup.masks(self.state.params)
        return jax.jit(self.setup.masks, out_shardings=self.setup.shardings.masks)(self.state.params)

    def evaluate(self) -> float:
        """The mean loss per token over the batches for evaluation."""
        sums = [self._evaluated(batch) for batch in self._eval_batches()]
        return float(sum(s.lm for s in sums) / max(1.0, float(sum(s.weights for s in sums))))

    def _evaluated(self, batch: Batch) -> Losses:
        return self.compiled("evaluate", max(0, self.now - 1))(self.state, batch)

    def _eval_batches(self) -> Iterator[Batch]:
        return (self.batch(i, "eval") for i in range(self.config.eval_steps))
