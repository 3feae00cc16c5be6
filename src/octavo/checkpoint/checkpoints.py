"""Checkpoints of a run: saved in the background, kept by policy, whole whatever happens."""

import atexit
import json
import operator
import os
import shutil
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from octavo.checkpoint import leaves, manifest, store, together
from octavo.checkpoint.errors import CheckpointError, CheckpointWarning
from octavo.checkpoint.folder import Folder
from octavo.checkpoint.lock import Lock
from octavo.checkpoint.reading import EXTRA, STATE, TREE, Renew, Restored, newest, sound

_open: "weakref.WeakSet[Checkpoints]" = weakref.WeakSet()


class Checkpoints:
    """The checkpoints in a directory, which this run alone may write.

    The newest `keep` are kept (None: all), and for good those of every `keep_period`-th step. `asynchronous` saves
    return when the arrays are copied; what goes wrong later is raised by the next call. A directory that cannot be
    written to can still be read.

    The processes of a run under `jax.distributed` make, save and restore together, in a directory that all of them see;
    what fails on one is raised on all. Their saves are waited for.

    >>> import tempfile
    >>> import numpy as np
    >>> with tempfile.TemporaryDirectory() as directory, Checkpoints(directory, keep=2) as checkpoints:
    ...     for step in (1, 2, 3):
    ...         checkpoints.save(step, {"w": np.full(2, step)}, {"loss": 1 / step})
    ...     restored = checkpoints.restore({"w": np.zeros(2, int)})
    ...     restored.step, restored.state["w"].tolist(), checkpoints.steps()
    (3, [3, 3], [2, 3])
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        keep_period: int = 0,
        asynchronous: bool = True,
    ):
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep} would keep no checkpoint; give at least 1, or None for all")
        if keep_period < 0:
            raise ValueError(f"keep_period={keep_period} is negative; 0 keeps no checkpoint for good")
        self.directory = Path(directory).absolute()
        self.keep, self.keep_period, self.asynchronous = keep, keep_period, asynchronous
        self._folder = Folder(self.directory)
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._lock: Lock | None = None
        self._unwritable: OSError | None = None
        self._closed = False
        together.first_only(self._open)
        _open.add(self)

    def _open(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(self.directory)
            self._folder.tidy()
        except OSError as error:
            if not self.directory.is_dir():
                raise CheckpointError(f"{self.directory} cannot be made: {error}") from error
            self._unwritable = error

    def save(self, step: int, state: Any, extra: dict[str, Any] | None = None, *, force: bool = False) -> None:
        """Save a pytree and a dictionary that JSON can hold as the checkpoint of a step.

        An asynchronous save waits for the one before it to end, copies the arrays and returns. A step that is there
        already is replaced only with `force`, or where it is damaged.
        """
        self._check_open()
        self.wait()
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"step={step} is negative")
        try:
            text = json.dumps({} if extra is None else extra)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"`extra` of step {step} holds what JSON cannot: {error}") from error
        found = leaves.leaves_of(state)
        needed = _bytes(found)
        if together.several():
            self._save_together(step, state, found, text, needed, force)
            return
        self._check_free(step, force)
        for _, value in found.values():
            if isinstance(value, jax.Array):
                value.copy_to_host_async()
        self._check_room(step, needed)
        # A save that is waited for needs no copies: nothing else runs meanwhile.
        copy = self.asynchronous
        arrays = {path: leaves.to_host(leaf, value, copy=copy) for path, (leaf, value) in found.items()}
        files = {TREE: _described(state, found), EXTRA: text}
        places = store.places(list(arrays))

        def write(directory: Path) -> None:
            if some := {places[path]: array for path, array in arrays.items() if array.size}:
                store.write(directory, some)

        self._thread = threading.Thread(
            target=self._write, args=(step, write, files, needed), name=f"checkpoint of step {step}"
        )
        self._thread.start()
        if not self.asynchronous:
            self.wait()

    def _save_together(
        self,
        step: int,
        state: Any,
        found: dict[leaves.Path, tuple[leaves.Leaf, Any]],
        text: str,
        needed: int,
        force: bool,
    ) -> None:
        staging = self._folder.of(step, "saving")

        def begin() -> None:
            self._check_free(step, force)
            self._check_room(step, needed)
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)

        def finish() -> None:
            # The arrays are there: what is left to write are the files about them.
            self._write(step, lambda _: None, {TREE: _described(state, found), EXTRA: text}, needed, fresh=False)
            self._raise_failure()

        together.first_only(begin)
        problem = None
        try:
            together.write(staging / STATE, found)
        except Exception as error:
            problem = self._failed(step, f"{type(error).__name__}: {error}; {self._room(needed)}")
            problem.__cause__ = error
        together.agree(problem)
        together.first_only(finish)

    def restore(
        self, like: Any = None, step: int | None = None, *, part: str = "", renew: Renew | None = None
    ) -> Restored | None:
        """The newest whole checkpoint, or that of a step; None if there is none at all.

        `like` and `part` are those of `octavo.checkpoint.load`. A damaged checkpoint is passed over with a warning;
        asked for by its step it is an error. Leaves for whose path `renew` is true are those of `like`, with a warning,
        where the checkpoint has them in another shape or not at all.
        """
        self._check_open()
        self.wait()
        if not together.several():
            return newest(self._folder, like, step=step, part=part, renew=renew)
        # One process looks for the newest that is whole, and all read that one.
        found = together.same(together.first_only(lambda: _chosen(self._folder, step)) or 0)
        problem, restored = None, None
        try:
            restored = newest(self._folder, like, step=found - 1, part=part, renew=renew) if found else None
        except CheckpointError as error:
            problem = error
        together.agree(problem)
        return restored

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there, in order; one that is being saved is not yet."""
        self._raise_failure()
        return self._folder.whole()

    def latest(self) -> int | None:
        """The last of the steps."""
        return max(self.steps(), default=None)

    def wait(self) -> None:
        """Wait until what was saved is on disk; raise what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_failure()

    def close(self) -> None:
        """Wait, and let another process write to the directory."""
        try:
            self.wait()
        finally:
            self._closed = True
            _open.discard(self)
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            warnings.warn(str(failure), CheckpointWarning, stacklevel=2)

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.directory)!r}, keep={self.keep}, keep_period={self.keep_period})"

    # Writing.

    def _write(
        self, step: int, write: Callable[[Path], None], files: dict[str, str], needed: int, fresh: bool = True
    ) -> None:
        staging = self._folder.of(step, "saving")
        try:
            if fresh:
                shutil.rmtree(staging, ignore_errors=True)
            (staging / EXTRA).parent.mkdir(parents=True)
            write(staging / STATE)
            for name, text in files.items():
                (staging / name).write_text(text, encoding="utf-8")
            manifest.write(staging, step)
            self._folder.commit(step)
        except BaseException as error:
            room = self._room(needed)  # Before the half that was written is deleted.
            shutil.rmtree(staging, ignore_errors=True)
            self._failure = self._failed(step, f"{type(error).__name__}: {error}; {room}")
            self._failure.__cause__ = error
            return
        try:
            self._folder.thin(keep=self.keep, period=self.keep_period, latest=step)
        except BaseException as error:
            self._failure = CheckpointError(f"step {step} is saved, but an older checkpoint cannot be deleted: {error}")
            self._failure.__cause__ = error

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError(f"these checkpoints of {self.directory} are closed; open them anew")

    def _check_free(self, step: int, force: bool) -> None:
        if step in self._folder.all() and not force and self._folder.is_whole(step, contents=True):
            raise CheckpointError(f"{self._folder.of(step)} is there already; pass force=True to replace it")

    def _check_room(self, step: int, needed: int) -> None:
        if self._lock is None:
            raise self._failed(step, f"it cannot be written to: {self._unwritable}; {self._room(needed)}")
        try:
            free = shutil.disk_usage(self.directory).free
        except OSError as error:
            raise self._failed(step, f"the directory is gone ({error.strerror})") from error
        if free < needed:
            raise self._failed(step, f"{self._room(needed)}: make room, keep fewer checkpoints or save elsewhere")

    def _room(self, needed: int) -> str:
        try:
            free = f"{shutil.disk_usage(self.directory).free:,} are free"
        except OSError as error:
            free = f"how many are free is not known ({error.strerror})"
        return f"{needed:,} bytes are needed and {free}"

    def _failed(self, step: int, why: str) -> CheckpointError:
        whole = self._folder.whole()
        last = f"Step {whole[-1]} is the last one there" if whole else "There is none yet"
        return CheckpointError(f"the checkpoint of step {step} in {self.directory} was not saved: {why}. {last}")

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def _described(state: Any, found: dict[leaves.Path, tuple[leaves.Leaf, Any]]) -> str:
    """What every leaf is, and what makes QArrays of them."""
    dtypes = {path: "uint32" if leaf.kind == "key" else leaf.dtype for path, (leaf, _) in found.items()}
    return json.dumps(
        {
            "leaves": [leaf.to_json() for leaf, _ in found.values()],
            "quantized": [
                {"path": path, "static": leaves.static_of(q)} for path, q in leaves.qarrays_of(state).items()
            ],
            "as_bytes": [path for path, name in dtypes.items() if not store.is_native(leaves.dtype_of(name))],
        }
    )


def _chosen(folder: Folder, step: int | None) -> int:
    """The number after the step that is to be read, or 0 if there is none."""
    if step is None:
        found = sound(folder)
        return 0 if found is None else found + 1
    return step + 1


def _bytes(found: dict[leaves.Path, tuple[leaves.Leaf, Any]]) -> int:
    """How much a checkpoint takes on disk: arrays are not compressed, and each has two small files beside it."""
    return sum(8192 + leaves.nbytes(leaf, value) for leaf, value in found.values()) + (1 << 16)


@atexit.register
def _tell_at_exit() -> None:
    # Python waits for the thread of a save, but lets it start no other, and Orbax starts several.
    for checkpoints in list(_open):
        try:
            checkpoints.close()
        except CheckpointError as failure:
            advice = "Saves have to end before the program does: use `with Checkpoints(...)`, or close()"
            warnings.warn(f"{failure}. {advice}", CheckpointWarning, stacklevel=1)
