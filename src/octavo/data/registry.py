"""Datasets by the name that `dataset_type` gives them."""

from collections.abc import Callable
from typing import Any

from octavo.data.adapters import make_grain, make_hf, make_tfds
from octavo.data.dataset import Dataset, Layout, check_split
from octavo.data.stdlib import make_python
from octavo.data.synthetic import make_synthetic
from octavo.data.text import make_text
from octavo.data.tokens import make_tokens
from octavo.numerics import nearest_names

type DatasetMaker = Callable[[Any, str, Layout], Dataset]

_makers: dict[str, DatasetMaker] = {}


def register_dataset(name: str, maker: DatasetMaker, *, replace: bool = False) -> None:
    """Make a dataset known by a name; `maker` takes the configuration, the split and the layout of batches."""
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
    """The data that a training configuration asks for.

    `batch_size` is the rows of a batch, `per_device_batch_size` if it is not given. `config` is anything with the
    configuration's attributes.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(dataset_type="synthetic", max_target_length=16, per_device_batch_size=4)
    >>> data = make_dataset(config)
    >>> data.vocab_size, data.batch(0)["inputs"].shape
    (256, (4, 16))
    """
    check_split(split)
    name = config.dataset_type
    if name not in _makers:
        raise ValueError(f"unknown dataset_type {name!r}: {nearest_names(name, datasets())}")
    return _makers[name](config, split, Layout.of(config, split, batch_size))


for _name, _maker in {
    "synthetic": make_synthetic,
    "python": make_python,
    "text": make_text,
    "tokens": make_tokens,
    "grain": make_grain,
    "hf": make_hf,
    "tfds": make_tfds,
}.items():
    register_dataset(_name, _maker)
