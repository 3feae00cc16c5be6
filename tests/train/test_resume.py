"""A run that was interrupted is the run that was not, bit for bit."""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from octavo.checkpoint import load
from octavo.train.__main__ import main
from octavo.train.metrics import read_metrics
from octavo.train.run import train
from octavo.train.trainer import Trainer
from tests.train.common import small, words

pytestmark = [pytest.mark.standard_promotion, pytest.mark.usefixtures("shared_programs")]


def saved(directory, name):
    """The last checkpoint: every leaf as its type and bytes."""
    found = load(directory / name / "checkpoints")
    leaves = jax.tree_util.tree_leaves_with_path(found.state)
    named = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    return found.step, {path: (x.dtype.name, x.shape, x.tobytes()) for path, x in named.items()}


def lines(directory, name):
    """The lines of the metrics as they are in the file, without times and the run's name."""
    text = (directory / name / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    return [
        {k: v for k, v in row.items() if k != "run_name" and "perf/" not in k and "seconds" not in k} for row in rows
    ]


def assert_same(directory, whole, parts):
    (step, expected), (found_step, found) = saved(directory, whole), saved(directory, parts)
    assert found_step == step
    assert list(found) == list(expected)
    assert [path for path in expected if found[path] != expected[path]] == []
    assert lines(directory, parts) == lines(directory, whole)


class Crash(BaseException):
    """What nobody expects."""


def crash():
    raise Crash


# Each kind of state: keys of stochastic rounding, histories, microbatches, masks, stages, moments.
RUNS = {
    "stochastic": {"quantization": "int8"},
    "accumulated": {"quantization": "fp8_gpu", "gradient_accumulation_steps": 2},
    "sparse": {
        "quantization": "int8",
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


STEPS = 400


def arguments(directory, **changes):
    tiny = {"base_num_decoder_layers": 1, "base_mlp_dim": 32, "per_device_batch_size": 2}
    settings = {"base_output_directory": directory, "steps": STEPS, "quantization": "fp8_gpu", "init_weights_seed": 7}
    return words(**tiny, **settings, **changes)


def start(directory, **changes):
    """The command in a process of its own, which reads the programs that were compiled before."""
    command = [sys.executable, "-m", "octavo.train", *arguments(directory, **changes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0, text
    return text


# A process that has imported all that a run needs, and nothing else: a run that is forked from it starts at once.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__, "orbax.checkpoint"])


def run_command(words, output):
    """What a forked process does: the command, with its output in a pipe."""
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    sys.exit(main(words))


@contextlib.contextmanager
def forked(directory, **changes):
    """The process of a run, and the lines that it prints."""
    reader, writer = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=run_command, args=(arguments(directory, **changes), writer))
    process.start()
    writer.close()
    with reader, open(os.dup(reader.fileno())) as lines:
        yield process, lines
        process.join(300)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of a run that nothing interrupted, for others beside it."""
    directory = tmp_path_factory.mktemp("runs")
    finish(start(directory, run_name="whole"))
    return directory


def left(directory, name):
    """What a kill left: the step of the last checkpoint that has a name, and how many steps the metrics have."""
    folder = directory / name / "checkpoints"
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()] if folder.exists() else []
    metrics = directory / name / "metrics.jsonl"
    return max(steps, default=0), metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def kill_at_random(directory, rounds, seed):
    """Kill a run `rounds` times, now and then before its first step, and let it finish; what each kill left."""
    rng, found = random.Random(seed), []
    for _ in range(rounds):
        with forked(directory, run_name="killed", checkpoint_period=rng.randint(1, 3)) as (process, printed):
            # A save takes as long as some steps: earlier, most kills would come before the first one.
            wanted = rng.choice((0, *range(2, 26)))
            if wanted == 0:
                time.sleep(rng.uniform(0, 3))
            for line in printed if wanted else ():
                wanted -= line.startswith("completed step: ")
                if wanted == 0:
                    break
            time.sleep(rng.uniform(0, 0.5))
            process.kill()
        assert process.exitcode == -signal.SIGKILL
        found.append(left(directory, "killed"))
    # A run that is complete could be killed as often as one likes.
    assert found[-1][0] < STEPS
    finish(start(directory, run_name="killed"))
    assert [row["step"] for row in lines(directory, "killed")] == list(range(STEPS))
    assert_same(directory, "whole", "killed")
    return found


@pytest.mark.slow
def test_killed_twenty_times(whole):
    found = kill_at_random(whole, 20, seed=0)
    # Many of them moved the run on, and some took steps away that were not saved yet.
    assert len({step for step, _ in found}) > 8
    assert any(metrics > step for step, metrics in found)


@pytest.mark.slow
def test_terminated_from_outside(whole):
    """SIGTERM and Ctrl-C as an operating system sends them: saved, said, gone on from."""
    for number, status, text in ((signal.SIGTERM, 0, "stopped by SIGTERM"), (signal.SIGINT, 130, "stopped by Ctrl-C")):
        with start(whole, run_name="terminated", checkpoint_period=50) as process:
            before = [next(line for line in process.stdout if line.startswith("completed step: "))]
            process.send_signal(number)
            before += process.stdout.readlines()
        assert process.returncode == status
        assert text in before[-1]
        assert "saved; the same command resumes" in before[-1]
    text = finish(start(whole, run_name="terminated", checkpoint_period=50))
    assert "resuming at step " in text
    assert_same(whole, "whole", "terminated")
