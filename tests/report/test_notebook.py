"""What notebooks show: escaped, small, and in whatever colours the page around it has."""

import jax
import jax.numpy as jnp
import pytest

import octavo
from tests.report.page import Page

W, X = jax.ShapeDtypeStruct((64, 16), jnp.float32), jax.ShapeDtypeStruct((8, 64), jnp.float32)


def plan(path=".*"):
    rules = [octavo.QtRule(module_path=path, weight_qtype="int8")]
    return octavo.plan(lambda params, x: x @ params["out"]["w"], rules, {"out": {"w": W}}, X, on_unmatched="ignore")


SHOWN = {
    "QArray": lambda: octavo.quantize(jnp.linspace(-1, 1, 64), "int4"),
    "Quantizer": lambda: octavo.Quantizer("int4", channelwise_axes=(1,), tiled_axes={0: 32}),
    "QtRule": lambda: octavo.QtRule(module_path="<b>&.*", weight_qtype="int8"),
    "QuantizationRule": lambda: octavo.QuantizationRule(module_path="<b>&.*", weight_qtype="int8"),
    "Plan": plan,
}


@pytest.mark.parametrize("name", SHOWN)
def test_display(name):
    source = SHOWN[name]()._repr_html_()
    page = Page(source)
    assert len(source) < 8_000
    assert "color" not in source.replace("currentColor", "")
    assert not {"script", "style", "b>&"} & {tag for tag, _ in page.tags}
    assert page.all("table")
    assert name == "Plan" or name in page.text
    if "Rule" in name:
        assert "'<b>&.*'" in page.text


def test_only_what_differs_from_the_defaults_is_shown():
    page = Page(SHOWN["Quantizer"]()._repr_html_())
    assert "tiled_axes ((0, 32),)" in page.text
    assert "scale_dtype" not in page.text


def test_a_plan_shows_what_it_notes_and_what_is_left_alone():
    page = Page(plan("nowhere")._repr_html_())
    assert "rule 0 matches nothing" in page.text
    assert "0 of 1 matmuls quantized" in page.text
    assert [attrs for attrs in page.all("tr") if attrs] == [{"style": "opacity:.65"}]
