"""TensorBoard event files, by tensorboardX."""

import importlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class EventWriter:
    """Writes scalars to a new event file in `directory`.

    Every event is flushed before `write` returns: tensorboardX's `SummaryWriter` queues them, and what a killed process
    has queued would be missing from a run that resumes. Where a directory has event files already, the new one begins
    with a session start, which makes TensorBoard drop what they say about `start_step` and later steps.
    """

    def __init__(self, directory: str | os.PathLike[str], *, start_step: int = 0):
        try:
            self._event: Any = importlib.import_module("tensorboardX.proto.event_pb2").Event
            writer: Any = importlib.import_module("tensorboardX.event_file_writer").EventsWriter
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "enable_tensorboard=true needs the package tensorboardX: pip install 'octavo[training]', or set "
                "enable_tensorboard=false",
                name="tensorboardX",
            ) from None
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        earlier = sum(1 for _ in folder.glob("events.out.tfevents.*"))
        # TensorBoard reads files in the order of their names, and two runs may start within a second.
        self._writer = writer(str(folder / "events"), f".{earlier:04d}")
        if earlier:
            event = self._event(wall_time=time.time(), step=start_step)
            event.session_log.status = event.session_log.START
            self._writer.write_event(event)
        self._writer.flush()

    def write(self, step: int, scalars: Mapping[str, int | float]) -> None:
        """Write one event with these scalars, which are stored as float32."""
        event = self._event(wall_time=time.time(), step=step)
        for tag, value in scalars.items():
            event.summary.value.add(tag=tag, simple_value=value)
        self._writer.write_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Close the file; does nothing when it is closed."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
