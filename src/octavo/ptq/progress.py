"""The progress of a calibration on disk, so that an interrupted one resumes."""

import time
import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo._io import atomic_file

_SECONDS = 60.0
"""The time between two writes: the Hessians of a large model are gigabytes."""

ALL = "all.npz"
"""The file of a calibration that has the statistics of all weights in one pass."""


class Progress:
    """The sums of a calibration and the number of batches in them; without a path, nothing is written.

    Args:
        path: The file, replaced atomically.
        identity: What else the sums depend on, such as parameters: a file of anything else is an error.
    """

    def __init__(self, path: str | Path | None, *identity: Any):
        self.path = None if path is None else Path(path)
        self.count, self._written = 0, time.monotonic()
        self._sums: list[np.ndarray] = []
        self._data, self._wanted = 0, 0
        if self.path is None:
            return
        self._identity = _crc(0, identity)
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return
        try:
            with np.load(self.path, allow_pickle=False) as file:
                self.count, own, self._wanted = (int(file[name]) for name in ("count", "identity", "data"))
                self._sums = [file[f"sum{i}"] for i in range(len(file.files) - 3)]
        except (KeyError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"{self.path} is no interrupted calibration, or is damaged: remove it") from error
        if own != self._identity:
            raise ValueError(f"{self.path} is the calibration of other parameters or weights: remove it")

    def skips(self, number: int, batch: Any) -> bool:
        """Whether the batch of this number, from one, is in the sums already."""
        if self.path is None:
            return False
        self._data = _crc(self._data, batch)
        if number == self.count and self._data != self._wanted:
            raise ValueError(f"{self.path} is the calibration on other data: remove it")
        return number <= self.count

    def restore(self, empty: Any) -> Any:
        """The sums so far, with the structure of empty ones."""
        if not self._sums:
            return empty
        sums, self._sums = [jnp.asarray(x) for x in self._sums], []
        if [x.shape for x in sums] != [x.shape for x in jax.tree.leaves(empty)]:
            raise ValueError(f"{self.path} is the calibration of another function: remove it")
        return jax.tree.unflatten(jax.tree.structure(empty), sums)

    def finish(self, number: int) -> None:
        """Raise if the sums have more batches than there are."""
        if number < self.count:
            raise ValueError(f"{self.path} is the calibration on {self.count} batches, more than {number}: remove it")

    def write(self, sums: Any, number: int, *, now: bool = False) -> None:
        """Write the sums of this many batches, if the last time is a minute ago or `now`."""
        if self.path is None or number <= self.count or (not now and time.monotonic() - self._written < _SECONDS):
            return
        leaves = jax.tree.leaves(sums)
        if any(x.is_deleted() for x in leaves):  # interrupted within a step, which owns them
            return
        arrays = {f"sum{i}": np.asarray(x) for i, x in enumerate(leaves)}
        with atomic_file(self.path) as file:
            np.savez(file, count=number, identity=self._identity, data=self._data, **arrays)  # pyrefly: ignore
        self.count, self._written = number, time.monotonic()


def _crc(start: int, tree: Any) -> int:
    for leaf in jax.tree.leaves(tree):
        data = leaf.encode() if isinstance(leaf, str) else np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        start = zlib.crc32(data, start)
    return start
