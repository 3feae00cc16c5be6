"""Optimizer states in few bits and bfloat16 weights with stochastic rounding, in the trainer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from octavo import optim
from octavo.checkpoint import load
from octavo.train.config.schema import keys
from octavo.train.optimizer import make_optimizer
from octavo.train.program import Program, abstract_train_state
from octavo.train.run import train
from octavo.train.trainer import Trainer
from tests.train.common import small

pytestmark = pytest.mark.standard_promotion
MESH = {"num_devices": 0, "per_device_batch_size": 1, "base_num_kv_heads": 2, "sharding_tolerance": 0.5}
BF16 = {"weight_dtype": "bfloat16", "weight_rounding": "stochastic"}


def moments(state):
    return [x for x in jax.tree.leaves(state, is_leaf=optim.is_moment) if optim.is_moment(x)]


def losses(trainer, steps):
    return [float(trainer.step()["learning/loss"]) for _ in range(steps)]


def test_the_key_has_every_format():
    assert keys()["opt_state_dtype"].choices == ("", *optim.MOMENTS)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "lion"])
def test_states_have_the_structure_of_the_float_optimizer(name):
    momentum = {"sgd_momentum": 0.9} if name == "sgd" else {}
    params = Program(small(), vocab_size=256).abstract_state.params
    configs = [small(opt_type=name, opt_state_dtype=dtype, **momentum) for dtype in ("", "dynamic8", "linear8")]
    floats, *low = (jax.eval_shape(make_optimizer(config).init, params) for config in configs)
    assert not moments(floats)
    for state in low:
        assert moments(state)
        assert jax.tree.structure(jax.eval_shape(optim.dequantize_state, state)) == jax.tree.structure(floats)


@pytest.mark.slow
def test_a_run_with_moments_in_few_bits_learns_as_in_float():
    config = small(steps=12, opt_state_dtype="dynamic8", dataset_type="synthetic")
    low, full = losses(Trainer(config), 12), losses(Trainer(config.replace(opt_state_dtype="")), 12)
    assert low[0] == full[0]
    np.testing.assert_allclose(low, full, rtol=0.01)
    assert low[-1] < low[0] - 0.1


@pytest.mark.slow
def test_bfloat16_weights_learn_with_stochastic_rounding():
    trainer = Trainer(small(steps=12, opt_state_dtype="dynamic8", **BF16))
    found = losses(trainer, 12)
    assert {x.dtype.name for x in jax.tree.leaves(trainer.state.params)} == {"bfloat16"}
    assert {x.dtype.name for x in moments(trainer.state.opt_state)} == {"float32"}
    assert found[-1] < found[0] - 0.1


@pytest.mark.parametrize("dtype", ["dynamic8", "dynamic4", "float8"])
def test_the_state_is_sharded_as_its_parameters(dtype):
    config = small(**MESH, opt_state_dtype=dtype, base_emb_dim=64, base_mlp_dim=256)
    state = abstract_train_state(config, vocab_size=256)
    kernel = state.params["decoder"]["layers"]["mlp"]["wo"]["kernel"]
    adam = state.opt_state[0]
    for moment in (adam.mu, adam.nu):
        arrays = jax.tree.leaves(moment["decoder"]["layers"]["mlp"]["wo"]["kernel"])
        assert len(arrays) == (3 if dtype == "float8" else 2)
        assert {array.sharding.spec for array in arrays} == {kernel.sharding.spec}
    assert adam.mu["token_embedder"]["embedding"].dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"opt_state_dtype": "dynamic8"},
        {"opt_state_dtype": "float8", **BF16},
        {"opt_state_dtype": "linear8", "opt_type": "muon"},
    ],
    ids=str,
)
@pytest.mark.parametrize("shard_mode", ["auto", "explicit"])
def test_steps_on_a_mesh_are_those_of_one_device(changes, shard_mode):
    meshed = small(**MESH, **changes, shard_mode=shard_mode)
    single = meshed.replace(num_devices=1, per_device_batch_size=8, shard_mode="auto")
    np.testing.assert_allclose(losses(Trainer(meshed), 3), losses(Trainer(single), 3), rtol=2e-3)


@pytest.mark.slow
def test_a_checkpoint_opens_with_another_format_of_moments(tmp_path):
    """dynamic8 -> float -> dynamic8: the codes come back, and a run continues."""
    config = small(base_output_directory=str(tmp_path), steps=2, opt_state_dtype="dynamic8")
    lines = []
    train(config, log=lines.append)
    low = load(tmp_path / "test" / "checkpoints").state
    trained = train(config.replace(opt_state_dtype="", steps=3), log=lines.append)
    assert trained.complete
    assert "moments of the optimizer: converted from dynamic8 to float" in lines
    floats = load(tmp_path / "test" / "checkpoints").state
    assert moments(low["opt_state"])
    assert not moments(floats["opt_state"])
    assert train(config.replace(steps=4), log=lines.append).complete
    assert "moments of the optimizer: converted from float to dynamic8" in lines
    assert moments(load(tmp_path / "test" / "checkpoints").state["opt_state"])


def test_sgd_has_no_momentum_unless_it_is_given():
    params = {"w": jnp.ones(3)}
    states = [jax.tree.leaves(make_optimizer(small(opt_type="sgd", sgd_momentum=m)).init(params)) for m in (0.0, 0.9)]
    assert [sum(x.size for x in leaves) for leaves in states] == [1, 4]
    assert isinstance(make_optimizer(small()), optax.GradientTransformation)
