"""Parsing the text of an HLO module: computations, their instructions, and the trip counts of loops.

XLA's Python interface exposes compiled programs only as text.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*|)\{")
_NAME = re.compile(r"(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ?([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\]")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Shape:
    """An HLO dtype and dimensions.

    >>> Shape("s4", (3, 5)).bytes
    8
    """

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """The bytes of all elements, packed if they have fewer than eight bits."""
        return -(-self.size * bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def bits(dtype: str) -> int:
    """The bits of an element of an HLO type; 0 for a type that is not an array, such as a token.

    >>> bits("bf16"), bits("f8e4m3fn"), bits("s4"), bits("pred"), bits("c64"), bits("token")
    (16, 8, 4, 8, 64, 0)
    """
    if dtype == "pred":
        return 8
    match = re.match(r"(?:bf|[fsuc])(\d+)", dtype)
    return int(match[1]) if match else 0


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation. `operands` are names, `name#2` being an element of a tuple; `attributes` is text."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool = False

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of the result, those of nested tuples in order."""
        return shapes_of(self.type)

    @property
    def is_tuple(self) -> bool:
        """Whether the result is a tuple."""
        return self.type.startswith("(")

    @property
    def elements(self) -> tuple[str, ...]:
        """The types of the elements of a tuple, as texts."""
        return tuple(_parts(self.type[1:-1]))

    @property
    def index(self) -> int:
        """The index of a get-tuple-element."""
        match = re.search(r"index=(\d+)", self.attributes)
        return int(match[1]) if match else 0

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations of a conditional."""
        keys = ("branch_computations", "true_computation", "false_computation")
        return tuple(name for key in keys for name in self.called(key))

    @property
    def op_name(self) -> str:
        """The name of the traced operation, or of an argument."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return match[1].replace("\\'", "'") if match else ""

    def called(self, key: str) -> tuple[str, ...]:
        """The computations that an attribute names."""
        match = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
        return tuple(re.findall(r"[\w.\-]+", match[1])) if match else ()


def shapes_of(text: str) -> tuple[Shape, ...]:
    """The arrays in the text of a type.

    >>> [str(shape) for shape in shapes_of("(f32[2,3]{1,0}, (u8[], s4[7]{0:E(4)}))")]
    ['f32[2,3]', 'u8[]', 's4[7]']
    """
    return tuple(Shape(dtype, tuple(int(n) for n in re.findall(r"\d+", dims))) for dtype, dims in _ARRAY.findall(text))


