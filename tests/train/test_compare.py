"""Paired runs: same seeds, same batches; intervals and ratios."""

import json
import math
import re
import signal

import numpy as np
import pytest
from scipy import stats

from octavo.cli import main
from octavo.report import compare_report
from octavo.train import compare
from octavo.train.compare import Comparison, Result, StoppedError
from octavo.train.paired import interval
from tests.report.page import read
from tests.train.common import small, words

pytestmark = pytest.mark.standard_promotion


def result(name: str, seed: int, loss: float, seconds: float = 1.0, floats: float = 1.0, memory: int = 100) -> Result:
    return Result(
        name=name,
        seed=seed,
        loss=[[0, loss]],
        eval_loss=[[1, loss]],
        step_seconds=[9.0, 9.0, seconds],
        float_seconds=[1.0, 1.0, floats],
        memory_bytes=memory,
        state_bytes=10,
        forward_share=0.5,
        backward_share=0.5,
        share=0.5,
    )


def test_the_table_is_of_pairs():
    """Each run is compared with the float run of its seed, in loss and, step by step, in time."""
    found = Comparison(small(), ["int8"], seeds=2)
    found.results = [
        result("float", 0, 2.0),
        result("int8", 0, 2.02, seconds=0.5, memory=80),
        result("float", 1, 4.0),
        result("int8", 1, 4.08, seconds=1.0, floats=2.0, memory=80),
    ]
    base, row = found.table()
    assert (base.gap, base.step_ratio, base.memory_ratio) == (0, 1, 1)
    assert row.gap == pytest.approx(0.015)
    assert row.gap_low == pytest.approx(0.015 - 12.706 * 0.005, rel=1e-3)
    assert row.step_ratio == 0.5
    assert row.memory_ratio == 0.8
    assert re.search(r"int8 +3.0500 +\+1.50 +-4.85 .. \+7.85 +0.50x +0.80x +50.0 %", str(found))


def test_gaps_by_batch_and_the_time_to_a_loss():
    """int8 is 1 % above float in each batch, needs 4/3 of its steps to the target, a step half the time."""
    found = Comparison(small(), ["int8"], seeds=2)
    for seed in (0, 1):
        base, low = (result(name, seed, 2.0, seconds=seconds) for name, seconds in (("float", 1.0), ("int8", 0.5)))
        base.loss = [[step, 5.0 - step / 100] for step in range(64)]
        low.loss = [[step, loss * (1.01 + 1e-4 * (step % 2))] for step, loss in base.loss]
        base.eval_loss = [[16, 4.0], [32, 3.0], [48, 2.0], [64, 1.0]]
        low.eval_loss = [[16, 4.0], [32, 3.5], [48, 3.0], [64, 2.0]]
        found.results += [base, low]
    base, row = found.table()
    assert (base.batch_gap, base.target_steps, base.target_time) == (0, 1, 1)
    assert row.batch_gap == pytest.approx(0.01005, rel=1e-3)
    assert row.batch_high - row.batch_low < 1e-4
    assert (row.target_steps, row.target_time) == pytest.approx((4 / 3, 2 / 3))
    assert re.search(r"int8 +\+1.00 +\+1.00 .. \+1.00 +1.33x +0.67x", str(found))


def test_the_terminal_and_the_page_have_the_same_ratios(tmp_path):
    found = Comparison(small(), ["int8", "fp8_full"], seeds=1)
    found.results = [
        result("float", 0, 2.0),
        result("int8", 0, 2.0, seconds=0.565, memory=80),
        result("fp8_full", 0, 2.0, seconds=1.77, memory=120),
    ]
    page = read(compare_report(found.to_dict(), tmp_path / "compare.html")).text
    for name, step, memory in (("int8", "0.56", "0.80"), ("fp8_full", "1.77", "1.20")):
        assert re.search(rf"{name} .* {step}x +{memory}x ", str(found))
        assert re.search(rf"{name} 2\.0000 [^x]* {step} x {memory} x ", page)
    assert "faster" not in str(found)


@pytest.mark.parametrize("count", [2, 5, 11, 40])
def test_intervals_are_students(count):
    values = np.random.default_rng(count).normal(size=count).tolist()
    wanted = stats.t.interval(0.95, count - 1, loc=np.mean(values), scale=stats.sem(values))
    np.testing.assert_allclose(interval(values), wanted, rtol=1e-9)
    assert all(math.isnan(x) for x in interval([1.0]))


@pytest.mark.slow
def test_a_comparison_is_run_kept_and_reported(tmp_path, capsys):
    argv = ["compare", *words(steps=3, base_output_directory=tmp_path, eval_steps=1)]
    argv += ["quantization=int8,qat_int8", "use_qwix_quantization=true", "seeds=1", "eval_points=1"]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert "seed 0: float, int8, qat_int8" in said
    assert re.search(r"^float +\d\.\d{4} +\+0.00", said, re.M)
    assert re.search(r"^qat_int8 +\d\.\d{4} ", said, re.M)
    saved = json.loads((tmp_path / "test" / "comparison.json").read_text())
    assert [run["name"] for run in saved["runs"]] == ["float", "int8", "qat_int8"]
    assert len(saved["runs"][1]["loss"]) == 3
    assert saved["runs"][0]["share"] == 0
    assert saved["runs"][1]["share"] > 0.5 > saved["runs"][2]["share"] > 0
    page = (tmp_path / "test" / "report.html").read_text()
    assert "<svg" in page
    assert all(f"{what}, {name}" in page for what in ("Plan", "Error by layer") for name in ("int8", "qat_int8"))
    # A second time nothing is run, and all is as it was.
    assert main(argv) == 0
    assert "seed 0" not in capsys.readouterr().out
    assert json.loads((tmp_path / "test" / "comparison.json").read_text()) == saved


