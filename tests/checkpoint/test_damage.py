"""Damaged checkpoints are detected, and the previous one is used."""

import json
import shutil

import numpy as np
import pytest

from octavo.checkpoint import CheckpointError, CheckpointManager, CheckpointWarning, load

STATE = {"w": np.arange(100.0), "b": {"c": np.arange(3)}}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    directory = tmp_path_factory.mktemp("original")
    with CheckpointManager(directory) as manager:
        for step in (1, 2, 3):
            manager.save(step, {**STATE, "w": STATE["w"] + step}, {"step": step})
    return directory


@pytest.fixture
def run(original, tmp_path):
    return shutil.copytree(original, tmp_path / "run")


def flip(path, bit=5):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1 << bit
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "missing": (lambda path: path.unlink(), r"is missing \(No such file or directory\)"),
    "flipped": (flip, r"has other contents than were written|is no manifest"),
    "truncated": (truncate, r"has \d+ bytes instead of \d+|is no manifest"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_named_and_the_previous_checkpoint_used(run, how):
    damage, text = DAMAGE[how]
    files = sorted(p for p in (run / "3").rglob("*") if p.is_file())
    assert {"manifest.json", "tree.json", "metadata", "_METADATA", ".zarray", "0"} <= {p.name for p in files}
    for path in files:
        before = path.read_bytes()
        damage(path)
        match = rf"step 3 is damaged: {path} ({text}).*; step 2 is used instead"
        with CheckpointManager(run) as manager, pytest.warns(CheckpointWarning, match=match):
            restored = manager.restore(STATE)
        assert (restored.step, restored.extra, restored.state["w"][0]) == (2, {"step": 2}, 2)
        path.write_bytes(before)
    assert load(run).step == 3


def test_restoring_a_damaged_step_raises(run):
    flip(run / "2" / "state" / "w" / "0")
    with CheckpointManager(run) as manager:
        with pytest.raises(CheckpointError, match=r"2/state/w/0 has other contents than were written"):
            manager.restore(STATE, 2)
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 7; the steps 1, 2, 3 are there"):
            manager.restore(STATE, 7)
        assert manager.restore(STATE).step == 3


def test_no_checkpoint_is_intact(run):
    flip(run / "1" / "state" / "w" / "0")
    (run / "2" / "tree.json").unlink()
    (run / "3" / "manifest.json").write_text("[]")
    with CheckpointManager(run) as manager, pytest.raises(CheckpointError) as error:
        manager.restore(STATE)
    lines = str(error.value).splitlines()
    assert lines[0] == f"no checkpoint in {run} is intact:"
    assert [line[: len("  step 1")] for line in lines[1:]] == ["  step 3", "  step 2", "  step 1"]


def test_a_renamed_folder_is_damaged(run):
    (run / "3").rename(run / "30")
    with pytest.warns(CheckpointWarning, match=r"30/manifest\.json is of step 3: the folder was renamed"):
        assert load(run).step == 2
    assert load(run / "30").step == 3


def test_a_newer_layout_version_raises(run):
    from octavo.checkpoint import manifest

    body = {"version": 2, "step": 3, "files": {}}
    (run / "3" / "manifest.json").write_text(json.dumps({**body, "crc32": manifest._own_checksum(body)}))
    with pytest.raises(CheckpointError, match=r"3 was written by a newer Octavo \(layout 2\); update to read it"):
        load(run)


def test_damaged_checkpoints_do_not_count_in_max_to_keep(run):
    (run / "2" / "tree.json").unlink()
    with CheckpointManager(run, max_to_keep=2, asynchronous=False) as manager:
        assert manager.all_steps() == [1, 3]
        manager.save(4, STATE)
        assert manager.all_steps() == [3, 4]
    assert sorted(p.name for p in run.iterdir()) == [".lock", "3", "4"]


def test_interrupted_operations_are_finished_or_undone(run):
    shutil.copytree(run / "1", run / "4.saving")
    (run / "4.saving" / "manifest.json").unlink()  # Killed while writing.
    (run / "5.saving" / "state.orbax-checkpoint-tmp").mkdir(parents=True)
    (run / "3").rename(run / "3.saving")  # Killed before the rename.
    shutil.copytree(run / "1", run / "3.replaced")
    (run / "2").rename(run / "2.replaced")  # Killed before the new one took its place.
    shutil.copytree(run / "1", run / "0.removed")
    (run / "notes").mkdir()
    (run / "best.json").write_text("{}")
    with CheckpointManager(run) as manager:
        assert manager.all_steps() == [1, 2, 3]
        assert manager.restore(STATE).state["w"][0] == 3
    assert sorted(p.name for p in run.iterdir()) == [".lock", "1", "2", "3", "best.json", "notes"]


def test_load_changes_nothing(run):
    (run / "3").rename(run / "3.saving")
    (run / ".lock").unlink()
    assert load(run).step == 2
    assert sorted(p.name for p in run.iterdir()) == ["1", "2", "3.saving"]


def test_a_checkpoint_deleted_while_it_is_read_is_not_damaged(run, monkeypatch):
    from octavo.checkpoint import array_store

    read = array_store.read

    def deleted_meanwhile(directory, *args):
        if directory.parent.name == "3":
            (run / "3").rename(run / "4")
            shutil.rmtree(run / "4")
        return read(directory, *args)

    monkeypatch.setattr(array_store, "read", deleted_meanwhile)
    assert load(run).step == 2
