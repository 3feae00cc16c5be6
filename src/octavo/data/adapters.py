"""Documents through other people's loaders: Grain, Hugging Face datasets, TensorFlow Datasets."""

import glob
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from octavo.data.dataset import Layout
from octavo.data.mixing import key_of
from octavo.data.optional import require
from octavo.data.permutation import Permutation
from octavo.data.record import text_in
from octavo.data.stream import Stream
from octavo.data.tokenizer import make_tokenizer
from octavo.numerics import nearest_names

_COLUMN = "text"
_BUFFER = 10_000  # documents that Hugging Face's streaming shuffle holds


def make_hf(config: Any, split: str, layout: Layout) -> Stream:
    """A dataset of Hugging Face's hub or of local files, streamed; shuffled for training within a buffer."""
    datasets = require("datasets", "dataset_type=hf", "datasets")
    path = getattr(config, "hf_path", "")
    if not path:
        raise ValueError("dataset_type=hf needs hf_path: a dataset's name on the hub, or 'json', 'parquet', 'text', …")

    def opened(part: str, epoch: int, shuffle: bool) -> Iterator[str]:
        files = _patterns(_option(config, part, "hf_train_files", "hf_eval_files"))
        rows = datasets.load_dataset(
            path,
            data_dir=getattr(config, "hf_data_dir", "") or None,
            data_files=files or None,
            # Files that were given are all one split, which datasets calls "train" whatever is in them.
            split="train" if files else _split(config, part),
            streaming=True,
        )
        if shuffle:
            rows = rows.shuffle(seed=layout.seed, buffer_size=_BUFFER)
            rows.set_epoch(epoch)
        return (_text(row) for row in rows)

    files = _option(config, split, "hf_train_files", "hf_eval_files")
    return _stream("hf", opened, config, split, layout, {"path": path, "files": files})


def make_tfds(config: Any, split: str, layout: Layout) -> Stream:
    """A dataset of TensorFlow Datasets, in the order of its files."""
    tfds = require("tensorflow_datasets", "dataset_type=tfds", "tensorflow-datasets tensorflow")
    name = getattr(config, "dataset_name", "")
    if not name:
        raise ValueError("dataset_type=tfds needs dataset_name, as in dataset_name=wikipedia/20230601.en")
    folder = getattr(config, "dataset_path", "")

    def opened(part: str, epoch: int, shuffle: bool) -> Iterator[str]:
        del epoch, shuffle
        rows = tfds.load(name, split=_split(config, part), data_dir=folder or None, shuffle_files=False)
        return (_text(row) for row in tfds.as_numpy(rows))

    return _stream("tfds", opened, config, split, layout, {"path": name})


def make_grain(config: Any, split: str, layout: Layout) -> Stream:
    """Files that Grain reads; for training in a new order of records (arrayrecord) or of files in every epoch."""
    grain = require("grain", "dataset_type=grain", "grain")
    kind = getattr(config, "grain_file_type", "") or "arrayrecord"
    if kind not in _GRAIN:
        raise ValueError(f"unknown grain_file_type {kind!r}: {nearest_names(kind, tuple(_GRAIN))}")

    def files(part: str) -> list[str]:
        option = "grain_train_files" if part == "train" else "grain_eval_files"
        given = getattr(config, option, "")
        found = sorted(file for pattern in _patterns(given) for file in glob.glob(pattern, recursive=True))
        if not found:
            raise FileNotFoundError(f"{option}={given!r} matches no file; it is a pattern, or several with ';' between")
        return found

    def opened(part: str, epoch: int, shuffle: bool) -> Iterable[str]:
        key = key_of(layout.seed, epoch) if shuffle else None
        return _GRAIN[kind](grain, files(part), lambda count: _order(count, key))

    return _stream("grain", opened, config, split, layout, {"files": files(split), "file_type": kind})


type _Order = Callable[[int], Iterable[int]]


def _array_records(grain: Any, files: list[str], order: _Order) -> Iterator[str]:
    source = grain.sources.ArrayRecordDataSource(files)
    return (text_in(source[i]) for i in order(len(source)))


def _parquet(grain: Any, files: list[str], order: _Order) -> Iterator[str]:
    chosen = (files[i] for i in order(len(files)))
    return (_text(row) for file in chosen for row in grain.experimental.ParquetIterDataset(file))


def _tf_records(grain: Any, files: list[str], order: _Order) -> Iterator[str]:
    chosen = (files[i] for i in order(len(files)))
    return (text_in(record) for file in chosen for record in grain.experimental.TFRecordIterDataset(file))


_GRAIN: dict[str, Callable[[Any, list[str], _Order], Iterable[str]]] = {
    "arrayrecord": _array_records,
    "parquet": _parquet,
    "tfrecord": _tf_records,
}


def _order(count: int, key: int | None) -> Iterator[int]:
    """Places from 0 to below a count, in an order that a key names, looked up in blocks so that none is kept."""
    block = 4096
    permutation = None if key is None or not count else Permutation(count, key)
    for begin in range(0, count, block):
        places = np.arange(begin, min(begin + block, count))
        yield from (places if permutation is None else permutation(places)).tolist()


def _stream(
    name: str,
    opened: Callable[[str, int, bool], Iterable[str]],
    config: Any,
    split: str,
    layout: Layout,
    details: dict[str, Any],
) -> Stream:
    # A tokenizer that learns from the text learns the same for both splits.
    tokenizer = make_tokenizer(config, lambda: opened("train", 0, False))
    details = {"name": name, "split": split, **details}
    return Stream(lambda epoch: opened(split, epoch, layout.shuffle), tokenizer, layout, details)


def _split(config: Any, split: str) -> str:
    return _option(config, split, "train_split", "eval_split") or {"train": "train", "eval": "validation"}[split]


def _option(config: Any, split: str, train: str, evaluation: str) -> str:
    return getattr(config, train if split == "train" else evaluation, "") or ""


def _patterns(text: str) -> list[str]:
    return [part.strip() for part in text.split(";") if part.strip()]


def _text(row: Mapping[str, Any]) -> str:
    if _COLUMN not in row:
        raise ValueError(f"a row has no column {_COLUMN!r}; its columns are {', '.join(sorted(row))}")
    value = row[_COLUMN]
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)
