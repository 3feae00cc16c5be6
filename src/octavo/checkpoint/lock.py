"""A lock for the single writer of a directory; the operating system releases it when the process ends in any way."""

import errno
import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path

from octavo.checkpoint.errors import CheckpointError

_held: "weakref.WeakSet[Lock]" = weakref.WeakSet()


class Lock:
    """An exclusive lock on a directory. Raises OSError where the directory is not writable."""

    def __init__(self, directory: Path):
        self._handle: int | None = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._handle, 4096, 0)
            self.release()
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise CheckpointError(
                f"{directory} is in use by {_describe_owner(owner)}; two runs must not save to one directory: wait for "
                "that one to end, or choose another directory"
            ) from None
        note = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, json.dumps(note).encode(), 0)
        _held.add(self)

    def release(self) -> None:
        """Release the lock. The file stays: if it were removed, two processes could lock two files of one name."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _describe_owner(note: bytes) -> str:
    try:
        owner = json.loads(note)
        this = " (this one)" if (owner["pid"], owner["host"]) == (os.getpid(), socket.gethostname()) else ""
        return f"process {owner['pid']}{this} on {owner['host']}, since {owner['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _release_in_child() -> None:
    # A forked child, such as a data loader, shares the lock and would still hold it after its parent was killed.
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
