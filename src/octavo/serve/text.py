"""From tokens to text, piece by piece: whole characters only, and nothing of what ends the answer."""

from collections.abc import Callable, Sequence

_HALF = "\ufffd"
"""What a decoder gives for bytes that are not a character yet."""
_CONTEXT = 4
"""Tokens of the prompt that are decoded with the first ones after it."""


class TextStream:
    """The text of a growing list of tokens, after those of a prompt.

    >>> pieces = {0: b"a", 1: b"\\xc3", 2: b"\\xa4", 3: b"END"}
    >>> stream = TextStream(lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace"), stop=("END",))
    >>> [stream.push(i) for i in (0, 1, 2, 3)], stream.stopped
    (['a', '', 'ä', ''], True)
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = (), *, prompt: Sequence[int] = ()):
        self._decode, self._stop = decode, tuple(stop)
        # Tokens before `_start` are told; those from `_from` on are decoded too, as context: some decoders drop a
        # space at the beginning.
        self._tokens: list[int] = list(prompt[-_CONTEXT:])
        self._from, self._start = 0, len(self._tokens)
        self._held = ""
        self.stopped = False
        """Whether one of the texts that end the answer has come."""

    def push(self, token: int) -> str:
        """One more token: what may be told because of it."""
        self._tokens.append(token)
        return self._released(self._new())

    def finish(self) -> str:
        """What was held back for what might have come. Bytes that never became a character are dropped."""
        if self.stopped:
            return ""
        text = self._held + self._new(final=True)
        self._held = ""
        return text

    def _new(self, *, final: bool = False) -> str:
        before = self._decode(self._tokens[self._from : self._start])
        now = self._decode(self._tokens[self._from :])
        if now.endswith(_HALF):
            if not final:
                return ""
            now = now.rstrip(_HALF)
        if len(now) <= len(before):
            return ""
        self._from, self._start = self._start, len(self._tokens)
        return now[len(before) :]

    def _released(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        ends = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        kept = max((_beginning(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _beginning(text: str, stop: str) -> int:
    """How much of the end of `text` may be the beginning of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