@dataclasses.dataclass(frozen=True)
class Module:
    """The computations of a program by name.

    Attributes:
        computations: The instructions of each computation.
        entry: The entry computation.
        aliases: The donated argument whose buffer a result reuses, both by number.
    """

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str
    aliases: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.entry not in self.computations:
            raise ValueError("the text has no ENTRY computation: is it what `compiled.as_text()` gave?")

    @functools.cached_property
    def _by_name(self) -> dict[str, dict[str, Instruction]]:
        return {name: {i.name: i for i in lines} for name, lines in self.computations.items()}

    def find(self, computation: str, operand: str) -> Instruction | None:
        """The instruction that an operand names, through tuples and their elements where possible."""
        name, _, index = operand.partition("#")
        found = self._by_name[computation].get(name)
        if found is not None and found.opcode == "get-tuple-element" and not index:
            return self.find(computation, f"{found.operands[0]}#{found.index}") or found
        if found is not None and index and found.opcode == "tuple":
            return self.find(computation, found.operands[int(index)])
        return found

    def shape(self, computation: str, operand: str) -> Shape | None:
        """The shape of an operand; None for a tuple."""
        name, _, index = operand.partition("#")
        found = self._by_name[computation].get(name)
        if found is None:
            return None
        shapes = shapes_of(found.elements[int(index)]) if index else found.shapes
        return shapes[0] if len(shapes) == 1 else None

    def root(self, computation: str) -> Instruction:
        """The instruction whose result a computation returns."""
        lines = self.computations[computation]
        return next((i for i in lines if i.is_root), lines[-1])

    def constant(self, computation: str, operand: str) -> int | None:
        """The value of a constant integer or boolean, through conversions and copies; None for anything else."""
        found = self.find(computation, operand)
        while found is not None and found.opcode in ("convert", "copy", "bitcast", "reshape"):
            found = self.find(computation, found.operands[0])
        if found is None or found.opcode != "constant":
            return None
        text = {"true": "1", "false": "0"}.get(found.operands[0], found.operands[0])
        return int(text) if re.fullmatch(r"-?\d+", text) else None

    def trip_count(self, computation: str, loop: Instruction) -> int | None:
        """The trip count of a `while`, as annotated by XLA or from its counter; None if unknown."""
        if match := _TRIPS.search(loop.attributes):
            return int(match[1])
        (condition,), (body,) = loop.called("condition"), loop.called("body")
        test = self.root(condition)
        if test.opcode != "compare" or len(test.operands) != 2:
            return None
        index, limit = self.tuple_index(condition, test.operands[0]), self.constant(condition, test.operands[1])
        direction = re.search(r"direction=(\w+)", test.attributes)
        if index is None or limit is None or direction is None or direction[1] not in ("LT", "LE"):
            return None
        start = self.constant(computation, f"{loop.operands[0]}#{index}")
        step = self._step(body, index)
        if start is None or not step:
            return None
        return max(0, -(-(limit + (direction[1] == "LE") - start) // step))

    def tuple_index(self, computation: str, operand: str) -> int | None:
        """The element of a computation's tuple argument that an operand is."""
        name, _, index = operand.partition("#")
        found = self._by_name[computation].get(name)
        if found is not None and found.opcode in ("copy", "convert", "bitcast"):
            return self.tuple_index(computation, found.operands[0])
        if found is not None and found.opcode == "get-tuple-element":
            return found.index
        return int(index) if index else None

    def _step(self, body: str, index: int) -> int | None:
        """What an iteration adds to an element of its argument."""
        root = self.root(body)
        added = self.find(body, root.operands[index]) if root.opcode == "tuple" else None
        while added is not None and added.opcode in ("copy", "bitcast"):
            added = self.find(body, added.operands[0])
        if added is None or added.opcode != "add":
            return None
        sides = [(self.tuple_index(body, a), self.constant(body, b)) for a, b in (added.operands, added.operands[::-1])]
        return next((step for place, step in sides if place == index and step is not None), None)


def parse(text: str) -> Module:
    """Parse the text of an HLO module, such as `compiled.as_text()`.

    >>> module = parse("ENTRY %main (x: f32[2]) -> f32[2] {\\n  ROOT %x = f32[2]{0} parameter(0)\\n}")
    >>> module.root("main").opcode
    'parameter'
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name, lines = "", "", list[Instruction]()
    for line in map(str.strip, text.splitlines()):
        if not name and line.endswith("{") and (match := _HEADER.fullmatch(line)):
            name, lines = match[2], []
            entry = name if match[1] else entry
        elif name and (line == "}" or line.startswith("}, execution_thread=")):
            computations[name], name = tuple(lines), ""
        elif name and (instruction := _instruction(line)):
            lines.append(instruction)
    return Module(computations, entry, _aliases(text[: text.find("\n")]))


def _aliases(head: str) -> dict[int, int]:
    """The `input_output_alias` in the first line of a module."""
    _, _, listed = head.partition("input_output_alias={ ")
    return {int(result or 0): int(argument) for result, argument in _ALIAS.findall(listed.partition(" }")[0])}


def _instruction(line: str) -> Instruction | None:
    line = _COMMENT.sub("", line)
    head = _NAME.match(line)
    if head is None:
        return None
    rest = line[head.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode = _OPCODE.match(rest, end)
    if opcode is None:
        return None
    close = _closing(rest, opcode.end() - 1)
    operands = tuple(word.rsplit(" ", 1)[-1].lstrip("%") for word in _parts(rest[opcode.end() : close]))
    return Instruction(head[2], rest[:end], opcode[1], operands, rest[close + 1 :], bool(head[1]))


def _closing(text: str, start: int) -> int:
    """The position of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return start + match.start()
    return len(text)


def _parts(text: str) -> Iterator[str]:
    """Split at the commas outside of brackets."""
    depth, begin = 0, 0
    for at, sign in enumerate(text + ","):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            if word := text[begin:at].strip():
                yield word
            begin = at + 1


_LIST = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=")
_MESH = re.compile(r"replica_groups=(?:@?\w+)?\[?mesh\[([^\]]*)\][^{]*\{([^}]*)\}")


def group_size(attributes: str) -> int:
    """The number of devices in each group of a collective, from its `replica_groups`.

    >>> group_size("replica_groups={{0,1},{2,3}}"), group_size("replica_groups=[2,4]<=[4,2]T(1,0)")
    (2, 4)
    >>> group_size("replica_groups=mesh['data'=2,'fsdp'=4] {'data','fsdp'}")
    8
    """
    if match := _LIST.search(attributes):
        return len(match[1].split(","))
    if match := _IOTA.search(attributes):
        return int(match[1].split(",")[-1])
    if match := _MESH.search(attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", match[1])}
        # A sub-axis is written 'axis':(1)4, four long.
        parts = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", match[2])
        return math.prod(int(part) if part else sizes[axis] for axis, part in parts)
    raise ValueError(f"no devices in {attributes.strip()[:200]!r}: a collective names them by replica_groups")
