"""The formats in which models are opened: each has a predicate of paths, and a reader."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from octavo.pretrained.model import PretrainedModel


@dataclasses.dataclass(frozen=True)
class ModelFormat:
    """A format of model files: `matches` looks at a path without reading much, `read` opens it."""

    name: str
    about: str
    matches: Callable[[Path], bool]
    read: Callable[[Path], PretrainedModel]


_formats: dict[str, ModelFormat] = {}


def register_format(model_format: ModelFormat) -> None:
    """Register a format of model files; the first that matches a path reads it."""
    if model_format.name in _formats:
        raise ValueError(f"a format of model files named {model_format.name!r} exists")
    _formats[model_format.name] = model_format


def model_formats() -> tuple[ModelFormat, ...]:
    """All formats, in the order in which they are tried."""
    return tuple(_formats.values())


def open_model(path: str | Path) -> PretrainedModel:
    """Open a model: its configuration and tokenizer are read, parameters are loaded on demand.

    Args:
      path: A model that `octavo quantize` wrote, a run of `octavo train` or one of its checkpoints, a Hugging Face
        directory (config.json and safetensors, also in the layouts of compressed-tensors, GPTQ, AWQ and block fp8), or
        a GGUF file.

    >>> open_model("nowhere.gguf")
    Traceback (most recent call last):
    FileNotFoundError: there is no nowhere.gguf: give the path of a model...
    """
    path = Path(path).expanduser()
    known = "; ".join(found.about for found in model_formats())
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}: give the path of a model ({known})")
    for found in model_formats():
        if found.matches(path):
            return found.read(path)
    pickled = [*path.glob("*.bin"), *path.glob("*.pt*")] if path.is_dir() else [path]
    if any(file.suffix in (".bin", ".pt", ".pth") for file in pickled):
        raise ValueError(
            f"{path} holds {pickled[0].name}, a pickle, which may run code when it is loaded: save the model as "
            "safetensors (model.save_pretrained(..., safe_serialization=True))"
        )
    raise ValueError(f"{path} is not a model that Octavo can open, which are: {known}")
