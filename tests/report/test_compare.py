"""The page about a comparison shows each recipe once, with what the dictionary says of it."""

import itertools
import math
import re

import pytest

from octavo.report import compare_report
from tests.report import samples
from tests.report.page import read

NAMES = ("float", "int8", "fp8_full")


def comparison(names=NAMES, seeds=(0, 1), steps=30):
    runs, table = [], []
    for number, name in enumerate(names):
        for seed in seeds:
            loss = [[i, (2 + 8 / (1 + i)) * (1 + 0.01 * number) + 0.1 * seed] for i in range(steps)]
            runs.append(
                {
                    "name": name,
                    "seed": seed,
                    "loss": loss,
                    "eval_loss": [[i + 1, y] for i, y in loss[9::10]],
                    "step_seconds": [0.1 + 0.1 * number] * steps,
                    "final_loss": loss[-1][1],
                }
            )
        low, high = (math.nan, math.nan) if name == "float" else (0.01 * number - 0.002, 0.01 * number + 0.003)
        row = {"name": name, "loss": 2.25, "gap": 0.01 * number, "gap_low": low, "gap_high": high}
        table.append(row | {"step_ratio": 1.0 + number, "memory_ratio": 0.5, "share": 0.97})
    return {
        "steps": steps,
        "seeds": list(seeds),
        "runs": runs,
        "table": table,
        "config": {"steps": steps},
        "versions": {},
    }


def test_whole_page(tmp_path):
    path = compare_report(comparison(), tmp_path / "deep" / "compare.html")
    page = read(path)
    assert (
        "2 recipes and float trained the same model on the same batches for 30 steps, with each of 2 seeds."
        in page.text
    )
    assert "Of the recipes int8 has the lowest final loss, +1.00 % from float." in page.text
    assert "int8 2.2500 +1.00 % +0.80 to +1.30 % 2.00 x 0.50 x 97.0 %" in page.text
    assert "float 2.2500 - - 1.00 x 0.50 x 97.0 %" in page.text
    assert len(page.svgs) == 5
    whiskers = page.svgs[0]
    assert len([e for e in whiskers.iter() if e.tag.endswith("circle")]) == 2
    bands = [a for a in page.all("path") if a["class"].startswith("band")]
    assert len(bands) == 2 * 9, "each of three curves over two seeds, in three charts, wide and narrow"
    assert [b["class"] for b in bands[:3]] == ["band c0", "band c1", "band c2"], "float is grey"


def test_time_is_the_sum_of_the_steps(tmp_path):
    page = read(compare_report(comparison(seeds=(0,)), tmp_path / "c.html"))
    chart = next(svg for svg in page.svgs if "Loss by time" in svg[0].text)
    ends = {}
    for e in chart.iter():
        if e.get("class", "").startswith("line"):
            ends[e.get("class")] = float(re.findall(r"([\d.]+) [\d.]+$", e.get("d"))[0])
    start = 58  # the left edge, at the end of float's first step
    float_, int8, fp8 = (ends[f"line c{i}"] - start for i in range(3))
    # Steps of 0.1, 0.2 and 0.3 seconds: after 30 of them 3, 6 and 9 seconds, of which 0.1 are before the edge.
    assert (float_ / fp8, int8 / fp8) == (pytest.approx(2.9 / 8.9, abs=2e-3), pytest.approx(5.9 / 8.9, abs=2e-3))


def test_one_seed_and_unknown_numbers(tmp_path):
    given = comparison(("float", "int8"), seeds=(0,))
    given["table"][1] |= {"gap_low": math.nan, "gap_high": None, "memory_ratio": math.nan, "share": None}
    for run in given["runs"]:
        run |= {"eval_loss": [], "step_seconds": []}
    del given["config"], given["versions"]
    page = read(compare_report(given, tmp_path / "c.html"))
    assert "int8 and float trained the same model on the same batches for 30 steps, once." in page.text
    assert "The final loss of int8 is +1.00 % from float." in page.text
    assert "int8 2.2500 +1.00 % - 2.00 x - -" in page.text
    assert "95 % intervals" not in page.text
    assert "The runs have no loss on held-out text." in page.text
    assert "The runs have no times of their steps." in page.text
    assert not [a for a in page.all("path") if a["class"].startswith("band")]


