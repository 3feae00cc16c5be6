"""The layout on disk is Orbax's own, and Orbax logs nothing."""

import logging

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import octavo
from octavo.checkpoint import CheckpointManager

STATE = {"params": {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.zeros(3, jnp.bfloat16)}, "step": np.int32(4)}


@pytest.fixture
def saved(tmp_path):
    state = {**STATE, "q": octavo.quantize(jnp.ones((2, 4)), "int4")}
    with CheckpointManager(tmp_path) as manager:
        manager.save(4, state, {"tokens": 9})
    return tmp_path


def test_orbax_checkpointers_read_it(saved):
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(saved / "4" / "state")
    np.testing.assert_array_equal(tree["params"]["w"], STATE["params"]["w"])
    assert tree["params"]["b"].dtype == jnp.bfloat16
    assert tree["step"] == 4
    assert tree["q"]["qvalue"].dtype == jnp.int4
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(saved / "4" / "state")
    np.testing.assert_array_equal(tree["params"]["w"], STATE["params"]["w"])


def test_orbax_manager_reads_it(saved):
    with ocp.CheckpointManager(saved, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        assert manager.latest_step() == 4
        args = ocp.args.Composite(state=ocp.args.PyTreeRestore(), extra=ocp.args.JsonRestore())
        found = manager.restore(4, args=args)
    assert found.extra == {"tokens": 9}
    np.testing.assert_array_equal(found.state["params"]["w"], STATE["params"]["w"])


def test_nothing_is_printed_or_logged(tmp_path, capfd, caplog):
    logger = logging.getLogger("absl")
    before = logger.level, list(logger.filters)
    with caplog.at_level(logging.INFO), CheckpointManager(tmp_path) as manager:
        caplog.set_level(logging.DEBUG, logger="absl")
        manager.save(1, STATE)
        manager.restore(STATE)
    assert [record for record in caplog.records if "orbax" in record.pathname] == []
    assert "".join(capfd.readouterr()) == ""
    caplog.set_level(before[0], logger="absl")
    assert list(logger.filters) == before[1]