@pytest.mark.slow
def test_a_stopped_comparison_is_resumed(tmp_path, capsys, monkeypatch):
    """Stopped between two checkpoints: losses are those of a comparison that nothing stopped."""
    changes = {"steps": 5, "checkpoint_period": 2, "eval_steps": 1, "base_num_decoder_layers": 1}

    def command(folder):
        arguments = words(**changes, base_output_directory=tmp_path / folder)
        return main(["compare", *arguments, "quantization=int8", "seeds=1", "eval_points=5"]), capsys.readouterr().out

    def losses(folder):
        runs = json.loads((tmp_path / folder / "test" / "comparison.json").read_text())["runs"]
        return [(run["name"], run["loss"], run["eval_loss"]) for run in runs]

    assert command("whole")[0] == 0
    step, taken = compare.Trainer.step, []

    def interrupted(self):
        taken.append(self.config.quantization)
        if len(taken) == 5:  # the third step of float, and int8 takes it too
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(compare.Trainer, "step", interrupted)
    status, said = command("parts")
    assert (status, len(taken)) == (130, 6)
    assert said.endswith(
        "stopped by Ctrl-C after 3 steps of seed 0, saved; the same command with run_name=test resumes\n"
    )
    status, said = command("parts")
    assert (status, len(taken)) == (0, 10)
    assert "resuming at step 3 of 5" in said
    assert losses("parts") == losses("whole")
    assert not list((tmp_path / "parts" / "test" / "checkpoints").iterdir())


def test_what_a_stopped_comparison_says():
    text = str(StoppedError(1, 7, signal.SIGTERM, run_name=None))
    assert text == "stopped by SIGTERM after 7 steps of seed 1, not saved, because of enable_checkpointing=false"


@pytest.mark.slow
def test_seeds_share_their_programs():
    programs: dict = {}
    for seed in (0, 1):
        config = small(quantization="int8", init_weights_seed=seed, data_shuffle_seed=seed)
        trainer = compare.Trainer(config, programs=programs)
        assert trainer.compiled("train", 0) is next(iter(programs.values()))
        trainer.compiled("evaluate", 0)
    assert len(programs) == 2


def test_a_run_that_diverges_ends_alone(monkeypatch):
    class Fake:
        def __init__(self, config, programs):
            self.bad, self.count = config.quantization == "int4", 0
            self.verification = type("V", (), {"forward": 0.0, "backward": 0.0, "share": lambda self: 0.0})()

        def compiled(self, kind, step):
            return type("C", (), {"memory_analysis": lambda self: None})()

        def step(self):
            self.count += 1
            bad = self.bad and self.count == 2
            return {"learning/lm_loss": math.nan if bad else 1.0, "halted": bad}

        def evaluate(self):
            return 1.0

        def plan(self):
            return type("P", (), {"to_json": lambda self: '{"rows": []}'})()

    class Measured:
        def __init__(self, trainer):
            assert not trainer.bad, "what has diverged is not measured"

        def measure(self, step):
            return {"sites": {}}

    monkeypatch.setattr(compare, "Trainer", Fake)
    monkeypatch.setattr(compare, "Telemetry", Measured)
    monkeypatch.setattr(compare, "worst_weights", lambda trainer: [{"path": "w"}])
    lines: list[str] = []
    found = Comparison(small(steps=4), ["int4", "int8"], eval_points=2, log=lines.append)
    _, int4, int8 = found.run()
    assert [len(r.loss) for r in (int4, int8)] == [2, 4]
    assert math.isnan(int4.final_loss)
    assert int8.final_loss == 1
    assert (int8.plan, int8.telemetry, int8.histograms) == (
        {"rows": []},
        [{"step": 3, "sites": {}}],
        [{"path": "w"}],
    )
    assert (int4.plan, int4.telemetry, int4.histograms) == (None, [], [])
    assert "int4: the loss of step 1 is not finite; this run ends here" in lines
    assert "nan" in str(found)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quantization=int9"], "int9"),
        (["seeds=0"], "seeds=0: a whole number, 1 or more"),
        (["fresh=perhaps"], "fresh=perhaps: true or false"),
        (["stps=3"], "steps"),
    ],
)
def test_bad_arguments_exit_with_status_2(words, message, capsys):
    assert main(["compare", *words]) == 2
    assert message in capsys.readouterr().err


def test_help(capsys):
    assert main(["compare", "--help"]) == 0
    assert "usage: octavo compare" in capsys.readouterr().out
