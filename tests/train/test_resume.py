"""A run that was interrupted is the run that was not, bit for bit."""

import signal

import pytest

from octavo.train.metrics import TELEMETRY, read_metrics
from octavo.train.run import train
from octavo.train.trainer import Trainer
from tests.train.common import small
from tests.train.interrupted import assert_same, finish, kill_at_random, lines, saved, start

pytestmark = [pytest.mark.standard_promotion, pytest.mark.usefixtures("shared_programs")]


class Crash(BaseException):
    """What nobody expects."""


def crash():
    raise Crash


# Each kind of state: histories, microbatches, masks, stages, moments.
RUNS = {
    "accumulated": {"quantization": "fp8_gpu", "gradient_accumulation_steps": 2},
    "sparse": {
        "quantization": "int8",  # rounds stochastically
        "weight_sparsity_n": 2,
        "weight_sparsity_m": 4,
        "weight_sparsity_start_step": 2,
        "weight_sparsity_update_step": 4,
    },
    "staged": {"quantization": "fp8_gpu", "quantization_start_step": 2, "quantization_stop_step": 9},
    "muon": {"quantization": "int8", "opt_type": "muon", "mu_dtype": "bfloat16"},
    "moments": {"opt_state_dtype": "dynamic8", "weight_dtype": "bfloat16", "weight_rounding": "stochastic"},
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.slow
def test_interrupted_twice(name, tmp_path, monkeypatch):
    """Once by a signal after step 5, once by a crash after step 7, when the last checkpoint is of step 6."""
    step, acts = Trainer.step, {4: lambda: signal.raise_signal(signal.SIGTERM), 7: crash}

    def interrupted(self, *args):
        acts.pop(self.now, lambda: None)()
        return step(self, *args)

    def run(run_name):
        changes = {"base_output_directory": str(tmp_path), "steps": 12, "checkpoint_period": 3, "eval_interval": 4}
        changes |= {"base_num_decoder_layers": 1}
        # The key of seed 0 is all zeros, as one that was lost might be.
        return train(small(run_name=run_name, init_weights_seed=7, **changes, **RUNS[name]), log=lambda _: None)

    assert run("whole").complete
    monkeypatch.setattr(Trainer, "step", interrupted)
    assert (run("parts").step, list(acts)) == (5, [7])
    with pytest.raises(Crash):
        run("parts")
    assert saved(tmp_path, "parts")[0] == 6
    assert run("parts").complete
    assert [row["step"] for row in read_metrics(tmp_path / "parts" / "metrics.jsonl")] == list(range(12))
    assert_same(tmp_path, "whole", "parts")
    state = saved(tmp_path, "whole")[1]
    assert any(("key" in path) for path in state)
    assert any(("quant" in path) for path in state) == (RUNS[name].get("quantization") == "fp8_gpu")
    assert any(("masks" in path) for path in state) == ("weight_sparsity_n" in RUNS[name])


# The drift of scales is that since the last measurement, which may be before a kill.
MEASURED = {"quantization_metrics_interval": 7}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of a run that nothing interrupted, for others beside it."""
    directory = tmp_path_factory.mktemp("runs")
    finish(start(directory, run_name="whole", **MEASURED))
    return directory


@pytest.mark.slow
def test_killed_eight_times(whole):
    assert lines(whole, "whole", TELEMETRY)
    found = kill_at_random(whole, 8, seed=0, **MEASURED)
    # Many of them moved the run on, and some took steps away that were not saved yet.
    assert len({step for step, _ in found}) > 3
    assert any(metrics > step for step, metrics in found)


@pytest.mark.slow
def test_terminated_from_outside(whole):
    """SIGTERM and Ctrl-C as an operating system sends them: saved, said, gone on from."""
    for number, status, text in ((signal.SIGTERM, 0, "stopped by SIGTERM"), (signal.SIGINT, 130, "stopped by Ctrl-C")):
        with start(whole, run_name="terminated", checkpoint_period=50, **MEASURED) as process:
            before = [next(line for line in process.stdout if line.startswith("completed step: "))]
            process.send_signal(number)
            before += process.stdout.readlines()
        assert process.returncode == status
        assert text in before[-1]
        assert "saved; the same command with run_name=terminated resumes" in before[-1]
    text = finish(start(whole, run_name="terminated", checkpoint_period=50, **MEASURED))
    assert "resuming at step " in text
    assert_same(whole, "whole", "terminated")
