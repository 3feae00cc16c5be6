"""Which rule is for which operation."""

import random
import re
import time

import pytest

from octavo.rules import QuantizationRule, find, nearest, path_match

ROUTER = QuantizationRule(module_path=".*/router", skip=True)
MLP = QuantizationRule(module_path=".*/mlp/.*", weight_qtype="int4")
REST = QuantizationRule(weight_qtype="int8")
SCORES = QuantizationRule(act_qtype="int8", scope="activations", op_names=("einsum",))
SITES = [
    ("layers/router", "dot_general", True),
    ("layers/mlp/up", "dot_general", True),
    ("layers/attention/query", "dot_general", True),
    ("layers/attention", "einsum", False),
]


def test_the_first_match_wins():
    rules = [ROUTER, MLP, SCORES, REST]
    assert [find(rules, path, op, weights=w) for path, op, w in SITES] == [ROUTER, MLP, REST, SCORES]
    assert find([ROUTER, MLP], "head", "dot_general", weights=True) is None


PATHS = [
    "decoder/layers/attention/query",
    "decoder/layers/attention/key",
    "decoder/layers/mlp/wi",
    "decoder/norm",
    "head",
]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r".*/atention/.*", PATHS[:2]),
        (r"decoder/layer/mlp/.*", PATHS[2:3]),
        (r".*attenton/(query)", PATHS[:1]),
        (r"Head", PATHS[4:]),
        (r".*", []),
        (r"zzzz\d+", []),
    ],
)
def test_paths_that_were_probably_meant(pattern, expected):
    found = nearest(pattern, PATHS)
    assert len(found) <= 3
    assert list(found[: len(expected)]) == expected
    assert bool(found) == bool(expected)


def random_pattern(rng, depth):
    kind = rng.randrange(8)
    inner = lambda: random_pattern(rng, depth - 1)  # noqa: E731
    if depth == 0 or kind < 2:
        return rng.choice(["a", "b", ".", r"\d", "[ab]", "[^a]", "/", r"\w", "1", "$", "^", r"\b"])
    if kind == 2:
        return inner() + inner()
    if kind == 3:
        return f"({inner()}|{inner()})"
    if kind < 6:
        return f"(?:{inner()})" + rng.choice(["*", "+", "?", "{2}", "{1,2}", "{2,}", "*?", "+?"])
    return f"({rng.choice(['?=', '?!'])}{inner()}){inner()}"


def test_patterns_with_nested_repetitions_match_what_re_matches():
    rng, matched = random.Random(0), 0
    for _ in range(1500):
        pattern = "(?i)" * rng.randrange(2) + random_pattern(rng, 4)
        for path in ("", "a", "aB", "a/b1", "aab", "1/ab/"):
            expected = re.fullmatch(pattern, path) is not None
            tree = path_match.parser.parse(pattern)
            ends = path_match._ends(tree, {0}, path, bool(tree.state.flags & re.IGNORECASE))
            assert (len(path) in ends) == expected, (pattern, path)
            matched += expected
    assert matched > 500


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(.*/)*x", ".*" * 12 + "x", "((a{1,30}){1,30}){1,30}b"])
def test_no_pattern_takes_forever(pattern):
    rule = QuantizationRule(module_path=pattern, weight_qtype="int8")
    start = time.process_time()
    assert not rule.matches("a" * 60 + "/c", "dot_general", weights=True)
    assert time.process_time() - start < 2


def test_a_pattern_that_only_backtracking_matches_raises():
    with pytest.raises(ValueError, match="a regular expression with a backreference and repetitions within others"):
        QuantizationRule(module_path=r"((a+)+)\1", weight_qtype="int8")
    assert QuantizationRule(module_path=r"(.*)/\1", weight_qtype="int8").matches("a/a", "dot_general", weights=True)
