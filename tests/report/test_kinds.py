"""Every kind of run has its page, which `octavo report` renders again, and can be on a page with others."""

import json

import pytest

from octavo.cli import main
from octavo.report import render, render_together
from octavo.report.kinds import kind_of
from octavo.report.record import COMPARISON, CONVERSION, EVALUATION, ROLLOUTS, read_record, write_record
from octavo.report.run import float_twin, read_run
from tests.report import samples
from tests.report.page import read


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    return samples.convert(tmp_path_factory.mktemp("runs") / "int4")


def test_conversion(converted):
    page = read(render(converted))
    record = json.loads((converted / CONVERSION).read_text())
    tensors = record["tensors"]
    assert page.text.startswith("toy, converted")
    assert f"{8 * record['after'] / record['values']:.2f}" in page.text
    assert sum(t["after"] for t in tensors) == record["after"]
    assert sum(t["before"] for t in tensors) == record["before"]
    done = sum(t["quantized"] for t in tensors)
    assert f"{done} of {len(tensors)} parameters are quantized" in page.text
    worst = sorted((t["sqnr_db"], t["path"]) for t in tensors if t["quantized"])
    assert [h["path"] for h in record["histograms"]] == [path for _, path in worst[:4]]
    assert len(page.svgs) == 4
    assert "layer wi_0 wi_1 wo key out query value" in page.text
    assert "Outside of the layers: token_embedder" in page.text
    assert "octavo quantize toy int4 out" in page.text


def test_evaluation(tmp_path):
    page = read(render(samples.evaluate(tmp_path / "low")))
    assert "Perplexity 12.500 ± 0.400 on 4,000 tokens of book.txt. That is +1.62 % from float." in page.text
    assert "Same top token 95.3 %" in page.text
    assert "KL divergence 0.0123" in page.text
    assert "The lowest is 27.5 dB, of layers_1; the logits have 29.0 dB." in page.text
    assert len(page.svgs) == 2
    alone = read(render(samples.evaluate(tmp_path / "alone", against="")))
    assert "No other model was given to measure it by." in alone.text
    assert len(alone.svgs) == 1


def test_rollouts(tmp_path):
    runs = {
        "float": [{"reward": i / 40, "k3": 0.0} for i in range(40)],
        "int8": [{"reward": i / 80, "k3": 1e-9 * (1 + i)} for i in range(40)],
    }
    for name in ("one", "two"):
        write_record(tmp_path / name / ROLLOUTS, {"task": "a toy", "runs": runs, "describes": {"int8": "same codes"}})
    page = read(render(tmp_path / "one"))
    assert "Mean reward of the last steps: 0.86 in float, 0.43 in int8." in page.text
    assert "int8 40 0.056 0.431 1e-09 4e-08" in page.text
    assert "same codes" in page.text
    assert len(page.svgs) == 1
    both = read(render_together([tmp_path / "one", tmp_path / "two"], tmp_path / "both.html"))
    assert "two/int8 40 0.056 0.431 1e-09 4e-08" in both.text


def test_a_change_within_chance_is_said_to_be(tmp_path):
    folder = samples.evaluate(tmp_path / "low")
    record = json.loads((folder / EVALUATION).read_text())
    record["log_ratio"] = {"mean": 0.001, "error": 0.002}
    write_record(folder / EVALUATION, record)
    assert "which is within the 95 % interval" in read(render(folder)).text


def test_training_has_a_map_for_each_operand(tmp_path):
    page = read(render(samples.train(tmp_path / "int8")))
    assert page.source.count('class="heat"') == 4
    assert "layer wi_0 wo query out 0 45.0 42.0 39.0 36.0 1 44.0" in page.text
    assert "There is no checkpoint" not in page.text
    assert "Seconds per step" in page.text
    assert "1,000" in page.text


