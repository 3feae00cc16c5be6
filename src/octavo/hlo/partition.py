"""The HLO of a program right after it is partitioned for its devices."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache


def partitioned_hlo(lowered: Any) -> str:
    """The HLO text of a lowered program after SPMD partitioning, before a backend changes types.

    XLA's CPU backend all-gathers bfloat16 as float32, float8 as float16 and int4 as int8, since it computes in those
    types. The collective bytes of a platform are in this text of the program that was lowered for it, for example by
    `lowering_platforms=("tpu",)`: every backend partitions it in the same way, even if it then fails to compile it.
    """
    with tempfile.TemporaryDirectory() as directory:
        dump: dict[str, Any] = {
            "xla_dump_to": directory,
            "xla_dump_hlo_pass_re": "spmd-partitioning",
            "xla_dump_hlo_as_text": True,
            "xla_backend_optimization_level": 0,  # what comes after partitioning is thrown away
        }
        try:
            with _without_compilation_cache():
                compiled = lowered.compile(compiler_options=dump)
        except Exception:  # the backend cannot compile the program; partitioning was done before
            if (text := _dumped(directory)) is None:
                raise
            return text
        # On one device nothing is partitioned.
        return _dumped(directory) or compiled.as_text()


def _dumped(directory: str) -> str | None:
    texts = sorted(Path(directory).glob("*after_spmd-partitioning*.txt"))
    return texts[-1].read_text(encoding="utf-8") if texts else None


@contextlib.contextmanager
def _without_compilation_cache() -> Iterator[None]:
    """Nothing is dumped for a program that is read from JAX's compilation cache."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it remembers whether it is used
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
