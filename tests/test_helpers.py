"""Atomic writes, and the names of classes in JSON."""

import dataclasses

import pytest

from octavo import Quantizer
from octavo._config import Config
from octavo._io import atomic_file, atomic_write


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    atomic_write(path, "old")
    with pytest.raises(TypeError), atomic_file(path) as file:
        file.write("a text for a binary file")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_new_file_replaces_the_old_one(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    atomic_write(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_class_of_a_user_does_not_replace_a_built_in_one_of_the_same_name():
    quantizer = Quantizer("int8")

    @dataclasses.dataclass(frozen=True, repr=False)
    class AbsMax(Config):  # the name of a built-in calibration
        power: float = 2.0

    assert type(Config.from_json(quantizer.to_json()).calibration) is type(quantizer.calibration)
    assert Config.from_json(quantizer.to_json()) == quantizer
    assert Config.from_json(AbsMax(3.0).to_json()) == AbsMax(3.0)
