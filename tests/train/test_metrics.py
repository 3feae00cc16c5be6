"""Metrics survive a kill, resume without doubles, and can be read by any JSON parser."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import types

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from octavo.train.__main__ import main
from octavo.train.metrics import EventWriter, MetricWriter, read_metrics


def lines(path):
    refuse = lambda word: pytest.fail(f"{word} is not JSON")  # noqa: E731
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def write(directory, start, stop, **options):
    with MetricWriter(directory, run_name="r", tensorboard=False, start_step=start, **options) as writer:
        for step in range(start, stop):
            writer.write(step, {"learning/loss": 10.0 * start + step})
            writer.write_telemetry(step, {"weight": {"sqnr_db": 40.0}})


def test_lines(tmp_path):
    with MetricWriter(tmp_path / "runs" / "r", run_name="r", tensorboard=True) as writer:
        writer.write(0, {"learning/loss": jnp.float32(2.5), "count": np.int64(3), "on": True, "list": np.arange(2)})
        writer.write_telemetry(0, {"weight": {"sqnr_db": np.float32(40), "worst_site": "mlp"}})
    assert lines(tmp_path / "runs/r/metrics.jsonl") == [
        {"step": 0, "run_name": "r", "learning/loss": 2.5, "count": 3, "on": True, "list": [0, 1]}
    ]
    assert lines(tmp_path / "runs/r/telemetry.jsonl") == [
        {"step": 0, "run_name": "r", "weight": {"sqnr_db": 40.0, "worst_site": "mlp"}}
    ]
    (events,) = (tmp_path / "runs/r/tensorboard").iterdir()
    data = events.read_bytes()
    assert all(tag in data for tag in (b"learning/loss", b"count", b"weight/sqnr_db"))
    assert b"worst_site" not in data


def test_no_tensorboard(tmp_path):
    write(tmp_path, 0, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "telemetry.jsonl"]


def test_what_is_not_finite_is_null(tmp_path):
    with MetricWriter(tmp_path, run_name="r", tensorboard=True) as writer:
        writer.write(0, {"a": math.nan, "b": np.float32("inf"), "c": [-math.inf, 1.0]})
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert (line["a"], line["b"], line["c"]) == (None, None, [None, 1.0])


def test_resume_replaces_later_steps(tmp_path):
    extra = tmp_path / "elsewhere" / "copy.jsonl"
    write(tmp_path, 0, 8, extra_file=str(extra))
    write(tmp_path, 5, 10, extra_file=str(extra))
    for path in (tmp_path / "metrics.jsonl", extra):
        assert [(line["step"], line["learning/loss"]) for line in lines(path)] == [
            *((i, float(i)) for i in range(5)),
            *((i, 50.0 + i) for i in range(5, 10)),
        ]
    assert [line["step"] for line in lines(tmp_path / "telemetry.jsonl")] == list(range(10))
    assert not list(tmp_path.glob(".*")), "no temporary files stay"


def test_a_run_that_starts_over_starts_clean(tmp_path):
    write(tmp_path, 0, 8)
    write(tmp_path, 0, 2)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_line_is_dropped(tmp_path, cut):
    write(tmp_path, 0, 4)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    whole = 4 if cut == 1 else 3  # only the end of the line is gone: the object is whole
    assert [line["step"] for line in read_metrics(path)] == list(range(whole))
    write(tmp_path, whole, 6)
    assert [line["step"] for line in lines(path)] == list(range(6))


def test_a_resume_that_drops_nothing_leaves_the_file_alone(tmp_path):
    write(tmp_path, 0, 4)
    before = (tmp_path / "metrics.jsonl").stat().st_ino
    write(tmp_path, 4, 5)
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before
    write(tmp_path, 3, 5)
    assert (tmp_path / "metrics.jsonl").stat().st_ino != before, "a shorter file takes its place as a whole"


def test_evaluations_have_their_own_lines(tmp_path):
    with MetricWriter(tmp_path, run_name="r", tensorboard=False) as writer:
        for step in range(4):
            writer.write(step, {"learning/loss": 1.0})
            if step % 2:
                writer.write(step, {"eval/avg_loss": 2.0})
        with pytest.raises(ValueError, match="has step 3 already"):
            writer.write(3, {"eval/avg_loss": 2.0})
    assert len(lines(tmp_path / "metrics.jsonl")) == 6
    found = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in found] == [0, 1, 2, 3]
    assert [line.get("eval/avg_loss") for line in found] == [None, 2.0, None, 2.0]
    assert all(line["learning/loss"] == 1.0 for line in found)
    with MetricWriter(tmp_path, run_name="r", tensorboard=False, start_step=2) as writer:
        writer.write(2, {"learning/loss": 1.0})
        writer.write(3, {"learning/loss": 1.0})
        writer.write(3, {"eval/avg_loss": 3.0})
    assert [line.get("eval/avg_loss") for line in read_metrics(tmp_path / "metrics.jsonl")] == [None, 2.0, None, 3.0]


def test_a_killed_process_loses_nothing_that_was_written(tmp_path):
    code = """
        import os, signal, sys
        from octavo.train.metrics import MetricWriter
        writer = MetricWriter(sys.argv[1], run_name="r", tensorboard=True)
        for step in range(50):
            writer.write(step, {"learning/loss": 1.0})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), os.fspath(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == list(range(50))


def test_errors(tmp_path):
    with MetricWriter(tmp_path, run_name="r", tensorboard=False) as writer:
        writer.write(3, {"loss": 1.0})
        for step in (3, 2):
            with pytest.raises(ValueError, match=rf"metrics.jsonl has step 3 already, so step {step} cannot follow"):
                writer.write(step, {"loss": 1.0})
        with pytest.raises(ValueError, match="'step' is written by MetricWriter itself: give the metric of step 4"):
            writer.write(4, {"step": 4})
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\nnot json\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: not a JSON object with a step: 'not json'"):
        read_metrics(path)
    path.write_text('{"loss": 0}\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 1: not a JSON object with a step"):
        MetricWriter(tmp_path, run_name="r", tensorboard=False, start_step=1)


# TensorBoard.


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


def test_metrics_are_sent_to_a_project_of_weights_and_biases(tmp_path, monkeypatch):
    calls = []

    class Run:
        def log(self, scalars, step):
            calls.append((step, scalars))

        def finish(self):
            calls.append("finish")

    def init(**options):
        calls.append(options)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    with MetricWriter(tmp_path, run_name="a/b", tensorboard=False, wandb_project="p") as writer:
        writer.write(3, {"learning/loss": jnp.float32(2.5)})
        writer.write_telemetry(3, {"w": {"sqnr_db": 40.0}})
    options, *rest = calls
    assert options == {"project": "p", "name": "a/b", "id": "p-a-b", "resume": "allow", "dir": str(tmp_path)}
    assert rest == [(3, {"learning/loss": 2.5}), (3, {"w/sqnr_db": 40.0}), "finish"]


def test_without_wandb_training_does_not_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.chdir(tmp_path)
    assert main(["dataset_type=synthetic", "wandb_project_name=p", "run_name=r"]) == 1
    error = capsys.readouterr().err
    assert "wandb_project_name=p needs the package 'wandb'; install it with: pip install wandb, or leave" in error
    assert not list(tmp_path.rglob("metrics.jsonl"))
