"""Runs that are killed and resumed, and the comparison with a run that nothing interrupted."""

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

from octavo.checkpoint import load
from octavo.train.__main__ import main
from octavo.train.metrics import METRICS, TELEMETRY
from tests.train.common import words


def saved(directory, name):
    """The last checkpoint: every leaf as its type and bytes."""
    found = load(directory / name / "checkpoints")
    leaves = jax.tree_util.tree_leaves_with_path(found.state)
    named = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    return found.step, {path: (x.dtype.name, x.shape, x.tobytes()) for path, x in named.items()}


def lines(directory, name, file=METRICS):
    """The lines of the metrics as they are in the file, without times and the run's name."""
    path = directory / name / file
    text = path.read_text() if path.exists() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    return [
        {k: v for k, v in row.items() if k != "run_name" and "perf/" not in k and "seconds" not in k} for row in rows
    ]


def assert_same(directory, whole, parts):
    (step, expected), (found_step, found) = saved(directory, whole), saved(directory, parts)
    assert found_step == step
    assert list(found) == list(expected)
    assert [path for path in expected if found[path] != expected[path]] == []
    for file in (METRICS, TELEMETRY):
        assert lines(directory, parts, file) == lines(directory, whole, file), file


STEPS = 400


def arguments(directory, **changes):
    tiny = {"base_num_decoder_layers": 1, "base_mlp_dim": 32, "per_device_batch_size": 2}
    settings = {"base_output_directory": directory, "steps": STEPS, "quantization": "fp8_gpu", "init_weights_seed": 7}
    return words(**tiny, **{**settings, **changes})


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


def left(directory, name):
    """What a kill left: the step of the last checkpoint that has a name, and how many steps the metrics have."""
    folder = directory / name / "checkpoints"
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()] if folder.exists() else []
    metrics = directory / name / "metrics.jsonl"
    return max(steps, default=0), metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def kill_at_random(directory, rounds, seed, name="killed", **changes):
    """Kill a run `rounds` times, now and then before its first step, and let it finish; what each kill left."""
    rng, found = random.Random(seed), []
    for _ in range(rounds):
        period = rng.randint(1, 3)
        with forked(directory, run_name=name, checkpoint_period=period, **changes) as (process, printed):
            # A save takes as long as some steps: earlier, most kills would come before the first one.
            wanted = rng.choice((0, *range(2, 26)))
            if wanted == 0:
                time.sleep(rng.uniform(0, 3))
            seen = []
            for line in printed if wanted else ():
                seen.append(line)
                wanted -= line.startswith("completed step: ")
                if wanted == 0:
                    break
            time.sleep(rng.uniform(0, 0.5))
            process.kill()
        assert process.exitcode == -signal.SIGKILL, f"it ended by itself:\n{''.join(seen)}"
        found.append(left(directory, name))
    assert found == sorted(found, key=lambda pair: pair[0]), "a committed checkpoint was lost"
    # A run that is complete could be killed as often as one likes.
    assert found[-1][0] < STEPS
    finish(start(directory, run_name=name, **changes))
    assert [row["step"] for row in lines(directory, name)] == list(range(STEPS))
    assert_same(directory, "whole", name)
    return found
