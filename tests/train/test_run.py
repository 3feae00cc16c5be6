"""A run and its directory: files, log, signals, errors and faults."""

import json
import os
import re
import signal
import threading

import jax
import numpy as np
import pytest

from octavo.checkpoint import CheckpointError, CheckpointManager, load, manifest
from octavo.train import run as run_module
from octavo.train.__main__ import main as command
from octavo.train.halt import HaltedError, stop_signals
from octavo.train.metrics import read_metrics
from octavo.train.run import Outcome, train
from octavo.train.trainer import Trainer
from tests.train.common import small, words

pytestmark = [pytest.mark.standard_promotion, pytest.mark.usefixtures("shared_programs")]


def lines_of(**changes):
    """What a run says, and how it ends."""
    said = []
    return said, train(small(**changes), log=said.append)


def at(directory, **changes):
    # Of one length, the schedules of all runs are one program.
    return {"base_output_directory": str(directory), "learning_rate_schedule_steps": 8, **changes}


def metrics_of(directory, name="test"):
    return read_metrics(directory / name / "metrics.jsonl")


def steps_of(directory, name="test"):
    with CheckpointManager(directory / name / "checkpoints") as checkpoints:
        return checkpoints.all_steps()


def when(text, act):
    """A listener that acts once, at the first line with a text, and keeps all lines."""
    said = []

    def say(line):
        said.append(line)
        if text in line and not any(text in before for before in said[:-1]):
            act()

    return said, say


def test_a_run_writes_metrics_plan_and_checkpoints(tmp_path):
    said, outcome = lines_of(
        **at(tmp_path, steps=6, quantization="int8", use_qwix_quantization=True, eval_interval=3, checkpoint_period=2)
    )
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows] == list(range(6))
    assert {"learning/loss", "learning/current_learning_rate", "perf/step_time_seconds", "perf/memory_bytes"} <= set(
        rows[0]
    )
    assert [row["step"] for row in rows if "eval/avg_loss" in row] == [2, 5]
    assert outcome == Outcome(6, "done", rows[-1]["learning/loss"], rows[-1]["eval/avg_loss"])
    assert rows[-1]["learning/loss"] < rows[0]["learning/loss"] - 0.05
    assert steps_of(tmp_path) == [2, 4, 6]
    assert sorted(p.name for p in (tmp_path / "test").iterdir()) == sorted(
        [
            "checkpoints",
            "config.yml",
            "data.json",
            "metrics.jsonl",
            "plan.json",
            "plan.txt",
            "telemetry.jsonl",
            "verify.json",
        ]
    )
    assert sum(line.startswith("completed step: ") for line in said) == 6
    assert sum(line.startswith("Completed eval after train step ") for line in said) == 2
    # The time of training is that of its steps, and is within the time of all.
    total = sum(row["perf/step_time_seconds"] for row in rows)
    assert rows[-1]["eval/training_seconds"] == pytest.approx(total)
    assert total < rows[-1]["eval/seconds"]


@pytest.mark.slow
def test_complete_runs_stay_and_more_steps_continue_them(tmp_path):
    lines_of(**at(tmp_path, steps=2))
    before = (tmp_path / "test" / "metrics.jsonl").read_bytes()
    said, outcome = lines_of(**at(tmp_path, steps=2))
    assert said == ["resuming at step 2 of 2", "this run is complete at step 2; to continue, raise steps=2"]
    assert (outcome.step, outcome.reason) == (2, "done")
    assert (tmp_path / "test" / "metrics.jsonl").read_bytes() == before
    said, outcome = lines_of(**at(tmp_path, steps=3))
    assert "changed since the last start of this run: steps: 2 -> 3" in said
    assert outcome.step == 3
    assert [row["step"] for row in metrics_of(tmp_path)] == [0, 1, 2]


