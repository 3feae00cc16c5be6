"""Telemetry: what is measured and when, static bounds that hold the tensors, and the worst weights."""

import json
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.train import telemetry
from octavo.train.run import train
from octavo.train.telemetry import (
    Telemetry,
    fixed_method,
    format_bounds,
    largest_magnitudes,
    range_warnings,
    worst_weights,
)
from octavo.train.trainer import Trainer
from tests.train.common import EXPERTS, same, small

pytestmark = [pytest.mark.standard_promotion, pytest.mark.usefixtures("shared_programs")]

FP8 = {"quantization": "fp8_full", "use_qwix_quantization": True}
NARROW = {
    "weight_quantization_calibration_method": "fixed,-0.01,0.01",
    "act_quantization_calibration_method": "fixed,-224,224",
}


def row(**changes):
    fine = {"saturation": 0.0, "underflow": 0.0, "worst_site": "mlp.rhs", "worst_underflow_site": "mlp.dlhs"}
    return {**fine, "to_noise": 9.0, **changes}


def test_ranges_that_fit_are_not_mentioned():
    assert not list(range_warnings({"weight": row(), "gradient": row(underflow=0.05), "sites": {}}))


def test_clipping_and_underflow_warn_with_the_key_that_changes_them():
    found = list(range_warnings({"activation": row(saturation=0.02), "gradient": row(underflow=0.4)}))
    assert found == [
        "warning: 2 % of activation values are clipped, worst at mlp.rhs: widen act_quantization_calibration_method",
        "warning: 40 % of gradient values underflow to zero, worst at mlp.dlhs: narrow "
        "bwd_quantization_calibration_method, or use smaller tiles",
    ]


def test_gradients_below_the_square_root_of_three_times_their_error_warn():
    (found,) = range_warnings({"weight": row(to_noise=1.0), "gradient": row(to_noise=1.7)})
    assert found == (
        "warning: gradients are 1.7 times their quantization error, less than the square root of 3, worst at mlp.rhs: "
        "use more bits, or finish in float by quantization_stop_step"
    )
    assert not list(range_warnings({"gradient": row(to_noise=1.74)}))
    assert not list(range_warnings({"gradient": row(to_noise=float("nan"))}))


def test_a_tensor_of_zeros_has_a_bound_too():
    assert fixed_method(0.0) == "fixed,-1,1"


@pytest.mark.slow
def test_bounds_hold_the_weights_whatever_the_run_has():
    trainer = Trainer(small(**FP8, **NARROW, **EXPERTS))
    found = largest_magnitudes(trainer)
    assert set(found) == {"weight", "activation", "gradient"}
    kernels = [x for path, x in jax.tree_util.tree_leaves_with_path(trainer.state.params["decoder"]) if x.ndim > 2]
    largest = max(float(jnp.abs(x).max()) for x in kernels)
    # The router, which is not quantized, may hold larger ones.
    assert 0.3 * largest < found["weight"] <= largest * 1.001
    method = fixed_method(found["weight"])
    assert 1.25 * found["weight"] <= float(method.split(",")[2]) < 2.5 * found["weight"]
    assert method in format_bounds(found)


@pytest.mark.slow
def test_a_run_proposes_and_warns(tmp_path):
    said = []
    config = small(
        **FP8,
        **NARROW,
        base_num_decoder_layers=1,
        calibration="auto",
        quantization_metrics_interval=2,
        steps=2,
        enable_checkpointing=False,
        base_output_directory=str(tmp_path),
    )
    train(config, log=said.append)
    text = "\n".join(said)
    assert "calibration=auto: " in text
    assert "Static bounds: " in text
    assert "of weight values are clipped" in text


@pytest.mark.slow
def test_telemetry_measures_what_is_quantized_and_when():
    stages = {"quantization": "fp8_full", "quantization_metrics_interval": 2, "quantization_start_step": 2}
    config = small(**stages, base_num_decoder_layers=1)
    trainer = Trainer(config)
    telemetry = Telemetry(trainer)
    assert [step for step in range(8) if telemetry.is_due(step)] == [3, 5, 7]
    for _ in range(4):
        trainer.step()
    before = jax.tree.map(np.asarray, trainer.state)
    row = telemetry.measure(3)
    assert {"weight", "activation", "gradient", "sites"} == set(row)
    assert 25 < row["weight"]["sqnr_db"] < 40
    assert 20 < row["gradient"]["sqnr_db"] < 32
    assert row["weight"]["saturation"] == 0
    assert row["weight"]["scale_drift"] == 0
    assert "decoder/layers/mlp/wi_0/dot_general0" in row["sites"]
    assert same(before, trainer.state)
    trainer.step()
    assert telemetry.measure(4)["gradient"]["scale_drift"] != 0


@pytest.mark.slow
def test_the_worst_come_first_and_the_worst_of_all_is_found():
    trainer = Trainer(small(quantization="int8"))
    holder = trainer.state.params["decoder"]["layers"]["mlp"]["wo"]
    kernel = holder["kernel"]
    # One value in each column of the second layer that the others are small against.
    spoiled = kernel.at[1, 0].set(100 * abs(kernel[1]).max())
    holder["kernel"] = spoiled
    found = worst_weights(trainer)
    assert len(found) == 4
    assert found[0]["path"] == "decoder/layers_1/mlp/wo/kernel"
    assert found[0]["sqnr_db"] < found[1]["sqnr_db"] <= found[2]["sqnr_db"] <= found[3]["sqnr_db"]
    assert found[0]["format"] == "int8"
    assert found[0]["shape"] == list(kernel.shape[1:])
    assert sum(found[0]["counts"]) == spoiled[1].size
    # By hand: a scale for each column.
    x = np.asarray(spoiled[1], np.float64)
    scale = abs(x).max(0) / 127.5
    error = np.square(np.clip(np.round(x / scale), -128, 127) * scale - x).sum()
    assert found[0]["sqnr_db"] == pytest.approx(10 * np.log10(np.square(x).sum() / error), abs=0.01)


@pytest.mark.slow
def test_float_has_none():
    assert worst_weights(Trainer(small(quantization=""))) == []


def test_the_last_step_is_measured_and_the_drift_continues_after_a_resume(monkeypatch):
    trainer = Mock(spec=Trainer)
    trainer.config = Mock(quantization_metrics_interval=100, steps=7)
    trainer.state, trainer.batch = None, lambda step: None
    trainer.schedule = Mock(at=lambda step: [1], stage=lambda step: 0)
    first = Telemetry(trainer)
    assert [step for step in range(7) if first.is_due(step)] == [6]
    monkeypatch.setattr(telemetry, "by_class", lambda stats: {"weight": {"scale": stats}})
    monkeypatch.setattr(telemetry, "summarize", lambda stats: {})
    first._compiled[0] = lambda state, batch: 1.0
    first.measure(3)
    resumed = Telemetry(trainer, json.loads(json.dumps(first.scales)))
    resumed._compiled[0] = lambda state, batch: 4.0
    assert resumed.measure(6)["weight"]["scale_drift"] == 2
