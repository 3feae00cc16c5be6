"""Histograms of tensors count what the format does to their values; heat maps put errors where they belong."""

import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo.qarray import Quantizer
from octavo.report.heat import extent_of, heat_map, place, shortest
from octavo.report.histograms import histograms_section
from octavo.report.tensors import histogram
from tests.report.page import Page


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fmt", ["int8", "int4", "nf4", "float8_e4m3fn", "mxfp4", "nvfp4"])
def test_every_value_is_counted_once_and_the_grid_is_the_format(fmt):
    x = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    q = Quantizer(fmt).quantize(jnp.asarray(x))
    found = histogram("w", x, q)
    assert sum(found["counts"]) == found["sampled"] == x.size
    np.testing.assert_array_equal(found["grid"], q.qtype.grid())
    assert found["low"] <= min(found["grid"]) < max(found["grid"]) <= found["high"]


def test_packed_tiles_are_measured_by_their_own_scales():
    x = np.ones((64, 8), np.float32) * np.repeat([1.0, 100.0], 32)[:, None].astype(np.float32)
    q = octavo.quantize(jnp.asarray(x), "int4", channelwise_axes=(1,), tiled_axes={0: 32}).pack(0)
    found = histogram("w", x, q)
    # Each value is the largest of its tile, so all of them are at the end of the format.
    assert found["counts"][-1] == x.size
    assert found["clipped"] == 0
    assert found["granularity"] == "per channel of axis 1, tiles of 32 along axis 0"


def test_what_is_clipped_and_what_becomes_zero():
    x = np.asarray([0.0, 1e-4, 1.0, 4.0, -4.0], np.float32)
    found = histogram("w", x, octavo.quantize(jnp.asarray(x), "int8", calibration_method="fixed,-2,2"))
    assert found["clipped"] == pytest.approx(2 / 4), "of the values other than zero"
    assert found["zeroed"] == pytest.approx(1 / 4)


def test_zero_points_count():
    x = np.linspace(1.0, 3.0, 50, dtype=np.float32)
    found = histogram("w", x, octavo.quantize(jnp.asarray(x), "int8", calibration_method="minmax"))
    assert found["counts"][0] == 0 or found["low"] < 0
    assert found["zeroed"] == 0
    assert sum(count > 0 for count in found["counts"]) > 20, "values spread over the range"


def test_large_tensors_are_sampled():
    x = np.random.default_rng(1).normal(size=(1024, 256)).astype(np.float32)
    found = histogram("w", x, octavo.quantize(jnp.asarray(x), "int8"))
    assert found["sampled"] == sum(found["counts"]) == 1 << 17


def test_drawing_says_what_it_shows():
    x = np.linspace(-1, 1, 256, dtype=np.float32)
    one = histogram("<w>", x, octavo.quantize(jnp.asarray(x), "int4"), sqnr_db=21.5)
    page = Page(f"<main>{histograms_section([one], about='Two words.')}</main>")
    assert "<w>" in page.text
    assert "21.5 dB, 0.00 % beyond the ends" in page.text
    assert len(page.svgs) == 1
    marks = next(e for e in page.svgs[0].iter() if e.get("class") == "marks")
    assert marks.get("d").count("M") == sum(one["low"] <= v <= one["high"] for v in one["grid"])
    assert histograms_section([], about="") == ""


@pytest.mark.parametrize(
    ("path", "turn", "wanted"),
    [
        ("decoder/layers_11/self_attention/query/kernel", (), ("11", "self_attention/query")),
        ("decoder/layers/mlp/wo/dot_general0", (2,), ("2", "mlp/wo")),
        ("decoder/dense_layers_0/mlp/wi_0/kernel", (), ("dense_layers 0", "mlp/wi_0")),
        ("transformer/h_3/attn/einsum1", (), ("3", "attn")),
        ("decoder/logits_dense/kernel", (), ("", "decoder/logits_dense")),
        ("mlp/dot_general0", (), ("", "mlp")),
    ],
)
def test_places(path, turn, wanted):
    assert place(path, turn) == wanted


def test_heat_map_orders_layers_and_colours_the_worst_most():
    cells = {(str(i), name): 40.0 - i for i in (10, 2, 1) for name in ("mlp/wo", "attention/out")}
    del cells["2", "mlp/wo"]
    page = Page(f"<main>{heat_map('Errors', cells)}</main>")
    assert page.text == "Errors layer wo out 1 39.0 39.0 2 - 38.0 10 30.0 30.0"
    strengths = [attrs["style"] for attrs in page.all("td") if "style" in attrs]
    assert strengths[0] == "--h:0%"
    assert strengths[-1] == "--h:90%"


def test_small_differences_stay_pale():
    low, high = extent_of([{("0", "a"): 30.0, ("1", "a"): 30.5}])
    assert (low, high) == (24.5, 30.5)
    assert shortest(["layer/a/w", "layer/b/w"]) == {"layer/a/w": "a/w", "layer/b/w": "b/w"}
