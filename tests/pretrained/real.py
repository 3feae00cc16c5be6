"""Real models for tests marked `data`, opened once."""

import functools
from pathlib import Path

import numpy as np

from octavo.pretrained import PretrainedModel, open_model

ROOT = Path(__file__).parents[2]
FILES = {
    "stories15m": "",
    "smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "minilm": "",
    "gemma3": "gemma-3-270m-q4_k_m.gguf",
}


def path_of(name: str) -> Path:
    """Where `make data` puts a model."""
    return ROOT / ".cache" / "data" / name / FILES[name]


@functools.cache
def real(name: str) -> PretrainedModel:
    """An opened model."""
    return open_model(path_of(name))


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    """What an independent implementation makes of a model: see golden/make.py."""
    with np.load(Path(__file__).parent / "golden" / f"{name}.npz") as file:
        return dict(file)
