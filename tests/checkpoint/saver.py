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
    with CheckpointManager(directory, max_to_keep=2, keep_period=50) as manager:
        step = (manager.latest_step() or 0) + 1
        while True:
            # Every fifth step is replaced, so that kills also hit replacements.
            manager.save(step, state(step), {"step": step})
            if step % 5 == 0:
                manager.save(step, state(step), {"step": step}, force=True)
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
    """End during a save, without closing."""
    CheckpointManager(directory).save(3, state(3, 3_000_000))


def hold(directory):
    """Hold the lock of a directory."""
    with CheckpointManager(directory):
        print("open", flush=True)
        time.sleep(600)


def fork(directory):
    """Hold the lock of a directory, with a child that outlives its parent."""
    with CheckpointManager(directory):
        if os.fork() == 0:
            print("open", flush=True)
        time.sleep(600)


def limited(directory):
    """Save more than the limit of file sizes."""
    with CheckpointManager(directory, asynchronous=False) as manager:
        manager.save(1, state(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            manager.save(2, state(2, 1_000_000))
        except CheckpointError as error:
            print(error)
        manager.save(3, state(3))
        print(manager.all_steps(), sorted(os.listdir(directory)))


def full(directory):
    """Fill a small disk: detected beforehand, then only during a save."""
    import shutil

    with CheckpointManager(directory, asynchronous=False) as manager:
        manager.save(1, state(1))
        for usage in (shutil.disk_usage, lambda _: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40)):
            shutil.disk_usage = usage
            try:
                manager.save(2, state(2, 10_000_000))
            except CheckpointError as error:
                print(error)
        print(manager.all_steps(), sorted(os.listdir(directory)), manager.restore(step=1).state["step"])


def distributed(directory, process, port):
    """Save and restore sharded arrays as one of two processes."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def put(value, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    w = np.arange(8, dtype=np.float32)
    state = {"sharded": put(w, "x"), "replicated": put(w), "empty": put(w[:0]), "host": w, "number": 3}
    with CheckpointManager(directory, max_to_keep=2) as manager:
        assert manager.restore(state) is None
        for step in (1, 2, 3):
            manager.save(step, state, {"step": step})
        assert manager.all_steps() == [2, 3]
        for like, size in ((state, 4), ({**state, "sharded": put(w)}, 8)):
            restored = manager.restore(like)
            assert (restored.step, restored.extra, restored.state["number"]) == (3, {"step": 3}, 3)
            start = int(process) * 4 if size == 4 else 0
            local = restored.state["sharded"].addressable_shards[0].data
            np.testing.assert_array_equal(local, w[start : start + size])
        for call in (lambda: manager.save(3, state), lambda: manager.restore(state, 9)):
            try:
                call()
            except CheckpointError as error:
                print(error)


if __name__ == "__main__":
    {f.__name__: f for f in (loop, spawn, leave, hold, fork, limited, full, distributed)}[sys.argv[1]](*sys.argv[2:])
