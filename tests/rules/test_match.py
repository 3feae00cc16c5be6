"""Which rule is for which operation."""

import pytest

from octavo.rules import QuantizationRule, find, nearest

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
