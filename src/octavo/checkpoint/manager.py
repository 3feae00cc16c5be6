"""Saving and restoring the checkpoints of a run."""

import atexit
import dataclasses
import json
import operator
import os
import shutil
import threading
import time
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from octavo.checkpoint import array_store, manifest, multiprocess
from octavo.checkpoint.errors import CheckpointError, CheckpointWarning
from octavo.checkpoint.leaves import Leaf, disk_size, flatten, qarray_metadata, to_host
from octavo.checkpoint.leaves import Path as Names
from octavo.checkpoint.lock import Lock
from octavo.checkpoint.restore import EXTRA, STATE, TREE, Reinit, Restored, existing, newest, read
from octavo.checkpoint.steps import StepDirectory

_open: "weakref.WeakSet[CheckpointManager]" = weakref.WeakSet()


class CheckpointManager:
    """Saves and restores the checkpoints in a directory, as its only writer.

    A directory that is not writable can still be read. The processes of a run under `jax.distributed` construct the
    manager, save and restore together, in a directory that all of them see; an error on one is raised on all, and
    their saves are synchronous.

    Args:
      directory: Where the checkpoints are; created if it does not exist.
      max_to_keep: How many of the newest checkpoints to keep; None keeps all.
      keep_period: Checkpoints of steps that it divides are never deleted; 0 for none.
      asynchronous: Whether `save` returns as soon as the arrays are copied to host memory. An error while writing is
        then raised by the next call.

    >>> import tempfile
    >>> import numpy as np
    >>> with tempfile.TemporaryDirectory() as directory, CheckpointManager(directory, max_to_keep=2) as manager:
    ...     for step in (1, 2, 3):
    ...         manager.save(step, {"w": np.full(2, step)}, {"loss": 1 / step})
    ...     restored = manager.restore({"w": np.zeros(2, int)})
    ...     restored.step, restored.state["w"].tolist(), manager.all_steps()
    (3, [3, 3], [2, 3])
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_to_keep: int | None = 3,
        keep_period: int = 0,
        asynchronous: bool = True,
    ):
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(f"max_to_keep={max_to_keep} would keep no checkpoint; give at least 1, or None for all")
        if keep_period < 0:
            raise ValueError(f"keep_period={keep_period} is negative; 0 keeps no checkpoint for good")
        self.directory = Path(directory).absolute()
        self.max_to_keep, self.keep_period, self.asynchronous = max_to_keep, keep_period, asynchronous
        self._steps = StepDirectory(self.directory)
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._lock: Lock | None = None
        self._unwritable: OSError | None = None
        self._closed = False
        multiprocess.on_primary(self._acquire)
        _open.add(self)

    def _acquire(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(self.directory)
            self._steps.recover()
        except OSError as error:
            if not self.directory.is_dir():
                raise CheckpointError(f"{self.directory} cannot be created: {error}") from error
            self._unwritable = error

    def save(self, step: int, state: Any, extra: dict[str, Any] | None = None, *, force: bool = False) -> None:
        """Save a checkpoint. Waits for the previous asynchronous save to finish.

        Args:
          step: The step that the checkpoint is of.
          state: A pytree of arrays, PRNG keys, numbers and QArrays.
          extra: A dictionary that JSON can represent.
          force: Whether an existing checkpoint of this step is replaced; a damaged one always is.
        """
        self._check_open()
        self.wait_until_finished()
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"step={step} is negative")
        try:
            text = json.dumps({} if extra is None else extra)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"`extra` of step {step} holds what JSON cannot: {error}") from error
        leaves = flatten(state)
        files = {TREE: _tree_json(state, leaves), EXTRA: text}
        if multiprocess.is_multiprocess():
            self._save_shards(step, leaves, files, force)
            return
        size = disk_size(leaves)
        self._check_writable(step, size, force)
        for _, value in leaves.values():
            if isinstance(value, jax.Array):
                value.copy_to_host_async()
        # A synchronous save needs no copies: nothing else runs meanwhile.
        arrays = {path: to_host(leaf, value, copy=self.asynchronous) for path, (leaf, value) in leaves.items()}
        self._thread = threading.Thread(
            target=self._write, args=(step, arrays, files, size), name=f"checkpoint of step {step}"
        )
        self._thread.start()
        if not self.asynchronous:
            self.wait_until_finished()

    def _save_shards(
        self, step: int, leaves: dict[Names, tuple[Leaf, Any]], files: dict[str, str], force: bool
    ) -> None:
        """Save from several processes: each writes its shards, and process 0 the rest when all are done."""
        size, staging = disk_size(leaves), self._steps.path(step, "saving")

        def prepare() -> None:
            self._check_writable(step, size, force)
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)

        def commit() -> None:
            self._write(step, None, files, size)
            self._raise_failure()

        multiprocess.on_primary(prepare)
        problem = None
        try:
            array_store.write(staging / STATE, {path: array_store.to_global(*leaf) for path, leaf in leaves.items()})
        except Exception as error:
            problem = self._save_error(step, f"{type(error).__name__}: {error}; {self._space(size)}")
            problem.__cause__ = error
        multiprocess.raise_on_all(problem)
        multiprocess.on_primary(commit)

    def restore(
        self, like: Any = None, step: int | None = None, *, subtree: str = "", reinit: Reinit | None = None
    ) -> Restored | None:
        """Restore the newest intact checkpoint, with a warning about each newer one that is damaged, or that of a step.

        Args:
          like: The expected structure, as for `octavo.checkpoint.load`.
          step: The step to restore; raises if it is damaged.
          subtree: The subtree to restore, as for `octavo.checkpoint.load`.
          reinit: Given the path of a leaf that the checkpoint has in another shape or not at all, says whether it may
            keep its value of `like`, with a warning, instead of raising.

        Returns:
          The restored checkpoint, or None if there are no checkpoints.
        """
        self._check_open()
        self.wait_until_finished()
        steps = self._steps

        def verify_step(step: int) -> int:
            return manifest.verify(steps.path(step), step, contents=manifest.EVERY_FILE)

        def read_step(step: int) -> Restored:
            return read(existing(steps, step), like, step=step, subtree=subtree, reinit=reinit)

        if not multiprocess.is_multiprocess():
            return newest(steps, read_step) if step is None else read_step(operator.index(step))
        if step is None:  # Process 0 looks for the newest intact one, and all read that one.
            found = multiprocess.on_primary(lambda: newest(steps, verify_step))
            step = multiprocess.broadcast(-1 if found is None else found)
        problem, restored = None, None
        try:
            restored = None if step == -1 else read_step(step)
        except CheckpointError as error:
            problem = error
        multiprocess.raise_on_all(problem)
        return restored

    def all_steps(self) -> list[int]:
        """The steps of the committed checkpoints, in order."""
        self._raise_failure()
        return self._steps.intact()

    def latest_step(self) -> int | None:
        """The last of the steps."""
        return max(self.all_steps(), default=None)

    def resume_step(self) -> int | None:
        """The step that another manager of this directory would restore: an interrupted save counts if it is complete.

        Unlike `latest_step`, it does not raise the error of a failed save.
        """
        complete = [step for step in self._steps.all("saving") if self._steps.is_intact(step, "saving", contents=True)]
        return max([*self._steps.intact(), *complete], default=None)

    def wait_until_finished(self) -> None:
        """Wait until asynchronous saves are on disk; raise their errors."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_failure()

    def close(self) -> None:
        """Wait for asynchronous saves and release the lock of the directory."""
        try:
            self.wait_until_finished()
        finally:
            self._closed = True
            _open.discard(self)
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            warnings.warn(str(failure), CheckpointWarning, stacklevel=2)

    def __repr__(self) -> str:
        options = f"max_to_keep={self.max_to_keep}, keep_period={self.keep_period}"
        return f"CheckpointManager({str(self.directory)!r}, {options})"

    def _write(self, step: int, arrays: Mapping[Names, Any] | None, files: dict[str, str], size: int) -> None:
        """Write and commit a checkpoint; without `arrays`, the `saving` folder has them already."""
        staging = self._steps.path(step, "saving")
        try:
            if arrays is not None:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir(parents=True)
                array_store.write(staging / STATE, arrays)
            for name, text in files.items():
                (staging / name).parent.mkdir(exist_ok=True)
                (staging / name).write_text(text, encoding="utf-8")
            manifest.write(staging, step)
            self._steps.commit(step)
        except BaseException as error:
            space = self._space(size)  # Before the incomplete folder is deleted.
            _delete_unfinished(staging)
            self._failure = self._save_error(step, f"{type(error).__name__}: {error}; {space}")
            self._failure.__cause__ = error
            return
        try:
            self._steps.prune(max_to_keep=self.max_to_keep, keep_period=self.keep_period, latest=step)
        except BaseException as error:
            self._failure = CheckpointError(f"step {step} is saved, but an older checkpoint cannot be deleted: {error}")
            self._failure.__cause__ = error

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError(f"the checkpoint manager of {self.directory} is closed; make a new one")

    def _check_writable(self, step: int, size: int, force: bool) -> None:
        if step in self._steps.all() and not force and self._steps.is_intact(step, contents=True):
            raise CheckpointError(f"{self._steps.path(step)} exists already; pass force=True to replace it")
        if self._lock is None:
            raise self._save_error(step, f"the directory is not writable: {self._unwritable}; {self._space(size)}")
        try:
            free = shutil.disk_usage(self.directory).free
        except OSError as error:
            raise self._save_error(step, f"the directory is gone ({error.strerror})") from error
        if free < size:
            raise self._save_error(step, f"{self._space(size)}: free some, keep fewer checkpoints or save elsewhere")

    def _space(self, size: int) -> str:
        try:
            free = f"{shutil.disk_usage(self.directory).free:,} are free"
        except OSError as error:
            free = f"how many are free is not known ({error.strerror})"
        return f"{size:,} bytes are needed and {free}"

    def _save_error(self, step: int, why: str) -> CheckpointError:
        intact = self._steps.intact()
        last = f"The last checkpoint is of step {intact[-1]}" if intact else "There is no checkpoint yet"
        return CheckpointError(f"the checkpoint of step {step} in {self.directory} was not saved: {why}. {last}")

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def _delete_unfinished(path: Path, *, seconds: float = 5.0) -> None:
    """Delete the folder of a failed save. Writes of other arrays may still be ending and create files meanwhile."""
    end = time.monotonic() + seconds
    shutil.rmtree(path, ignore_errors=True)
    while path.exists() and time.monotonic() < end:
        time.sleep(0.05)
        shutil.rmtree(path, ignore_errors=True)


def _tree_json(state: Any, leaves: dict[Names, tuple[Leaf, Any]]) -> str:
    quantized = [{"path": path, "static": static} for path, static in qarray_metadata(state).items()]
    return json.dumps({"leaves": [dataclasses.asdict(leaf) for leaf, _ in leaves.values()], "quantized": quantized})


@atexit.register
def _close_at_exit() -> None:
    # Python waits for the thread of a save, but does not let it start others, and Orbax starts several.
    for manager in list(_open):
        try:
            manager.close()
        except CheckpointError as failure:
            advice = "Saves have to finish before the program ends: use `with CheckpointManager(...)`, or close()"
            warnings.warn(f"{failure}. {advice}", CheckpointWarning, stacklevel=1)
