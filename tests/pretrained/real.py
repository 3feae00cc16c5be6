"""Real models for tests: opened once, or skipped with the command that fetches them."""

import functools
from pathlib import Path

import pytest

from octavo.pretrained import Source, open_model

ROOT = Path(__file__).parents[2]
FILES = {"stories15m": "", "smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "minilm": ""}


def path_of(name: str) -> Path:
    """Where `make data` puts a model."""
    path = ROOT / ".cache" / "data" / name / FILES[name]
    if not path.exists():
        pytest.skip(f"the model is not there: make data ARGS={name}")
    return path


@functools.cache
def _opened(path: Path) -> Source:
    return open_model(path)


def real(name: str) -> Source:
    """An opened model."""
    return _opened(path_of(name))
