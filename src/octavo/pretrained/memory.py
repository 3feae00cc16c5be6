"""Memory of the process: its peak, and returning what was freed."""

import ctypes
import sys
from pathlib import Path


def peak_memory() -> int:
    """Peak resident memory of this process in bytes; 0 if unknown.

    >>> peak_memory() > 2**20
    True
    """
    try:
        # Unlike getrusage, this does not count memory of the parent before a fork.
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ModuleNotFoundError:  # not on Windows
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def release_memory() -> None:
    """Return memory that was freed to the system, where the C library keeps it: 50 MiB after a small model was read.

    >>> release_memory()
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        if trim is not None:
            trim(0)
