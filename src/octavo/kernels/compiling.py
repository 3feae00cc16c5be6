"""Compiling the CPU kernels, at install time or by hand with `python -m octavo.kernels.build`.

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
HINT = "run `python -m octavo.kernels.build`"


class BuildError(Exception):
    """The library could not be built; the message is one line."""


def library() -> Path:
    """The path of the compiled library, in this file's directory and named after the platform."""
    return Path(__file__).parent / f"_cpu-{sysconfig.get_platform()}.so"


def is_current() -> bool:
    """Whether the library exists and is newer than all sources and headers."""
    if not library().exists():
        return False
    built = library().stat().st_mtime
    return all(path.stat().st_mtime <= built for path in SOURCES.iterdir())


def build() -> Path:
    """Compile the library and return its path; raises `BuildError`.

    The file is replaced atomically: processes that have loaded the old library keep using it.
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
    """The path of the library, compiled if it is missing or out of date; on failure, reports why and returns None."""
    if is_current():
        return library()
    try:
        return build()
    except BuildError as error:
        say(f"octavo: CPU kernels are not built, XLA's own code runs instead: {error}")
        # A library that is out of date would be loaded as if it were current.
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
