"""The persistent cache of compiled programs, so that a second start of a model compiles nothing."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """Octavo's directory for compiled programs of this version, in the user's cache directory."""
    from importlib.metadata import version

    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "octavo" / "compiled" / version("octavo")


def use_compiled_programs() -> Path:
    """Keep compiled programs on disk, by the program, the devices and the version of jax; returns the directory.

    A directory that the user has set (`JAX_COMPILATION_CACHE_DIR`) is used instead.
    """
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    found = jax.config.jax_compilation_cache_dir
    return cache_directory() if found is None or "://" in found else Path(found)
