"""Datasets by name: validation, and the contract of every dataset."""

import json

import numpy as np
import pytest

from octavo.data import KEYS, BatchConfig, datasets, make_dataset, make_tokenizer, register_dataset, register_tokenizer
from octavo.data import registry as makers


def test_all_datasets_are_known():
    assert datasets() == ("chat", "grain", "hf", "python", "synthetic", "text", "tfds", "tokens")


def test_an_unknown_dataset_gets_the_nearest_name(config):
    with pytest.raises(
        ValueError, match=r"unknown dataset_type 'pyton': did you mean 'python'.*Known: chat, grain, hf"
    ):
        make_dataset(config(dataset_type="pyton"))


def test_an_unknown_split_raises(config):
    with pytest.raises(ValueError, match="a split is one of train, eval, got 'test'"):
        make_dataset(config(dataset_type="synthetic"), "test")


def test_names_are_registered_once(monkeypatch, config):
    monkeypatch.setattr(makers, "_makers", dict(makers._makers))
    with pytest.raises(ValueError, match="a dataset named 'text' exists"):
        register_dataset("text", makers._makers["synthetic"])
    register_dataset("mine", makers._makers["synthetic"])
    assert make_dataset(config(dataset_type="mine")).describe()["name"] == "synthetic"
    register_dataset("text", makers._makers["synthetic"], replace=True)
    assert make_dataset(config(dataset_type="text")).describe()["name"] == "synthetic"


def test_tokenizers_are_registered_once(config):
    with pytest.raises(ValueError, match="a tokenizer named 'byte' exists"):
        register_tokenizer("byte", lambda config, texts: None)
    with pytest.raises(ValueError, match=r"unknown tokenizer_type 'bite': did you mean 'byte'"):
        make_tokenizer(config(tokenizer_type="bite"), tuple)


@pytest.mark.parametrize("size", [0, -1, 0.5, "4"])
def test_invalid_batch_sizes(config, size):
    with pytest.raises(ValueError, match="per_device_batch_size is a whole number of at least 1"):
        make_dataset(config(dataset_type="synthetic", per_device_batch_size=size))


def test_batch_size_overrides_the_config(config):
    wanted = config(dataset_type="synthetic", per_device_batch_size=4.0)
    assert make_dataset(wanted).batch(0)["inputs"].shape == (4, 16)
    assert make_dataset(wanted, batch_size=7).batch(0)["inputs"].shape == (7, 16)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_target_length", 0, "max_target_length is a whole number of at least 1, got 0"),
        ("reuse_example_batch", -1, "reuse_example_batch is a whole number of at least 0, got -1"),
        ("vocab_size", -5, "vocab_size is a whole number of at least 0, got -5"),
    ],
)
def test_batch_configs_are_validated(config, field, value, message):
    with pytest.raises(ValueError, match=message):
        make_dataset(config(dataset_type="synthetic", **{field: value}))


def test_only_training_reuses_batches(config):
    wanted = config(reuse_example_batch=1)
    assert BatchConfig.from_config(wanted, "train").reuse == 1
    assert BatchConfig.from_config(wanted, "eval").reuse == 0


@pytest.mark.parametrize("kind", ["python", "text", "tokens", "synthetic"])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_contract_of_every_dataset(config, kind, split, tmp_path):
    from octavo.data import write_tokens

    (tmp_path / "a.txt").write_text("Some text, said over and over. " * 100)
    write_tokens(tmp_path / "a.bin", np.arange(4000) % 50, eos=7)
    path = {"text": "a.txt", "tokens": "a.bin"}.get(kind)
    wanted = config(dataset_type=kind, dataset_path=str(tmp_path / path) if path else "")
    data, again = make_dataset(wanted, split), make_dataset(wanted, split)
    for index in (5, 0, 5, 1000):
        batch, same = data.batch(index), again.batch(index)
        assert tuple(batch) == KEYS
        for key in KEYS:
            assert batch[key].dtype == np.int32
            assert batch[key].shape == (4, 16)
            np.testing.assert_array_equal(batch[key], same[key])
        assert 0 <= batch["inputs"].min() <= batch["inputs"].max() < data.vocab_size
        assert 0 <= batch["targets"].min() <= batch["targets"].max() < data.vocab_size
    described = data.describe()
    assert json.loads(json.dumps(described)) == described
    assert described["name"] == kind
    assert described["vocab_size"] == data.vocab_size
    assert isinstance(data.decode(batch["inputs"][0]), str)
