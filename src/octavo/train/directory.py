"""What a run says about itself before it starts, and keeps in its directory."""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import yaml

from octavo.inspect import Plan
from octavo.train.config import Config
from octavo.train.trainer import Trainer

type Say = Callable[[str], None]


def keep_config(config: Config, directory: Path, say: Say) -> None:
    """Keep the settings, and say which of them differ from those that the run was left with."""
    path, text = directory / "config.yml", config.to_yaml()
    if path.exists():
        old, new = yaml.safe_load(path.read_text(encoding="utf8")) or {}, yaml.safe_load(text)
        changed = [f"{key}: {old.get(key)!r} -> {new[key]!r}" for key in new if old.get(key) != new[key]]
        if changed:
            say(f"changed since this run was last here: {', '.join(changed)}")
    write(path, text)


def describe(trainer: Trainer, directory: Path, say: Say) -> None:
    """Say, and write down, what is trained and what of it is quantized."""
    size, data = sum(x.size for x in jax.tree.leaves(trainer.state.params)), trainer.data.describe()
    say(f"number parameters: {size / 1e6:.3f} million")
    say(f"data: {json.dumps(data)}")
    write(directory / "data.json", json.dumps(data, indent=2))
    for name, content in (trainer.data.tokenizer.files() if trainer.data.tokenizer else {}).items():
        write(directory / name, content.decode())
    if trainer.rules:
        plan, verification = trainer.plan(), trainer.verification
        say(f"{plan}\n{verification.summary()}")
        keep_plan(plan, directory)
        write(directory / "verify.json", verification.to_json())
    else:
        say("quantization: none, all products are in float")
    say(f"Per train step: Total TFLOPs: {trainer.flops / 1e12:.6f}")


def keep_plan(plan: Plan, directory: Path) -> None:
    """Keep a plan for people and for programs."""
    write(directory / "plan.txt", f"{plan}\n")
    write(directory / "plan.json", plan.to_json())


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(text, encoding="utf8")
    draft.replace(path)
