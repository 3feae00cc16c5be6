"""What a run logs about itself when it starts, and writes to its directory."""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import yaml

from octavo._io import atomic_write
from octavo.inspect import Plan
from octavo.train.config import Config
from octavo.train.config.text import to_yaml
from octavo.train.trainer import Trainer

type Log = Callable[[str], None]


def write_config(config: Config, directory: Path, log: Log) -> None:
    """Write the configuration, and log what differs from the one that the run had before."""
    path, text = directory / "config.yml", to_yaml(config)
    if path.exists():
        old, new = yaml.safe_load(path.read_text(encoding="utf8")) or {}, yaml.safe_load(text)
        changed = [f"{key}: {old.get(key)!r} -> {new[key]!r}" for key in new if old.get(key) != new[key]]
        if changed:
            log(f"changed since the last start of this run: {', '.join(changed)}")
    atomic_write(path, text)


def describe(trainer: Trainer, directory: Path, log: Log) -> None:
    """Log and write the model, the data and the quantization plan."""
    size, data = sum(x.size for x in jax.tree.leaves(trainer.state.params)), trainer.data.describe()
    log(f"number parameters: {size / 1e6:.3f} million")
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
