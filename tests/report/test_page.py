"""The page about a run says what the run's files say, whatever of them is there."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import pytest

import octavo
from octavo.hlo import Collective, Communication
from octavo.inspect import Plan
from octavo.report import tables, write_report
from octavo.report.run import read_run
from octavo.train.metrics import MetricWriter
from tests.report.page import SIGNS, read

HOSTILE = "<script>alert('x')</script>\"&'</svg></title>"


def make(directory, *, scale=1.0, seconds=0.1, steps=40, memory=None, losses=None, config=None, telemetry=False):
    with MetricWriter(directory, run_name=directory.name, tensorboard=False) as writer:
        for step in range(steps):
            loss = scale * (2 + 8 / (1 + step)) if losses is None else losses[step]
            found = {"learning/loss": loss, "perf/step_time_seconds": 9.0 if step == 0 else seconds}
            writer.write(step, found | ({"perf/memory_bytes": memory} if memory else {}))
            if telemetry and step % 10 == 0:
                row = {"saturation": 0.01, "underflow": 0.02, "sqnr_db": 30.0 + step}
                worst = {"worst_site": "mlp/dot_general0.lhs", "worst_sqnr_db": 12.5}
                writer.write_telemetry(step, {"weight": row, "gradient": row | worst})
    if config is not None:
        (directory / "config.yml").write_text(json.dumps(config))
    return directory


def planned(directory, long=False):
    """Write a plan; with `long`, one with the paths and shapes of a decoder, and with collectives."""
    loss = lambda params, x: jnp.mean((x @ params["mlp"]["w"] @ params["logits_dense"]["w"]) ** 2)  # noqa: E731
    w, x = jax.ShapeDtypeStruct((32, 32), jnp.float32), jax.ShapeDtypeStruct((8, 32), jnp.float32)
    params, rules = {"mlp": {"w": w}, "logits_dense": {"w": w}}, octavo.recipe("int8")
    plan = octavo.plan(loss, rules, params, x)
    if long:
        path, shapes = "decoder/dense_layers_10/self_attention/query", "(8,2048,4096) x (4096,32,128)"
        row = dataclasses.replace(plan.rows[0], path=path, shapes=shapes, times=32, fwd="float8_e4m3fn x float8_e4m3fn")
        plan = Plan([row, dataclasses.replace(plan.rows[-1], path=path)], plan.rules)
        plan = plan.with_communication(Communication((Collective("all-reduce", "f32", (8,), 8),), ()))
    (directory / "plan.json").write_text(plan.to_json())
    step = jax.value_and_grad(octavo.quantized(loss, rules))
    (directory / "verify.json").write_text(octavo.verify(step, params, x).to_json())


def tile(page, label):
    """The figure and the words of a tile."""
    html = re.search(rf"<dt>{label}</dt><dd[^>]*>(.*?)</dd><dd[^>]*>(.*?)</dd>", page.source)
    return tuple(text.translate(SIGNS) for text in html.groups())


def test_what_a_device_sends(tmp_path):
    run = make(tmp_path / "run", steps=2)
    w, x = jax.ShapeDtypeStruct((32, 32), jnp.float32), jax.ShapeDtypeStruct((8, 32), jnp.float32)
    plan = octavo.plan(lambda params, x: x @ params["up"]["w"], octavo.recipe("int8"), {"up": {"w": w}}, x)
    sent = [
        Collective("all-gather", "s8", (32, 32), 8, weights=("params['up']['w']",)),
        Collective("reduce-scatter", "f32", (4, 32), 8, is_gradient=True),
        Collective("all-reduce", "f32", (8,), 8),
    ]
    (run / "plan.json").write_text(plan.with_communication(Communication(tuple(sent), ("a/while",))).to_json())
    page = read(write_report(run))
    assert "A device sends 4.54 kB in a step: weights 896 B, gradients 3.58 kB, the rest 56 B" in page.text
    assert "collective bytes" in page.text
    assert "reduce-scatter f32 3.58 kB 79.0 % all-gather s8 896 B 19.8 % all-reduce f32 56 B 1.2 %" in page.text
    assert "Counted once, unknown trip count: a/while" in page.text
    (run / "plan.json").write_text(plan.with_communication(Communication(())).to_json())
    assert "A device sends nothing in a step." in read(write_report(run)).text
    (run / "plan.json").write_text(plan.to_json())
    assert "sends" not in read(write_report(run)).text


def test_whole_page(tmp_path):
    config = {"run_name": "low", "steps": 40, "quantization": "int8", "learning_rate": 0.003, "dataset_type": "python"}
    low = make(tmp_path / "low", scale=1.01, seconds=0.08, memory=300, config=config, telemetry=True)
    planned(low)
    (low / "data.json").write_text(json.dumps({"name": "a library", "tokens": 12}))
    float_ = make(tmp_path / "float", memory=400, config={"run_name": "float", "quantization": ""})
    page = read(write_report(low, against=float_))
    assert tile(page, "Gap to float") == ("+1.00 %", "mean of the last 4 steps")
    assert tile(page, "Step time") == ("0.80 x", "80 ms against 100 ms")
    assert tile(page, "Memory") == ("0.75 x", "300 B against 400 B")
    assert tile(page, "FLOPs quantized")[0] == f"{100 * read_run(low).share():.1f} %"
    assert "A model trained for 40 steps on a library, quantized by int8. It is measured against float, in float." in (
        page.text
    )
    assert "int8 above float, %" in page.text
    assert "gradient mlp/dot_general0.lhs 12.5 dB" in page.text
    assert "1 of 2 matmuls are quantized, 50.0 % of forward FLOPs" in page.text
    assert "learning_rate 0.003 0.001" in page.text
    assert "dataset_type" not in page.text.partition("keys have their defaults")[0], "defaults come last"
    assert "tokens 12" in page.text
    assert "missing" not in {attrs.get("class") for _, attrs in page.tags}
    assert len(page.svgs) == 5
    assert len(page.all("button")) == 11


def test_final_loss_is_the_mean_of_the_last_tenth(tmp_path):
    page = read(write_report(make(tmp_path / "run", losses=[9.0] * 36 + [1.0, 2.0, 3.0, 4.0])))
    assert tile(page, "Final loss") == ("2.5000", "mean of the last 4 steps")
    assert tile(page, "Gap to float") == ("-", "no run to compare with")
    assert tile(page, "Step time") == ("100 ms", "median"), "the first step, which compiles, does not count"


def test_shares_of_both_passes(tmp_path):
    run = make(tmp_path / "run")
    products = [
        {"flops": flops, "kind": kind, "backward": backward}
        for flops, kind, backward in (
            (90, "native", False),
            (10, "float", False),
            (60, "emulated", True),
            (40, "float", True),
        )
    ]
    (run / "verify.json").write_text(json.dumps({"matmuls": products}))
    page = read(write_report(run))
    assert tile(page, "FLOPs quantized") == ("75.0 %", "90.0 % forward, 60.0 % backward")


def test_missing_parts_are_said_to_be_missing(tmp_path):
    run = tmp_path / "bare"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    page = read(write_report(run, path=tmp_path / "out" / "page.html"))
    assert (tmp_path / "out" / "page.html").exists()
    for words in ("No loss", "No step times", "no telemetry", "no plan.json", "no config.yml"):
        assert words in page.text
    assert not page.svgs


def test_damaged_files_are_reported(tmp_path):
    run = make(tmp_path / "run")
    (run / "plan.json").write_text('{"rows": [')
    (run / "verify.json").write_text("[1]")
    page = read(write_report(run))
    assert "plan.json cannot be read: Expecting value" in page.text
    assert "verify.json cannot be read: a mapping is expected, this is a list." in page.text
    assert len(page.svgs) == 2, "the rest is there"


def test_a_loss_that_is_not_finite_breaks_the_line(tmp_path):
    losses = [3.0, 2.0, float("nan"), float("inf"), 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    page = read(write_report(make(tmp_path / "run", losses=losses, steps=10)))
    assert "It was not finite at 2 steps, first at step 2." in page.text
    line = next(a["d"] for a in page.all("path") if a["class"] == "line c1")
    assert line.count("M") == 2
    everywhere = read(write_report(make(tmp_path / "nan", losses=[float("nan")] * 10, steps=10)))
    assert tile(everywhere, "Final loss")[0] == "-"


@pytest.mark.parametrize("steps", [1, 2])
def test_short_runs(tmp_path, steps):
    run = make(tmp_path / "run", steps=steps, telemetry=True)
    page = read(write_report(run, against=run))
    assert tile(page, "Gap to float") == ("+0.00 %", "of the last step")


def test_evaluations_are_drawn(tmp_path):
    run = make(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"step": {step}, "eval/avg_loss": 2.5}}\n' for step in (19, 39))
    page = read(write_report(run))
    assert tile(page, "Final loss")[1] == "mean of the last 4 steps; held out 2.5000"
    assert "line c2" in {attrs["class"] for attrs in page.all("path")}
    assert "training held out" in page.text


def test_runs_of_other_lengths(tmp_path):
    page = read(write_report(make(tmp_path / "a", steps=30), against=make(tmp_path / "b", steps=20, scale=0.5)))
    assert tile(page, "Gap to float")[0] == "+100.00 %", "over the steps that both have"


def test_text_is_escaped(tmp_path):
    config = {"run_name": HOSTILE, "quantization": HOSTILE, "dataset_path": HOSTILE, HOSTILE: 1}
    run = make(tmp_path / "run", config=config, telemetry=True)
    planned(run)
    plan = json.loads((run / "plan.json").read_text())
    plan["rows"][0] |= {"path": HOSTILE, "reason": HOSTILE, "op": HOSTILE}
    plan["notes"] = [HOSTILE]
    (run / "plan.json").write_text(json.dumps(plan))
    (run / "data.json").write_text(json.dumps({"name": HOSTILE, HOSTILE: HOSTILE}))
    lines = (run / "telemetry.jsonl").read_text().replace("mlp/dot_general0.lhs", json.dumps(HOSTILE)[1:-1])
    (run / "telemetry.jsonl").write_text(lines)
    page = read(write_report(run, against=make(tmp_path / "float")))
    assert "<script>alert" not in page.source
    assert len(page.all("script")) == 1
    assert page.text.count(HOSTILE) > 8


def test_large_runs_stay_small(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MOST_ROWS", 100)  # of 1500, which take long when every call is type-checked
    run = tmp_path / "run"
    run.mkdir()
    row = '{{"step": {0}, "learning/loss": {1}, "perf/step_time_seconds": 0.1{0}}}\n'
    with (run / "metrics.jsonl").open("w") as file:
        file.writelines(row.format(step, 2 + step % 7) for step in range(20_000))
    planned(run)
    plan = json.loads((run / "plan.json").read_text())
    plan["rows"] = [plan["rows"][0] | {"flops": i} for i in range(4000)]
    (run / "plan.json").write_text(json.dumps(plan))
    page = read(write_report(run, against=run))
    assert "the 100 largest are listed, all of them are in plan.json" in page.text
    rows = re.findall(r"<tr.*?</tr>", page.source, re.DOTALL)
    plan_rows = [row for row in rows if row.count("<td") == 10]
    assert len(plan_rows) == 100
    assert len(page.source.encode()) + 1400 * max(map(len, plan_rows)) < 2_000_000


def test_errors(tmp_path):
    make(tmp_path / "first")
    with pytest.raises(FileNotFoundError, match=r"there is no run in .*fist: did you mean 'first'\?"):
        write_report(tmp_path / "fist")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty is no run's directory: it has no metrics.jsonl"):
        write_report(tmp_path / "first", against=tmp_path / "empty")
