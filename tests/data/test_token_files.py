"""Token files: round trips, and errors for invalid ids and files."""

import json

import numpy as np
import pytest

from octavo.data import make_dataset, read_tokens, write_tokens


@pytest.mark.parametrize("suffix", [".npy", ".bin"])
@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (70000, "uint32")]
)
def test_tokens_round_trip(tmp_path, suffix, vocab_size, dtype):
    ids = np.arange(1000) % vocab_size
    ids[-1] = vocab_size - 1
    header = write_tokens(tmp_path / f"x{suffix}", ids, vocab_size=vocab_size, eos=3, bos=4)
    found, read = read_tokens(tmp_path / f"x{suffix}")
    assert read == header
    assert found.dtype == dtype
    assert isinstance(found, np.memmap)
    np.testing.assert_array_equal(found, ids)
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def test_documents_are_separated_by_eos(config, tmp_path):
    write_tokens(tmp_path / "x.bin", [9, 1, 2, 9, 3, 9], eos=9, bos=0)
    write_tokens(tmp_path / "y.bin", [9, 4, 9], eos=9)
    paths = {"dataset_path": str(tmp_path / "x.bin"), "eval_dataset_path": str(tmp_path / "y.bin")}
    data = make_dataset(config(dataset_type="tokens", per_device_batch_size=1, max_target_length=7, **paths))
    batch = data.batch(0)
    assert batch["inputs"].tolist() == [[0, 1, 2, 0, 3, 0, 0]]
    assert batch["inputs_segmentation"].tolist() == [[1, 1, 1, 2, 2, 0, 0]]
    assert batch["targets"].tolist() == [[1, 2, 9, 3, 9, 0, 0]]
    other = make_dataset(config(dataset_type="tokens", per_device_batch_size=1, **paths), "eval").batch(0)
    assert other["targets"][0, :3].tolist() == [4, 9, 0]


def test_the_last_twentieth_is_held_out(config, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(1000, dtype=np.int64))
    wanted = config(dataset_type="tokens", dataset_path=str(tmp_path / "x.npy"), per_device_batch_size=200)
    train, rest = make_dataset(wanted), make_dataset(wanted, "eval")
    assert train.vocab_size == 1000
    assert set(train.batch(0)["targets"].ravel().tolist()) == set(range(950)) - {0} | {0}
    assert rest.batch(0)["inputs"][0, 0] == 950
    assert rest.describe()["tokens"] == 49
    assert rest.decode([1, 2]) == "1 2"


def test_unpacked_rows_of_a_token_file(config, tmp_path):
    write_tokens(tmp_path / "x.bin", [9, *[1, 2, 9] * 100], eos=9)
    wanted = config(dataset_type="tokens", dataset_path=str(tmp_path / "x.bin"), packing=False)
    batch = make_dataset(wanted).batch(0)
    assert batch["targets"][:, :4].tolist() == [[1, 2, 9, 0]] * 4


def test_the_tokenizer_of_a_token_file(config, tmp_path):
    text = np.frombuffer(b"plain text, said twice", np.uint8)
    write_tokens(tmp_path / "x.npy", text, vocab_size=256, eos=255, tokenizer="byte")
    data = make_dataset(config(dataset_type="tokens", dataset_path=str(tmp_path / "x.npy")))
    assert data.decode(text) == "plain text, said twice"
    assert data.tokenizer.files(), "a run writes these, so that its model can be prompted"


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (np.array([[1, 2]]), {}, r"one-dimensional integers, got int64 of shape \(1, 2\)"),
        (np.array([0.5, 1.0]), {}, "one-dimensional integers, got float64"),
        ([1], {}, "has two tokens or more, got 1"),
        ([1, -2], {}, "from 0 to below vocab_size=2, got -2 to 1"),
        ([1, 20], {"vocab_size": 10}, "from 0 to below vocab_size=10, got 1 to 20"),
        ([1, 2], {"eos": 3}, "eos=3 is no id below vocab_size=3"),
        ([1, 2], {"tokenizer": "word"}, "unknown tokenizer 'word'. Known: bpe, byte, huggingface"),
    ],
)
def test_invalid_ids_are_not_written(tmp_path, ids, options, message):
    with pytest.raises(ValueError, match=message):
        write_tokens(tmp_path / "x.bin", ids, **options)
    assert list(tmp_path.iterdir()) == []


def test_invalid_files_are_not_read(tmp_path, config):
    with pytest.raises(ValueError, match=r"token files end in .npy or .bin"):
        write_tokens(tmp_path / "x.tok", [1, 2])
    with pytest.raises(FileNotFoundError, match=r"is no file; token files are .npy or .bin"):
        read_tokens(tmp_path / "x.bin")
    (tmp_path / "x.bin").write_bytes(b"\0" * 8)
    with pytest.raises(FileNotFoundError, match=r"x.bin.json is missing: it describes the bytes"):
        read_tokens(tmp_path / "x.bin")
    write_tokens(tmp_path / "x.bin", [1, 2, 3])
    (tmp_path / "x.bin").write_bytes(b"\0\0")
    with pytest.raises(ValueError, match=r"has 2 bytes; 3 tokens of uint8, as its .json says, have 3"):
        read_tokens(tmp_path / "x.bin")
    write_tokens(tmp_path / "x.npy", [1, 2, 3])
    np.save(tmp_path / "x.npy", np.arange(5))
    with pytest.raises(ValueError, match=r"has 5 tokens, its .json says 3"):
        read_tokens(tmp_path / "x.npy")
    np.save(tmp_path / "x.npy", np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"holds float64 of shape \(2, 2\)"):
        read_tokens(tmp_path / "x.npy")
    (tmp_path / "x.npy.json").write_text(json.dumps({"tokens": 3, "dtype": "int3", "vocab_size": 4}))
    with pytest.raises(ValueError, match="does not describe a token file: the dtype of token files is one of uint8"):
        read_tokens(tmp_path / "x.npy")
    with pytest.raises(ValueError, match="dataset_type=tokens needs dataset_path"):
        make_dataset(config(dataset_type="tokens"))
