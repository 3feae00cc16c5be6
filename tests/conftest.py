"""Strict JAX for every test: no implicit dtype or rank promotion, array shapes checked, eight devices."""

import gc
import importlib.util
import os

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # Small programs compile in 8 % less CPU time unsplit, and two workers use both cores already.
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)

import jax
import pytest
from hypothesis import settings
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

if importlib.util.find_spec("jaxtyping") and importlib.util.find_spec("beartype"):
    from jaxtyping import install_import_hook

    install_import_hook("octavo", "beartype.beartype")

settings.register_profile("octavo", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("octavo")


@pytest.fixture(autouse=True)
def _promotion(request):
    """JAX's own promotion rules for tests marked `standard_promotion`, which call libraries that rely on them."""
    if request.node.get_closest_marker("standard_promotion") is None:
        yield
    else:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            yield


@pytest.fixture(scope="session")
def compiled_programs(tmp_path_factory):
    # Each worker has its own: JAX writes an entry in place, and another process could read half of it.
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def compiled_once(compiled_programs):
    """JAX's compilation cache for the tests of a module: a run and the one that resumes it are one program.

    Not for tests that read what XLA writes while it compiles: a program from the cache was compiled before.
    """
    names = {
        "jax_compilation_cache_dir": str(compiled_programs),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of the cases of a test marked `sampled(n)`, every n-th runs by default; all others are slow."""
    seen: dict[str, int] = {}
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None:
            name = item.nodeid.partition("[")[0]
            number = seen[name] = seen.get(name, -1) + 1
            if number % marker.args[0]:
                item.add_marker("slow")


def pytest_collection_finish():
    """What was imported stays: the collector need not go through it again and again."""
    gc.collect()
    gc.freeze()
