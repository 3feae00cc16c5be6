"""Two and four processes on loopback: one run, whichever of them is asked to stop or dies."""

import signal
import time

import jax
import numpy as np
import pytest

from octavo.checkpoint import CheckpointManager, load
from octavo.train.metrics import read_metrics
from octavo.train.run import train
from octavo.train.trainer import Trainer
from tests.train.common import small
from tests.train.multiprocess.launch import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.standard_promotion]


def losses(directory) -> list[float]:
    return [row["learning/loss"] for row in read_metrics(directory / "test" / "metrics.jsonl")]


def alone(rows: int, **changes):
    """The same configuration for one process with one device."""
    return small(base_num_kv_heads=2, per_device_batch_size=rows, **changes)


def test_two_processes_train_as_one(tmp_path):
    """Each reads its rows; losses, evaluation and parameters are those of one process, to the order of sums."""
    changes = {"steps": 6, "checkpoint_period": 3, "eval_interval": 3}
    together = launch(2, tmp_path, per_device_batch_size=4, quantization="", **changes)
    assert together.statuses() == [0, 0], together.everything()
    assert "completed step" not in together.text(1)
    assert "done after 6 steps" in together.text(0)
    assert (tmp_path / "test" / "report.html").is_file()

    one = tmp_path / "one"
    assert train(alone(8, base_output_directory=str(one), **changes), log=lambda _: None).complete
    np.testing.assert_allclose(losses(tmp_path), losses(one), rtol=1e-5)
    rows, expected = (read_metrics(d / "test" / "metrics.jsonl") for d in (tmp_path, one))
    assert rows[5]["eval/avg_loss"] == pytest.approx(expected[5]["eval/avg_loss"], rel=1e-5)
    assert rows[0]["perf/per_device_tokens"] == 4 * 32
    saved, other = (load(d / "test" / "checkpoints").state["params"] for d in (tmp_path, one))
    for a, b in zip(jax.tree.leaves(saved), jax.tree.leaves(other), strict=True):
        # Adam's first steps are as long for a small gradient as for a large one: rounding in it counts in full.
        np.testing.assert_allclose(a, b, atol=2e-4)


def test_four_processes_and_then_one(tmp_path):
    """A mesh across processes, quantized, gradients too; its checkpoint goes on in one process on one device."""
    mesh = {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
    mesh |= {"gradient_scatter_dtype": "int8", "gradient_scatter_error_feedback": True}
    changes = {"quantization": "int8", "use_qwix_quantization": True, "checkpoint_period": 2}
    changes["learning_rate_schedule_steps"] = 6
    together = launch(4, tmp_path, per_device_batch_size=2, steps=4, **mesh, **changes)
    assert together.statuses() == [0] * 4, together.everything()
    before = losses(tmp_path)
    assert load(tmp_path / "test" / "checkpoints").step == 4

    lines: list[str] = []
    config = alone(8, steps=6, base_output_directory=str(tmp_path), **changes)
    assert train(config, log=lines.append).step == 6
    assert "resuming at step 4 of 6" in lines
    assert any("has other shapes for 7 arrays that are reset, " in line for line in lines)
    assert losses(tmp_path)[:4] == before
    trainer = Trainer(config)
    expected = [float(trainer.step()["learning/loss"]) for _ in range(6)]
    # Codes differ where a rounding was close; more than that would be another batch or another state.
    np.testing.assert_allclose(losses(tmp_path), expected, rtol=2e-3)


def test_killed_and_asked_to_stop(tmp_path):
    """A process that dies ends the others, soon and with a reason; the job goes on; a signal to one stops all."""
    changes = {"steps": 100_000, "checkpoint_period": 5, "log_period": 5, "per_device_batch_size": 4}
    together = launch(2, tmp_path, **changes)
    together.wait_for(r"completed step: 10,")
    together.all[1].kill()
    killed = time.monotonic()
    status, _ = together.statuses(timeout=60)
    assert time.monotonic() - killed < 60
    assert status == 1, together.everything()
    assert "process 0 of 2 lost the others at step " in together.text(0)
    assert "Start all processes again with the same command: the run resumes from the checkpoint of step " in (
        together.text(0)
    )
    step = load(tmp_path / "test" / "checkpoints").step
    assert step >= 5

    again = launch(2, tmp_path, **changes)
    again.wait_for(rf"completed step: {step + 10},")
    assert f"resuming at step {step} of 100000" in again.text(0)
    again.all[1].send_signal(signal.SIGTERM)
    assert again.statuses(timeout=60) == [0, 0], again.everything()
    assert "SIGTERM: stopping after step " in again.text(0)
    assert "saved; the same command with run_name=test resumes" in again.text(0)
    stopped = load(tmp_path / "test" / "checkpoints").step
    assert len(losses(tmp_path)) == stopped > step + 10


@pytest.mark.parametrize("killed", [0, 1])
def test_killed_during_a_save(tmp_path, killed):
    """The process that remains names the checkpoint from which the run resumes."""
    together = launch(2, tmp_path, steps=100_000, checkpoint_period=5, log_period=5, per_device_batch_size=4)
    together.wait_for(r"completed step: 10,")
    checkpoints, deadline = tmp_path / "test" / "checkpoints", time.monotonic() + 60
    while not list(checkpoints.glob("*.saving")):
        assert time.monotonic() < deadline, together.everything()
    together.all[killed].kill()
    assert together.statuses(timeout=90)[1 - killed] != 0
    with CheckpointManager(checkpoints) as manager:
        step = manager.restore().step
    assert (
        f"process {1 - killed} of 2 lost the others at step {step + 5}: one of them ended or cannot be reached. "
        f"Start all processes again with the same command: the run resumes from the checkpoint of step {step}. ("
    ) in together.text(1 - killed)


def test_the_first_process_is_killed(tmp_path):
    """The one that the others found each other by."""
    together = launch(2, tmp_path, steps=100_000, checkpoint_period=5, log_period=5, per_device_batch_size=4)
    together.wait_for(r"completed step: 10,")
    together.all[0].kill()
    _, status = together.statuses(timeout=90)
    assert status != 0
    assert "lost the others" in together.text(1) or "JAX distributed service" in together.text(1)
