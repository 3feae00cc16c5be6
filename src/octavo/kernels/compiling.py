"""Compiling the CPU kernels: what the install does, and `python -m octavo.kernels.build` by hand.

Standard library only, since the build backend runs this file before Octavo is installed.
"""

import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "cpu"
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC")
HINT = "run `make` or `python -m octavo.kernels.build`"


class BuildError(Exception):
    """Why there is no library, in one line."""


def library() -> Path:
    """Where the compiled library is, or would be: beside this file, named after the platform."""
    return Path(__file__).parent / f"_cpu-{sysconfig.get_platform()}.so"


def is_current() -> bool:
    """Whether the library is there and no source or header is newer than it."""
    if not library().exists():
        return False
    built = library().stat().st_mtime
    return all(path.stat().st_mtime <= built for path in SOURCES.iterdir())


def build() -> Path:
    """Compile the library anew; raises `BuildError`.

    A library that is in use stays as it is for the processes that loaded it: the new one takes its name, not its place.
    """
    command, include = _compiler(), _headers()
    with tempfile.TemporaryDirectory(dir=library().parent, prefix=".build-") as folder:
        made = Path(folder) / "library.so"
        sources = map(str, sorted(SOURCES.glob("*.cc")))
        words = [*command, *FLAGS, f"-I{include}", *sources, "-o", str(made)]
        try:
            done = subprocess.run(words, capture_output=True, text=True)
        except OSError as error:
            raise BuildError(f"{command[0]} cannot be run: {error.strerror}") from None
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise BuildError(f"{command[0]} failed: {errors[0] if errors else f'exit status {done.returncode}'}")
        os.replace(made, library())
    return library()


def build_if_needed(say=print) -> Path | None:
    """The library, compiled if it is missing or old; without one, a line that says why, and None."""
    if is_current():
        return library()
    try:
        return build()
    except BuildError as error:
        say(f"octavo: CPU kernels are not built, XLA's own code runs instead: {error}")
        # An old library would be loaded as if it were the new one.
        library().unlink(missing_ok=True)
        return None


def _compiler() -> list[str]:
    if os.environ.get("CXX"):
        return os.environ["CXX"].split()
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if found is None:
        raise BuildError("no C++ compiler was found")
    return [found]


def _headers() -> str:
    try:
        from jax.ffi import include_dir
    except ImportError:
        raise BuildError("jax, whose headers are needed, is not installed where the build runs") from None
    return include_dir()
