"""Restoring a checkpoint whose optimizer moments have another format than those of the run."""

import dataclasses
import warnings
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from octavo.checkpoint import CheckpointManager, CheckpointWarning, Restored, load_abstract
from octavo.optim import dequantize_state, quantize_state_like
from octavo.train.optimizer import make_optimizer
from octavo.train.sharding import tree_shardings
from octavo.train.step import is_reset_on_remesh
from octavo.train.trainer import Trainer


def restore_state(trainer: Trainer, checkpoints: CheckpointManager) -> Restored | None:
    """The newest intact checkpoint with the trainer's `opt_state_dtype`, whatever it was saved with."""
    saved = _saved_dtype(checkpoints)
    if saved is None or saved == trainer.config.opt_state_dtype:
        return checkpoints.restore(trainer.state, reinit=is_reset_on_remesh)
    like = dataclasses.replace(trainer.state, opt_state=_abstract_opt_state(trainer, saved))
    found = checkpoints.restore(like, reinit=is_reset_on_remesh)
    assert found is not None
    out = {} if trainer.is_single_device else {"out_shardings": trainer.state_shardings.opt_state}
    convert = jax.jit(lambda old: quantize_state_like(dequantize_state(old), trainer.abstract_state.opt_state), **out)
    state = dataclasses.replace(found.state, opt_state=convert(found.state.opt_state))
    return dataclasses.replace(found, state=state)


def _saved_dtype(checkpoints: CheckpointManager) -> str | None:
    """The `opt_state_dtype` of the newest intact checkpoint; None if there is no checkpoint."""
    if checkpoints.latest_step() is None:
        return None
    with warnings.catch_warnings(action="ignore", category=CheckpointWarning):  # restoring warns about the same
        return load_abstract(checkpoints.directory).extra.get("config", {}).get("opt_state_dtype", "")


def _abstract_opt_state(trainer: Trainer, opt_state_dtype: str) -> Any:
    """The shapes and shardings of the optimizer's state with another format of moments."""
    optimizer = make_optimizer(trainer.config.replace(opt_state_dtype=opt_state_dtype))
    params = trainer.abstract_state.params
    state = jax.eval_shape(optimizer.init, params)
    if trainer.is_single_device:
        where: Any = jax.tree.map(lambda _: SingleDeviceSharding(trainer.mesh.devices.item()), state)
    else:
        where = tree_shardings(state, params, trainer.param_specs, trainer.mesh)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, where)
