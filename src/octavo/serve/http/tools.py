"""Calls of tools in the texts that models write."""

import dataclasses
import json
import re
import secrets
from collections.abc import Collection
from typing import Any

from octavo.serve.text import overlap

_MARKERS = ("<tool_call>", "[TOOL_CALLS]")
"""What templates let a call begin with. Without one of them, a call is an answer that is JSON and nothing else."""
_BETWEEN = re.compile(r"(?:\s|;|</?tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>)*")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a tool, with its arguments as JSON text."""

    name: str
    arguments: str
    call_id: str = dataclasses.field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def to_dict(self) -> dict[str, Any]:
        """The call in OpenAI's format."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class ToolParser:
    """Separates the calls of tools from other text, while it is generated.

    Args:
        names: The names of the tools.
        template: The chat template of the model, which shows how it writes calls.
        parallel: Whether an answer may have several calls; otherwise the first is returned.

    >>> parser = ToolParser(["add"], "... <tool_call> ...")
    >>> parser.push('Well. <tool'), parser.push('_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('Well. ', '')
    >>> rest, calls = parser.finish()
    >>> rest, calls[0].name, calls[0].arguments
    ('', 'add', '{"a": 1}')
    """

    def __init__(self, names: Collection[str], template: str = "", *, parallel: bool = True):
        self._options: dict[str, Any] = {"names": names, "template": template, "parallel": parallel}
        self._names, self._parallel = frozenset(names), parallel
        self._marker = next((marker for marker in _MARKERS if marker in template), None)
        self._held, self._is_plain = "", False

    def fresh(self) -> "ToolParser":
        """A parser of another text."""
        return ToolParser(**self._options)

    def push(self, text: str) -> str:
        """Add text, and return what is certainly no part of a call."""
        self._held += text
        if self._marker is None:
            start = self._held.lstrip()
            # An answer that is not JSON from its first character has no call.
            self._is_plain = self._is_plain or not (start == "" or start[0] in "{[<")
            return self._release(len(self._held) if self._is_plain else 0)
        found = self._held.find(self._marker)
        return self._release(found if found >= 0 else len(self._held) - overlap(self._held, self._marker))

    def finish(self) -> tuple[str, list[Call]]:
        """The text that was held back and is no call, and the calls."""
        calls = self._calls()
        if calls is None:
            return self._release(len(self._held)), []
        return "", calls if self._parallel else calls[:1]

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _calls(self) -> list[Call] | None:
        """The calls in the text that was held back; None if it has anything else."""
        found: list[Call] = []
        decoder, position = json.JSONDecoder(), _BETWEEN.match(self._held).end()  # pyrefly: ignore
        while position < len(self._held):
            try:
                value, position = decoder.raw_decode(self._held, position)
            except (ValueError, RecursionError):
                return None
            for one in value if isinstance(value, list) else [value]:
                call = self._call(one)
                if call is None:
                    return None
                found.append(call)
            position = _BETWEEN.match(self._held, position).end()  # pyrefly: ignore
        return found or None

    def _call(self, value: Any) -> Call | None:
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, dict):
            return None
        return Call(name, json.dumps(arguments, ensure_ascii=False))
