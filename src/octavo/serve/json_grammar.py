"""A pushdown automaton over the bytes of JSON texts that a grammar allows.

A stack holds what is open in the text, innermost last, and a state is a tuple of stacks: the ways to read the text so
far. Each stack can be completed, since nothing is opened that would nest deeper than `_DEPTH`. So a state is never a
dead end, and of more than `_STACKS` stacks the first are kept.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

type Frame = tuple[Any, ...]
type Stack = tuple[Frame, ...]
type State = tuple[Stack, ...]

DIGITS = 18
"""The most digits of an integer, and of both parts of another number."""
_EXPONENT = 2
_SPACES = 40
"""The most bytes of whitespace at a time, which a model could otherwise write for ever."""
_DEPTH = 64
_STACKS = 32
_SPACE = frozenset(b" \n\t")


@dataclasses.dataclass(frozen=True)
class Literal:
    """One of some JSON texts."""

    texts: tuple[bytes, ...]


@dataclasses.dataclass(frozen=True)
class String:
    """A string whose number of characters is bounded."""

    least: int = 0
    most: int | None = None


@dataclasses.dataclass(frozen=True)
class Number:
    """A finite number."""


@dataclasses.dataclass(frozen=True)
class Integer:
    """An integer between bounds, which it may equal."""

    least: int = 1 - 10**DIGITS
    most: int = 10**DIGITS - 1


@dataclasses.dataclass(frozen=True)
class Array:
    """A list of values of one node, by its index."""

    items: int
    least: int = 0
    most: int | None = None


@dataclasses.dataclass(frozen=True)
class Object:
    """An object with these properties, in this order: keys as JSON texts, nodes of the values, which are required."""

    keys: tuple[bytes, ...]
    values: tuple[int, ...]
    required: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Map:
    """An object with any keys, of a node of strings, and values of one node."""

    keys: int
    values: int


@dataclasses.dataclass(frozen=True)
class Union:
    """A value of one of some nodes."""

    options: tuple[int, ...]


type Node = Literal | String | Number | Integer | Array | Object | Map | Union

# The kinds of frames, their first item. The second is the index of the node.
ROOT, LITERAL, STRING, NUMBER, INTEGER, ARRAY, OBJECT, MAP = range(8)
# What a frame of an array or object expects.
_FIRST, _NEXT, _KEY, _COLON, _VALUE, _AFTER = range(6)

CLOSED, DEAD = -2, -1


def _string_table() -> list[list[int]]:
    """The next state inside of a string, by state and byte: `CLOSED` after the closing quote, `DEAD` for an error.

    State 0 is between characters, 1 follows a backslash, 2 to 5 need 4 to 1 hexadecimal digits, and 6 needs one below
    8: escapes are no surrogates. 7 to 9 need 1 to 3 more bytes of UTF-8; 10 to 13 follow bytes with fewer successors.
    """
    table = [[DEAD] * 256 for _ in range(14)]

    def put(state: int, values: Sequence[int], to: int) -> None:
        for value in values:
            table[state][value] = to

    put(0, range(0x20, 0x80), 0)
    put(0, b'"', CLOSED)
    put(0, b"\\", 1)
    put(0, range(0xC2, 0xE0), 7)
    put(0, range(0xE1, 0xF0), 8)
    put(0, range(0xF1, 0xF4), 9)
    for state, (lead, successors, to) in enumerate(
        (
            (0xE0, range(0xA0, 0xC0), 7),
            (0xED, range(0x80, 0xA0), 7),
            (0xF0, range(0x90, 0xC0), 8),
            (0xF4, range(0x80, 0x90), 8),
        ),
        10,
    ):
        table[0][lead] = state
        put(state, successors, to)
    put(1, b'"\\/bfnrt', 0)
    put(1, b"u", 2)
    for state, to in ((2, 3), (3, 4), (4, 5), (5, 0)):
        put(state, b"0123456789abcdefABCDEF", to)
    put(2, b"dD", 6)
    put(6, b"01234567", 4)
    for state, to in ((7, 0), (8, 7), (9, 8)):
        put(state, range(0x80, 0xC0), to)
    return table


STRING_STEPS = _string_table()
_AFTER_SIGN, _ZERO, _WHOLE, _POINT, _FRACTION, _E, _E_SIGN, _E_DIGITS = range(8)
_IS_NUMBER = frozenset((_ZERO, _WHOLE, _FRACTION, _E_DIGITS))


class Grammar:
    """The JSON texts of a node.

    Args:
        nodes: Nodes, which refer to each other by index.
        root: The index of the node of a complete text.

    Raises:
        ValueError: No text is finite, as of an object that requires itself.

    >>> grammar = Grammar([Array(1, most=2), Literal((b"true", b"null"))], 0)
    >>> state = grammar.read(grammar.start, b"[true, nu")
    >>> grammar.read(state, b"ll,"), grammar.is_complete(grammar.read(state, b"ll]"))
    ((), True)
    """

    def __init__(self, nodes: Sequence[Node], root: int):
        self.nodes = [Union(_flat(nodes, i)) if isinstance(node, Union) else node for i, node in enumerate(nodes)]
        self.root = root
        self._depths = self._least_depths()
        if self._depths[root] > _DEPTH:
            raise ValueError(f"no value is nested less than {_DEPTH} levels deep")
        self.start: State = (((ROOT, root, 0),),)
        self._steps = {
            ROOT: self._step_root,
            LITERAL: self._step_literal,
            STRING: self._step_string,
            NUMBER: self._step_number,
            INTEGER: self._step_integer,
            ARRAY: self._step_array,
            OBJECT: self._step_object,
            MAP: self._step_map,
        }

    def step(self, state: State, byte: int) -> State:
        """The state after one more byte; empty if no text continues so."""
        return _merged(self._steps[stack[-1][0]](stack[:-1], stack[-1], byte) for stack in state if stack)

    def read(self, state: State, text: bytes) -> State:
        """The state after some bytes."""
        for byte in text:
            state = self.step(state, byte)
        return state

    def read_each(self, state: State, text: bytes) -> State:
        """The state after some bytes, of each stack on its own: as masks are computed."""
        return _merged(self.read((stack,), text) for stack in state)

    def is_complete(self, state: State) -> bool:
        """Whether the text is a complete value."""
        return any(not stack or (len(stack) == 1 and self._may_end(stack[0])) for stack in state)

    def _least_depths(self) -> list[int | float]:
        """The least number of frames that each node needs."""
        depths: list[int | float] = [math.inf] * len(self.nodes)
        changed = True
        while changed:
            new = [self._least_depth(node, depths) for node in self.nodes]
            depths, changed = new, new != depths
        return depths

    def _least_depth(self, node: Node, depths: Sequence[int | float]) -> int | float:
        match node:
            case Array(items, least, _):
                return 1 + (depths[items] if least else 0)
            case Object(_, values, required):
                return 1 + max((depths[v] for v, needed in zip(values, required, strict=True) if needed), default=0)
            case Union(options):
                return min((depths[option] for option in options), default=math.inf)
        return 1

    def _fits(self, index: int, depth: int) -> bool:
        return depth + self._depths[index] <= _DEPTH

    def _value(self, index: int, byte: int, rest: Stack) -> list[Stack]:
        """The stacks after the first byte of a value."""
        node = self.nodes[index]
        if isinstance(node, Union):
            return [stack for option in node.options for stack in self._value(option, byte, rest)]
        if not self._fits(index, len(rest)):
            return []
        match node:
            case Literal():
                return self._step_literal(rest, (LITERAL, index, b""), byte)
            case String():
                return [(*rest, (STRING, index, 0, 0))] if byte == 0x22 else []
            case Number():
                phase = {0x2D: _AFTER_SIGN, 0x30: _ZERO}.get(byte, _WHOLE if 0x31 <= byte <= 0x39 else None)
                return [] if phase is None else [(*rest, (NUMBER, index, phase, 1))]
            case Integer():
                return self._step_integer(rest, (INTEGER, index, b""), byte)
            case Array():
                return [(*rest, (ARRAY, index, _FIRST, 0, 0))] if byte == 0x5B else []
            case Object():
                return [(*rest, (OBJECT, index, _FIRST, 0, 0))] if byte == 0x7B else []
            case Map():
                return [(*rest, (MAP, index, _FIRST, 0))] if byte == 0x7B else []

    def _may_end(self, frame: Frame) -> bool:
        """Whether a number may end here."""
        if frame[0] == NUMBER:
            return frame[2] in _IS_NUMBER
        return frame[0] == INTEGER and self._is_integer(self.nodes[frame[1]], frame[2])

    def _step_root(self, rest: Stack, frame: Frame, byte: int) -> list[Stack]:
        if byte in _SPACE:
            return [((ROOT, frame[1], frame[2] + 1),)] if frame[2] < _SPACES else []
        return self._value(frame[1], byte, rest)

    def _step_literal(self, rest: Stack, frame: Frame, byte: int) -> list[Stack]:
        _, index, prefix = frame
        prefix += bytes((byte,))
        node = self.nodes[index]
        assert isinstance(node, Literal)
        longer = [text for text in node.texts if text.startswith(prefix)]
        found = [rest] if prefix in longer else []
        return [*found, (*rest, (LITERAL, index, prefix))] if len(longer) > len(found) else found

    def _step_string(self, rest: Stack, frame: Frame, byte: int) -> list[Stack]:
        _, index, state, count = frame
        node = self.nodes[index]
        assert isinstance(node, String)
        new = STRING_STEPS[state][byte]
        if new == DEAD:
            return []
        if new == CLOSED:
            return [rest] if count >= node.least else []
        if state == 0:
            if count == node.most:
                return []
            count = min(count + 1, node.least if node.most is None else node.most)
        return [(*rest, (STRING, index, new, count))]

    def _step_number(self, rest: Stack, frame: Frame, byte: int) -> list[Stack]:
        _, index, phase, digits = frame
        new = _next_phase(phase, byte)
        if new is None:
            return self._after_number(rest, byte) if phase in _IS_NUMBER else []
        digits = digits + 1 if new == phase else 1
        if digits > (_EXPONENT if new == _E_DIGITS else DIGITS):
            return []
        return [(*rest, (NUMBER, index, new, digits))]

    def _step_integer(self, rest: Stack, frame: Frame, byte: int) -> list[Stack]:
        _, index, prefix = frame
        node = self.nodes[index]
        longer = prefix + bytes((byte,))
        if _can_continue(node, longer):
            return [(*rest, (INTEGER, index, longer))]
        return self._after_number(rest, byte) if self._is_integer(node, prefix) else []

    def _is_integer(self, node: Node, text: bytes) -> bool:
        assert isinstance(node, Integer)
        return text not in (b"", b"-") and node.least <= int(text) <= node.most

    def _after_number(self, rest: Stack, byte: int) -> list[Stack]:
        """A number has no end of its own: the byte is the first after it."""
        return self._steps[rest[-1][0]](rest[:-1], rest[-1], byte) if rest else []

    def _step_array(self, rest: Stack, frame: Frame, byte: int) -> list[Stack]:
        _, index, phase, count, spaces = frame
        node = self.nodes[index]
        assert isinstance(node, Array)
        if byte in _SPACE:
            return [(*rest, (ARRAY, index, phase, count, spaces + 1))] if spaces < _SPACES else []
        if byte == 0x5D:  # ]
            return [rest] if phase != _NEXT and count >= node.least else []
        if count == node.most:
            return []
        if phase == _AFTER:
            more = byte == 0x2C and self._fits(node.items, len(rest) + 1)
            return [(*rest, (ARRAY, index, _NEXT, count, 0))] if more else []
        count = min(count + 1, node.least if node.most is None else node.most)
        return self._value(node.items, byte, (*rest, (ARRAY, index, _AFTER, count, 0)))

    def _step_object(self, rest: Stack, frame: Frame, byte: int) -> list[Stack]:
        _, index, phase, number, extra = frame
        node = self.nodes[index]
        assert isinstance(node, Object)
        if phase == _KEY:  # within a key: `extra` is its start
            extra += bytes((byte,))
            keys = [i for i in self._next_keys(node, number, len(rest) + 1) if node.keys[i].startswith(extra)]
            if keys and node.keys[keys[0]] == extra:
                return [(*rest, (OBJECT, index, _COLON, keys[0], 0))]
            return [(*rest, (OBJECT, index, _KEY, number, extra))] if keys else []
        if byte in _SPACE:
            return [(*rest, (OBJECT, index, phase, number, extra + 1))] if extra < _SPACES else []
        if phase == _COLON:
            return [(*rest, (OBJECT, index, _VALUE, number, 0))] if byte == 0x3A else []
        if phase == _VALUE:
            return self._value(node.values[number], byte, (*rest, (OBJECT, index, _AFTER, number + 1, 0)))
        if byte == 0x7D:  # }
            return [rest] if phase != _NEXT and not any(node.required[number:]) else []
        if byte != (0x2C if phase == _AFTER else 0x22) or not self._next_keys(node, number, len(rest) + 1):
            return []
        return [(*rest, (OBJECT, index, _NEXT, number, 0) if phase == _AFTER else (OBJECT, index, _KEY, number, b'"'))]

    def _next_keys(self, node: Object, number: int, depth: int) -> list[int]:
        """The properties that may follow: up to the first that is required."""
        found = []
        for i in range(number, len(node.keys)):
            if self._fits(node.values[i], depth):
                found.append(i)
            if node.required[i]:
                break
        return found

    def _step_map(self, rest: Stack, frame: Frame, byte: int) -> list[Stack]:
        _, index, phase, spaces = frame
        node = self.nodes[index]
        assert isinstance(node, Map)
        if byte in _SPACE:
            return [(*rest, (MAP, index, phase, spaces + 1))] if spaces < _SPACES else []
        if phase == _COLON:
            return [(*rest, (MAP, index, _VALUE, 0))] if byte == 0x3A else []
        if phase == _VALUE:
            return self._value(node.values, byte, (*rest, (MAP, index, _AFTER, 0)))
        if byte == 0x7D:
            return [rest] if phase != _NEXT else []
        if byte != (0x2C if phase == _AFTER else 0x22) or not self._fits(node.values, len(rest) + 1):
            return []
        if phase == _AFTER:
            return [(*rest, (MAP, index, _NEXT, 0))]
        return [(*rest, (MAP, index, _COLON, 0), (STRING, node.keys, 0, 0))]


def _merged(some: Iterable[Iterable[Stack]]) -> State:
    """Different stacks, and not too many."""
    found = dict.fromkeys(itertools.chain.from_iterable(some))
    return tuple(itertools.islice(found, _STACKS))


def _flat(nodes: Sequence[Node], index: int) -> tuple[int, ...]:
    """The options of a union, without unions, which may refer to each other in a cycle."""
    found: dict[int, None] = {}
    seen, pending = set(), [index]
    while pending:
        current = pending.pop()
        node = nodes[current]
        if not isinstance(node, Union):
            found[current] = None
        elif current not in seen:
            seen.add(current)
            pending.extend(reversed(node.options))
    return tuple(found)


def _next_phase(phase: int, byte: int) -> int | None:
    """What follows in a number; None if the byte is no part of it."""
    if 0x30 <= byte <= 0x39:
        if phase == _AFTER_SIGN:
            return _ZERO if byte == 0x30 else _WHOLE
        return {_WHOLE: _WHOLE, _POINT: _FRACTION, _FRACTION: _FRACTION}.get(phase, _E_DIGITS if phase >= _E else None)
    if byte == 0x2E:
        return _POINT if phase in (_ZERO, _WHOLE) else None
    if byte in b"eE":
        return _E if phase in (_ZERO, _WHOLE, _FRACTION) else None
    return _E_SIGN if byte in b"+-" and phase == _E else None


def _can_continue(node: Node, text: bytes) -> bool:
    """Whether a text is the start of an integer of a node."""
    assert isinstance(node, Integer)
    if text == b"-":
        return node.least < 0
    digits = text.removeprefix(b"-")
    if not digits.isdigit() or (digits[:1] == b"0" and text != b"0"):
        return False
    value = int(digits)
    for more in range(DIGITS + 1 - len(digits) if value else 1):
        low, high = value * 10**more, (value + 1) * 10**more - 1
        if text[0] == 0x2D:
            low, high = -high, -low
        if low <= node.most and high >= node.least:
            return True
    return False
