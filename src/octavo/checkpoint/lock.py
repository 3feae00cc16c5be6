"""One writer to a directory: a lock that the operating system releases when its process ends, however it ends."""

import errno
import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path

from octavo.checkpoint.errors import CheckpointError

NAME = ".lock"

_held: "weakref.WeakSet[Lock]" = weakref.WeakSet()


class Lock:
    """The right to write to a directory. Raises OSError where the directory cannot be written to at all."""

    def __init__(self, directory: Path):
        self._handle: int | None = os.open(directory / NAME, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._handle, 4096, 0)
            self.release()
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise CheckpointError(
                f"{directory} is in use by {_owner(owner)}; two runs must not save to one directory: wait for "
                "that one to end, or choose another directory"
            ) from None
        note = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, json.dumps(note).encode(), 0)
        _held.add(self)

    def release(self) -> None:
        """Let others write. The file stays: removing it would let two processes lock two files of one name."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _owner(note: bytes) -> str:
    try:
        owner = json.loads(note)
        this = " (this one)" if (owner["pid"], owner["host"]) == (os.getpid(), socket.gethostname()) else ""
        return f"process {owner['pid']}{this} on {owner['host']}, since {owner['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _leave_to_parent() -> None:
    # A forked child, say a data loader, shares the lock and would hold it on after its parent was killed.
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_leave_to_parent)
