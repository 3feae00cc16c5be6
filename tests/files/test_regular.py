"""RegularFile: bytes by position, and no surprises from what is no file or no longer whole."""

import os

import pytest

from octavo.files import FileError
from octavo.files.regular import RegularFile


def test_bytes_by_position(tmp_path):
    (tmp_path / "f").write_bytes(b"0123456789")
    with RegularFile(tmp_path / "f") as file:
        assert file.size == 10
        assert file.read(3, 4, "them") == b"3456"
        assert file.read(10, 0, "nothing") == b""
        for offset, count in [(8, 3), (-1, 2), (0, -1), (1 << 70, 1)]:
            with pytest.raises(FileError, match="is truncated: them needs bytes"):
                file.read(offset, count, "them")
        os.truncate(tmp_path / "f", 5)
        with pytest.raises(FileError, match="was truncated while it was read, at them"):
            file.read(3, 4, "them")
    with pytest.raises(FileError, match="is closed"):
        file.read(0, 1, "them")


def test_what_is_no_file_raises(tmp_path):
    with pytest.raises(FileError, match="nowhere: there is no such file"):
        RegularFile(tmp_path / "nowhere")
    with pytest.raises(FileError, match="is a directory"):
        RegularFile(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="is not a regular file"):
        RegularFile(tmp_path / "pipe")
    with pytest.raises(FileError, match="cannot be opened"):
        RegularFile("a\0b")
