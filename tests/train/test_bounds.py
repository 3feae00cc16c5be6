"""Static bounds: proposed so that they hold what is there, and a word in the log where they do not."""

import jax
import jax.numpy as jnp
import pytest

from octavo.train.run import train
from octavo.train.telemetry import Bound, format_bounds, propose_bounds, range_warnings
from octavo.train.trainer import Trainer
from tests.train.common import EXPERTS, small

pytestmark = pytest.mark.standard_promotion

FP8 = {"quantization": "fp8_full", "use_qwix_quantization": True}
NARROW = {
    "weight_quantization_calibration_method": "fixed,-0.01,0.01",
    "act_quantization_calibration_method": "fixed,-224,224",
}


def row(**changes):
    fine = {"saturation": 0.0, "underflow": 0.0, "worst_site": "mlp.rhs", "worst_underflow_site": "mlp.dlhs"}
    return {**fine, **changes}


def test_ranges_that_fit_are_not_mentioned():
    assert not list(range_warnings({"weight": row(), "gradient": row(underflow=0.05), "sites": {}}))


def test_what_clips_and_what_vanishes_is_said_with_the_key_that_changes_it():
    found = list(range_warnings({"activation": row(saturation=0.02), "gradient": row(underflow=0.4)}))
    assert found == [
        "warning: 2 % of activation values are clipped, worst at mlp.rhs: widen act_quantization_calibration_method",
        "warning: 40 % of gradient values underflow to zero, worst at mlp.dlhs: narrow "
        "bwd_quantization_calibration_method, or use smaller tiles",
    ]


def test_a_tensor_of_zeros_has_a_bound_too():
    assert Bound(0.0).method == "fixed,-1,1"


@pytest.mark.slow
def test_bounds_hold_the_weights_whatever_the_run_has():
    trainer = Trainer(small(**FP8, **NARROW, **EXPERTS))
    bounds = propose_bounds(trainer)
    assert set(bounds) == {"weight", "activation", "gradient"}
    kernels = [x for path, x in jax.tree_util.tree_leaves_with_path(trainer.state.params["decoder"]) if x.ndim > 2]
    largest = max(float(jnp.abs(x).max()) for x in kernels)
    # The router, which is not quantized, may hold larger ones.
    assert 0.3 * largest < bounds["weight"].largest <= largest * 1.001
    limit = float(bounds["weight"].method.split(",")[2])
    assert 1.25 * bounds["weight"].largest <= limit < 2.5 * bounds["weight"].largest
    assert bounds["weight"].method in format_bounds(bounds)


@pytest.mark.slow
def test_a_run_proposes_and_warns(tmp_path):
    said = []
    config = small(
        **FP8,
        **NARROW,
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
