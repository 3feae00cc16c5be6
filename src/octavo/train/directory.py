"""The directory of a run: its configuration, data and plan, its checkpoints, and how it resumes from them."""

import dataclasses
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import yaml
from jax.sharding import SingleDeviceSharding

from octavo import _remote
from octavo._io import atomic_write
from octavo.checkpoint import CheckpointManager, CheckpointWarning, Restored, load_abstract
from octavo.inspect import Plan
from octavo.optim import dequantize_state, quantize_state_like
from octavo.pretrained import write_adapter
from octavo.rules import rules_to_json
from octavo.train.config import Config
from octavo.train.config.text import to_yaml
from octavo.train.optimizer import make_optimizer
from octavo.train.sharding import tree_shardings
from octavo.train.step import is_reset_on_remesh
from octavo.train.trainer import Trainer

type Log = Callable[[str], None]


def write_config(config: Config, log: Log) -> None:
    """Write the configuration, and log what differs from the one that the run had before."""
    path, text = config.run_directory / "config.yml", to_yaml(config)
    if path.exists():
        old, new = yaml.safe_load(path.read_text(encoding="utf8")) or {}, yaml.safe_load(text)
        changed = [f"{key}: {old.get(key)!r} -> {new[key]!r}" for key in new if old.get(key) != new[key]]
        if changed:
            log(f"changed since the last start of this run: {', '.join(changed)}")
    atomic_write(path, text)


def describe(trainer: Trainer, log: Log) -> None:
    """Log and write the model, the data and the quantization plan."""
    directory = trainer.config.run_directory
    size, data = sum(x.size for x in jax.tree.leaves(trainer.state.params)), trainer.data.describe()
    log(f"number parameters: {size / 1e6:.3f} million")
    if trainer.state.frozen:
        kept = sum(x.nbytes for x in jax.tree.leaves(trainer.state.frozen))
        log(f"these are adapters of rank {trainer.config.lora_rank}; frozen weights: {kept / 2**20:.1f} MiB")
    log(f"data: {json.dumps(data)}")
    atomic_write(directory / "data.json", json.dumps(data, indent=2))
    for name, content in (trainer.data.tokenizer.files() if trainer.data.tokenizer else {}).items():
        atomic_write(directory / name, content)
    if trainer.rules:
        plan, verification = trainer.plan(), trainer.verification
        log(f"{plan}\n{verification.summary()}")
        write_plan(plan, directory)
        atomic_write(directory / "verify.json", verification.to_json())
    else:
        log("quantization: none, all matmuls are in float")
    log(f"Per train step: Total TFLOPs: {trainer.flops / 1e12:.6f}")


def write_plan(plan: Plan, directory: Path) -> None:
    atomic_write(directory / "plan.txt", f"{plan}\n")
    atomic_write(directory / "plan.json", plan.to_json())


def check_no_overwrite(config: Config, checkpoints: CheckpointManager) -> None:
    """Raise if a run without checkpoints would overwrite one that has some."""
    if not config.enable_checkpointing and (steps := checkpoints.all_steps()):
        raise ValueError(
            f"{checkpoints.directory} has a checkpoint of step {steps[-1]}, and enable_checkpointing=false would "
            "overwrite the metrics of that run: choose another run_name, or leave checkpoints enabled to resume it"
        )


def restore(trainer: Trainer, checkpoints: CheckpointManager, log: Log) -> dict[str, Any]:
    """Resume from the newest intact checkpoint, if there is one; returns the `extra` dictionary saved with it."""
    if not trainer.config.enable_checkpointing:
        return {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        found = _restore_state(trainer, checkpoints)
    for warning in caught:
        log(f"warning: {warning.message}")
    if found is None:
        return {}
    trainer.resume(found.state)
    log(f"resuming at step {found.step} of {trainer.config.steps}")
    saved = found.extra.get("config", {}).get("opt_state_dtype", "")
    if saved != (moments := trainer.config.opt_state_dtype):
        log(f"moments of the optimizer: converted from {saved or 'float'} to {moments or 'float'}")
    data = json.loads(json.dumps(trainer.data.describe()))
    before = found.extra.get("data", data)
    if changed := [name for name in {**before, **data} if before.get(name) != data.get(name)]:
        log(f"warning: the data has changed, so the run will not continue as it would have: {', '.join(changed)}")
    return found.extra


def _restore_state(trainer: Trainer, checkpoints: CheckpointManager) -> Restored | None:
    """The newest intact checkpoint, with the optimizer's moments converted to the trainer's `opt_state_dtype`."""
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
    state = jax.eval_shape(optimizer.init, trainer.abstract_state.trained)
    if trainer.is_single_device:
        shardings: Any = jax.tree.map(lambda _: SingleDeviceSharding(trainer.mesh.devices.item()), state)
    else:
        shardings = tree_shardings(state, params, trainer.param_specs, trainer.mesh)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)


def description(trainer: Trainer) -> dict[str, Any]:
    """The configuration, the model and its rules, to read parameters without a trainer."""
    rules, *_ = trainer.recipe_schedule.at(max(0, trainer.now - 1))
    return {
        "config": trainer.config.to_dict(),
        "model": json.loads(trainer.model.replace(placement=()).to_json()),
        "rules": json.loads(rules_to_json(rules)),
    }


def save_adapter(trainer: Trainer, log: Log) -> None:
    """Write the adapters of a finished run for PEFT, into its directory."""
    config, path = trainer.config, trainer.config.run_directory / "adapter"
    if config.lora_init in ("loftq", "eora"):
        log(
            f"no adapter for PEFT: with lora_init={config.lora_init} it belongs to the quantized weights of the run, "
            "not to the model"
        )
        return
    base = trainer.source.name if trainer.source is not None else config.load_parameters_path
    write_adapter(path, trainer.model, trainer.state.params, rank=config.lora_rank, alpha=config.lora_alpha, base=base)
    log(f"adapter for PEFT and for --adapter: {path}")


def save_quantized(trainer: Trainer, log: Log) -> None:
    """Save the quantized parameters of a finished run."""
    path, params = trainer.config.save_quantized_params_path, trainer.quantized_params()
    before, after = (sum(x.nbytes for x in jax.tree.leaves(p)) for p in (trainer.state.params, params))
    with CheckpointManager(_remote.pull(path), asynchronous=False) as checkpoints:
        checkpoints.save(
            trainer.now, {"params": params, "quant": trainer.state.quant}, description(trainer), force=True
        )
    _remote.push(path)
    log(f"quantized parameters: {before / 2**20:.1f} MiB -> {after / 2**20:.1f} MiB, in {path}")
