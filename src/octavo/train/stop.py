"""Signals that ask a run to end: it saves first."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stop:
    """Whether a signal asked to stop, and which."""

    by: signal.Signals | None = None


@contextmanager
def stopping() -> Iterator[Stop]:
    """Note SIGTERM and the first Ctrl-C instead of dying of them; a second Ctrl-C interrupts as ever.

    Other threads than the main one cannot take signals, so there nothing changes.

    >>> with stopping() as stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     stop.by.name
    'SIGTERM'
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: Any) -> None:
        if stop.by is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.by = signal.Signals(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            # None: a handler that was not installed from Python, and cannot be from there.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
