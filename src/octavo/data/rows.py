"""Rows of tokens with their positions, documents and targets.

A stream is tokens with the tokenizer's `eos` before the first document and after every one:

    eos a b c eos d e eos

A row of length L is a window of L + 1 of these. What is in its first L places is read, what is in its last L predicted.
So every document is read as `bos a b c` and predicted as `a b c eos`: no token is wasted, and none predicted across
documents.
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


def assemble(windows: np.ndarray, *, eos: int, bos: int, counts: np.ndarray | None = None) -> Batch:
    """A batch from windows [batch, length + 1]; only the first `counts` predictions of each row are there, or all.

    Positions start at 0 where a document or the row does; documents are numbered from 1 in each row; 0 is padding.

    >>> batch = assemble(np.array([[9, 1, 2, 9, 3, 9]], np.int32), eos=9, bos=8)
    >>> for name in KEYS[:4]:
    ...     print(name, batch[name][0])
    inputs [8 1 2 8 3]
    inputs_position [0 1 2 0 1]
    inputs_segmentation [1 1 1 2 2]
    targets [1 2 9 3 9]
    """
    read, targets = windows[:, :-1], windows[:, 1:]
    starts = read == eos
    inputs = np.where(starts, np.int32(bos), read) if bos != eos else read
    starts[:, :1] = True
    places = np.arange(read.shape[1], dtype=np.int32)
    segments = np.cumsum(starts, axis=1, dtype=np.int32)
    positions = places - np.maximum.accumulate(np.where(starts, places, np.int32(0)), axis=1)
    arrays = [inputs, positions, segments, targets]
    if counts is not None:
        there = places < counts[:, None]
        arrays = [np.where(there, array, np.int32(0)) for array in arrays]
    inputs, positions, segments, targets = (np.ascontiguousarray(array, np.int32) for array in arrays)
    return dict(zip(KEYS, (inputs, positions, segments, targets, positions.copy(), segments.copy()), strict=True))


def as_numbers(ids: Ids) -> str:
    """Ids as they are, for data without a text.

    >>> as_numbers([3, 4])
    '3 4'
    """
    return " ".join(str(int(i)) for i in np.asarray(ids).reshape(-1))


def gather(stream: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """The windows of length + 1 tokens at these places of a stream; what lies beyond its end repeats its last token."""
    places = starts[:, None] + np.arange(length + 1)
    if places.size and places[:, -1].max() >= stream.size:
        places = np.minimum(places, stream.size - 1)
    return stream[places].astype(np.int32)
