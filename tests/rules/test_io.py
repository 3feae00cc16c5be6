"""Rules as JSON and YAML that people write."""

import itertools
import json
import sys
from pathlib import Path

import pytest

from octavo import Matmul, Operand
from octavo.calibration import Percentile
from octavo.numerics import Stochastic, get_format
from octavo.rules import (
    QtRule,
    QuantizationRule,
    as_rules,
    mixed_precision,
    recipe,
    recipes,
    rules_from_json,
    rules_from_yaml,
    rules_to_json,
    rules_to_yaml,
)

RICH = (
    QuantizationRule(module_path="head", skip=True, optional=True),
    QtRule(
        weight_qtype=get_format("int4").replace(preserve_max=True), act_qtype="int8", tile_size={0: 128, 1: 128},
        op_names=("dot_general", "gmm"), weight_calibration_method=Percentile(99.0),
        rounding=Stochastic(shared_axes=(0,)), sparsity=(2, 4),
        additional_qt_config={"drhs_grad_qtype": "int8", "tile_size": {0: 64, 1: 64}},
    ),
    QtRule(fwd=Matmul(None, Operand("mxfp4,floor")), dlhs=Matmul(Operand("int8", tile=0.25, calibration="rms,7"))),
)  # fmt: skip
WRITTEN = """
quantization:
  qwix:
    use_abstract_model: true
    rules:
      - module_path: '.*/attn/.*'
        weight_qtype: int8
      - type: QuantizationRule
        module_path: '.*'
        weight_qtype: fp8
        act_qtype: fp8
      - fwd: {lhs: int8, rhs: {qtype: int4, tile: 32}}
"""
READ = (
    QtRule(module_path=".*/attn/.*", weight_qtype="int8"),
    QuantizationRule(weight_qtype="float8_e4m3fn", act_qtype="float8_e4m3fn"),
    QtRule(fwd=Matmul(Operand("int8"), Operand("int4", tile=32))),
)


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_survives(name):
    rules = mixed_precision({".*/q": {"w_bits": 4}}) if name == "intmp" else recipe(name)
    assert rules_from_json(rules_to_json(rules)) == rules
    assert rules_from_yaml(rules_to_yaml(rules)) == rules


def test_everything_survives():
    assert rules_from_json(rules_to_json(RICH)) == RICH
    assert rules_from_yaml(rules_to_yaml(RICH)) == RICH


def test_only_what_differs_is_written():
    rules = [QtRule(weight_qtype="int8"), QuantizationRule(skip=True)]
    assert json.loads(rules_to_json(rules)) == [{"weight_qtype": "int8"}, {"type": "QuantizationRule", "skip": True}]
    assert rules_to_yaml(rules) == "- weight_qtype: int8\n- type: QuantizationRule\n  skip: true\n"
    written = json.loads(rules_to_json(recipe("te_nvfp4", exclude=None)))[-1]
    assert written["drhs"]["lhs"] == {"qtype": "nvfp4", "rounding": "stochastic"}
    assert written["drhs"]["rhs"] == {"qtype": "nvfp4"}
    assert (written["drhs"]["residual"], written["drhs"]["rotate"]) == ("original", 16)


def test_what_people_write():
    assert rules_from_yaml(WRITTEN) == READ


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"weight_qtpye": "int8"}, "rule 2 of 2: unknown field 'weight_qtpye'; did you mean 'weight_qtype'"),
        ({"weight_qtype": "int9"}, "^rule 2 of 2: weight_qtype='int9'"),
        ({"type": "QTRule"}, "rule 2 of 2: type='QTRule': did you mean 'QtRule'"),
        ({"fwd": {"left": "int8"}}, "rule 2 of 2: fwd: unknown field 'left'"),
        (
            {"fwd": {"rhs": {"qtype": "int8", "tiles": 4}}},
            "^rule 2 of 2: fwd.rhs: unknown field 'tiles'; did you mean 'tile'",
        ),
        ({"fwd": {"rhs": {"tile": 4}}}, "^rule 2 of 2: .*qtype"),
        ("int8", "rule 2 of 2 is 'int8'; a mapping"),
    ],
)
def test_errors_name_the_rule(entry, message):
    with pytest.raises(ValueError, match=message):
        rules_from_json(json.dumps([{"weight_qtype": "int8"}, entry]))


@pytest.mark.parametrize("text", ['"int8"', '{"weight_qtype": "int8"}', "null"])
def test_rules_are_a_list(text):
    with pytest.raises(ValueError, match="rules are a list of mappings"):
        rules_from_json(text)


def test_what_stands_for_rules(tmp_path):
    assert as_rules("int8") == recipe("int8")
    assert as_rules(READ[0]) == READ[:1]
    assert as_rules(list(READ)) == READ
    (tmp_path / "rules.json").write_text(rules_to_json(READ))
    (tmp_path / "rules.yml").write_text(WRITTEN)
    assert as_rules(tmp_path / "rules.json") == READ
    assert as_rules(str(tmp_path / "rules.yml")) == READ
    with pytest.raises(ValueError, match=r"rules are read from .json, .yml, .yaml files"):
        as_rules(Path("rules.toml"))
    with pytest.raises(ValueError, match="unknown recipe 'int7x'"):
        as_rules("int7x")
    with pytest.raises(ValueError, match=r"rule 2 of 2 is 'int8', .*did you mean recipe\('int8'\)"):
        as_rules([READ[0], "int8"])


def test_yaml_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ModuleNotFoundError, match="pip install pyyaml"):
        rules_to_yaml(READ)
    with pytest.raises(ModuleNotFoundError, match="pip install pyyaml"):
        rules_from_yaml("[]")


BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in itertools.pairwise("abcdefgh")
)
DAMAGED = {
    "twice in JSON": ('[{"weight_qtype": "int8", "weight_qtype": "int4"}]', "the key 'weight_qtype' is there twice"),
    "deep JSON": ("[" * 100_000, "nested too deeply"),
    "rules and qwix": ('{"rules": [], "qwix": []}', "given by 'qwix' alone; remove 'rules'"),
    "beside rules": ('{"rules": [], "rulez": []}', "given by 'rules' alone; remove 'rulez'"),
    "twice in YAML": ("- weight_qtype: int8\n  weight_qtype: int4", "'weight_qtype' is there twice, in line"),
    "a list as a key": ("- [a, b]: 1", "a key in line 1 is a sequence, not text"),
    "deep YAML": ("[" * 5000, "nested too deeply"),
    "a cycle": ("&a [*a]", "an alias in line 1 contains itself"),
    "a bomb": (BOMB, "its aliases expand to more than 100,000 values"),
    "no YAML": ("a: b: c", "mapping values are not allowed here"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_rules_say_what_is_wrong(name, tmp_path):
    text, match = DAMAGED[name]
    file = tmp_path / ("rules.json" if text[:2] in ("[{", "[[", '{"') and "YAML" not in name else "rules.yml")
    file.write_text(text)
    with pytest.raises(ValueError, match=match) as raised:
        as_rules(file)
    assert str(raised.value).startswith(f"{file}: ") or "alone" in match


def test_a_rules_file_that_is_not_utf8(tmp_path):
    (tmp_path / "rules.yml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"rules.yml: it is not UTF-8 text"):
        as_rules(tmp_path / "rules.yml")
