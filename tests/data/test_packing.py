"""Packed rows against a plain reference."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.data import KEYS, BatchConfig
from octavo.data.corpus import Corpus, find_documents, gather_windows
from octavo.data.packing import make_batch
from octavo.data.synthetic import Fixed, Language

EOS, BOS = 9, 8
DOCUMENTS = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=12), min_size=1, max_size=8)


def corpus(documents, *, size=3, length=5, bos=BOS, **changes):
    tokens = np.array([EOS] + [token for document in documents for token in [*document, EOS]], np.uint16)
    config = BatchConfig(batch_size=size, length=length, **changes)
    return Corpus(tokens, config, eos=EOS, bos=bos, vocab_size=10, details={})


def rows_of(data, count):
    """The rows of the first batches, as lists of (input, position, segment, target) without padding."""
    rows = []
    for index in range(count):
        batch = data.batch(index)
        assert tuple(batch) == KEYS
        for array in batch.values():
            assert array.dtype == np.int32
            assert array.shape == (data.config.batch_size, data.config.length)
        np.testing.assert_array_equal(batch["inputs_position"], batch["targets_position"])
        np.testing.assert_array_equal(batch["inputs_segmentation"], batch["targets_segmentation"])
        arrays = [batch[key] for key in KEYS[:4]]
        for row in zip(*(array.tolist() for array in arrays), strict=True):
            quads = list(zip(*row, strict=True))
            there = [quad for quad in quads if quad[2]]
            assert quads == there + [(0, 0, 0, 0)] * (len(quads) - len(there)), "padding is zeros at the end"
            rows.append(there)
    return rows


def expected_rows(documents, length, bos):
    """Each document as pairs of read and predicted, one after the other, cut into rows."""
    pairs = [
        (number, token, target)
        for number, document in enumerate(documents)
        for token, target in zip([bos, *document], [*document, EOS], strict=True)
    ]
    rows = []
    for begin in range(0, len(pairs), length):
        row, last, position, segment = [], None, 0, 0
        for number, token, target in pairs[begin : begin + length]:
            position, segment = (position + 1, segment) if number == last else (0, segment + 1)
            last = number
            row.append((token, position, segment, target))
        rows.append(row)
    return rows


@given(DOCUMENTS, st.integers(1, 9), st.integers(1, 4), st.sampled_from([BOS, EOS]))
def test_packed_rows_against_the_reference(documents, length, size, bos):
    data = corpus(documents, size=size, length=length, bos=bos, shuffle=False)
    expected = expected_rows(documents, length, bos)
    assert data.num_rows == len(expected)
    rows = rows_of(data, data.num_batches)
    assert [row for row in rows if row] == expected
    assert len(rows) - len(expected) < size


@given(DOCUMENTS, st.integers(1, 9), st.integers(1, 4))
def test_unpacked_rows_are_the_starts_of_documents(documents, length, size):
    data = corpus(documents, size=size, length=length, packing=False, shuffle=False)
    expected = [
        [(token, i, 1, target) for i, (token, target) in enumerate(zip([BOS, *d], [*d, EOS], strict=True))][:length]
        for d in documents
    ]
    assert [row for row in rows_of(data, data.num_batches) if row] == expected


@given(DOCUMENTS, st.integers(1, 5), st.booleans(), st.integers(0, 3))
def test_shuffled_epochs_have_every_row_once(documents, size, packing, seed):
    data = corpus(documents, size=size, length=3, packing=packing, seed=seed)
    plain = corpus(documents, size=1, length=3, packing=packing, shuffle=False)
    wanted = sorted(rows_of(plain, plain.num_rows))
    rows = rows_of(data, -(-3 * data.num_rows // size))
    for epoch in range(3):
        assert sorted(rows[epoch * data.num_rows : (epoch + 1) * data.num_rows]) == wanted


def test_evaluation_repeats_after_a_pass():
    data = corpus([[1, 2, 3], [4, 5]], shuffle=False)
    for again in (data.num_batches, 5 * data.num_batches):
        for key in KEYS:
            np.testing.assert_array_equal(data.batch(0)[key], data.batch(again)[key])


def test_a_batch_depends_on_its_index_alone():
    documents = [[i % 8] * (i + 1) for i in range(30)]
    one, other = corpus(documents), corpus(documents)
    forward = [one.batch(i)["inputs"].tolist() for i in range(12)]
    assert forward == [other.batch(i)["inputs"].tolist() for i in reversed(range(12))][::-1]
    assert forward != [corpus(documents, seed=1).batch(i)["inputs"].tolist() for i in range(12)]


def test_reuse_repeats_the_first_batches():
    documents = [[i % 8] * (i + 1) for i in range(30)]
    all_of_them, few = corpus(documents), corpus(documents, reuse=2)
    assert [few.batch(i)["inputs"].tolist() for i in range(5)] == [
        all_of_them.batch(i % 2)["inputs"].tolist() for i in range(5)
    ]


def test_arrays_of_a_batch_share_no_memory():
    batch = corpus([[1, 2, 3]] * 9).batch(0)
    batch["inputs"][:] = 7
    batch["inputs_segmentation"][:] = 7
    assert not (batch["targets_segmentation"] == 7).any()
    assert not (batch["targets"] == 7).any()


def test_empty_documents_are_left_out():
    starts, sizes = find_documents(np.array([EOS, EOS, 1, 2, EOS, EOS, 3, EOS, EOS]), EOS)
    assert (starts.tolist(), sizes.tolist()) == ([1, 5], [3, 2])


def test_documents_are_found_across_chunks(monkeypatch):
    stream = np.array([EOS, 1, 2, EOS, 3, EOS, 4, 5, 6, EOS])
    whole = find_documents(stream, EOS)
    monkeypatch.setattr("octavo.data.corpus._CHUNK", 3)
    for one, other in zip(whole, find_documents(stream, EOS), strict=True):
        np.testing.assert_array_equal(one, other)


def test_windows_beyond_the_end_repeat_the_last_token():
    assert gather_windows(np.array([1, 2, 3], np.uint8), np.array([0, 2]), 2).tolist() == [[1, 2, 3], [3, 3, 3]]


def test_without_an_eos_a_row_is_one_document():
    batch = make_batch(np.array([[1, 9, 3]], np.int32), eos=-1, bos=-1)
    assert batch["inputs"].tolist() == [[1, 9]]
    assert batch["inputs_segmentation"].tolist() == [[1, 1]]


def test_a_negative_index_raises():
    with pytest.raises(ValueError, match="batches are numbered from 0, got -1"):
        corpus([[1]]).batch(-1)


def test_an_empty_corpus_raises():
    with pytest.raises(ValueError, match="nothing to learn from in 1 tokens"):
        corpus([])


def random_corpus(config):
    tokens = np.random.default_rng(0).integers(0, 50, 1000).astype(np.uint8)
    return Corpus(tokens, config, eos=0, bos=0, vocab_size=50, details={})


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "make", [random_corpus, lambda config: Language(config, "train"), lambda config: Fixed(config, "train")]
)
def test_batch_rows_are_rows_of_the_batch(make, shuffle):
    data = make(BatchConfig(batch_size=6, length=16, shuffle=shuffle, reuse=5, vocab_size=50))
    for index in (0, 3, 12):
        whole = data.batch(index)
        for start, stop in ((0, 6), (2, 4), (5, 6)):
            for name, rows in data.batch_rows(index, start, stop).items():
                np.testing.assert_array_equal(rows, whole[name][start:stop])


def test_rows_outside_the_batch():
    data = Fixed(BatchConfig(batch_size=6, length=16), "train")
    with pytest.raises(ValueError, match="rows 4 to 7 are not within a batch of 6"):
        data.batch_rows(0, 4, 7)
