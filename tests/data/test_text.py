"""Text files and the source of the Python library: documents and held-out shares."""

import gzip
import hashlib
import os
import sysconfig

import numpy as np
import pytest

from octavo.data import make_dataset
from octavo.data.corpus import Fingerprint
from octavo.data.text import held_out_names, library_files, split_tail


def read_through(data):
    """All documents of an unshuffled, packed dataset, decoded."""
    rows = [data.batch(i) for i in range(data.num_batches)]
    targets = np.concatenate([row["targets"][row["targets_segmentation"] > 0] for row in rows])
    documents = "".join("\0" if i == 255 else chr(i) for i in targets).split("\0")
    assert documents.pop() == ""
    return [document.encode("latin-1").decode() for document in documents]


def unshuffled(config, split="train", **changes):
    data = make_dataset(config(**changes), split)
    data.config = type(data.config)(batch_size=4, length=16, shuffle=False)
    return data


def test_every_file_of_a_folder_is_a_document(config, tmp_path):
    texts = {f"part{i:02}/text{i}.txt": f"Nº {i} " * (i + 1) for i in range(40)}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "ignored.pkl").write_bytes(b"\0")
    train = read_through(unshuffled(config, dataset_path=str(tmp_path)))
    rest = read_through(unshuffled(config, "eval", dataset_path=str(tmp_path)))
    assert rest
    assert set(train).isdisjoint(rest)
    assert train == [text for text in texts.values() if text in train]
    assert sorted(train + rest) == sorted(texts.values())


def test_of_a_single_file_the_end_is_held_out(config, tmp_path):
    text = "äöü" * 1000
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    path = str(tmp_path / "book.txt")
    (train,) = read_through(unshuffled(config, dataset_path=path))
    (rest,) = read_through(unshuffled(config, "eval", dataset_path=path))
    assert train + rest == text
    assert len(rest) == 150


def test_eval_dataset_path(config, tmp_path):
    (tmp_path / "a.txt").write_text("for training")
    (tmp_path / "b.txt").write_text("for evaluation")
    paths = {"dataset_path": str(tmp_path / "a.txt"), "eval_dataset_path": str(tmp_path / "b.txt")}
    assert read_through(unshuffled(config, **paths)) == ["for training"]
    data = unshuffled(config, "eval", **paths)
    assert read_through(data) == ["for evaluation"]
    assert data.describe()["path"] == paths["eval_dataset_path"]


def test_patterns_and_compressed_files(config, tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "one.log").write_text("one" * 30)
    with gzip.open(tmp_path / "deep" / "two.log.gz", "wb") as file:
        file.write(b"two" * 30)
    elsewhere = {"eval_dataset_path": str(tmp_path / "deep/two.log.gz")}
    data = unshuffled(config, dataset_path=str(tmp_path / "**" / "*.log*"), **elsewhere)
    assert read_through(data) == ["one" * 30, "two" * 30]
    assert read_through(unshuffled(config, "eval", dataset_path=str(tmp_path / "**/*.log"), **elsewhere)) == [
        "two" * 30
    ]


def test_empty_files_and_invalid_bytes(config, tmp_path):
    for i in range(25):
        (tmp_path / f"{i}.txt").write_bytes(b"" if i % 2 else b"\xff%d" % i)
    documents = read_through(unshuffled(config, dataset_path=str(tmp_path)))
    assert documents
    assert all(document.startswith("\N{REPLACEMENT CHARACTER}") for document in documents)


def test_paths_without_text_raise(config, tmp_path):
    with pytest.raises(ValueError, match="dataset_type=text needs dataset_path: a file, a folder or a pattern"):
        make_dataset(config())
    with pytest.raises(
        FileNotFoundError, match=r"dataset_path='.*nothing' finds no text; it should be a file, a folder"
    ):
        make_dataset(config(dataset_path=str(tmp_path / "nothing")))
    with pytest.raises(
        FileNotFoundError, match=r"finds no text; it should be a file that ends in .txt.*name others by"
    ):
        make_dataset(config(dataset_path=str(tmp_path)))
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match="dataset_type=text: the train split has no text"):
        make_dataset(config(dataset_path=str(tmp_path)))


def test_a_vocabulary_may_be_larger_but_not_smaller(config, tmp_path):
    (tmp_path / "a.txt").write_text("text" * 100)
    assert make_dataset(config(dataset_path=str(tmp_path))).vocab_size == 256
    assert make_dataset(config(dataset_path=str(tmp_path), vocab_size=300)).vocab_size == 300
    with pytest.raises(ValueError, match="vocab_size=100 is too small: tokenizer_type=byte has 256 ids"):
        make_dataset(config(dataset_path=str(tmp_path), vocab_size=100))


def test_a_missing_file_changes_no_other():
    names = [f"file{i}" for i in range(500)]
    kept = held_out_names(names)
    assert 10 < len(kept) < 45
    assert held_out_names(names[::2]) == kept & set(names[::2])
    assert held_out_names([]) == set()


def test_splits_are_between_characters():
    for text in ("", "a", "é" * 7, "日本" * 33, "x" * 100):
        head, tail = split_tail(text.encode(), 0.3)
        assert head.decode() + tail.decode() == text


def test_the_library_is_the_default_corpus(config):
    data = make_dataset(config(dataset_type="python", max_target_length=128))
    other = make_dataset(config(dataset_type="python"), "eval")
    about, rest = data.describe(), other.describe()
    assert about["documents"] > 200
    assert about["bytes"] > 3_000_000
    assert about["tokens"] == about["bytes"] + about["documents"]
    assert 0.01 < rest["bytes"] / about["bytes"] < 0.15
    assert about["sha256"] != rest["sha256"]
    text = "".join(data.decode(data.batch(i)["inputs"]) for i in range(20))
    assert "self" in text
    assert "def " in text


def test_the_library_is_the_same_on_all_machines():
    names = library_files_here()
    assert "os.py" in names
    assert "json/decoder.py" in names
    assert list(names) == sorted(names)
    parts = {part for name in names for part in name.split("/")}
    assert parts.isdisjoint({"test", "tests", "site-packages", "__pycache__", "idlelib", "tkinter", "lib2to3"})
    assert not [name for name in names if "_sysconfigdata" in name]


def library_files_here():
    from pathlib import Path

    return library_files(Path(sysconfig.get_paths()["stdlib"]))


def test_an_incomplete_library(config, tmp_path, monkeypatch):
    for i in range(60):
        (tmp_path / f"module{i}.py").write_text(f"value = {i}\n" * 20)
    for name in ("test/test_os.py", "site-packages/x.py", "__pycache__/y.py", "_sysconfigdata_linux.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("no")
    os.symlink(tmp_path / "module0.py", tmp_path / "linked.py")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    documents = [
        make_dataset(config(dataset_type="python"), split).describe()["documents"] for split in ("train", "eval")
    ]
    assert sum(documents) == 60


def test_a_python_without_source_raises(config, tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "gone")})
    with pytest.raises(FileNotFoundError, match="this Python comes without; use dataset_type=text"):
        make_dataset(config(dataset_type="python"))


def test_fingerprints_depend_on_document_boundaries():
    text = "naïve"
    found = Fingerprint.of([text])
    assert (found.documents, found.bytes) == (1, 6)
    assert found.sha256 == hashlib.sha256(b"6:" + text.encode()).hexdigest()
    assert Fingerprint.of(["ab", "c"]) != Fingerprint.of(["a", "bc"])