@pytest.mark.slow
def test_step_times_leave_out_what_happens_between_steps(tmp_path, monkeypatch):
    """Evaluation, saving, measuring and the compilation of a stage take a second each here."""

    def slowly(owner, name):
        fn = getattr(owner, name)

        def call(*args, **kwargs):
            threading.Event().wait(1.0)
            return fn(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    slowly(Trainer, "evaluate")
    slowly(CheckpointManager, "save")
    slowly(run_module.Telemetry, "measure")
    compiled = []

    def compile_slowly(self, kind, step, fn=Trainer.compiled):
        if (kind, self.schedule.stage(step)) not in compiled:
            compiled.append((kind, self.schedule.stage(step)))
            threading.Event().wait(1.0)
        return fn(self, kind, step)

    monkeypatch.setattr(Trainer, "compiled", compile_slowly)
    changes = {"quantization": "int8", "quantization_start_step": 3, "quantization_metrics_interval": 4}
    said, _ = lines_of(**at(tmp_path, steps=6, eval_interval=2, checkpoint_period=2, **changes))
    rows = metrics_of(tmp_path)
    assert compiled[0] == ("train", 0)
    assert ("train", 1) in compiled
    assert rows[-1]["eval/seconds"] > 8
    assert max(row["perf/step_time_seconds"] for row in rows) < 1
    text = next(line for line in said if line.startswith("signal to quantization noise after step 3: "))
    assert re.search(r"weight \d\d\.\d dB.* \(measured in \d+\.\d seconds\)$", text)


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")])
@pytest.mark.slow
def test_signals_save_and_end(tmp_path, number, reason):
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    said, say = when("completed step: 1,", lambda: signal.raise_signal(number))
    outcome = train(small(**at(tmp_path)), log=say)
    # The line of a step comes when the next one is on its way.
    assert (outcome.step, outcome.reason, outcome.complete) == (3, reason, False)
    assert f"{number.name}: stopping after step 2" in said
    assert steps_of(tmp_path) == [3]
    assert [row["step"] for row in metrics_of(tmp_path)] == [0, 1, 2]
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_a_second_interrupt_ends_at_once():
    before = signal.getsignal(signal.SIGINT)
    with stop_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.by == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_leave_signals_alone():
    found = []

    def body():
        with stop_signals() as stop:
            found.append((stop.by, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [(None, signal.getsignal(signal.SIGTERM))]


@pytest.mark.parametrize(
    ("number", "status", "text"),
    [(signal.SIGTERM, 0, "SIGTERM"), pytest.param(signal.SIGINT, 130, "Ctrl-C", marks=pytest.mark.slow)],
)
def test_the_command_prints_that_it_was_stopped(tmp_path, monkeypatch, capsys, number, status, text):
    step = Trainer.step

    def signalled(self, *args):
        if self.now == 2:
            signal.raise_signal(number)
        return step(self, *args)

    monkeypatch.setattr(Trainer, "step", signalled)
    assert command(words(**at(tmp_path))) == status
    out = capsys.readouterr().out
    assert f"stopped by {text} after 3 steps, saved; the same command with run_name=test resumes, loss " in out
    assert "Next:" not in out


@pytest.mark.slow
def test_a_value_that_is_not_finite_stops_the_run(tmp_path, capsys):
    arguments = at(tmp_path, learning_rate=1e30, warmup_steps_fraction=0.0, gradient_clipping_threshold=0.0)
    assert command(words(**arguments, checkpoint_period=1)) == 1
    error = capsys.readouterr().err
    assert re.match(r"octavo train: step 0 has loss 6\.", error)
    assert re.search(r"all gradients are finite, but the update of \S+ is as large as 1(\.\d+)?e\+30", error)
    assert "there is no checkpoint yet" in error
    assert "Try a lower learning_rate" in error
    assert f"Report: {tmp_path / 'test' / 'report.html'}" in error
    assert metrics_of(tmp_path) == []
    assert steps_of(tmp_path) == []


@pytest.mark.slow
def test_a_bad_step_is_found_one_late_and_nothing_of_it_is_saved(tmp_path, monkeypatch):
    step = Trainer.step

    def poisoned(self, *args):
        if self.now == 3:
            params = self.state.params
            params["token_embedder"]["embedding"] = params["token_embedder"]["embedding"] * float("inf")
        return step(self, *args)

    monkeypatch.setattr(Trainer, "step", poisoned)
    with pytest.raises(HaltedError, match=r"^step 3 has loss nan; .*checkpoints/2\. "):
        lines_of(**at(tmp_path, checkpoint_period=2))
    assert [row["step"] for row in metrics_of(tmp_path)] == [0, 1, 2]
    assert steps_of(tmp_path) == [2]
    monkeypatch.setattr(Trainer, "step", step)
    said, outcome = lines_of(**at(tmp_path, checkpoint_period=2))
    assert said[0] == "resuming at step 2 of 8"
    assert outcome.step == 8
    assert [row["step"] for row in metrics_of(tmp_path)] == list(range(8))


@pytest.mark.slow
def test_a_target_ends_the_run_for_good(tmp_path):
    changes = at(tmp_path, steps=20, eval_interval=2, target_eval_loss=5.5, learning_rate=0.02)
    said, outcome = lines_of(**changes)
    rows = metrics_of(tmp_path)
    evals = {row["step"]: row["eval/avg_loss"] for row in rows if "eval/avg_loss" in row}
    assert outcome.reason == "target"
    assert outcome.complete
    assert outcome.step < 20
    assert max(evals) == outcome.step - 1
    assert outcome.eval_loss == evals.pop(max(evals)) <= 5.5 < min(evals.values(), default=9)
    text = next(line for line in said if line.startswith("target_eval_loss=5.5 reached after "))
    assert text.split(": ")[0] == f"target_eval_loss=5.5 reached after {outcome.step} steps"
    assert "seconds of training" in text
    said, again = lines_of(**changes)
    assert again == outcome
    assert said[-1] == (
        f"this run reached target_eval_loss=5.5 at step {outcome.step}, with a loss of {outcome.eval_loss:.4f}; to "
        "continue, lower target_eval_loss"
    )


def damage(folder):
    """Flip a byte in the middle of the largest file."""
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, capsys):
    lines_of(**at(tmp_path, steps=4, checkpoint_period=2))
    damage(tmp_path / "test" / "checkpoints" / "4")
    assert command(words(**at(tmp_path, steps=4, checkpoint_period=2))) == 0
    out = capsys.readouterr().out
    assert "warning: the checkpoint of step 4 is damaged: " in out
    assert "step 2 is used instead" in out
    assert "resuming at step 2 of 4" in out
    assert [row["step"] for row in metrics_of(tmp_path)] == [0, 1, 2, 3]
    assert steps_of(tmp_path) == [2, 4]


@pytest.mark.slow
def test_a_full_disk_is_an_error_and_the_last_checkpoint_stays(tmp_path, monkeypatch, capsys):
    write = manifest.write

    def fill(directory, step):
        if step > 2:
            raise OSError(28, "No space left on device")
        return write(directory, step)

    monkeypatch.setattr(manifest, "write", fill)
    assert command(words(**at(tmp_path, checkpoint_period=2))) == 1
    error = capsys.readouterr().err
    assert error.startswith("octavo train: the checkpoint of step 4 in ")
    assert "No space left on device" in error
    assert "The last checkpoint is of step 2" in error
    assert load(tmp_path / "test" / "checkpoints").step == 2
    monkeypatch.undo()
    assert lines_of(**at(tmp_path, checkpoint_period=2))[0][0] == "resuming at step 2 of 8"


def test_two_runs_cannot_share_a_directory(tmp_path, capsys):
    with CheckpointManager(tmp_path / "test" / "checkpoints"):
        assert command(words(**at(tmp_path))) == 1
    error = capsys.readouterr().err
    assert f"is in use by process {os.getpid()}" in error
    assert "choose another directory" in error
    assert not (tmp_path / "test" / "metrics.jsonl").exists()


def test_an_error_on_the_way_lets_go_of_the_directory(tmp_path, monkeypatch):
    def fail(self, config, mesh=None, schedule=None):
        raise ValueError("no model today")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "__init__", fail)
        with pytest.raises(ValueError, match="no model today"):
            lines_of(**at(tmp_path))
    CheckpointManager(tmp_path / "test" / "checkpoints").close()


@pytest.mark.slow
def test_another_model_in_the_same_directory_is_an_error_and_changes_nothing(tmp_path):
    lines_of(**at(tmp_path, steps=1))
    before = (tmp_path / "test" / "config.yml").read_bytes()
    with pytest.raises(CheckpointError, match=r"expected float32\[2,32,128\], found float32\[2,32,64\]"):
        lines_of(**at(tmp_path, steps=2, base_mlp_dim=128))
    assert (tmp_path / "test" / "config.yml").read_bytes() == before


@pytest.mark.slow
def test_changed_data_is_a_warning(tmp_path):
    lines_of(**at(tmp_path, steps=1))
    said, _ = lines_of(**at(tmp_path, steps=2, synthetic_kind="fixed"))
    assert said[1] == (
        "warning: the data has changed, so the run will not continue as it would have: kind, entropy, batches"
    )


@pytest.mark.slow
def test_without_checkpoints_none_is_written(tmp_path):
    lines_of(**at(tmp_path, steps=2, enable_checkpointing=False, checkpoint_period=1))
    assert steps_of(tmp_path) == []
    said, _ = lines_of(**at(tmp_path, steps=1, enable_checkpointing=False))
    assert not [line for line in said if "resuming" in line]
    assert [row["step"] for row in metrics_of(tmp_path)] == [0]
    lines_of(**at(tmp_path, steps=1, run_name="saved"))
    with pytest.raises(ValueError, match=r"checkpoint of step 1, and enable_checkpointing=false would overwrite"):
        lines_of(**at(tmp_path, steps=1, run_name="saved", enable_checkpointing=False))


@pytest.mark.slow
def test_parameters_of_another_run(tmp_path):
    lines_of(**at(tmp_path, steps=2, run_name="first"))
    path = tmp_path / "first" / "checkpoints"
    trainer = Trainer(small(load_parameters_path=str(path)))
    saved = load(path, subtree="params").state
    jax.tree.map(np.testing.assert_array_equal, trainer.state.params, saved)
    assert trainer.now == 0
    _, outcome = lines_of(**at(tmp_path, steps=2, run_name="second", load_parameters_path=str(path)))
    first, second = metrics_of(tmp_path, "first"), metrics_of(tmp_path, "second")
    assert outcome.step == 2
    assert second[0]["learning/loss"] < first[0]["learning/loss"]


@pytest.mark.slow
def test_quantized_parameters_are_written_at_the_end_and_only_then(tmp_path, monkeypatch):
    changes = at(tmp_path, steps=4, quantization="int8", save_quantized_params_path=str(tmp_path / "served"))
    _, say = when("completed step: 1,", lambda: signal.raise_signal(signal.SIGTERM))
    assert train(small(**changes), log=say).step == 3
    assert not (tmp_path / "served").exists()
    with monkeypatch.context() as patch:
        # As if killed between the last checkpoint and these parameters.
        patch.setattr(run_module, "save_quantized", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            lines_of(**changes)
    assert not (tmp_path / "served").exists()
    said, _ = lines_of(**changes)
    assert said[-1].startswith("quantized parameters: ")
    assert load(tmp_path / "served").step == 4


def test_metrics_have_no_value_that_is_not_finite_and_a_copy_goes_elsewhere(tmp_path):
    lines_of(**at(tmp_path, steps=2, metrics_file=str(tmp_path / "copy.jsonl")))
    text = (tmp_path / "test" / "metrics.jsonl").read_text()
    assert text == (tmp_path / "copy.jsonl").read_text()
    assert all(
        np.isfinite(v) for line in text.splitlines() for v in json.loads(line).values() if not isinstance(v, str)
    )


@pytest.mark.slow
def test_progress_is_flushed_to_a_pipe(tmp_path, monkeypatch):
    """Lines before the first step too: whoever follows a log wants to see what is being compiled."""
    calls = []
    monkeypatch.setattr("builtins.print", lambda *args, **kwargs: calls.append((args, kwargs)))
    train(small(**at(tmp_path, steps=1)))
    assert len(calls) > 4
    assert all(kwargs == {"flush": True} for _, kwargs in calls)


@pytest.mark.slow
def test_on_several_devices_the_plan_has_collective_bytes(tmp_path):
    sizes = {"num_devices": 0, "per_device_batch_size": 1, "base_emb_dim": 64, "sharding_tolerance": 0.5}
    stages = {"steps": 3, "quantization": "int8", "use_qwix_quantization": True, "quantization_start_step": 1}
    said, _ = lines_of(**at(tmp_path, **sizes, **stages, enable_checkpointing=False))
    before, after = [line for line in said if line.startswith("in a step, a device sends ")]
    assert "(s8 " not in before
    plan = json.loads((tmp_path / "test" / "plan.json").read_text())
    assert after == f"in a step, {plan['communication']['line']}"
    assert plan["communication"]["line"] in (tmp_path / "test" / "plan.txt").read_text()
    assert 0 < plan["communication"]["by_kind"]["all-gather"]["s8"] < plan["communication"]["weights"]
    assert plan["communication"]["gradients"] > plan["communication"]["weights"]
    # A weight of a product is gathered, and has its row; norms are gathered too, and have none.
    sent = {row["weight"]: row["collective_bytes"] for row in plan["rows"] if row["weight"]}
    assert all(sent.values())
    assert 0.9 * plan["communication"]["weights"] < sum(sent.values()) < plan["communication"]["weights"]
