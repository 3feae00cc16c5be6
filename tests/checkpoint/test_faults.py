"""Kills, full disks, read-only and locked directories: the last checkpoint survives."""

import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from octavo.checkpoint import (
    CheckpointError,
    CheckpointManager,
    CheckpointWarning,
    PeerLostError,
    manifest,
    multiprocess,
)

SAVER = pathlib.Path(__file__).with_name("saver.py")


def start(*args, prefix=()):
    command = [*prefix, sys.executable, str(SAVER), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(process):
    out, _ = process.communicate(timeout=120)
    return process.returncode, out.splitlines()


def kill_at_random(directory, rounds):
    """Kill processes that save, forked from one parent that has imported everything."""
    rng, latest = random.Random(0), 0
    with subprocess.Popen(
        [sys.executable, str(SAVER), "spawn", str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        for _ in range(rounds):
            parent.stdin.write("\n")
            parent.stdin.flush()
            pid = int(parent.stdout.readline())
            # During the second save, or somewhere in those that follow.
            printed = [int(parent.stdout.readline()) for _ in range(2)]
            time.sleep(rng.uniform(0, 0.3))
            os.kill(pid, signal.SIGKILL)
            printed += [int(line) for line in iter(parent.stdout.readline, f"{-signal.SIGKILL}\n")]
            latest = check_after_kill(directory, latest, printed)
        parent.stdin.close()


def check_after_kill(directory, latest, printed):
    with CheckpointManager(directory) as manager:
        restored = manager.restore()
    # A step is printed after its save has begun, and the next save begins after it has ended.
    assert restored.step >= max(printed) - 1
    assert restored.step > latest
    latest = restored.step
    assert restored.extra == {"step": latest}
    assert restored.state["step"] == latest
    assert (restored.state["w"] == latest).all()
    np.testing.assert_array_equal(restored.state["b"]["c"], np.arange(latest, latest + 7))
    assert all(name == ".lock" or name.isdecimal() for name in os.listdir(directory))
    assert len([name for name in os.listdir(directory) if name.isdecimal() and int(name) % 50]) <= 3
    return latest


def test_killed(tmp_path):
    kill_at_random(tmp_path, 1)


@pytest.mark.slow
def test_killed_many_times(tmp_path):
    kill_at_random(tmp_path, 20)


@pytest.mark.slow
def test_stopped_before_every_rename_and_fsync(tmp_path, monkeypatch):
    """As if killed before the n-th rename or fsync, for every n."""

    class Killed(BaseException):
        pass

    def save(directory, step, limit=None):
        count = 0

        def counted(fn):
            def call(*args, **kwargs):
                nonlocal count
                count += 1
                if limit is not None and count > limit:
                    raise Killed
                return fn(*args, **kwargs)

            return call

        with (
            CheckpointManager(directory, max_to_keep=2, asynchronous=False) as manager,
            monkeypatch.context() as patch,
        ):
            for name in ("rename", "replace", "fsync"):
                patch.setattr(os, name, counted(getattr(os, name)))
            # A killed process does not clean up.
            rmtree = shutil.rmtree
            patch.setattr(
                shutil, "rmtree", lambda *a, **k: None if limit is not None and count > limit else rmtree(*a, **k)
            )
            manager.save(step, {"w": np.full(3, step + 100 * (limit is None))}, force=True)
        return count

    save(tmp_path / "base", 1)
    save(tmp_path / "base", 2)
    for step in (2, 3):  # A replaced step, and a new one.
        total = save(shutil.copytree(tmp_path / "base", tmp_path / f"{step}"), step)
        assert total > 10
        outcomes = set()
        for limit in range(total):
            directory = shutil.copytree(tmp_path / "base", tmp_path / f"{step}, {limit}")
            with pytest.raises((CheckpointError, Killed)):
                save(directory, step, limit)
            with CheckpointManager(directory) as manager:
                restored = manager.restore()
                outcomes.add((restored.step, int(restored.state["w"][0])))
                assert manager.all_steps()[-1] == restored.step
                assert not [name for name in os.listdir(directory) if "." in name[1:]]
        assert outcomes == ({(2, 102), (2, 2)} if step == 2 else {(2, 102), (3, 3)})


def test_a_program_that_ends_during_its_last_save(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": 1})
    process = subprocess.run([sys.executable, str(SAVER), "leave", str(tmp_path)], capture_output=True, text=True)
    assert process.returncode == 0
    with CheckpointManager(tmp_path) as manager:
        restored = manager.restore()
    if restored.step == 1:
        assert "step 3" in process.stderr
        assert "use `with CheckpointManager(...)`, or close()" in process.stderr
    else:
        assert (restored.state["w"] == 3).all()


def test_two_writers(tmp_path):
    with start("hold", tmp_path) as process:
        assert process.stdout.readline() == "open\n"
        text = rf"{tmp_path} is in use by process {process.pid} on .*, since .*choose another directory"
        with pytest.raises(CheckpointError, match=text):
            CheckpointManager(tmp_path)
        process.kill()
        process.wait()
    with CheckpointManager(tmp_path), pytest.raises(CheckpointError, match=rf"process {os.getpid()} \(this one\)"):
        CheckpointManager(tmp_path)
    CheckpointManager(tmp_path).close()


def test_a_forked_child_does_not_hold_the_lock(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(SAVER), "fork", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout.readline() == "open\n"
        process.kill()
        process.wait()
        CheckpointManager(tmp_path).close()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


def test_a_file_size_limit(tmp_path):
    code, (error, steps) = finish(start("limited", tmp_path))
    assert code == 0
    assert f"step 2 in {tmp_path} was not saved: " in error
    assert "File too large" in error
    assert re.search(r"; 4,\d{3},\d{3} bytes are needed and [\d,]+ are free", error)
    assert error.endswith("are free. The last checkpoint is of step 1")
    assert steps == "[1, 3] ['.lock', '1', '3']"


def test_the_folder_of_a_failed_save_is_deleted_while_others_still_write(tmp_path, monkeypatch):
    """One array fails and another is written a little later, when the folder is being deleted."""
    remove, late = shutil.rmtree, tmp_path / "2.saving" / "state" / "late"

    def rmtree(path, **kwargs):
        if path.name == "2.saving" and path.exists() and not late.exists():
            late.parent.mkdir(parents=True, exist_ok=True)
            late.touch()
            monkeypatch.setattr(shutil, "rmtree", remove)  # this deletion fails, the next does not
            return
        remove(path, **kwargs)

    def fail(folder, arrays):
        monkeypatch.setattr(shutil, "rmtree", rmtree)
        raise OSError("No space left on device")

    with CheckpointManager(tmp_path, asynchronous=False) as manager:
        monkeypatch.setattr("octavo.checkpoint.array_store.write", fail)
        with pytest.raises(CheckpointError, match="No space left on device"):
            manager.save(2, {"w": np.zeros(2)})
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock"]


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs Linux")
@pytest.mark.slow
def test_a_full_disk(tmp_path):
    mount = f"mount -t tmpfs -o size=16m none {tmp_path}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("may not mount a small disk")
    process = start("full", tmp_path, prefix=("unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh"))
    code, (known, surprise, steps) = finish(process)
    assert code == 0
    assert re.search(rf"step 2 in {tmp_path} was not saved: 40,[\d,]+ bytes are needed and 16,[\d,]+ are free", known)
    assert known.endswith("keep fewer checkpoints or save elsewhere. The last checkpoint is of step 1")
    assert f"step 2 in {tmp_path} was not saved: " in surprise
    assert "No space left on device" in surprise
    assert steps == "[1] ['.lock', '1'] 1"


def test_an_asynchronous_error_is_raised_by_the_next_call(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    text = rf"step 2 in {tmp_path} was not saved: OSError: \[Errno 28\] No space left.*; [\d,]+ bytes are needed and .*"
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": 1})
        manager.wait_until_finished()
        for call in (
            manager.wait_until_finished,
            manager.all_steps,
            manager.restore,
            lambda: manager.save(3, {"w": 3}),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(manifest, "write", fail)
                manager.save(2, {"w": 2})
                manager._thread.join()
            with pytest.raises(CheckpointError, match=text) as error:
                call()
            assert isinstance(error.value.__cause__, OSError)
            assert manager.all_steps() == [1]  # Raised once, and the next save may succeed.
        manager.save(2, {"w": 2})
        assert manager.restore().step == 2
        monkeypatch.setattr(manifest, "write", fail)
        manager.save(3, {"w": 3})
        with pytest.raises(CheckpointError, match=r"step 3 .* The last checkpoint is of step 2"):
            manager.close()


def test_a_deleted_directory(tmp_path):
    with CheckpointManager(tmp_path / "run") as manager:
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(
            CheckpointError, match=r"step 1 .* not saved: the directory is gone .*There is no checkpoint yet"
        ):
            manager.save(1, {"w": 1})


def test_an_error_of_the_program_is_not_masked_by_one_of_the_save(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "write", lambda *_: 1 / 0)

    def program():
        with CheckpointManager(tmp_path) as manager:
            manager.save(1, {"w": 1})
            raise KeyError

    with pytest.warns(CheckpointWarning, match=r"step 1 .* ZeroDivisionError"), pytest.raises(KeyError):
        program()


def test_an_old_checkpoint_that_cannot_be_deleted(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    with CheckpointManager(tmp_path, max_to_keep=1, asynchronous=False) as manager:
        manager.save(1, {"w": 1})
        with monkeypatch.context() as patch:
            patch.setattr("octavo.checkpoint.steps.StepDirectory.prune", refuse)
            with pytest.raises(
                CheckpointError, match=r"step 2 is saved, but an older checkpoint cannot be deleted: .*13"
            ):
                manager.save(2, {"w": 2})
        assert manager.all_steps() == [1, 2]


@pytest.fixture
def nobody():
    """A directory that this process cannot write to, whatever its user."""
    directory = pathlib.Path(tempfile.mkdtemp())
    with CheckpointManager(directory) as manager:
        manager.save(1, {"w": 1})
    directory.chmod(0o555)
    root = os.geteuid() == 0
    (directory / ".lock").chmod(0o444)
    if root:
        os.seteuid(65534)
    yield directory
    if root:
        os.seteuid(0)
    directory.chmod(0o755)
    shutil.rmtree(directory)


def test_a_read_only_directory_can_be_read(nobody):
    with CheckpointManager(nobody) as manager:
        assert manager.restore().state == {"w": 1}
        text = rf"step 2 in {nobody} was not saved: the directory is not writable: \[Errno 13\].*bytes are needed"
        with pytest.raises(CheckpointError, match=text):
            manager.save(2, {"w": 2})
        assert manager.all_steps() == [1]
    with pytest.raises(CheckpointError, match=rf"{nobody}/new cannot be created: \[Errno 13\]"):
        CheckpointManager(nobody / "new")


@pytest.mark.parametrize("error", [ValueError, jax.errors.JaxRuntimeError])
def test_a_process_that_is_gone_is_an_error_of_its_own(monkeypatch, error):
    def fail(_):
        raise error("UNKNOWN: Gloo AllGather failed: connection reset by peer")

    monkeypatch.setattr(multiprocess, "is_multiprocess", lambda: True)
    monkeypatch.setattr(multihost_utils, "process_allgather", fail)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", fail)
    with pytest.raises(PeerLostError, match="connection reset by peer"):
        multiprocess.raise_on_all(None)
    with pytest.raises(PeerLostError, match="connection reset by peer"):
        multiprocess.broadcast(3)


def test_the_step_to_resume_from_is_that_of_the_last_complete_save(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        assert manager.resume_step() is None
        for step in (1, 2):
            manager.save(step, {"w": np.ones(3)})
        manager.wait_until_finished()
        assert manager.resume_step() == 2
        # Killed before the rename, and in the middle of the save after it.
        (tmp_path / "2").rename(tmp_path / "2.saving")
        (tmp_path / "3.saving").mkdir()
        assert (manager.latest_step(), manager.resume_step()) == (1, 2)
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore().step == 2
