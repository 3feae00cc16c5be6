"""Fixed random tokens, and a language with a known entropy."""

import numpy as np
import pytest

from octavo.data import make_dataset


def test_fixed_is_the_same_batch_at_every_step(config):
    data = make_dataset(config(dataset_type="synthetic", synthetic_kind="fixed", vocab_size=50, max_target_length=64))
    first = data.batch(0)
    np.testing.assert_array_equal(first["inputs"], data.batch(17)["inputs"])
    np.testing.assert_array_equal(first["inputs"][:, 1:], first["targets"][:, :-1])
    assert len(np.unique(first["inputs"])) > 45
    assert first["inputs"].max() < 50
    assert (first["inputs_segmentation"] == 1).all()
    np.testing.assert_array_equal(first["inputs_position"][0], np.arange(64))
    assert data.num_batches == 1


def language(config, split="train", **changes):
    return make_dataset(config(dataset_type="synthetic", **changes), split)


@pytest.mark.parametrize("vocab_size", [11, 64, 1000])
def test_entropy_of_the_language(config, vocab_size):
    data = language(config, vocab_size=vocab_size, per_device_batch_size=64, max_target_length=256)
    batch = data.batch(0)
    probabilities = data.probabilities(batch["inputs"], batch["targets"])
    assert (probabilities > 0).all()
    losses = -np.log(probabilities)
    assert abs(losses.mean() - data.entropy) < 4 * losses.std() / np.sqrt(losses.size)
    assert data.entropy == pytest.approx(1.875 * np.log(2))


def test_probabilities_sum_to_one(config):
    data = language(config, vocab_size=64)
    inputs = data.batch(0)["inputs"]
    total = sum(data.probabilities(inputs, np.full_like(inputs, token)) for token in range(64))
    np.testing.assert_allclose(total, 1)


def test_empirical_conditional_entropy(config):
    data = language(config, vocab_size=11, per_device_batch_size=256, max_target_length=512)
    batch = data.batch(0)
    states = np.pad(batch["inputs"], ((0, 0), (1, 0)))[:, :-1] % 4 * 11 + batch["inputs"]
    counts = np.zeros((44, 11))
    np.add.at(counts, (states.ravel(), batch["targets"].ravel()), 1)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    plugged = -np.sum(counts * np.log(np.where(shares > 0, shares, 1))) / counts.sum()
    assert plugged == pytest.approx(data.entropy, abs=0.01)
    # The last token alone tells less: there is something for attention to do.
    alone = counts.reshape(4, 11, 11).sum(axis=0)
    shares = alone / np.maximum(alone.sum(axis=1, keepdims=True), 1)
    assert -np.sum(alone * np.log(np.where(shares > 0, shares, 1))) / alone.sum() > data.entropy + 0.2


def test_samples_differ_by_batch_split_and_seed(config):
    data = language(config)
    seen = {data.batch(i)["targets"].tobytes() for i in range(20)}
    seen |= {language(config, "eval").batch(0)["targets"].tobytes()}
    seen |= {language(config, data_shuffle_seed=1).batch(0)["targets"].tobytes()}
    assert len(seen) == 22
    np.testing.assert_array_equal(data.successors, language(config, "eval", data_shuffle_seed=3).successors)


def test_successors_differ_and_are_never_the_start(config):
    successors = language(config, vocab_size=11).successors
    assert successors.min() >= 1
    assert successors.max() <= 10
    assert all(len(set(row)) == 5 for row in successors.tolist())


def test_the_default_vocabulary_and_text(config):
    data = language(config)
    assert data.vocab_size == 256
    assert data.decode(np.array([3, 4])) == "3 4"
    assert data.describe()["entropy"] == data.entropy
    assert data.num_batches is None


def test_invalid_vocabularies_and_kinds(config):
    with pytest.raises(ValueError, match="synthetic language needs a vocab_size above 10, got 10"):
        language(config, vocab_size=10)
    with pytest.raises(ValueError, match=r"unknown synthetic_kind 'langage': did you mean 'language'"):
        language(config, synthetic_kind="langage")
