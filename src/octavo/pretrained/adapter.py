"""LoRA adapters in the files of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors.

PEFT stores `lora_A` as [rank, in] and `lora_B` as [out, rank]: the transposes of a and b.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from octavo._io import atomic_write
from octavo._tree import flatten_paths
from octavo.files.safetensors import SafeTensors, write
from octavo.models import ModelConfig, abstract_params
from octavo.models.decoder import layer_groups
from octavo.pretrained.architectures import ARCHITECTURES
from octavo.pretrained.model import Leaf, PretrainedModel, to_float
from octavo.pretrained.names import HUGGINGFACE
from octavo.pretrained.tokenizer import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_UNSUPPORTED: dict[str, Any] = {
    "use_dora": False,
    "fan_in_fan_out": False,
    "bias": "none",
    "modules_to_save": None,
    "alpha_pattern": {},
    "layers_pattern": None,
}
"""Settings of PEFT with the only values that are read."""


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A LoRA adapter of a decoder.

    Args:
      params: a and b by path, such as `decoder/layers_0/mlp/wo/kernel_lora_a`.
      rank: The rank; modules may have others.
      alpha: The adapter is multiplied by alpha / rank.
      root: Whether it is multiplied by alpha / sqrt(rank) instead (rsLoRA).
      name: A name for messages.
    """

    params: Mapping[str, np.ndarray]
    rank: int
    alpha: float
    root: bool = False
    name: str = "the adapter"

    def delta(self, path: str) -> np.ndarray | None:
        """What it adds to the kernel at a path; None if it has nothing for it."""
        if f"{path}_lora_a" not in self.params:
            return None
        a, b = (np.asarray(self.params[f"{path}_lora_{part}"], np.float32) for part in "ab")
        # PEFT divides by the rank of the configuration's r, or of a module's rank_pattern: that of its own matrices.
        return a @ b * np.float32(self.alpha / (math.sqrt(a.shape[1]) if self.root else a.shape[1]))


def with_adapter(model: PretrainedModel, adapter: Adapter) -> PretrainedModel:
    """A model with an adapter merged into its weights, which are in float then.

    Args:
      model: The model. Weights in low precision are dequantized where the adapter changes them.
      adapter: The adapter.

    Raises:
      ValueError: The adapter is of another model.
    """
    kernels = {path.rpartition("_lora_")[0] for path in adapter.params}
    leaves = dict(model.leaves)
    for path in sorted(kernels):
        leaf = leaves.get(path)
        shapes = [tuple(adapter.params[f"{path}_lora_{part}"].shape) for part in "ab"]
        if leaf is None or leaf.shape != (shapes[0][0], shapes[1][1]):
            has = "no such weight" if leaf is None else f"one of the shape {leaf.shape}"
            raise ValueError(
                f"{adapter.name} is not an adapter of {model.name}: it has {path!r} with {shapes[0]} and {shapes[1]}, "
                f"but the model has {has}"
            )
        load = functools.partial(_merged, leaf, adapter, path)
        leaves[path] = Leaf(leaf.shape, leaf.dtype, load, f"{leaf.stored or leaf.dtype} with an adapter")
    return dataclasses.replace(model, leaves=leaves)


def _merged(leaf: Leaf, adapter: Adapter, path: str) -> np.ndarray:
    delta = adapter.delta(path)
    assert delta is not None
    return (to_float(leaf.load(), "float32").astype(np.float32) + delta).astype(leaf.dtype)


