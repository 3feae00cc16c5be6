"""The configuration in words: what `octavo train --help` prints, and what a run prints when it starts."""

import dataclasses
from collections.abc import Mapping

from octavo.rules import recipes
from octavo.train.config import GROUPS, Config, keys
from octavo.train.files import models
from octavo.train.keys import shown, wrap

WIDTH = 100

_USAGE = """\
usage: octavo train [CONFIG.yml] [key=value ...]        (also: python -m octavo.train)

Trains a decoder language model, in float or quantized, and writes checkpoints, metrics and a
report to base_output_directory/run_name. The same run_name again resumes the run.

  octavo train quantization=int8                        a small model on Python's own source
  octavo train run_name=a model_name=10m steps=1000     a bigger one; run it again to resume
  octavo train configs/deepseek_fp8.yml steps=100       a file; key=value overrules it
  OCTAVO_STEPS=50 octavo train                          any key from the environment

From weak to strong: defaults, CONFIG.yml and its base_config, the model's file, environment
(OCTAVO_<KEY> or M_<KEY>), key=value. Lists are a,b or [a,b]; null or none is nothing.

Exit status 0: done, or saved on SIGTERM; 130: saved on Ctrl-C; 1: stopped by a loss that is not
finite, a full disk or another error; 2: the configuration is wrong, and nothing was started."""


def help_text() -> str:
    """All keys by groups, with defaults and allowed values."""
    parts = [_USAGE, _wrapped("Models: ", ", ".join(models())), _wrapped("Recipes: ", ", ".join(recipes(aliases=True)))]
    for group, title in GROUPS.items():
        parts.append(f"{title}\n" + "\n".join(_help_lines(group)))
    parts.append("Next: octavo train quantization=int8 steps=50")
    return "\n\n".join(parts)


def print_config(config: Config, sources: Mapping[str, str] | None = None) -> str:
    """A configuration by groups: what was changed with where it was set, then any notes of the sources.

    >>> from octavo.train.config import Config
    >>> text = print_config(Config(steps=5), {"steps": "command line"})
    >>> print(*text.splitlines()[:4], sep="\\n")
    Run
        run_name               ""
        base_output_directory  runs
      * steps                  5     command line
    """
    places = sources or {}
    parts = []
    for group, title in GROUPS.items():
        names = [name for name, key in keys().items() if key.group == group]
        texts = [shown(getattr(config, name)) or '""' for name in names]
        left, middle = max(map(len, names)), max(map(len, texts))
        lines = [
            f"  {'*' if changed else ' '} {name:<{left}}  {text:<{middle}}  {places.get(name, '') if changed else ''}"
            for name, text in zip(names, texts, strict=True)
            for changed in [getattr(config, name) != getattr(Config, name)]
        ]
        parts.append("\n".join([title, *(line.rstrip() for line in lines)]))
    found = getattr(sources, "notes", ())
    return "\n\n".join([*parts, *(["\n".join(f"note: {note}" for note in found)] if found else [])])


def _help_lines(group: str) -> list[str]:
    fields = [field for field in dataclasses.fields(Config) if field.metadata["key"].group == group]
    names, defaults = [field.name for field in fields], [shown(field.default) or '""' for field in fields]
    left, middle = max(map(len, names)), max(map(len, defaults))
    lines = []
    for field, default in zip(fields, defaults, strict=True):
        lines.append(_wrapped(f"  {field.name:<{left}}  {default:<{middle}}  ", field.metadata["key"].text))
    return lines


def _wrapped(head: str, text: str) -> str:
    """A text behind its head, further lines below it."""
    return head + ("\n" + " " * len(head)).join(wrap(text, WIDTH - len(head)))
