"""Statistics on disk, so that the next quantization of the same model needs no calibration data."""

import dataclasses
import json
import os
import zipfile
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from octavo._io import atomic_file
from octavo.ptq.layout import MatrixView
from octavo.ptq.statistics import Statistics

_ARRAYS = tuple(field.name for field in dataclasses.fields(Statistics) if field.name != "view")


def save_statistics(path: str | os.PathLike[str], statistics: Mapping[str, Statistics]) -> None:
    """Write statistics, as `collect_statistics` gives them, to a file in NumPy's npz format; atomically.

    Args:
        path: The file.
        statistics: The statistics by the name of the weight.

    >>> import tempfile
    >>> from octavo.ptq.statistics import collect_statistics
    >>> found, _ = collect_statistics(lambda params, x: x @ params["w"], {"w": jnp.eye(2)}, [jnp.ones((3, 2))])
    >>> path = f"{tempfile.mkdtemp()}/statistics.npz"
    >>> save_statistics(path, found)
    >>> load_statistics(path)["w"].hessian.tolist()
    [[[1.0, 1.0], [1.0, 1.0]]]
    """
    arrays = {
        f"{name}:{part}": np.asarray(getattr(one, part))
        for name, one in statistics.items()
        for part in _ARRAYS
        if getattr(one, part) is not None
    }
    views = {name: dataclasses.asdict(one.view) for name, one in statistics.items()}
    with atomic_file(path) as file:
        np.savez(file, views=np.asarray(json.dumps(views)), **arrays)  # pyrefly: ignore


def load_statistics(path: str | os.PathLike[str]) -> dict[str, Statistics]:
    """Read what `save_statistics` wrote.

    Args:
        path: The file.

    Returns:
        The statistics by the name of the weight.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            views = {
                name: MatrixView(**{key: tuple(value) for key, value in view.items()})
                for name, view in json.loads(str(file["views"])).items()
            }
            arrays = {key: jnp.asarray(file[key]) for key in file.files if key != "views"}
    except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} has no statistics of weights, or is damaged: {error}") from error
    own = {name: {part: arrays[f"{name}:{part}"] for part in _ARRAYS if f"{name}:{part}" in arrays} for name in views}
    return {name: Statistics(view=view, **own[name]) for name, view in views.items()}
