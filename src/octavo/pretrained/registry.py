"""Which kinds of model files there are: each has a test that looks at a path, and a reader."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from octavo.pretrained.source import Source


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of model files: `fits` looks at a path without reading much, `read` opens it."""

    name: str
    about: str
    fits: Callable[[Path], bool]
    read: Callable[[Path], Source]


_kinds: dict[str, Kind] = {}


def register_kind(kind: Kind) -> None:
    """Make a kind of model files known; the first that fits a path reads it."""
    if kind.name in _kinds:
        raise ValueError(f"a kind of model files named {kind.name!r} exists")
    _kinds[kind.name] = kind


def kinds() -> tuple[Kind, ...]:
    """All kinds, in the order in which they are tried."""
    return tuple(_kinds.values())


def open_model(path: str | Path) -> Source:
    """Open a model: what is read of it is what describes it; parameters are read when they are asked for.

    `path` is a model that `octavo quantize` wrote, a run of `octavo train` or one of its checkpoints, a Hugging Face
    directory (config.json and safetensors, also in the layouts of compressed-tensors, GPTQ, AWQ and block fp8), a GGUF
    file, or a model.bin of llama2.c.

    >>> open_model("nowhere.gguf")
    Traceback (most recent call last):
    FileNotFoundError: there is no nowhere.gguf: give the path of a model...
    """
    path = Path(path).expanduser()
    known = "; ".join(kind.about for kind in kinds())
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}: give the path of a model ({known})")
    for kind in kinds():
        if kind.fits(path):
            return kind.read(path)
    pickled = [*path.glob("*.bin"), *path.glob("*.pt*")] if path.is_dir() else [path]
    if any(file.suffix in (".bin", ".pt", ".pth") for file in pickled):
        raise ValueError(
            f"{path} holds {pickled[0].name}, which only running code from the file could open: save the model as "
            "safetensors (model.save_pretrained(..., safe_serialization=True))"
        )
    raise ValueError(f"{path} is no model that Octavo can open; it opens {known}")
