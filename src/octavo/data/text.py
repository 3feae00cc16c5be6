"""Text files, and the source of Python's own library, as documents with a held-out share."""

import glob
import gzip
import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from octavo.data.corpus import Corpus, make_corpus
from octavo.data.dataset import BatchConfig

HELD_OUT = 0.05
"""The share of the data that is held out for evaluation."""

_SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".py")
_MANY = 20

_INSTALLED = {"__pycache__", "site-packages", "dist-packages", "lib-dynload"}
# Distributions package these separately or not at all: with them, machines with the same Python would have other data.
_OPTIONAL = {"test", "tests", "idle_test", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "distutils"}
_GENERATED = {"encodings", "pydoc_data"}
_EXCLUDED = _INSTALLED | _OPTIONAL | _GENERATED
_BUILD = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


def make_text(config: Any, split: str, batch_config: BatchConfig) -> Corpus:
    """The text files at `dataset_path`, one document each; for evaluation `eval_dataset_path`, or the held-out share.

    Of twenty files or more, some files are held out, chosen by the hash of their names; of fewer, the end of each.
    """
    files = find_files(getattr(config, "dataset_path", ""), "dataset_path")
    eval_path = getattr(config, "eval_dataset_path", "")

    def documents(split: str) -> Iterator[str]:
        if eval_path:
            yield from _read_all(files if split == "train" else find_files(eval_path, "eval_dataset_path"))
        elif len(files) < _MANY:
            for file in files.values():
                if piece := split_tail(_read_bytes(file))[split == "eval"]:
                    yield _decode(piece)
        else:
            yield from _read_all(_select(files, split))

    path = eval_path if split == "eval" and eval_path else config.dataset_path
    return make_corpus("text", documents, config, split, batch_config, {"path": str(path)})


def make_python(config: Any, split: str, batch_config: BatchConfig) -> Corpus:
    """The source of the running Python's library, one document per file; a twentieth of the files is held out."""
    files = library_files(Path(sysconfig.get_paths()["stdlib"]))
    if len(files) < 2:
        raise FileNotFoundError(
            "dataset_type=python reads the source of Python's own library, and this Python comes without; "
            "use dataset_type=text with a dataset_path, or dataset_type=synthetic"
        )
    details = {"python": platform.python_version()}
    return make_corpus("python", lambda split: _read_all(_select(files, split)), config, split, batch_config, details)


def held_out_names(names: Sequence[str], share: float = HELD_OUT) -> set[str]:
    """The names that are held out: those with a hash in the lowest share, and at least one.

    Whether a name is held out does not depend on the others, so that a missing file changes nothing else.

    >>> held_out_names(["a", "b", "c"], 0.0)
    {'c'}
    """
    hashes = {name: int(hashlib.sha256(name.encode()).hexdigest()[:12], 16) / 16**12 for name in names}
    lowest = {min(hashes, key=hashes.__getitem__)} if hashes else set()
    return {name for name, value in hashes.items() if value < share} or lowest


def find_files(path: str, option: str) -> dict[str, Path]:
    """The text files of a file, directory or pattern by their relative names, sorted."""
    if not path:
        raise ValueError(f"dataset_type=text needs {option}: a file, a folder or a pattern such as 'books/**/*.txt'")
    root = Path(path).expanduser()
    if root.is_dir():
        endings = tuple(suffix + packed for suffix in _SUFFIXES for packed in ("", ".gz"))
        files = [file for file in root.rglob("*") if file.is_file() and file.name.lower().endswith(endings)]
        wanted = f"a file that ends in {', '.join(_SUFFIXES)} (.gz too); name others by a pattern such as '{path}/*.c'"
    else:
        matches = [root] if root.is_file() else [Path(m) for m in glob.glob(str(root), recursive=True)]
        files = [file for file in matches if file.is_file()]
        root = Path(os.path.commonpath([file.parent for file in files])) if files else root
        wanted = "a file, a folder, or a pattern that matches files"
    if not files:
        raise FileNotFoundError(f"{option}={path!r} finds no text; it should be {wanted}")
    return dict(sorted((file.relative_to(root).as_posix(), file) for file in files))


def library_files(root: Path) -> dict[str, Path]:
    """The source files that every installation of a Python version has, by relative path, sorted."""
    found = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _EXCLUDED and not name.startswith(("config-", "."))]
        for name in files:
            path = Path(folder, name)
            if name.endswith(".py") and not name.startswith(_BUILD) and not path.is_symlink():
                found[path.relative_to(root).as_posix()] = path
    return dict(sorted(found.items()))


def split_tail(data: bytes, share: float = HELD_OUT) -> tuple[bytes, bytes]:
    """UTF-8 text without its last share, and that share, split between characters.

    >>> split_tail("abcé".encode(), 0.2)
    (b'abc', b'\\xc3\\xa9')
    """
    index = len(data) - int(len(data) * share)
    while 0 < index < len(data) and data[index] & 0xC0 == 0x80:
        index -= 1
    return data[:index], data[index:]


def _select(files: dict[str, Path], split: str) -> dict[str, Path]:
    held_out = held_out_names(tuple(files))
    return {name: file for name, file in files.items() if (name in held_out) == (split == "eval")}


def _read_all(files: dict[str, Path]) -> Iterator[str]:
    return (text for file in files.values() if (text := _decode(_read_bytes(file))))


def _read_bytes(file: Path) -> bytes:
    return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()


def _decode(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
