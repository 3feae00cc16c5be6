"""The configuration as files that are written from the keys: YAML, and the tables of its page in the documentation.

`python -m octavo.train.pages`, in a clone of the repository, writes both anew after a key has changed.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from octavo.train.config import GROUPS, Config
from octavo.train.files import CONFIGS
from octavo.train.keys import shown, wrap

_BASE = """\
# Every key of `octavo train` with its default, by groups. A file of your own needs only what it changes:
#
#   base_config: base.yml
#   model_name: 10m
#   quantization: int8
#
# Names follow MaxText. `octavo train --help` prints the same list.

"""


def yaml_of(values: Mapping[str, Any], *, comments: bool = False) -> str:
    """Values as YAML, by groups; with comments, each key with what it is and what it may be."""
    blocks = []
    for group, title in GROUPS.items():
        fields = [field for field in dataclasses.fields(Config) if field.metadata["key"].group == group]
        lines = [_line(field.name, values[field.name]) for field in fields]
        if comments:
            lines = _commented(lines, [field.metadata["key"].text for field in fields])
        blocks.append("\n".join([f"# {title}", *lines]) + "\n")
    return "\n".join(blocks)


def base_yaml() -> str:
    """The text of configs/base.yml."""
    return _BASE + yaml_of(Config().to_dict(), comments=True)


def markdown() -> str:
    """The tables of keys in the documentation."""
    parts = []
    for group, title in GROUPS.items():
        rows = [_row(field) for field in dataclasses.fields(Config) if field.metadata["key"].group == group]
        parts.append(
            "\n".join([f"### {title}", "", "| key | default | meaning | allowed |", "|---|---|---|---|", *rows])
        )
    return "\n\n".join(parts) + "\n"


def with_tables(page: str) -> str:
    """A page with its tables of keys, between `<!-- keys -->` and `<!-- end -->`, as they are now."""
    return re.sub(
        r"(<!-- keys -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}\n{markdown()}\n{m[2]}", page, flags=re.DOTALL
    )


def _line(name: str, value: Any) -> str:
    value = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return f"{name}: {text.removesuffix('...\n').rstrip()}"


def _commented(lines: list[str], comments: list[str]) -> list[str]:
    """Lines with comments in a column."""
    left = max(map(len, lines))
    out = []
    for line, comment in zip(lines, comments, strict=True):
        first, *more = wrap(comment, 116 - left)
        out += [f"{line:<{left}}  # {first}", *(f"{'':<{left}}  # {rest}" for rest in more)]
    return out


def _row(field: dataclasses.Field) -> str:
    key, default = field.metadata["key"], shown(field.default)
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


if __name__ == "__main__":
    (CONFIGS / "base.yml").write_text(base_yaml(), encoding="utf-8")
    page = Path("docs/config.md")
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
