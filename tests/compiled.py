"""Where tests cache compiled programs: workers, subprocesses, later runs and other clones read them.

JAX's key of a program holds its flags and JAX's version; the name of the directory adds the instructions of the CPU.
"""

import hashlib
import os
import re
import time
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
INSTRUCTIONS = re.search(r"^flags.*", CPUINFO.read_text() if CPUINFO.exists() else "flags", re.MULTILINE)[0]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
COMPILED = CACHE / "octavo" / f"tests-{hashlib.sha256(INSTRUCTIONS.encode()).hexdigest()[:12]}"


def remove_unread(days=14):
    """Remove the programs that no run has read for so long."""
    for entry in COMPILED.glob("*"):
        if time.time() - entry.stat().st_atime > days * 86_400:
            entry.unlink(missing_ok=True)
