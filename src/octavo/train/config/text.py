"""The configuration as text: `--help`, what a run prints when it starts, YAML, and the tables of the documentation."""

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from octavo.train.config.files import model_names
from octavo.train.config.schema import GROUPS, Config
from octavo.train.config.values import format_value

WIDTH = 100
RECIPES = (
    *("aqt_fp8", "aqt_fp8_full", "bitnet", "deepseek_fp8", "fp4", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_full", "fp8_gpu"),
    *("fp8_nanoo", "int4", "int4w", "int8", "int8w", "intmp", "mxfp4", "mxfp4_hadamard", "mxfp8", "nanoo_fp8", "nvfp4"),
    *("qat_int4", "qat_int8", "quartet2", "switchback", "te_fp8_currentscaling", "te_fp8_delayedscaling", "te_mxfp8"),
    *("te_nvfp4", "te_nvfp4_no_rht", "tetrajet2"),
)
"""The names of the built-in recipes: the registry itself imports JAX, which `--help` should not wait for."""

_USAGE = """\
usage: octavo train [CONFIG.yml] [key=value ...]        (also: python -m octavo.train)

Trains a decoder language model, in float or quantized, and writes checkpoints, metrics and a
report to base_output_directory/run_name. The same run_name again resumes the run.

  octavo train quantization=int8                        a small model on Python's own source
  octavo train run_name=a model_name=10m steps=1000     a larger one; run it again to resume
  octavo train configs/deepseek_fp8.yml steps=100       a file; key=value overrides it
  OCTAVO_STEPS=50 octavo train                          any key from the environment

From weak to strong: defaults, CONFIG.yml and its base_config, the model's file, environment
(OCTAVO_<KEY> or M_<KEY>), key=value. Lists are a,b or [a,b]; null or none is nothing.

Exit status 0: done, or saved on SIGTERM; 130: saved on Ctrl-C; 1: stopped by a loss that is not
finite, a full disk or another error; 2: the configuration is wrong, and nothing was started."""

_BASE = """\
# Every key of `octavo train` with its default, by groups. A file of your own needs only what it changes:
#
#   base_config: base.yml
#   model_name: 10m
#   quantization: int8
#
# Names follow MaxText. `octavo train --help` prints the same list.

"""


def help_text() -> str:
    """All keys by groups, with defaults and allowed values."""
    parts = [_USAGE, _wrap("Models: ", ", ".join(model_names())), _wrap("Recipes: ", ", ".join(RECIPES))]
    for title, rows in _aligned(Config()):
        parts.append("\n".join([title, *(_wrap(f"  {text}", field.metadata["key"].text) for field, text in rows)]))
    parts.append("Next: octavo train quantization=int8 steps=50")
    return "\n\n".join(parts)


def format_config(config: Config, sources: Mapping[str, str] | None = None) -> str:
    """A configuration by groups: changed keys are marked and say where they were set; notes of the sources follow.

    >>> text = format_config(Config(steps=5), {"steps": "command line"})
    >>> print(*text.splitlines()[:4], sep="\\n")
    Run
        run_name               ""
        base_output_directory  runs
      * steps                  5     command line
    """
    parts = []
    for title, rows in _aligned(config):
        lines = [title]
        for field, text in rows:
            changed = getattr(config, field.name) != field.default
            source = (sources or {}).get(field.name, "") if changed else ""
            lines.append(f"  {'*' if changed else ' '} {text}{source}".rstrip())
        parts.append("\n".join(lines))
    notes = getattr(sources, "notes", ())
    return "\n\n".join([*parts, *(["\n".join(f"note: {note}" for note in notes)] if notes else [])])


def to_yaml(config: Config, *, comments: bool = False) -> str:
    """All keys by groups, as a file with the same configuration; with comments, each key with its help.

    >>> to_yaml(Config(steps=5)).splitlines()[:4]
    ['# Run', "run_name: ''", 'base_output_directory: runs', 'steps: 5']
    """
    blocks = []
    for group, title in GROUPS.items():
        lines = [_yaml_line(field.name, getattr(config, field.name)) for field in _fields(group)]
        if comments:
            left = max(map(len, lines))
            for i, field in enumerate(_fields(group)):
                first, *more = _split(field.metadata["key"].text, 116 - left)
                lines[i] = "\n".join([f"{lines[i]:<{left}}  # {first}", *(f"{'':<{left}}  # {text}" for text in more)])
        blocks.append("\n".join([f"# {title}", *lines]) + "\n")
    return "\n".join(blocks)


def base_yaml() -> str:
    """The text of configs/base.yml."""
    return _BASE + to_yaml(Config(), comments=True)


def with_tables(page: str) -> str:
    """A page with its tables of keys, between `<!-- keys -->` and `<!-- end -->`, updated."""
    head = ["| key | default | meaning | allowed |", "|---|---|---|---|"]
    parts = [
        "\n".join([f"### {title}", "", *head, *(_row(field) for field in _fields(group))])
        for group, title in GROUPS.items()
    ]
    tables = "\n\n".join(parts) + "\n"
    return re.sub(r"(<!-- keys -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}\n{tables}\n{m[2]}", page, flags=re.DOTALL)


def _fields(group: str) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(Config) if field.metadata["key"].group == group]


def _aligned(config: Config) -> Iterator[tuple[str, list[tuple[dataclasses.Field, str]]]]:
    """The title of each group, and its fields with their names and values in columns."""
    for group, title in GROUPS.items():
        values = {field.name: format_value(getattr(config, field.name)) or '""' for field in _fields(group)}
        left, right = max(map(len, values)), max(map(len, values.values()))
        yield title, [(f, f"{f.name:<{left}}  {values[f.name]:<{right}}  ") for f in _fields(group)]


def _wrap(head: str, text: str) -> str:
    """A text behind its head, further lines indented below it."""
    return head + ("\n" + " " * len(head)).join(_split(text, WIDTH - len(head)))


def _split(text: str, width: int) -> list[str]:
    """A text in lines; allowed values, in brackets, start a line of their own."""
    if len(text) <= width:
        return [text]
    first, bracket, rest = text.partition("  [")
    return [line for piece in (first, bracket.strip() + rest) for line in textwrap.wrap(piece, width)]


def _yaml_line(name: str, value: Any) -> str:
    value = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return f"{name}: {text.removesuffix('...\n').rstrip()}"


def _row(field: dataclasses.Field) -> str:
    key, default = field.metadata["key"], format_value(field.default)
    allowed = key.allowed
    if key.choices:
        allowed = ", ".join('`""`' if choice == "" else f"`{choice}`" for choice in key.choices)
    cells = [
        f"`{field.name}`",
        f"`{default}`" if default else "",
        key.help.replace("<", "&lt;"),
        allowed.replace(" | ", ", ").replace("<", "&lt;"),
    ]
    return f"| {' | '.join(cells)} |".replace("  ", " ")
