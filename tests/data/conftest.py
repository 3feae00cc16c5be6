"""A cache directory per test, and small configurations."""

from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """What is kept between runs, in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "octavo"


@pytest.fixture
def config():
    """Makes a configuration: text by bytes, four rows of sixteen, with changes."""

    def make(**changes):
        defaults = {
            "dataset_type": "text",
            "synthetic_kind": "language",
            "dataset_path": "",
            "eval_dataset_path": "",
            "tokenizer_type": "byte",
            "tokenizer_path": "",
            "vocab_size": 0,
            "max_target_length": 16,
            "per_device_batch_size": 4,
            "packing": True,
            "data_shuffle_seed": 0,
            "reuse_example_batch": 0,
        }
        return SimpleNamespace(**{**defaults, **changes})

    return make
