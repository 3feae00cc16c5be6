"""Documents from the loaders of other libraries: Grain, Hugging Face datasets, TensorFlow Datasets."""

import glob
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from octavo._names import unknown_name
from octavo._optional import import_optional
from octavo.data.dataset import BatchConfig
from octavo.data.shuffle import Permutation, fold_key
from octavo.data.streaming import DocumentStream
from octavo.data.tokenizer import make_tokenizer

_COLUMN = "text"
_SHUFFLE_BUFFER = 10_000  # documents
_BLOCK = 4096


def make_hf(config: Any, split: str, batch_config: BatchConfig) -> DocumentStream:
    """A dataset of the Hugging Face hub or of local files, streamed; shuffled within a buffer for training."""
    datasets = import_optional("datasets", "dataset_type=hf", "datasets")
    path = getattr(config, "hf_path", "")
    if not path:
        raise ValueError("dataset_type=hf needs hf_path: a dataset's name on the hub, or 'json', 'parquet', 'text', …")

    def open_split(split: str, epoch: int, shuffle: bool) -> Iterator[str]:
        files = _patterns(_option(config, split, "hf_train_files", "hf_eval_files"))
        rows = datasets.load_dataset(
            path,
            data_dir=getattr(config, "hf_data_dir", "") or None,
            data_files=files or None,
            # Files that are given are one split, which datasets always calls "train".
            split="train" if files else _split_name(config, split),
            streaming=True,
        )
        if shuffle:
            rows = rows.shuffle(seed=batch_config.seed, buffer_size=_SHUFFLE_BUFFER)
            rows.set_epoch(epoch)
        return (_text(row) for row in rows)

    files = _option(config, split, "hf_train_files", "hf_eval_files")
    return _make_stream("hf", open_split, config, split, batch_config, {"path": path, "files": files})


def make_tfds(config: Any, split: str, batch_config: BatchConfig) -> DocumentStream:
    """A dataset of TensorFlow Datasets, in the order of its files."""
    tfds = import_optional("tensorflow_datasets", "dataset_type=tfds", "tensorflow-datasets tensorflow")
    name = getattr(config, "dataset_name", "")
    if not name:
        raise ValueError("dataset_type=tfds needs dataset_name, as in dataset_name=wikipedia/20230601.en")
    folder = getattr(config, "dataset_path", "")

    def open_split(split: str, epoch: int, shuffle: bool) -> Iterator[str]:
        del epoch, shuffle
        rows = tfds.load(name, split=_split_name(config, split), data_dir=folder or None, shuffle_files=False)
        return (_text(row) for row in tfds.as_numpy(rows))

    return _make_stream("tfds", open_split, config, split, batch_config, {"path": name})


def make_grain(config: Any, split: str, batch_config: BatchConfig) -> DocumentStream:
    """Files read by Grain; in training, records (arrayrecord) or files are shuffled anew in every epoch."""
    grain = import_optional("grain", "dataset_type=grain", "grain")
    file_type = getattr(config, "grain_file_type", "") or "arrayrecord"
    if file_type not in _GRAIN_READERS:
        raise ValueError(f"unknown grain_file_type {file_type!r}: {unknown_name(file_type, _GRAIN_READERS)}")

    def find(split: str) -> list[str]:
        option = "grain_train_files" if split == "train" else "grain_eval_files"
        given = getattr(config, option, "")
        found = sorted(file for pattern in _patterns(given) for file in glob.glob(pattern, recursive=True))
        if not found:
            raise FileNotFoundError(f"{option}={given!r} matches no file; it is a pattern, or several with ';' between")
        return found

    def open_split(split: str, epoch: int, shuffle: bool) -> Iterable[str]:
        key = fold_key(batch_config.seed, epoch) if shuffle else None
        return _GRAIN_READERS[file_type](grain, find(split), lambda count: _order(count, key))

    details = {"files": find(split), "file_type": file_type}
    return _make_stream("grain", open_split, config, split, batch_config, details)


type _Order = Callable[[int], Iterable[int]]