def test_many_recipes_keep_their_labels_apart(tmp_path):
    names = ("float", *(f"recipe_{i}" for i in range(12)))
    page = read(compare_report(comparison(names), tmp_path / "c.html"))
    chart = page.svgs[1]
    labels = [e for e in chart.iter() if e.get("class", "").startswith("name")]
    assert len(labels) == 13 + 12
    places = sorted(float(e.get("y")) for e in labels[:13])
    assert min(b - a for a, b in itertools.pairwise(places)) >= 13.9


def test_a_loss_that_is_not_finite(tmp_path):
    given = comparison()
    given["runs"][2]["loss"][20:] = [[i, math.nan] for i in range(20, 30)]
    page = read(compare_report(given, tmp_path / "c.html"))
    assert "nan" not in page.source.replace("Installed", "")


def test_text_is_escaped(tmp_path):
    hostile = "<script>alert('x')</script>"
    page = read(compare_report(comparison(("float", hostile)), tmp_path / "c.html"))
    assert "<script>alert" not in page.source
    assert hostile in page.text


def test_errors(tmp_path):
    with pytest.raises(
        ValueError, match="the comparison has no 'runs' and no 'table': it needs 'steps', 'runs', 'table'"
    ):
        compare_report({"steps": 3}, tmp_path / "c.html")


def test_what_each_recipe_quantized_and_how_well_it_fits(tmp_path):
    found = comparison(seeds=(0,))
    row = {"path": "mlp/wo", "weight": "mlp/wo/kernel", "times": 1, "shapes": "(2,3)", "flops": 12, "reason": None}
    kinds = {"op": "dot_general", "fwd": "int8 x int8", "dlhs": "", "drhs": "", "lowering": "int8"}
    plan = {"rows": [row | kinds | {"bytes_before": 8, "bytes_after": 2}], "share": 1.0, "notes": []}
    sites = {"decoder/layers/mlp/wo/dot_general0": {"rhs": {"sqnr_db": [41.5, 38.25]}}}
    found["runs"][1] |= {"plan": plan, "telemetry": [{"step": 29, "sites": sites}]}
    page = read(compare_report(found, tmp_path / "c.html"))
    assert "Error by layer, int8" in page.text
    assert "0 41.5 1 38.2" in page.text
    assert "Plan, int8" in page.text
    assert "1 of 1 matmuls are quantized, 100.0 % of forward FLOPs" in page.text
    assert "fp8_full" not in page.text.split("Error by layer, int8")[1].split("Configuration")[0]


def test_the_worst_weights_of_each_recipe_are_drawn_over_their_grid(tmp_path):
    found = samples.comparison()
    page = read(compare_report(found, tmp_path / "c.html"))
    for name, fmt, values in (("int8", "int8", 256), ("fp8", "float8_e4m3fn", 253)):
        part = page.source.split(f'aria-labelledby="worst-tensors-{name}"')[1].split("</section>")[0]
        assert part.count("<svg") == part.count("<figure") == 2
        assert f"decoder/layers_1/mlp/wo/kernel</code><br>{fmt}, per channel of axis 0: 21.0 dB" in part
        marks = re.findall(r'class="marks many" d="([^"]*)"', part)
        assert [drawn.count("M") for drawn in marks] == [values, values]
    assert "Worst tensors, float" not in page.text
    assert page.text.count("Weights with the lowest signal to noise at the end of the run.") == 2


def test_a_page_of_many_recipes_stays_small(tmp_path):
    found = samples.comparison(("int8", "fp8", "nvfp4"), seeds=1)
    worst = {run["name"]: 2 * run["histograms"] for run in found["runs"] if "histograms" in run}
    one = found["runs"][1]
    found["runs"] += [one | {"name": f"r{i}", "histograms": worst["int8"]} for i in range(20)]
    read(compare_report(found, tmp_path / "c.html"))  # which asserts that it is below 2 MB


def test_an_interval_around_zero_is_no_measured_difference(tmp_path):
    given = comparison(("float", "int8"))
    given["table"][1] |= {"gap": -0.0025, "gap_low": -0.043, "gap_high": 0.038}
    page = read(compare_report(given, tmp_path / "c.html"))
    headline = "No difference in the final loss of int8 from float is measured: the 95 % interval is"
    assert headline in page.text
    assert "The final loss of int8 is" not in page.text


def test_the_baseline_is_dashed_and_drawn_on_top(tmp_path):
    text = compare_report(comparison(("float", "int8")), tmp_path / "c.html").read_text()
    assert "svg .line.c0 { stroke-dasharray:" in text
    assert text.index('class="line c1"') < text.index('class="line c0"')
