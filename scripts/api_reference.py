"""Griffe extension for docs/api.md: how docstrings and public names become the API reference."""

import re
from typing import Any

import griffe

import octavo

# The examples of a docstring: from the first prompt to the next blank line that no prompt follows.
EXAMPLES = re.compile(r"^( *)(>>> (?:.|\n)*?)(?=\n\s*\n *[^>\s]|\Z)", re.MULTILINE)


class ApiReference(griffe.Extension):
    """Examples become sections, and `octavo.name` is what Python finds there.

    Read from the sources alone, `octavo.einsum` would be the module of the function.
    """

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None and "Examples:" not in obj.docstring.value:
            obj.docstring.value = with_section(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for name in octavo.__all__ if pkg.path == "octavo" else ():
            found = getattr(octavo, name)
            pkg.members[name] = griffe.Alias(name, f"{found.__module__}.{found.__qualname__}", parent=pkg)


def with_section(text: str) -> str:
    """A docstring whose examples are in a section, as Google style has them.

    >>> with_section("Add one.\\n\\n>>> add(1)\\n2").splitlines()
    ['Add one.', '', 'Examples:', '  >>> add(1)', '  2']
    """

    def section(found: re.Match[str]) -> str:
        lines = [line.removeprefix(found[1]) for line in found[0].splitlines()]
        return "\n".join([f"{found[1]}Examples:", *(f"{found[1]}  {line}".rstrip() for line in lines)])

    return EXAMPLES.sub(section, text)
