"""Constrained decoding: masks over the vocabulary that keep an answer within a grammar of JSON texts."""

import bisect
import functools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from octavo.serve import json_schema
from octavo.serve.json_grammar import CLOSED, DEAD, STRING, STRING_STEPS, Grammar, Stack, State, String
from octavo.serve.sampling import pack_mask

_CACHE_BYTES = 16 << 20
"""The most bytes of the masks that one constraint keeps."""
# UTF-8 has no other bytes.
_BYTES = frozenset(range(0xF5)) - {0xC0, 0xC1}
_ASCII = frozenset(range(0x20, 0x7F))


class Vocabulary:
    """The bytes of the tokens of a model.

    Args:
        pieces: The bytes of each token; None for those that are no text.
        size: The size of the model's vocabulary.
        eos_ids: The tokens that end a text.

    Raises:
        ValueError: The tokens cannot write all JSON texts.

    >>> vocabulary = Vocabulary([bytes([i]) for i in range(256)], size=257, eos_ids=(256,))
    >>> constraint = Constraint.of_schema({"enum": ["yes", "no"]}, vocabulary)
    >>> matcher = constraint.start()
    >>> [matcher.push(byte) for byte in b'"no"'], matcher.is_finished
    ([True, True, True, True], True)
    """

    def __init__(self, pieces: Sequence[bytes | None], *, size: int, eos_ids: Collection[int] = ()):
        self.size = size
        self.pieces: list[bytes | None] = [
            piece if piece and i not in eos_ids else None for i, piece in enumerate(pieces[:size])
        ]
        single = {piece[0] for piece in self.pieces if piece is not None and len(piece) == 1}
        if missing := sorted(_ASCII - single):
            raise ValueError(
                f"this tokenizer cannot write all JSON texts: it has no token for {chr(missing[0])!r} alone"
            )
        self.has_bytes = single >= _BYTES
        """Whether each byte of UTF-8 has a token. Otherwise a token that is part of a character is not used."""
        known = [(p, i) for i, p in enumerate(self.pieces) if p is not None and (self.has_bytes or _is_text(p))]
        known.sort()
        self._texts, self._ids = [p for p, _ in known], np.asarray([i for _, i in known], np.int64)
        eos = np.zeros(size, bool)
        eos[[i for i in eos_ids if i < size]] = True
        self.eos_mask = eos
        self._tables: dict[int, _StringTable] = {}
        self._string_table(0)  # the largest

    def mask(self, grammar: Grammar, stack: Stack) -> np.ndarray:
        """Which tokens may follow a stack of a grammar."""
        mask = np.zeros(self.size, bool)
        if stack and stack[-1][0] == STRING:
            *_, (_, index, state, count) = stack
            node = grammar.nodes[index]
            assert isinstance(node, String)
            mask[self._string_table(state).ids(grammar, stack[:-1], node, count)] = True
        else:
            mask[self._ids[_walk(grammar, (stack,), self._texts)]] = True
        return mask

    def _string_table(self, state: int) -> "_StringTable":
        if state not in self._tables:
            self._tables[state] = _StringTable(self._texts, self._ids, state)
        return self._tables[state]


class _StringTable:
    """How each token continues a string: nearly all tokens do, which would take long to find for each stack.

    Args:
        texts: The bytes of tokens.
        ids: Their ids.
        state: The state within the string that they are read from.
    """

    def __init__(self, texts: Sequence[bytes], ids: np.ndarray, state: int):
        inside, closing = [], []
        for text, token in zip(texts, ids.tolist(), strict=True):
            end, chars, length = _read_string(text, state)
            if end == CLOSED:
                closing.append((text[length:], token, chars))
            elif end != DEAD:
                inside.append((token, chars))
        closing.sort()
        # Tokens that stay within the string, and those that end it with the bytes that then follow.
        self._inside = np.asarray(inside, np.int64).reshape(-1, 2)
        self._tails = [tail for tail, _, _ in closing]
        self._closing = np.asarray([one[1:] for one in closing], np.int64).reshape(-1, 2)

    def ids(self, grammar: Grammar, rest: Stack, node: String, count: int) -> np.ndarray:
        """The tokens that may follow `count` characters of a string, which is on top of a stack."""
        inside, closing = self._inside, self._closing[_walk(grammar, (rest,), self._tails)]
        closing = closing[closing[:, 1] + count >= node.least]
        if node.most is not None:
            inside = inside[inside[:, 1] + count <= node.most]
            closing = closing[closing[:, 1] + count <= node.most]
        return np.concatenate([inside[:, 0], closing[:, 0]])


