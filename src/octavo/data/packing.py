"""Packed rows of tokens with their positions, segments and targets.

A stream is tokens with the tokenizer's `eos` before the first document and after every one:

    eos a b c eos d e eos

A row of length L is a window of L + 1 tokens: the first L are the inputs, the last L the targets. So every document has
the inputs `bos a b c` and the targets `a b c eos`, and no token is predicted across documents.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

type Batch = dict[str, np.ndarray]
"""Six int32 arrays [batch, length], named as in MaxText."""

type Ids = Iterable[Any]
"""Token ids: a list or an array of any shape."""

KEYS = (
    "inputs",
    "inputs_position",
    "inputs_segmentation",
    "targets",
    "targets_position",
    "targets_segmentation",
)


def make_batch(windows: np.ndarray, *, eos: int, bos: int, counts: np.ndarray | None = None) -> Batch:
    """A batch from windows [batch, length + 1].

    Positions start at 0 with each document or row; segments number the documents of a row from 1; 0 is padding.

    Args:
      windows: The tokens of each row.
      eos: The token before and after each document.
      bos: The input in place of `eos`.
      counts: The number of targets in each row, if some rows are padded.

    >>> batch = make_batch(np.array([[9, 1, 2, 9, 3, 9]], np.int32), eos=9, bos=8)
    >>> for name in KEYS[:4]:
    ...     print(name, batch[name][0])
    inputs [8 1 2 8 3]
    inputs_position [0 1 2 0 1]
    inputs_segmentation [1 1 1 2 2]
    targets [1 2 9 3 9]
    """
    inputs, targets = windows[:, :-1], windows[:, 1:]
    starts = inputs == eos
    if bos != eos:
        inputs = np.where(starts, np.int32(bos), inputs)
    starts[:, :1] = True
    index = np.arange(inputs.shape[1], dtype=np.int32)
    segments = np.cumsum(starts, axis=1, dtype=np.int32)
    positions = index - np.maximum.accumulate(np.where(starts, index, np.int32(0)), axis=1)
    arrays = [inputs, positions, segments, targets]
    if counts is not None:
        arrays = [np.where(index < counts[:, None], array, np.int32(0)) for array in arrays]
    inputs, positions, segments, targets = (np.ascontiguousarray(array, np.int32) for array in arrays)
    return dict(zip(KEYS, (inputs, positions, segments, targets, positions.copy(), segments.copy()), strict=True))
