"""The worst weights of a trainer: each layer by itself, in the order of their errors."""

import numpy as np
import pytest

from octavo.train.telemetry import worst_weights
from octavo.train.trainer import Trainer
from tests.train.common import small

pytestmark = pytest.mark.standard_promotion


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
