"""How much memory a process has held."""

import sys
from pathlib import Path


def peak_memory() -> int:
    """The most memory that this process has held at once, in bytes; 0 where that is not known.

    >>> peak_memory() > 2**20
    True
    """
    try:
        # The resource usage of a process counts that of its parent when it was forked; this does not.
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
