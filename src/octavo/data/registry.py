"""Datasets by the name of their `dataset_type`."""

from collections.abc import Callable
from typing import Any

from octavo._names import unknown_name
from octavo.data.chat import make_chat
from octavo.data.dataset import BatchConfig, Dataset
from octavo.data.loaders import make_grain, make_hf, make_tfds
from octavo.data.synthetic import make_synthetic
from octavo.data.text import make_python, make_text
from octavo.data.token_files import make_tokens

type DatasetMaker = Callable[[Any, str, BatchConfig], Dataset]

_SPLITS = ("train", "eval")
_makers: dict[str, DatasetMaker] = {
    "synthetic": make_synthetic,
    "python": make_python,
    "text": make_text,
    "chat": make_chat,
    "tokens": make_tokens,
    "grain": make_grain,
    "hf": make_hf,
    "tfds": make_tfds,
}


def register_dataset(name: str, maker: DatasetMaker, *, replace: bool = False) -> None:
    """Register a dataset by name; `maker` takes the configuration, the split and the `BatchConfig`."""
    if name in _makers and not replace:
        raise ValueError(f"a dataset named {name!r} exists; choose another name or pass replace=True")
    _makers[name] = maker


def datasets() -> tuple[str, ...]:
    """The names of all datasets, sorted.

    >>> "python" in datasets()
    True
    """
    return tuple(sorted(_makers))


def make_dataset(config: Any, split: str = "train", *, batch_size: int | None = None) -> Dataset:
    """Make the dataset of a training configuration.

    Args:
      config: The training configuration, or any object with its attributes.
      split: `"train"` or `"eval"`.
      batch_size: The number of rows of a batch; `per_device_batch_size` by default.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(dataset_type="synthetic", max_target_length=16, per_device_batch_size=4)
    >>> data = make_dataset(config)
    >>> data.vocab_size, data.batch(0)["inputs"].shape
    (256, (4, 16))
    """
    if split not in _SPLITS:
        raise ValueError(f"a split is one of {', '.join(_SPLITS)}, got {split!r}")
    name = config.dataset_type
    if name not in _makers:
        raise ValueError(f"unknown dataset_type {name!r}: {unknown_name(name, _makers)}")
    return _makers[name](config, split, BatchConfig.from_config(config, split, batch_size))
