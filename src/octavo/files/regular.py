"""Reading files by position, with an exception where a memory map would raise a signal."""

import os
import stat
from pathlib import Path

from octavo.files.errors import FileError


class RegularFile:
    """A file of known size, read by offset and length with `pread`.

    Accessing a memory map of a file that was truncated kills the process; a short read here raises `FileError`.
    Devices, pipes and directories raise before anything is read.
    """

    _fd = -1

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            # A pipe would block in open() until somebody writes to it.
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self._fd)
        except FileNotFoundError:
            raise FileError(f"{self.path}: there is no such file") from None
        except (OSError, ValueError) as error:
            raise FileError(f"{self.path}: cannot be opened ({error})") from None
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise FileError(
                f"{self.path}: is {'a directory' if stat.S_ISDIR(status.st_mode) else 'not a regular file'}"
            )
        self.size = status.st_size

    def check(self, offset: int, count: int, what: str) -> None:
        """Raise unless the file has `count` bytes from `offset`; `what` names them in the error."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise FileError(
                f"{self.path}: is truncated: {what} needs bytes {offset} to {offset + count} of {self.size}"
            )

    def read(self, offset: int, count: int, what: str) -> bytearray:
        """Exactly `count` bytes from `offset`."""
        if self._fd < 0:
            raise FileError(f"{self.path}: is closed")
        self.check(offset, count, what)
        data = bytearray(count)
        view, done = memoryview(data), 0
        while done < count:
            got = os.preadv(self._fd, [view[done:]], offset + done)
            if got == 0:
                raise FileError(f"{self.path}: was truncated while it was read, at {what}")
            done += got
        return data

    def close(self, _close=os.close) -> None:  # bound here: the module may be unloaded at interpreter exit
        if self._fd >= 0:
            _close(self._fd)
            self._fd = -1

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self):
        self.close()