def read_adapter(directory: str | Path, config: ModelConfig) -> Adapter:
    """Read an adapter that PEFT or `write_adapter` wrote.

    Args:
      directory: The directory of adapter_config.json.
      config: The model that the adapter is for.

    Raises:
      ValueError: The adapter is of another kind or of another model.
    """
    directory = Path(directory)
    if not (directory / CONFIG).is_file():
        raise FileNotFoundError(
            f"{directory} has no {CONFIG}: an adapter is a directory that PEFT's save_pretrained wrote"
        )
    settings = read_json(directory / CONFIG)
    if settings.get("peft_type") != "LORA":
        raise ValueError(f"{directory} is an adapter of the type {settings.get('peft_type')}: only LORA is supported")
    for name, only in _UNSUPPORTED.items():
        if (given := settings.get(name, only)) not in (only, None, [], {}):
            raise ValueError(f"{directory}: {name}={given!r} is not supported; train the adapter with {name}={only!r}")
    names = _module_names(config)
    params: dict[str, np.ndarray] = {}
    with SafeTensors(directory / WEIGHTS) as file:
        for name in file.names():
            module, _, part = name.removeprefix(_PREFIX).partition(".lora_")
            path = names.get(module)
            if path is None or part not in ("A.weight", "B.weight"):
                raise ValueError(f"{directory} is not an adapter of this model: it has {name!r}")
            params[f"{path}_lora_{part[0].lower()}"] = np.asarray(file.read(name)).T
    found = Adapter(params, settings["r"], settings["lora_alpha"], bool(settings.get("use_rslora")), str(directory))
    if missing := [path for path in params if f"{path[:-1]}{'b' if path.endswith('a') else 'a'}" not in params]:
        raise ValueError(f"{directory} has {missing[0]!r} without its counterpart")
    return found


def write_adapter(
    directory: str | Path, config: ModelConfig, adapters: Any, *, rank: int, alpha: float, base: str = ""
) -> None:
    """Write adapters for PEFT.

    Args:
      directory: Created if needed.
      config: The model, whose layers may be stacked.
      adapters: A tree of a and b like the parameters, as `octavo.lora.Adapted.init` makes it.
      rank: The rank.
      alpha: The adapter is multiplied by alpha / rank.
      base: The name of the model that it is for.
    """
    paths = {path: name for name, path in _module_names(config).items()}
    tensors, modules = {}, set()
    for path, value in _unstacked(config, adapters).items():
        kernel, _, part = path.rpartition("_lora_")
        if kernel not in paths or value.ndim != 2:
            raise ValueError(f"{path!r} of the shape {value.shape} has no place in an adapter of PEFT")
        modules.add(paths[kernel].rpartition(".")[2])
        tensors[f"{_PREFIX}{paths[kernel]}.lora_{part.upper()}.weight"] = np.ascontiguousarray(np.asarray(value).T)
    directory = Path(directory)
    write(directory / WEIGHTS, tensors, {"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    atomic_write(directory / CONFIG, json.dumps(settings, indent=2))


def _module_names(config: ModelConfig) -> dict[str, str]:
    """The path of each kernel by the name of its module in Hugging Face's models."""
    plain = _plain(config)
    tensors = ARCHITECTURES["deepseek_v3"].huggingface_names if config.kv_lora_rank else HUGGINGFACE
    names = tensors.param_names(abstract_params(plain), plain.first_dense_layers)
    return {name.removesuffix(".weight"): path for path, name in names.items() if path.endswith("/kernel")}


def _plain(config: ModelConfig) -> ModelConfig:
    return config.replace(scan_layers=False, unscanned_first=0, unscanned_last=0)


def _unstacked(config: ModelConfig, adapters: Any) -> dict[str, np.ndarray]:
    """Adapters by path, with a path for each layer."""
    groups = {group.name: group for group in layer_groups(config)}
    names = [group.name for group in layer_groups(_plain(config))]
    found: dict[str, np.ndarray] = {}
    for path, value in flatten_paths(adapters).items():
        top, _, rest = path.partition("/")
        name, _, rest = rest.partition("/")
        if top != "decoder" or name not in groups:
            found[path] = np.asarray(value)
            continue
        group = groups[name]
        for i, layer in enumerate(group.layers):
            found[f"decoder/{names[layer]}/{rest}"] = np.asarray(value[i] if group.is_stack else value)
    return found
