"""Octavo's own directories: converted models, and training runs with their checkpoints.

A converted model has `octavo.json` (configuration, rules, origin), `params/` (an Orbax checkpoint with a checksum of
every file), the files of the tokenizer and a model card.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from octavo._config import Config as Description
from octavo._io import atomic_write
from octavo._tree import flatten_paths, unflatten_paths
from octavo.checkpoint import CheckpointError, CheckpointManager, load, load_abstract
from octavo.models import ModelConfig
from octavo.models.functional import unstacked_paths
from octavo.pretrained.adapter import Adapter, with_adapter
from octavo.pretrained.export import Export, converting, register_exporter
from octavo.pretrained.model import Leaf, ModelFormat, PretrainedModel, register_format
from octavo.pretrained.tokenizer import read_tokenizer
from octavo.qarray import QArray, is_qarray
from octavo.rules import QtRule, QuantizationRule, rules_from_json, rules_to_json
from octavo.transform.learned import LEARNED
from octavo.transform.state import GRADIENT_STATE, QUANT_STATS

NAME = "octavo.json"
VERSION = 1
RANGES = "ranges"
"""The directory of the ranges that training remembers."""


def write_model(source: PretrainedModel, params: dict[str, Any], directory: Path, *, facts: dict[str, Any]) -> None:
    """Write a converted model.

    Args:
      source: Its configuration, tokenizer, rules and origin.
      params: Its parameters by path.
      directory: Created if needed.
      facts: Further entries of octavo.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with CheckpointManager(directory / "params", asynchronous=False) as checkpoints:
        checkpoints.save(0, unflatten_paths(params), force=True)
    if source.state and source.rules:
        with CheckpointManager(directory / RANGES, asynchronous=False) as checkpoints:
            checkpoints.save(0, source.state, force=True)
    if source.tokenizer is not None:
        source.tokenizer.save(directory)
    described = {
        "version": VERSION,
        "name": source.name,
        "config": json.loads(source.config.to_json()),
        "rules": json.loads(rules_to_json(source.rules)),
        "origin": dict(source.origin),
        **facts,
    }
    atomic_write(directory / NAME, json.dumps(described, indent=2))


def _export(source: PretrainedModel, done: Export, out: Path) -> None:
    served = done.rules if any(map(_quantizes_activations, done.rules)) else ()
    summary = done.summary
    facts = {"command": done.command, "bits_per_weight": summary.bits_per_weight, "bytes": summary.after}
    write_model(dataclasses.replace(source, rules=served), done.params, out, facts=facts)


def _quantizes_activations(rule: QuantizationRule) -> bool:
    """Whether a matmul that this rule matches needs the rule when it runs."""
    if rule.skip:
        return False
    fwd = rule.fwd if isinstance(rule, QtRule) else None
    return rule.act_qtype is not None or rule.rotate is not None or (fwd is not None and fwd.lhs is not None)


def _is_converted(path: Path) -> bool:
    return (path / NAME).is_file()


