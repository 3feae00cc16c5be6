"""Strict JAX for every test: no implicit dtype or rank promotion, array shapes checked, eight devices."""

import collections
import gc
import importlib
import importlib.util
import os
import shutil
from pathlib import Path

from tests.compiled import COMPILED, remove_unread

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # Small programs compile in 8 % less CPU time unsplit, and two workers use both cores already.
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)

# Two thirds of the suite's time is compilation. Tests that read what XLA writes while it compiles switch the cache off.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
# Compilation makes and frees millions of small objects. With glibc's cache for more of them than the usual seven of a
# size, it takes a tenth less CPU time; workers and subprocesses read this when they start.
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.tcache_count=8000:glibc.malloc.trim_threshold=1073741824")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import pytest
from hypothesis import settings

DATA = Path(__file__).parents[1] / ".cache" / "data"
# The packages that annotate shapes: checking every call of the others would make tracing a third slower for nothing.
SHAPED = ("calibration", "kernels", "models", "numerics", "qarray", "serve")
# Files that take longer than their number of tests says, by default or with slow tests.
LONG = (
    *("docs/test_code", "train/test_communication", "train/test_mesh", "train/test_resume", "train/test_recipes"),
    *("train/test_run", "train/test_trainer", "checkpoint/test_faults", "cli/test_compile", "compat/test_aqt"),
    *("frameworks/test_linen_ops", "transform/test_quantized", "compat/test_qwix_programs", "models/test_decoder"),
    *("ops/test_ragged", "inspect/test_telemetry", "optim/test_optimizers", "frameworks/test_nnx", "ptq/test_models"),
    *("pretrained/test_architectures", "ptq/test_algorithms", "examples/test_mnist"),
)
LEFT_OUT = pytest.StashKey[dict[str, int]]()

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile("octavo", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("octavo")


def pytest_addoption(parser):
    parser.addoption(
        "--shapes",
        choices=("check", "trust"),
        default="check",
        help="whether jaxtyping's shapes are checked at every call, which makes tracing a third slower",
    )


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        remove_unread()
    found = importlib.util.find_spec("jaxtyping") and importlib.util.find_spec("beartype")
    if found and config.getoption("--shapes") == "check":
        from jaxtyping import install_import_hook

        install_import_hook([f"octavo.{package}" for package in SHAPED], "beartype.beartype")


@pytest.fixture(autouse=True)
def _promotion(request):
    """JAX's own promotion rules for tests marked `standard_promotion`, which call libraries that rely on them."""
    if request.node.get_closest_marker("standard_promotion") is None:
        yield
    else:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            yield


def mappings():
    """How many memory mappings this process has; Linux allows 65,530, and each compiled program takes several."""
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


@pytest.fixture(autouse=True, scope="module")
def _programs():
    """Compiled programs are freed before they exhaust the mappings, which crashes XLA in the next compilation."""
    yield
    if mappings() > 30_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def registries(monkeypatch):
    """What a test registers is gone after it: a worker runs many files."""
    for module, names in (
        ("calibration", ("_makers",)),
        ("numerics", ("_formats", "_aliases")),
        ("rules", ("_recipes",)),
    ):
        registry = importlib.import_module(f"octavo.{module}.registry")
        for name in names:
            monkeypatch.setattr(registry, name, dict(getattr(registry, name)))


def missing(item):
    """The commands that fetch what a test needs and this machine does not have."""
    names = [name for marker in item.iter_markers("data") for name in marker.args]
    absent = sorted({name for name in names if not (DATA / name).exists()})
    if absent:
        yield f"make data ARGS={absent[0]!r}" if len(absent) == 1 else f"make data ARGS='{' '.join(absent)}'"
    if item.get_closest_marker("browser") and not shutil.which("chromium"):
        yield "scripts/browser"
    for marker in item.iter_markers("compiler"):
        if not importlib.util.find_spec({"tpu": "libtpu", "cuda": "jax_cuda12_plugin"}[marker.args[0]]):
            yield f"pip install 'octavo[{marker.args[0]}]'"


def longest_first(items):
    """Long files first, then those with most tests: a long one at the end would leave the other worker idle."""
    files = [item.nodeid.partition("::")[0] for item in items]
    rank, tests = {f"tests/{name}.py": i for i, name in enumerate(LONG)}, collections.Counter(files)
    order = sorted(range(len(items)), key=lambda i: (rank.get(files[i], len(LONG)), -tests[files[i]], files[i], i))
    items[:] = [items[i] for i in order]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Deselect the tests whose data, browser or compiler is not here; the last line of the run says so."""
    left_out: dict[str, int] = {}
    here, absent = [], []
    for item in items:
        commands = list(missing(item))
        (absent if commands else here).append(item)
        for command in commands:
            left_out[command] = left_out.get(command, 0) + 1
    if absent:
        config.hook.pytest_deselected(items=absent)
        items[:] = here
    config.stash[LEFT_OUT] = left_out
    result = yield
    longest_first(items)
    return result


def pytest_sessionfinish(session):
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = session.config.stash.get(LEFT_OUT, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    # Every worker collects the same tests, so one of them speaks for all.
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", {})


def pytest_terminal_summary(terminalreporter, config):
    left_out = config.stash.get(LEFT_OUT, {})
    if left_out:
        commands = "; ".join(f"{count} need {command!r}" for command, count in sorted(left_out.items()))
        terminalreporter.write_line(f"not run here: {commands}")


def pytest_collection_finish():
    """Imported modules stay, and what tracing makes soon goes: the garbage collector need not visit either often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
