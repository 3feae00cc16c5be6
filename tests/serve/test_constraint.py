"""Constrained decoding: whatever is sampled under the masks is JSON of the schema, and all of its texts can be."""

import json

import numpy as np
import pytest

from octavo.data.subwords import SubwordTokenizer, train_bpe
from octavo.serve import Constraint, Vocabulary
from octavo.serve.json_grammar import Grammar
from octavo.serve.json_schema import SchemaError, compile_schema, compile_tool_calls

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["äö", "b", 3, None, 31]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {
        "value": {"type": ["number", "null"]},
        "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    },
    "required": ["value"],
}
EITHER = {
    "$defs": {"a": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/a"}]}, "maxItems": 2}},
    "anyOf": [{"const": {"x": [1, "y"]}}, {"$ref": "#/$defs/a"}, {"type": "string", "maxLength": 3}],
}
MAP = {"type": "object", "additionalProperties": {"type": "integer", "exclusiveMinimum": -20, "exclusiveMaximum": -8}}


def is_person(x):
    assert list(x) == [key for key in PERSON["properties"] if key in x]
    return (
        1 <= len(x["name"]) <= 6
        and 0 <= x.get("age", 0) <= 130
        and x.get("kind", 3) in PERSON["properties"]["kind"]["enum"]
        and 1 <= len(x["tags"]) <= 3
        and all(type(tag) is bool for tag in x["tags"])
    )


def is_tree(x):
    number = type(x["value"]) in (int, float, type(None)) and abs(x["value"] or 0) < float("inf")
    return number and set(x) <= {"value", "children"} and all(map(is_tree, x.get("children", [])))


def is_either(x):
    if isinstance(x, list):
        return len(x) <= 2 and all(type(one) is int or (isinstance(one, list) and is_either(one)) for one in x)
    return x == {"x": [1, "y"]} or (isinstance(x, str) and len(x) <= 3)


def is_map(x):
    return isinstance(x, dict) and all(type(one) is int and -20 < one < -8 for one in x.values())


SCHEMAS = {
    "person": (PERSON, is_person, [{"name": "Ü\n", "age": 1, "tags": [True]},{"name": "x", "kind": 3, "tags": [True]}]),
    "tree": (TREE, is_tree, [{"value": -1.5e-7, "children": [{"value": None}, {"value": 0}]}]),
    "either": (EITHER, is_either, [[1, [-23, []]], "abc", {"x": [1, "y"]}, []]),
    "map": (MAP, is_map, [{}, {"a\"b": -19, "": -9}]),
    "object": (None, lambda x: isinstance(x, dict), [{"a": [1, {"b": "\u2028é\\"}, 1e5, True, None]}, {}]),
}  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary():
    """Single bytes, and the pieces of a trained BPE that cross the borders of strings and numbers."""
    texts = [json.dumps(x, indent=i) for _, _, many in SCHEMAS.values() for x in many for i in (None, 1)]
    tokenizer = SubwordTokenizer(train_bpe([*texts * 4, '{"a": "b"}, é水' * 9], 400), eos_ids=(0,))
    return Vocabulary(tokenizer.token_bytes(), size=tokenizer.vocab_size + 5, eos_ids=(0,))


def constraint_of(schema, vocabulary):
    return Constraint.json(vocabulary) if schema is None else Constraint.of_schema(schema, vocabulary)


def allowed(matcher, vocabulary):
    return np.flatnonzero(np.unpackbits(matcher.mask(), bitorder="little")[: vocabulary.size]).tolist()


@pytest.mark.parametrize("name", list(SCHEMAS))
def test_all_that_is_sampled_is_of_the_schema(name, vocabulary):
    schema, is_valid, _ = SCHEMAS[name]
    constraint = constraint_of(schema, vocabulary)
    texts = set()
    for seed in range(12):
        rng, matcher, text = np.random.default_rng(seed), constraint.start(), b""
        for step in range(200):
            tokens = allowed(matcher, vocabulary)
            assert tokens
            pieces = {vocabulary.pieces[token]: token for token in tokens}
            # In the end, what closes.
            closing = [pieces[p] for p in (b'"', b"}", b"]", None) if p in pieces and step > 8 + 2 * seed]
            token = closing[0] if closing else int(rng.choice(tokens))
            if token == 0:
                break
            assert matcher.push(token)
            text += vocabulary.pieces[token]
            if matcher.is_finished:
                break
        assert is_valid(json.loads(text.decode())), text
        texts.add(text)
    assert len(texts) > 6
    if name == "person":
        assert any(len(vocabulary.pieces[t]) > 1 for t in allowed(constraint.start(), vocabulary))


@pytest.mark.parametrize("name", list(SCHEMAS))
def test_all_texts_of_the_schema_can_be_sampled(name, vocabulary):
    schema, is_valid, values = SCHEMAS[name]
    constraint = constraint_of(schema, vocabulary)
    longest = sorted((p for p in vocabulary.pieces if p), key=len, reverse=True)
    for value in values:
        assert is_valid(value)
        for indent in (None, 2):
            text = json.dumps(value, indent=indent, ensure_ascii=False).encode()
            if name == "either" and isinstance(value, dict):
                text = b'{"x":[1,"y"]}'  # values of an enum are written in one way
            for pieces in (longest, [p for p in longest if len(p) == 1]):
                matcher, rest = constraint.start(), text
                while rest:
                    piece = next(p for p in pieces if rest.startswith(p))
                    assert vocabulary.pieces.index(piece) in allowed(matcher, vocabulary)
                    assert matcher.push(vocabulary.pieces.index(piece))
                    rest = rest.removeprefix(piece)
                assert matcher.is_finished or 0 in allowed(matcher, vocabulary)


def test_masks_are_those_of_trying_each_token(vocabulary):
    """The tables of strings and the walk over sorted tokens find what reading every token does."""
    constraint = Constraint.of_schema(PERSON, vocabulary)
    rng, matcher, grammar = np.random.default_rng(3), constraint.start(), constraint.grammar
    for _ in range(25):
        tokens = allowed(matcher, vocabulary)
        state = matcher._state
        tried = [i for i, p in enumerate(vocabulary.pieces) if p is not None and grammar.read(state, p)]
        assert tokens == tried
        matcher.push(int(rng.choice(tokens)))
        if matcher.is_finished:
            matcher = constraint.start()


def test_strings_hold_utf8_and_whole_escapes():
    grammar = compile_schema({"type": "string"})
    for text in ('"é水🤗"', r'"\n\"\\\u00e4\ud7ff"', '"\x7f"'):
        assert grammar.is_complete(grammar.read(grammar.start, text.encode()))
    wrong = (
        b'"\x80',
        b'"\xc0\xaf',
        b'"\xed\xa0',
        b'"\xf4\x90',
        b'"\xe0\x80',
        b'"\n',
        b'"\\x',
        b'"\\ud8',
        b'"\\u00g',
        b'"\xff',
    )
    for text in wrong:
        assert grammar.read(grammar.start, text) == ()
    grammar = compile_schema({"type": "number"})
    for text, is_number in ((b"-0.5e+10", True), (b"01", False), (b"-", False), (b"1e999", False), (b"+1", False)):
        state = grammar.read(grammar.start, text)
        assert grammar.is_complete(state) == is_number


def test_a_vocabulary_without_all_bytes():
    letters = [chr(i).encode() for i in range(0x20, 0x7F)]
    vocabulary = Vocabulary([*letters, "é".encode(), b"\xc3"], size=200)
    matcher = Constraint.of_schema({"const": "ä"}, vocabulary).start()
    for byte in rb'"\u00e4"':
        assert matcher.push(byte - 0x20)
    assert matcher.is_finished
    matcher = Constraint.json(vocabulary).start()
    for byte in b'{"':
        matcher.push(byte - 0x20)
    assert [95 in allowed(matcher, vocabulary), 96 in allowed(matcher, vocabulary)] == [True, False]
    with pytest.raises(ValueError, match="it has no token for '~' alone"):
        Vocabulary(letters[:-1], size=200)


def test_nothing_nests_for_ever():
    grammar = compile_schema(TREE)
    state, depth = grammar.start, 0
    while deeper := grammar.read(state, b'{"value":1,"children":['):
        state, depth = deeper, depth + 1
    assert depth == 32
    # What is open can be closed: the innermost list is empty.
    assert grammar.is_complete(grammar.read(state, b"]}" * depth))
    # Two stacks for each bracket, but not two to the power of them.
    twice = compile_schema(
        {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "array", "items": {"$ref": "#"}}]}
    )
    assert len(twice.read(twice.start, b"[" * 30)) <= 32
    assert compile_schema({"anyOf": [{"type": "null"}, {"$ref": "#"}]}).nodes


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "pattern": "a"}, "the keyword 'pattern' at # is not supported"),
        ({"type": "array", "items": {"oneOf": []}}, "the keyword 'oneOf' at #/items is not supported"),
        ({"type": "number", "minimum": 3}, "the keyword 'minimum' at # is supported for integers only"),
        ({"properties": {"a": {"type": "date"}}}, "'type' at #/properties/a is one of object, array, string"),
        ({"enum": ["a"], "minLength": 3}, "'minLength' at # is not supported next to 'enum'"),
        ({"enum": ["a"], "type": "integer"}, "has no value: its enum is empty, or of another type"),
        ({"minLength": 3}, "the schema at # has 'minLength', but no 'type'"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no integer is between its bounds"),
        ({"type": "integer", "minimum": "3"}, "the keyword 'minimum' at # is a number"),
        ({"type": "string", "minLength": 4, "maxLength": 3}, "'minLength' at # is above 'maxLength'"),
        ({"type": "array", "maxItems": -1}, "'maxItems' at # is a whole number of at least 0"),
        ({"$ref": "#/$defs/a"}, "there is no '#/$defs/a' in the schema"),
        ({"$ref": "http://a"}, "'$ref' at # is a path within the schema"),
        ({"$ref": "#"}, "no value is nested less than 64 levels deep"),
        ({"required": ["a"], "properties": {"a": {"$ref": "#"}}}, "no value is nested less than 64"),
        ({"required": ["a"], "additionalProperties": False}, "has 'a', which 'properties' has not"),
        ({"enum": [float("inf")]}, "a value that is no JSON in UTF-8"),
        ({"enum": ["\ud800"]}, "a value that is no JSON in UTF-8"),
        ({"enum": list(range(2000))}, "more than 1000 values in enums"),
        ({"anyOf": [{"type": "string"}] * 600}, "more than 500 parts"),
        ({"$defs": {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(99)}, "$ref": "#/$defs/0"}, "than 64 levels"),
        (False, "the schema at # is an object, or true"),
        (3, "the schema at # is an object, or true"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(schema, text):
    with pytest.raises(SchemaError) as caught:
        compile_schema(schema)
    assert text in str(caught.value)


def test_calls_of_tools():
    grammar = compile_tool_calls({"f": {"$ref": "#/$defs/a", "$defs": {"a": MAP}}, "g": {"properties": {}}})
    assert isinstance(grammar, Grammar)
    for text, is_call in (
        (b'{"name": "f", "arguments": {"x": -9}}', True),
        (b'{"name":"g","arguments":{}}', True),
        (b'{"name": "f", "arguments": {"x": 9', False),
        (b'{"name": "h"', False),
    ):
        assert bool(grammar.read(grammar.start, text)) == is_call
