"""Programs that tests run, limit and kill: `python saver.py <what> <directory> ...`."""

import importlib
import os
import resource
import sys
import time

import numpy as np

from octavo.checkpoint import CheckpointError, CheckpointManager


def state(step, size=50_000):
    return {"w": np.full(size, step, np.float32), "b": {"c": np.arange(step, step + 7)}, "step": step}


def loop(directory):
    """Save until killed."""
    with CheckpointManager(directory, max_to_keep=2, keep_period=50) as checkpoints:
        step = (checkpoints.latest_step() or 0) + 1
        while True:
            # Every fifth step once more, so that the killer also finds replacements.
            checkpoints.save(step, state(step), {"step": step})
            if step % 5 == 0:
                checkpoints.save(step, state(step), {"step": step}, force=True)
            print(step, flush=True)
            step += 1


def spawn(directory):
    """Fork a process that saves for each line of input: imports once, and starts no thread before."""
    importlib.import_module("orbax.checkpoint")
    for _ in sys.stdin:
        if (pid := os.fork()) == 0:
            print(os.getpid(), flush=True)
            loop(directory)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def leave(directory):
    """End right after a save, without closing."""
    CheckpointManager(directory).save(3, state(3, 3_000_000))


def hold(directory):
    """Keep a directory open."""
    with CheckpointManager(directory):
        print("open", flush=True)
        time.sleep(600)


def fork(directory):
    """Keep a directory open, with a child that outlives its parent."""
    with CheckpointManager(directory):
        if os.fork() == 0:
            print("open", flush=True)
        time.sleep(600)


def limited(directory):
    """Save what is larger than a file may be."""
    with CheckpointManager(directory, asynchronous=False) as checkpoints:
        checkpoints.save(1, state(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            checkpoints.save(2, state(2, 1_000_000))
        except CheckpointError as error:
            print(error)
        checkpoints.save(3, state(3))
        print(checkpoints.all_steps(), sorted(os.listdir(directory)))


def full(directory):
    """Fill a small disk, first when it is known beforehand, then in the middle of a save."""
    import shutil

    with CheckpointManager(directory, asynchronous=False) as checkpoints:
        checkpoints.save(1, state(1))
        for usage in (shutil.disk_usage, lambda _: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40)):
            shutil.disk_usage = usage
            try:
                checkpoints.save(2, state(2, 10_000_000))
            except CheckpointError as error:
                print(error)
        print(checkpoints.all_steps(), sorted(os.listdir(directory)), checkpoints.restore(step=1).state["step"])


if __name__ == "__main__":
    {f.__name__: f for f in (loop, spawn, leave, hold, fork, limited, full)}[sys.argv[1]](*sys.argv[2:])
