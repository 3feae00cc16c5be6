"""Text files as documents, and which of them are held out."""

import glob
import gzip
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

HELD_OUT = 0.05
SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".py")


def held_out(names: Sequence[str], share: float = HELD_OUT) -> set[str]:
    """The names that are kept for evaluation: those whose hash is in the lowest share, and one of them at least.

    A name's lot does not depend on the other names, so that a missing file moves no other one.

    >>> held_out(["a", "b", "c"], 0.0)
    {'c'}
    """
    lots = {name: int(hashlib.sha256(name.encode()).hexdigest()[:12], 16) / 16**12 for name in names}
    return {name for name, lot in lots.items() if lot < share} or ({min(lots, key=lots.__getitem__)} if lots else set())


def find_files(path: str, option: str) -> dict[str, Path]:
    """The text files that a file, a folder or a pattern names, by the name they have under it, sorted."""
    if not path:
        raise ValueError(f"dataset_type=text needs {option}: a file, a folder or a pattern such as 'books/**/*.txt'")
    root = Path(path).expanduser()
    if root.is_dir():
        endings = tuple(suffix + packed for suffix in SUFFIXES for packed in ("", ".gz"))
        files = [file for file in root.rglob("*") if file.is_file() and file.name.lower().endswith(endings)]
        found = {file.relative_to(root).as_posix(): file for file in files}
        looked = f"a file that ends in {', '.join(SUFFIXES)} (.gz too); name others by a pattern such as '{path}/*.c'"
    else:
        matches = [root] if root.is_file() else [Path(m) for m in glob.glob(str(root), recursive=True)]
        files = [file for file in matches if file.is_file()]
        base = _common(files)
        found = {file.relative_to(base).as_posix(): file for file in files}
        looked = "a file, a folder, or a pattern that matches files"
    if not found:
        raise FileNotFoundError(f"{option}={path!r} finds no text; it should be {looked}")
    return dict(sorted(found.items()))


def read(file: Path) -> bytes:
    """What a file holds, unpacked if its name ends in .gz."""
    if file.suffix == ".gz":
        with gzip.open(file) as packed:
            return packed.read()
    return file.read_bytes()


def text_of(data: bytes) -> str:
    """Bytes as UTF-8 text; what is not valid becomes U+FFFD."""
    return data.decode("utf-8", errors="replace")


def cut(data: bytes, share: float = HELD_OUT) -> tuple[bytes, bytes]:
    """All but the last share of some UTF-8 text, and that share, not cut within a character.

    >>> cut("abcé".encode(), 0.2)
    (b'abc', b'\\xc3\\xa9')
    """
    place = len(data) - int(len(data) * share)
    while 0 < place < len(data) and data[place] & 0xC0 == 0x80:
        place -= 1
    return data[:place], data[place:]


def _common(files: Iterable[Path]) -> Path:
    """The deepest folder that all files are in."""
    parents = [file.parent for file in files]
    if not parents:
        return Path()
    base = parents[0]
    while not all(parent.is_relative_to(base) for parent in parents):
        base = base.parent
    return base