def _read_converted(directory: Path) -> PretrainedModel:
    try:
        described = json.loads((directory / NAME).read_text(encoding="utf-8"))
        if described["version"] > VERSION:
            raise ValueError(f"{directory} was written by a newer Octavo; update to read it")
        config = Description.from_json(json.dumps(described["config"]))
        rules = rules_from_json(json.dumps(described["rules"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{directory / NAME} is damaged: it has no {error}") from error
    if not isinstance(config, ModelConfig):
        raise ValueError(f"{directory / NAME} describes {config!r}, which is not a model")
    origin = {**described["origin"], "kind": "Octavo", "path": directory.name, "name": described["name"]}
    leaves = _leaves(directory / "params", "")
    state = load(directory / RANGES).state if (directory / RANGES).is_dir() else {}
    return PretrainedModel(config, leaves, read_tokenizer(directory), rules, origin, state)


def _leaves(directory: Path, part: str) -> dict[str, Leaf]:
    """The leaves of a checkpoint, with stacked layers unstacked."""
    found: dict[str, Leaf] = {}
    for path, value in flatten_paths(load_abstract(directory, subtree=part).state, is_qarray).items():
        stored = value.qtype.name if isinstance(value, QArray) else str(value.dtype)
        for name, i in unstacked_paths(path, value.shape[0] if value.shape else 0):
            load_layer = functools.partial(_load_layer, directory, f"{part}/{path}", i)
            found[name] = Leaf(tuple(value.shape[i is not None :]), str(value.dtype), load_layer, stored)
    return found


def _load_layer(directory: Path, part: str, index: int | None) -> Any:
    value = _load(directory, part)
    return value if index is None else value[index]


# Stacked layers are loaded one after the other, from one array.
@functools.lru_cache(maxsize=1)
def _load(directory: Path, part: str) -> Any:
    return load(directory, subtree=part).state


def _checkpoints(path: Path) -> Path | None:
    """The checkpoints of a path: a run, its directory of checkpoints, or one of them."""
    for checkpoints in (path / "checkpoints", path):
        try:
            load_abstract(checkpoints, subtree="params")
        except (CheckpointError, OSError):
            continue
        return checkpoints
    return None


def _is_run(path: Path) -> bool:
    return path.is_dir() and _checkpoints(path) is not None


def _read_run(path: Path) -> PretrainedModel:
    checkpoints = _checkpoints(path)
    assert checkpoints is not None
    found = load_abstract(checkpoints, subtree="params")
    if "model" not in found.extra:
        raise ValueError(f"{checkpoints} was saved without a description of its model: it is no run of `octavo train`")
    config = found.extra["config"]
    model = Description.from_json(json.dumps(found.extra["model"])).replace(scan_layers=False, remat="none")
    rank = config.get("lora_rank", 0)
    leaves = _leaves(checkpoints, "frozen" if rank else "params")
    if config["weight_sparsity_n"] is not None:
        leaves = _masked(checkpoints, leaves)
    rules = rules_from_json(json.dumps(found.extra["rules"]))
    run = next((p for p in (path, *path.resolve().parents[:2]) if (p / "config.yml").is_file()), path)
    origin = {
        "kind": "octavo train",
        "path": path.name,
        "name": config["run_name"],
        "step": found.step,
        "quantization": config["quantization"],
        "max_length": config["max_target_length"],
    }
    if config.get("quantize_kvcache"):
        origin["kv_cache"] = {"format": config["kv_quant_dtype"], "axis": config["kv_quant_axis"]}
    base = PretrainedModel(model, leaves, read_tokenizer(run), rules, origin, _unstacked_state(checkpoints))
    if not rank:
        return base
    adapters = {name: np.asarray(leaf.load()) for name, leaf in _leaves(checkpoints, "params").items()}
    return with_adapter(base, Adapter(adapters, rank, config["lora_alpha"], name=f"the adapter of {path}"))


def _unstacked_state(checkpoints: Path) -> dict[str, Any]:
    """The ranges that a run remembers, of each layer by its own name."""
    if "quant" not in load_abstract(checkpoints).state:  # its rules keep no state
        return {}
    state = load(checkpoints, subtree="quant").state
    found = {
        f"{collection}/{name}": x if i is None else x[i]
        for collection in (QUANT_STATS, GRADIENT_STATE, LEARNED)
        for path, x in flatten_paths(state.get(collection, {})).items()
        for name, i in unstacked_paths(path, x.shape[0] if x.shape else 0)
    }
    return unflatten_paths(found)


def _masked(checkpoints: Path, leaves: dict[str, Leaf]) -> dict[str, Leaf]:
    """Weights times the sparsity masks of training."""
    masks = {
        name: mask if i is None else mask[i]
        for path, mask in flatten_paths(load(checkpoints, subtree="masks").state).items()
        for name, i in unstacked_paths(path, mask.shape[0])
    }

    def load_masked(leaf: Leaf, mask: Any) -> Any:
        value: Any = leaf.load()
        return np.asarray(value) * np.asarray(mask, value.dtype)

    return leaves | {
        path: dataclasses.replace(leaf, load=functools.partial(load_masked, leaf, masks[path]), load_codes=None)
        for path, leaf in leaves.items()
        if path in masks
    }


register_format(
    ModelFormat("octavo", "a model that `octavo quantize` wrote", matches=_is_converted, read=_read_converted)
)
register_format(
    ModelFormat("run", "a run of `octavo train`, or one of its checkpoints", matches=_is_run, read=_read_run)
)
register_exporter("octavo", converting(_export, scale_dtype="bfloat16"))
