"""Histograms say what they show; heat maps put errors where they belong."""

import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo.qarray.histogram import histogram
from octavo.report.layers import HeatMap, layer_and_op, shortest, span_of
from octavo.report.page import environment
from tests.report.page import Page


def render(macro, *args):
    """A page with one macro of the templates."""
    blocks = environment().get_template("blocks.html").make_module({"headings": []})
    return Page(f"<main>{getattr(blocks, macro)(*args)}</main>")


def test_drawing_says_what_it_shows():
    x = np.linspace(-1, 1, 256, dtype=np.float32)
    one = histogram("<w>", x, octavo.quantize(jnp.asarray(x), "int4"), sqnr_db=21.5)
    page = render("worst_tensors", [one], "Two words.", "Worst tensors")
    assert "<w>" in page.text
    assert "21.5 dB, 0.00 % saturated" in page.text
    assert len(page.svgs) == 1
    marks = next(e for e in page.svgs[0].iter() if e.get("class") == "marks")
    assert marks.get("d").count("M") == sum(one["low"] <= v <= one["high"] for v in one["grid"])
    assert not render("worst_tensors", [], "", "Worst tensors").text


@pytest.mark.parametrize(
    ("path", "index", "wanted"),
    [
        ("decoder/layers_11/self_attention/query/kernel", (), ("11", "self_attention/query")),
        ("decoder/layers/mlp/wo/dot_general0", (2,), ("2", "mlp/wo")),
        ("decoder/dense_layers_0/mlp/wi_0/kernel", (), ("dense_layers 0", "mlp/wi_0")),
        ("transformer/h_3/attn/einsum1", (), ("3", "attn")),
        ("decoder/logits_dense/kernel", (), ("", "decoder/logits_dense")),
        ("mlp/dot_general0", (), ("", "mlp")),
    ],
)
def test_layer_and_op(path, index, wanted):
    assert layer_and_op(path, index) == wanted


def test_heat_map_orders_layers_and_colours_the_worst_most():
    cells = {(str(i), name): 40.0 - i for i in (10, 2, 1) for name in ("mlp/wo", "attention/out")}
    del cells["2", "mlp/wo"]
    page = render("heat_map", HeatMap("Errors", cells, span_of([cells])))
    assert page.text == "Errors layer wo out 1 39.0 39.0 2 - 38.0 10 30.0 30.0"
    strengths = [attrs["style"] for attrs in page.all("td") if "style" in attrs]
    assert strengths[0] == "--h:0%"
    assert strengths[-1] == "--h:90%"


def test_small_differences_stay_pale():
    assert span_of([{("0", "a"): 30.0, ("1", "a"): 30.5}]) == (24.5, 30.5)
    assert shortest(["layer/a/w", "layer/b/w"]) == {"layer/a/w": "a/w", "layer/b/w": "b/w"}
