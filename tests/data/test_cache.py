"""Tokens are cached between runs, atomically, and a cache that is not writable is no error."""

from pathlib import Path

import numpy as np
import pytest

from octavo.data import make_dataset
from octavo.data.cache import cache_directory, cached


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("It was a dark and stormy night. " * 200)
    return str(path)


def test_tokens_are_written_once_and_mapped(config, book, cache, monkeypatch):
    first = make_dataset(config(dataset_path=book))
    (kept,) = cache.iterdir()
    assert kept.name.startswith("tokens-")
    assert kept.suffix == ".npy"
    assert np.load(kept).dtype == np.uint8
    monkeypatch.setattr("octavo.data.corpus._tokenize", lambda *_: pytest.fail("tokenized again"))
    second = make_dataset(config(dataset_path=book))
    np.testing.assert_array_equal(first.batch(3)["inputs"], second.batch(3)["inputs"])
    assert isinstance(second._tokens.base, np.memmap)


def test_other_text_is_another_file(config, book, cache):
    make_dataset(config(dataset_path=book))
    Path(book).write_text("Something else. " * 100)
    assert "Something" in make_dataset(config(dataset_path=book)).decode(
        make_dataset(config(dataset_path=book)).batch(0)["inputs"]
    )
    assert len(list(cache.iterdir())) == 2


def test_a_broken_file_is_not_read(config, book, cache):
    whole = make_dataset(config(dataset_path=book)).batch(0)["inputs"]
    (kept,) = cache.iterdir()
    kept.write_bytes(kept.read_bytes()[:500])
    np.testing.assert_array_equal(make_dataset(config(dataset_path=book)).batch(0)["inputs"], whole)
    np.testing.assert_array_equal(make_dataset(config(dataset_path=book)).batch(0)["inputs"], whole)


def test_an_unwritable_cache_is_no_error(config, book, cache, monkeypatch):
    whole = make_dataset(config(dataset_path=book)).batch(0)["inputs"]
    cache.parent.joinpath("file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent / "file"))
    np.testing.assert_array_equal(make_dataset(config(dataset_path=book)).batch(0)["inputs"], whole)


def test_without_a_home_directory_nothing_is_cached(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "")

    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("octavo.data.cache.cache_directory", nowhere)
    assert cached("name", lambda path: None) is None


def test_the_cache_directory_follows_the_xdg_rules(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "octavo"
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in ("", "here"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert cache_directory() == tmp_path / ".cache" / "octavo"


def test_a_failed_write_leaves_nothing(cache):
    def fail(file):
        file.write(b"half")
        raise OSError("disk full")

    assert cached("name", fail) is None
    assert list(cache.iterdir()) == []
    with pytest.raises(KeyError):
        cached("name", lambda path: {}["a bug is no disk that is full"])
    assert list(cache.iterdir()) == []
