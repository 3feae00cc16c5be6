"""Peers in other interpreters, each in a process of its own that times itself on request: torch with torchao."""

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("torch_peer.py")


class MissingError(RuntimeError):
    """An interpreter does not exist or lacks the packages; the text says which."""


class Peer:
    """A process that answers each line of its input with a line; `ready` is its first line."""

    def __init__(self, python: str, words: list[str], *, missing: str) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:
            self.process = subprocess.Popen([python, *words], text=True, **pipes)
        except OSError as error:
            raise MissingError(f"{python} does not start: {error.strerror}") from error
        self.ready = self._line()
        if not self.ready:
            self.close()
            raise MissingError(f"{python} has no {missing}")

    def ask(self, line: str) -> str:
        """The answer to a line."""
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)
        answer = self._line()
        if not answer:
            raise RuntimeError("the process of a peer ended")
        return answer

    def close(self) -> None:
        """Close its input and wait for it to end."""
        self.process.communicate()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


class Torch:
    """torch and torchao: `linear` and `step` make calls for `side_by_side`."""

    def __init__(self, python: str) -> None:
        self.peer = Peer(python, [str(SCRIPT)], missing="torch")
        self.versions = json.loads(self.peer.ready)
        if "torchao" not in self.versions:
            self.peer.close()
            raise MissingError(f"{python} has no torchao")

    def linear(self, kind: str, m: int, k: int, n: int) -> Callable[[], float]:
        """A call of a linear layer that returns its seconds; ValueError where torch cannot make it."""
        return self._call({"what": "linear", "kind": kind, "sizes": [m, k, n]})

    def step(self, kind: str, **sizes: int) -> Callable[[], float]:
        """A training step that returns its seconds; ValueError where torch cannot take it."""
        return self._call({"what": "step", "kind": kind, "sizes": sizes})

    def _call(self, request: dict) -> Callable[[], float]:
        key = json.dumps(request)
        self._ask({"make": key, **request})

        def call() -> float:
            seconds = self._ask({"run": key})
            # OpenMP threads keep spinning for a while, which would slow down the next call.
            time.sleep(0.02)
            return seconds

        return call

    def _ask(self, request: dict) -> float:
        answer = json.loads(self.peer.ask(json.dumps(request)))
        if isinstance(answer, str):
            raise ValueError(answer)
        return answer


def attempt(results: Any, name: str, make: Callable[[], Callable[[], float]]) -> dict[str, Callable[[], float]]:
    """A peer's call by name; none, recorded as skipped, if the peer cannot do it."""
    try:
        return {name: make()}
    except ValueError as error:
        results.skip(name, str(error))
        return {}


@contextlib.contextmanager
def torch_process(results: Any, python: str | None) -> Iterator[Torch | None]:
    """torch in the given interpreter; None, recorded as skipped, if it is not available."""
    torch = None
    try:
        if python is None:
            raise MissingError("no interpreter was given: --torch PYTHON")
        torch = Torch(python)
        results.add_versions(torch.versions)
    except MissingError as error:
        results.skip("torch and torchao", str(error))
    try:
        yield torch
    finally:
        if torch is not None:
            torch.peer.close()
