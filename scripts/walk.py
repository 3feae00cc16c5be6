"""Counts what one int8 matmul passes through: functions, files and changes of package of Octavo's own code.

    PYTHONPATH=src python scripts/walk.py [--list]

Each walk is traced once with `sys.setprofile`, in a process of its own caches; JAX's own functions do not count.
"""

import argparse
import collections
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import octavo

ROOT = str(Path(octavo.__file__).parent)


class Walk:
    """The calls of Octavo's functions while a function runs."""

    def __init__(self) -> None:
        self.calls: collections.Counter[tuple[str, str, int]] = collections.Counter()
        self.changes = 0
        self._package = ""

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        # Comprehensions and lambdas belong to the function that they are written in.
        if event != "call" or not code.co_filename.startswith(ROOT) or code.co_name.startswith("<"):
            return
        file = code.co_filename.removeprefix(ROOT + "/")
        self.calls[file, code.co_name, code.co_firstlineno] += 1
        package = file.split("/")[0]
        self.changes += package != self._package
        self._package = package

    def run(self, fn: Callable[[], Any]) -> "Walk":
        sys.setprofile(self)
        try:
            fn()
        finally:
            sys.setprofile(None)
        return self

    def row(self, name: str) -> str:
        files = {file for file, _, _ in self.calls}
        numbers = self.calls.total(), len(self.calls), len(files), self.changes
        return f"{name:<24}" + "".join(f"{n:>12,}" for n in numbers)


def lower_train_step() -> None:
    """From a configuration to the lowered program of the first training step of a small language model."""
    from octavo.train import load
    from octavo.train.program import Program

    keys = {
        "model_name": "1m",
        "quantization": "int8",
        "dataset_type": "synthetic",
        "max_target_length": 32,
        "use_qwix_quantization": True,
    }
    config, _ = load([f"{key}={value}" for key, value in keys.items()], environ={})
    Program(config, vocab_size=256).lower()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="list the functions of the forward pass, by file")
    args = parser.parse_args()
    params, x = {"w": jnp.ones((64, 32))}, jnp.ones((16, 64))
    low = octavo.quantized(lambda params, x: x @ params["w"], "int8")
    made = Walk().run(lambda: octavo.quantized(lambda params, x: x @ params["w"], "int8"))
    forward = Walk().run(lambda: jax.make_jaxpr(low)(params, x))
    gradient = Walk().run(lambda: jax.make_jaxpr(jax.grad(lambda p, x: low(p, x).sum()))(params, x))
    print(f"{'walk':<24}{'calls':>12}{'functions':>12}{'files':>12}{'packages':>12}")
    print(made.row("quantized(fn, 'int8')"))
    print(forward.row("forward jaxpr"))
    print(gradient.row("gradient jaxpr"))
    print(Walk().run(lower_train_step).row("first training step"))
    if args.list:
        for (file, name, line), count in sorted(forward.calls.items()):
            print(f"{count:>5}  {file}:{line} {name}")


if __name__ == "__main__":
    main()
