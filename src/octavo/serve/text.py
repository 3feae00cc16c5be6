"""Incremental detokenization: complete characters only, without stop texts."""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"
"""The replacement character, which decoders return for incomplete characters."""
_CONTEXT = 4
"""Tokens of the prompt that are decoded together with the first tokens of the answer."""


class TextStream:
    """Detokenizes incrementally, one token at a time.

    Args:
        decode: The text of token ids.
        stop: Texts that end the answer, which does not contain them.
        prompt: The tokens before the answer: some decoders drop a space at the start of a text.

    >>> pieces = {0: b"a", 1: b"\\xc3", 2: b"\\xa4", 3: b"END"}
    >>> stream = TextStream(lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace"), stop=("END",))
    >>> [stream.push(i) for i in (0, 1, 2, 3)], stream.stopped
    (['a', '', 'ä', ''], True)
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = (), *, prompt: Sequence[int] = ()):
        self._decode, self._stop = decode, tuple(stop)
        # Tokens before `_start` have been returned as text; those from `_from` on are decoded too, as context.
        self._tokens: list[int] = list(prompt[-_CONTEXT:])
        self._from, self._start = 0, len(self._tokens)
        self._held = ""
        self.stopped = False
        """Whether a stop text has occurred."""

    def push(self, token: int) -> str:
        """Add a token, and return the text that is now certain."""
        self._tokens.append(token)
        return self._release(self._new())

    def finish(self) -> str:
        """The text that was held back, which a stop text might have continued; an incomplete character is dropped."""
        if self.stopped:
            return ""
        text = self._held + self._new(final=True)
        self._held = ""
        return text

    def _new(self, *, final: bool = False) -> str:
        before = self._decode(self._tokens[self._from : self._start])
        now = self._decode(self._tokens[self._from :])
        if now.endswith(_INCOMPLETE):
            if not final:
                return ""
            now = now.rstrip(_INCOMPLETE)
        if len(now) <= len(before):
            return ""
        self._from, self._start = self._start, len(self._tokens)
        return now[len(before) :]

    def _release(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        ends = [index for stop in self._stop if (index := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        held = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a start of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
