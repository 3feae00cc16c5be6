"""The weights of a trainer that fit their number format worst."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from octavo._tree import flatten_paths
from octavo.models.decoder import layer_groups
from octavo.qarray import QArray, is_qarray
from octavo.qarray.histogram import WORST, histogram, sqnr_db
from octavo.train.sparse import masked
from octavo.train.trainer import Trainer


def worst_weights(trainer: Trainer) -> list[dict[str, Any]]:
    """Histograms of the weights with the lowest signal to noise, quantized as they are now, the worst first.

    The layers of a stack are weights of their own. Weights that are quantized without a loss are left out.
    """
    floats = flatten_paths(masked(trainer.state.params, trainer.state.masks))
    stacks = [f"decoder/{group.name}/" for group in layer_groups(trainer.model) if group.is_stack]
    found: list[tuple[float, str, np.ndarray, QArray]] = []
    for path, q in flatten_paths(trainer.quantized_params(), is_qarray).items():
        if not isinstance(q, QArray):
            continue
        for name, x, codes in _layers(path, np.asarray(floats[path], np.float32), q, stacks):
            db = sqnr_db(x, np.asarray(codes.dequantize("float32")))
            if db is not None:
                found = sorted([*found, (db, name, x, codes)], key=lambda entry: entry[:2])[:WORST]
    return [histogram(name, x, codes, sqnr_db=db) for db, name, x, codes in found]


def _layers(path: str, x: np.ndarray, q: QArray, stacks: list[str]) -> Iterator[tuple[str, np.ndarray, QArray]]:
    """A weight, or each of those that lie in one array."""
    stack = next((start for start in stacks if path.startswith(start)), None)
    if stack is None:
        yield path, x, q
        return
    for i in range(len(x)):
        yield f"{stack[:-1]}_{i}/{path.removeprefix(stack)}", x[i], q[i]
