"""Grammars of JSON Schemas, of which a subset is supported: see docs/http.md."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from octavo.serve.json_grammar import Array, Grammar, Integer, Literal, Map, Node, Number, Object, String, Union

_ANNOTATIONS = frozenset(
    ("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "deprecated")
)
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_KEYWORDS = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength"),
    "integer": _BOUNDS,
    "number": (),
    "boolean": (),
    "null": (),
}
"""The types, and the keywords that are for them."""
_ALONE = ("$ref", "anyOf", "const", "enum")
"""Keywords that are used without others than `type`."""
SUPPORTED = (*_ALONE, "type", *(keyword for some in _KEYWORDS.values() for keyword in some))

_MAX_NODES, _MAX_LITERALS, _MAX_NESTING = 500, 1000, 64


class SchemaError(ValueError):
    """A schema that is wrong, or is not supported."""


def json_object(*, raw: bool = True) -> Grammar:
    """The grammar of all JSON objects."""
    compiler = _Compiler({}, raw)
    return Grammar(compiler.nodes, compiler.any_object)


def compile_schema(schema: Any, *, raw: bool = True) -> Grammar:
    """The grammar of the JSON texts that a schema describes.

    It may have fewer texts than the schema: properties come in the order of the schema, and no others where it names
    some.

    Args:
        schema: A JSON Schema, as parsed JSON.
        raw: Whether texts of the schema with characters beyond ASCII are written as these, else as escapes.

    Raises:
        SchemaError: A keyword is not supported, or has a wrong value.

    >>> grammar = compile_schema({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}})
    >>> [bool(grammar.read(grammar.start, text)) for text in (b"[3, 4]", b"[3, 14", b"[-")]
    [True, False, False]
    >>> compile_schema({"type": "string", "pattern": "a+"})
    Traceback (most recent call last):
    octavo.serve.json_schema.SchemaError: the keyword 'pattern' at # is not supported
    """
    compiler = _Compiler(schema, raw)
    try:
        return Grammar(compiler.nodes, compiler.node(schema, "#"))
    except SchemaError:
        raise
    except ValueError as error:
        raise SchemaError(f"the schema describes {error}") from None


def compile_tool_calls(tools: Mapping[str, Any], *, raw: bool = True) -> Grammar:
    """The grammar of a call of one of some tools, as `{"name": ..., "arguments": ...}`.

    Args:
        tools: By name, the schema of a tool's arguments.
        raw: As of `compile_schema`.

    Raises:
        SchemaError: A schema is wrong or not supported.
    """
    compiler = _Compiler({}, raw)
    options = []
    for name, parameters in tools.items():
        # References are within the schema of one tool.
        compiler.schema, compiler.references = parameters, {}
        values = (compiler.literal(name, f"tool {name}"), compiler.node(parameters, f"#, arguments of {name}"))
        options.append(compiler.add(Object((b'"name"', b'"arguments"'), values, (True, True))))
    try:
        return Grammar(compiler.nodes, compiler.add(Union(tuple(options))))
    except ValueError as error:
        raise SchemaError(f"the tools describe {error}") from None


class _Compiler:
    def __init__(self, schema: Any, raw: bool):
        self.schema, self.raw = schema, raw
        self.nodes: list[Node] = []
        self.references: dict[str, int] = {}
        self._num_literals = self._nesting = 0
        self.string = self.add(String())
        self.any = self.add(Union(()))
        self.any_object = self.add(Map(self.string, self.any))
        simple = (self.add(Number()), self.add(Literal((b"true", b"false", b"null"))))
        self.nodes[self.any] = Union((self.any_object, self.add(Array(self.any)), self.string, *simple))

    def add(self, node: Node) -> int:
        """Add a node, and return its index."""
        if len(self.nodes) >= _MAX_NODES:
            raise SchemaError(f"the schema is too large: it has more than {_MAX_NODES} parts")
        self.nodes.append(node)
        return len(self.nodes) - 1

    def literal(self, value: Any, path: str) -> int:
        """The node of one value."""
        return self.add(Literal((self._text(value, path),)))

    def node(self, schema: Any, path: str) -> int:
        """The node of a schema at a path."""
        if self._nesting == _MAX_NESTING:
            raise SchemaError(f"the schema is nested more than {_MAX_NESTING} levels deep")
        self._nesting += 1
        try:
            return self._node(schema, path)
        finally:
            self._nesting -= 1

    def _node(self, schema: Any, path: str) -> int:
        if schema is True:
            return self.any
        if not isinstance(schema, dict):
            raise SchemaError(f"the schema at {path} is an object, or true")
        used = [key for key in schema if key not in _ANNOTATIONS]
        for key in used:
            if key not in SUPPORTED:
                raise SchemaError(f"the keyword {key[:60]!r} at {path} is not supported")
        alone = next((key for key in _ALONE if key in schema), None)
        if alone is not None:
            if others := [key for key in used if key not in (alone, "type")]:
                raise SchemaError(f"the keyword {others[0]!r} at {path} is not supported next to {alone!r}")
            if "type" in schema and alone in ("$ref", "anyOf"):
                raise SchemaError(f"the keyword 'type' at {path} is not supported next to {alone!r}")
            make = {"$ref": self._reference, "anyOf": self._any_of, "const": self._literal, "enum": self._literal}
            return make[alone](schema, path)
        types = self._types(schema, path)
        if not types:
            if used:
                raise SchemaError(f"the schema at {path} has {used[0]!r}, but no 'type'")
            return self.any
        options = [self._of_type(name, schema, path) for name in types]
        return options[0] if len(options) == 1 else self.add(Union(tuple(options)))

    def _types(self, schema: Mapping[str, Any], path: str) -> list[str]:
        given = schema.get("type")
        if given is None:
            # As most schemas mean it; the values are also those of the schema.
            return [name for name in ("object", "array") if any(key in schema for key in _KEYWORDS[name])][:1]
        names = given if isinstance(given, list) else [given]
        for name in names:
            if not isinstance(name, str) or name not in _KEYWORDS:
                raise SchemaError(f"the keyword 'type' at {path} is one of {', '.join(_KEYWORDS)}, or a list of them")
        if not names:
            raise SchemaError(f"the keyword 'type' at {path} is an empty list")
        return names

    def _of_type(self, name: str, schema: Mapping[str, Any], path: str) -> int:
        if name == "number" and (bounds := [key for key in _BOUNDS if key in schema]):
            raise SchemaError(f"the keyword {bounds[0]!r} at {path} is supported for integers only")
        make: dict[str, Callable[[Mapping[str, Any], str], int]] = {
            "object": self._object,
            "array": self._array,
            "integer": self._integer,
            "string": lambda schema, path: self.add(String(*_range(schema, path, "minLength", "maxLength"))),
            "number": lambda schema, path: self.add(Number()),
            "boolean": lambda schema, path: self.add(Literal((b"true", b"false"))),
            "null": lambda schema, path: self.add(Literal((b"null",))),
        }
        return make[name](schema, path)

    def _reference(self, schema: Mapping[str, Any], path: str) -> int:
        pointer = schema["$ref"]
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise SchemaError(f"the keyword '$ref' at {path} is a path within the schema, such as '#/$defs/name'")
        if pointer not in self.references:
            found: Any = self.schema
            for part in pointer.split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                if not isinstance(found, dict) or part not in found:
                    raise SchemaError(f"the keyword '$ref' at {path}: there is no {pointer[:100]!r} in the schema")
                found = found[part]
            # Before its content, which may refer to it.
            self.references[pointer] = index = self.add(Union(()))
            self.nodes[index] = Union((self.node(found, pointer),))
        return self.references[pointer]

    def _any_of(self, schema: Mapping[str, Any], path: str) -> int:
        options = schema["anyOf"]
        if not isinstance(options, list) or not options:
            raise SchemaError(f"the keyword 'anyOf' at {path} is a list of schemas")
        return self.add(Union(tuple(self.node(one, f"{path}/anyOf/{i}") for i, one in enumerate(options))))

    def _literal(self, schema: Mapping[str, Any], path: str) -> int:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if not isinstance(values, list):
            raise SchemaError(f"the keyword 'enum' at {path} is a list of values")
        if "type" in schema:
            types = self._types(schema, path)
            values = [value for value in values if any(_is_of_type(name, value) for name in types)]
        if not values:
            raise SchemaError(f"the schema at {path} has no value: its enum is empty, or of another type")
        self._num_literals += len(values)
        if self._num_literals > _MAX_LITERALS:
            raise SchemaError(f"the schema is too large: it has more than {_MAX_LITERALS} values in enums")
        return self.add(Literal(tuple(dict.fromkeys(self._text(value, path) for value in values))))

    def _text(self, value: Any, path: str) -> bytes:
        try:
            text = json.dumps(value, ensure_ascii=not self.raw, allow_nan=False, separators=(",", ":"))
            return text.encode()
        except ValueError:  # infinity, or half of a surrogate pair
            raise SchemaError(f"the schema at {path} has a value that is no JSON in UTF-8") from None

    def _object(self, schema: Mapping[str, Any], path: str) -> int:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", True)
        if not isinstance(properties, dict):
            raise SchemaError(f"the keyword 'properties' at {path} is an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaError(f"the keyword 'required' at {path} is a list of strings")
        missing = [name for name in dict.fromkeys(required) if name not in properties]
        if missing and others is False:
            raise SchemaError(f"the keyword 'required' at {path} has {missing[0][:60]!r}, which 'properties' has not")
        if not properties and not missing and others is not False:
            return self.add(Map(self.string, self.node(others, f"{path}/additionalProperties")))
        values = {name: self.node(one, f"{path}/properties/{name[:60]}") for name, one in properties.items()}
        values |= {name: self.node(others, f"{path}/additionalProperties") for name in missing}
        keys = tuple(self._text(name, path) for name in values)
        return self.add(Object(keys, tuple(values.values()), tuple(name in required for name in values)))

    def _array(self, schema: Mapping[str, Any], path: str) -> int:
        least, most = _range(schema, path, "minItems", "maxItems")
        return self.add(Array(self.node(schema.get("items", True), f"{path}/items"), least, most))

    def _integer(self, schema: Mapping[str, Any], path: str) -> int:
        for key in _BOUNDS:
            value = schema.get(key, 0)
            is_number = type(value) is int or (isinstance(value, float) and math.isfinite(value))
            if not is_number:
                raise SchemaError(f"the keyword {key!r} at {path} is a number")
        least, most = Integer().least, Integer().most
        if "minimum" in schema:
            least = max(least, math.ceil(schema["minimum"]))
        if "exclusiveMinimum" in schema:
            least = max(least, math.floor(schema["exclusiveMinimum"]) + 1)
        if "maximum" in schema:
            most = min(most, math.floor(schema["maximum"]))
        if "exclusiveMaximum" in schema:
            most = min(most, math.ceil(schema["exclusiveMaximum"]) - 1)
        if least > most:
            raise SchemaError(f"the schema at {path} has no value: no integer is between its bounds")
        return self.add(Integer(least, most))


def _range(schema: Mapping[str, Any], path: str, low: str, high: str) -> tuple[int, int | None]:
    for key in (low, high):
        if key in schema and (type(schema[key]) is not int or schema[key] < 0):
            raise SchemaError(f"the keyword {key!r} at {path} is a whole number of at least 0")
    least, most = schema.get(low, 0), schema.get(high)
    if most is not None and least > most:
        raise SchemaError(f"the keyword {low!r} at {path} is above {high!r}")
    return least, most


def _is_of_type(name: str, value: Any) -> bool:
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return name == "number" or (name == "integer" and (isinstance(value, int) or value.is_integer()))
    kinds: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return kinds[type(value)] == name
