"""Event files hold what TensorBoard expects, also after a run was resumed."""

import math
import sys

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from octavo.train.metrics import EventWriter


def events(directory):
    """The events of a directory's files in the order of their names, and of each file's records."""
    for path in sorted(directory.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            # A record is length, checksum of the length, bytes, checksum of the bytes.
            length = int.from_bytes(data[at : at + 8], "little")
            yield Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length


def scalars(event):
    return {value.tag: value.simple_value for value in event.summary.value}


def test_each_event_is_on_disk_at_once(tmp_path):
    writer = EventWriter(tmp_path / "tensorboard")
    writer.write(0, {"learning/loss": 2.5, "perf/µ": -0.1})
    writer.write(123456789012, {"learning/loss": math.nan, "large": 1e300})
    version, first, second = events(tmp_path / "tensorboard")
    writer.close()
    writer.close()
    assert version.file_version == "brain.Event:2"
    assert (first.step, scalars(first)) == (0, {"learning/loss": 2.5, "perf/µ": pytest.approx(-0.1, rel=1e-6)})
    assert (second.step, scalars(second)["large"]) == (123456789012, math.inf)
    assert math.isnan(scalars(second)["learning/loss"])


def test_a_run_that_resumes_replaces_later_steps(tmp_path):
    """A session start at step 5 makes TensorBoard drop what it has of that step and later ones."""
    for start, stop, value in ((0, 8, 1.0), (5, 10, 2.0)):
        writer = EventWriter(tmp_path, start_step=start)
        for step in range(start, stop):
            writer.write(step, {"loss": value})
        writer.close()
    assert len(list(tmp_path.iterdir())) == 2
    kept = {}
    for event in events(tmp_path):
        if event.session_log.status == SessionLog.START:
            kept = {step: value for step, value in kept.items() if step < event.step}
        for value in scalars(event).values():
            assert event.step not in kept
            kept[event.step] = value
    assert kept == {step: 1.0 if step < 5 else 2.0 for step in range(10)}


def test_without_tensorboardx_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'octavo\[training\]', or set enable_tensorboard=false"):
        EventWriter(tmp_path)
