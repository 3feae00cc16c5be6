"""Text files of one's own. Every file is a document."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.data.corpus import Corpus, make_corpus
from octavo.data.dataset import Layout
from octavo.data.files import cut, find_files, held_out, read, text_of

_MANY = 20


def make_text(config: Any, split: str, layout: Layout) -> Corpus:
    """The files at `dataset_path`; for evaluation those at `eval_dataset_path`, or what training leaves out.

    That is a twentieth: of twenty files or more some whole files, chosen by their names; of fewer the end of each.
    """
    files = find_files(getattr(config, "dataset_path", ""), "dataset_path")
    elsewhere = getattr(config, "eval_dataset_path", "")

    def documents(part: str) -> Iterator[str]:
        if elsewhere:
            yield from _texts(files if part == "train" else find_files(elsewhere, "eval_dataset_path"))
        elif len(files) < _MANY:
            for file in files.values():
                if piece := cut(read(file))[part == "eval"]:
                    yield text_of(piece)
        else:
            kept = held_out(tuple(files))
            yield from _texts({name: file for name, file in files.items() if (name in kept) == (part == "eval")})

    path = elsewhere if split == "eval" and elsewhere else config.dataset_path
    return make_corpus("text", documents, config, split, layout, {"path": str(path)})


def _texts(files: dict[str, Path]) -> Iterator[str]:
    return (text for file in files.values() if (text := text_of(read(file))))