def _read_string(text: bytes, state: int) -> tuple[int, int, int]:
    """The state after a text within a string, the characters that begin in it, and its bytes up to a closing quote."""
    chars = 0
    for i, byte in enumerate(text):
        new = STRING_STEPS[state][byte]
        if new < 0:
            return new, chars, i + 1
        chars += state == 0
        state = new
    return state, chars, len(text)


def _walk(grammar: Grammar, start: State, texts: Sequence[bytes]) -> list[int]:
    """The indices of those of some sorted texts that may follow a state."""
    found: list[int] = []
    # The states after the first bytes of the current text, which following texts may share.
    path, previous, i = [start], b"", 0
    while i < len(texts):
        text = texts[i]
        shared = 0
        while shared < min(len(path) - 1, len(text)) and text[shared] == previous[shared]:
            shared += 1
        del path[shared + 1 :]
        previous = text
        for end in range(shared, len(text)):
            state = grammar.step(path[-1], text[end])
            if not state:
                # No text that starts like this may follow.
                i = bisect.bisect_left(texts, _after(text[: end + 1]), i + 1)
                break
            path.append(state)
        else:
            found.append(i)
            i += 1
    return found


def _after(prefix: bytes) -> bytes:
    """The least text that is greater than all that start with a prefix."""
    prefix = prefix.rstrip(b"\xff")
    return prefix[:-1] + bytes((prefix[-1] + 1,)) if prefix else b"\xff" * 64


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


class Constraint:
    """What the answer of a request conforms to: a grammar over the tokens of a model.

    Masks are computed once for each stack of the grammar, and kept for other requests with the same constraint.
    """

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary):
        self.grammar, self.vocabulary = grammar, vocabulary
        self._masks: dict[Stack, np.ndarray] = {}
        self.eos_bits = pack_mask(vocabulary.eos_mask)

    @classmethod
    def json(cls, vocabulary: Vocabulary) -> "Constraint":
        """Any JSON object."""
        return cls(json_schema.json_object(raw=vocabulary.has_bytes), vocabulary)

    @classmethod
    def of_schema(cls, schema: Any, vocabulary: Vocabulary) -> "Constraint":
        """JSON texts of a schema; see `octavo.serve.json_schema.compile_schema`."""
        return cls(json_schema.compile_schema(schema, raw=vocabulary.has_bytes), vocabulary)

    def start(self) -> "Matcher":
        """A matcher of one answer."""
        return Matcher(self)

    def bits(self, stack: Stack) -> np.ndarray:
        """The mask of a stack, as bits."""
        if stack not in self._masks:
            if len(self._masks) * len(self.eos_bits) > _CACHE_BYTES:
                self._masks.clear()
            self._masks[stack] = pack_mask(self.vocabulary.mask(self.grammar, stack))
        return self._masks[stack]


class Matcher:
    """Reads one answer, token by token."""

    def __init__(self, constraint: Constraint):
        self._constraint, self._state = constraint, constraint.grammar.start

    def mask(self) -> np.ndarray:
        """The tokens that may follow, as bits of `pack_mask`."""
        rows = [self._constraint.bits(stack) for stack in self._state if stack]
        if self._constraint.grammar.is_complete(self._state):
            rows.append(self._constraint.eos_bits)
        return functools.reduce(np.bitwise_or, rows)

    def push(self, token: int) -> bool:
        """Read a token; whether it may follow."""
        piece = self._constraint.vocabulary.pieces[token] if token < len(self._constraint.vocabulary.pieces) else None
        self._state = () if piece is None else self._constraint.grammar.read_each(self._state, piece)
        return bool(self._state)

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete, and nothing may follow."""
        return bool(self._state) and not any(self._state)
