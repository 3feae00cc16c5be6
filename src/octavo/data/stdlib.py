"""The corpus that is always there: the source of Python's own library."""

import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.data.corpus import Corpus, make_corpus
from octavo.data.dataset import Layout
from octavo.data.files import held_out, read, text_of

_INSTALLED = {"__pycache__", "site-packages", "dist-packages", "lib-dynload"}
# With what distributions ship apart or not at all, the corpus would differ between machines that run the same Python.
_APART = {"test", "tests", "idle_test", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "distutils"}
_GENERATED = {"encodings", "pydoc_data"}
_WITHOUT = _INSTALLED | _APART | _GENERATED
_BUILD = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


def library_files(root: Path) -> dict[str, Path]:
    """The source files under a folder that every installation of a Python version has, by relative path, sorted."""
    found = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _WITHOUT and not name.startswith(("config-", "."))]
        for name in files:
            path = Path(folder, name)
            if name.endswith(".py") and not name.startswith(_BUILD) and not path.is_symlink():
                found[path.relative_to(root).as_posix()] = path
    return dict(sorted(found.items()))


def make_python(config: Any, split: str, layout: Layout) -> Corpus:
    """The source of the running Python's library, a file a document; a twentieth of the files is for evaluation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = library_files(root)
    if len(files) < 2:
        raise FileNotFoundError(
            "dataset_type=python reads the source of Python's own library, and this Python comes without; "
            "use dataset_type=text with a dataset_path, or dataset_type=synthetic"
        )
    kept = held_out(tuple(files))

    def documents(part: str) -> Iterator[str]:
        for name, file in files.items():
            if (name in kept) == (part == "eval") and (text := text_of(read(file))):
                yield text

    return make_corpus("python", documents, config, split, layout, {"python": platform.python_version()})