def test_a_float_run_beside_it_is_found(tmp_path):
    low = samples.train(tmp_path / "int8")
    assert float_twin(read_run(low)) is None
    samples.train(tmp_path / "other", recipe="", steps=50)
    assert float_twin(read_run(low)) is None, "another configuration"
    samples.train(tmp_path / "plain", recipe="", scale=1.0)
    assert float_twin(read_run(low)).name == "plain"
    page = read(render(low))
    assert "It is measured against plain, in float." in page.text
    assert "int8 above float, %" in page.text
    assert float_twin(read_run(tmp_path / "plain")) is None


def test_together(tmp_path, converted):
    runs = [samples.train(tmp_path / name, recipe=recipe, scale=s) for name, recipe, s in RUNS]
    runs += [converted, samples.evaluate(tmp_path / "e1"), samples.evaluate(tmp_path / "e2", perplexity=13.0)]
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / COMPARISON).write_text(json.dumps(samples.comparison()))
    page = read(render_together([*runs, tmp_path / "three"], tmp_path / "all.html"))
    assert "3 trainings and 1 conversion and 2 evaluations and 1 comparison" in page.text
    assert "Above float, %" in page.text
    assert "final loss against float, %" in page.text
    loss = 1.01 * sum(2 + 8 / (1 + step) for step in range(54, 60)) / 6
    assert f"fp8 {loss:.4f} +1.00 %" in page.text
    assert "quantization '' int8 fp8" in page.text
    for heading in ("Comparisons", "Conversions", "Perplexity", "Distances", "Result", "Speed and memory"):
        assert f'id="{heading.lower().replace(" ", "-")}"' in page.source


RUNS = (("f", "", 1.0), ("a", "int8", 1.01), ("b", "fp8", 1.01))


def test_runs_of_one_recipe_go_by_their_names(tmp_path):
    runs = [samples.train(tmp_path / name, scale=scale) for name, scale in (("one", 1.0), ("two", 1.02))]
    page = read(render_together(runs, tmp_path / "both.html"))
    assert "final loss against one, %" in page.text
    assert "two +2.00 %" in page.text
    assert "The runs have the same configuration." in page.text


def test_command(tmp_path, capsys, converted, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(converted), "--out", "page.html"]) == 0
    assert capsys.readouterr().out == "report: page.html\n"
    other = samples.evaluate(tmp_path / "low")
    assert main(["report", str(converted), str(other)]) == 0
    assert read(tmp_path / "report.html").text.startswith("Runs side by side")
    assert main(["report", str(tmp_path / "lo")]) == 2
    assert "there is no" in (err := capsys.readouterr().err)
    assert "did you mean 'low'" in err
    assert main(["report", str(tmp_path)]) == 2
    assert "is no run that there is a page about. These are" in capsys.readouterr().err
    assert main(["report", str(other), str(other)]) == 2
    assert "a run is given twice: name each of them once" in capsys.readouterr().err


def test_records_of_files_lie_beside_them(tmp_path, converted):
    file = tmp_path / "small.gguf.conversion.json"
    file.write_text((converted / CONVERSION).read_text())
    assert kind_of(file).name == "conversion"
    assert render(file).name == "small.gguf.report.html"
    page = read(render_together([file, converted], tmp_path / "two.html"))
    assert "small.gguf" in page.text


def test_damaged_records_are_reported(tmp_path):
    (tmp_path / CONVERSION).write_text('{"name": ')
    with pytest.raises(ValueError, match=r"conversion.json is damaged: .*; run the command that wrote it again"):
        render(tmp_path)
    (tmp_path / CONVERSION).write_text('{"name": "x"}')
    with pytest.raises(ValueError, match="is damaged: it has no 'before'"):
        render(tmp_path)
    with pytest.raises(ValueError, match="it has no 'steps'"):
        read_record(tmp_path / CONVERSION, COMPARISON)


def test_text_is_escaped(tmp_path):
    hostile = "<script>alert(1)</script>"
    folder = samples.evaluate(tmp_path / "low", against=hostile)
    page = read(render(folder))
    assert page.source.count("<script>") == 1
    assert hostile in page.text