def _array_records(grain: Any, files: list[str], order: _Order) -> Iterator[str]:
    source = grain.sources.ArrayRecordDataSource(files)
    return (parse_text(source[i]) for i in order(len(source)))


def _parquet(grain: Any, files: list[str], order: _Order) -> Iterator[str]:
    return (_text(row) for i in order(len(files)) for row in grain.experimental.ParquetIterDataset(files[i]))


def _tf_records(grain: Any, files: list[str], order: _Order) -> Iterator[str]:
    return (
        parse_text(record) for i in order(len(files)) for record in grain.experimental.TFRecordIterDataset(files[i])
    )


_GRAIN_READERS = {"arrayrecord": _array_records, "parquet": _parquet, "tfrecord": _tf_records}


def _order(count: int, key: int | None) -> Iterator[int]:
    """The numbers below `count`, permuted by a key, computed in blocks so that the order is never in memory."""
    permutation = None if key is None or not count else Permutation(count, key)
    for start in range(0, count, _BLOCK):
        index = np.arange(start, min(start + _BLOCK, count))
        yield from (index if permutation is None else permutation(index)).tolist()


def _make_stream(
    name: str,
    open_split: Callable[[str, int, bool], Iterable[str]],
    config: Any,
    split: str,
    batch_config: BatchConfig,
    details: dict[str, Any],
) -> DocumentStream:
    # A tokenizer that is trained on the text is trained on the same text for both splits.
    tokenizer = make_tokenizer(config, lambda: open_split("train", 0, False))
    details = {"name": name, "split": split, **details}
    return DocumentStream(
        lambda epoch: open_split(split, epoch, batch_config.shuffle), tokenizer, batch_config, details
    )


def _split_name(config: Any, split: str) -> str:
    return _option(config, split, "train_split", "eval_split") or {"train": "train", "eval": "validation"}[split]


def _option(config: Any, split: str, train: str, evaluation: str) -> str:
    return getattr(config, train if split == "train" else evaluation, "") or ""


def _patterns(text: str) -> list[str]:
    return [pattern.strip() for pattern in text.split(";") if pattern.strip()]


def _text(row: Mapping[str, Any]) -> str:
    if _COLUMN not in row:
        raise ValueError(f"a row has no column {_COLUMN!r}; its columns are {', '.join(sorted(row))}")
    value = row[_COLUMN]
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)


def parse_text(record: bytes, column: str = "text") -> str:
    """The text of a column of a serialized tf.train.Example, without TensorFlow.

    An Example is nested protocol buffers: features (1), map (1) of name (1) to feature (2), bytes_list (1), value (1).
    """
    columns = {}
    try:
        for features in _fields(record, 1):
            for entry in _fields(features, 1):
                name = b"".join(_fields(entry, 1)).decode()
                columns[name] = [
                    value for feature in _fields(entry, 2) for held in _fields(feature, 1) for value in _fields(held, 1)
                ]
    except (IndexError, ValueError):
        raise ValueError(f"a record of {len(record)} bytes is no tf.train.Example") from None
    if not columns.get(column):
        raise ValueError(f"a record has no text in {column!r}; its columns are {', '.join(sorted(columns)) or 'none'}")
    return b"".join(columns[column]).decode("utf-8", errors="replace")


def _fields(data: bytes, wanted: int) -> Iterator[bytes]:
    """The values of a length-delimited field; others are skipped."""
    index = 0
    while index < len(data):
        tag, index = _varint(data, index)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            _, index = _varint(data, index)
        elif wire_type == 2:
            size, index = _varint(data, index)
            if index + size > len(data):
                raise ValueError("truncated")
            if number == wanted:
                yield data[index : index + size]
            index += size
        elif wire_type in (1, 5):
            index += 8 if wire_type == 1 else 4
        else:
            raise ValueError("unknown wire type")


def _varint(data: bytes, index: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[index]
        value |= (byte & 0x7F) << shift
        index, shift = index + 1, shift + 7
        if byte < 0x80:
            return value, index
