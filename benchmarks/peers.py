"""Another interpreter as a contender: torch with torchao in a process of its own, which times itself when asked."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

SCRIPT = Path(__file__).with_name("torch_peer.py")


class Torch:
    """The process; `linear` makes a call for `side_by_side`. Use it as a context manager."""

    def __init__(self, python: str) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([python, str(SCRIPT)], text=True, **pipes)
        self.versions = self._answer(f"{python} did not start: has it torch?")

    def linear(self, kind: str, m: int, k: int, n: int) -> Callable[[], float]:
        """A call of a linear layer that returns its seconds; ValueError where torch cannot make it."""
        key = f"{kind} {m} {k} {n}"
        self._ask({"make": key, "kind": kind, "shape": [m, k, n]})

        def call() -> float:
            seconds = self._ask({"run": key})
            # Threads of OpenMP go on spinning for a while, at the cost of whoever comes next.
            time.sleep(0.02)
            return seconds

        return call

    def _ask(self, request: dict) -> float:
        assert self.process.stdin is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = self._answer("torch's process ended")
        if isinstance(answer, str):
            raise ValueError(answer)
        return answer

    def _answer(self, otherwise: str):
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(otherwise)
        return json.loads(line)

    def __enter__(self) -> "Torch":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()
