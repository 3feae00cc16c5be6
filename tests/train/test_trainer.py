"""The step: accumulation, schedules, guards, state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import octavo
from octavo.checkpoint import CheckpointManager
from octavo.train.halt import explain_halt
from octavo.train.optimizer import learning_rate_schedule, make_optimizer
from octavo.train.trainer import Trainer
from tests.train.common import EXPERTS, same, small

pytestmark = [pytest.mark.standard_promotion, pytest.mark.usefixtures("shared_programs")]


def losses(trainer: Trainer, steps: int) -> list[float]:
    return [float(trainer.step()["learning/loss"]) for _ in range(steps)]


def gradients(trainer: Trainer, state, batch):
    return jax.jit(functools.partial(trainer.train_step.gradients, step=0))(state, batch)


def close(a, b, tolerance) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * float(np.abs(y).max()))


@pytest.mark.slow
def test_float_and_int8_begin_alike_and_both_learn():
    floats, ints = (Trainer(small(quantization=name, use_qwix_quantization=True)) for name in ("", "int8"))
    assert same(floats.state.params, ints.state.params)
    a, b = losses(floats, 8), losses(ints, 8)
    assert a[-1] < a[0] - 0.05
    assert b[-1] < b[0] - 0.05
    assert a[0] != b[0]
    assert abs(a[0] - b[0]) < 0.01
    assert floats.verification.share() == 0
    assert ints.verification.forward == ints.verification.backward > 0.5


@pytest.mark.slow
def test_microbatches_are_one_batch_in_float():
    whole, parts = (Trainer(small(gradient_accumulation_steps=n)) for n in (1, 4))
    batch = whole.data.batch(0)
    a, b = (gradients(t, t.state, batch) for t in (whole, parts))
    close(b[0], a[0], 2e-6)
    assert float(a[2].weights) == float(b[2].weights) == 256
    np.testing.assert_allclose(b[3], a[3], rtol=1e-6)


@pytest.mark.slow
def test_histories_of_microbatches_are_those_of_the_whole_batch():
    """Each microbatch sees the scales of the step before, and the largest magnitude of all is remembered."""
    whole, parts = (Trainer(small(quantization="fp8_gpu", gradient_accumulation_steps=n)) for n in (1, 4))
    for trainer in (whole, parts):
        trainer.step()
    a, b = whole.state.quant["_overwrite_with_gradient"], parts.state.quant["_overwrite_with_gradient"]
    assert jax.tree.structure(a) == jax.tree.structure(b)
    query = ["decoder", "layers", "self_attention", "query", "dot_general0"]
    first = [functools.reduce(dict.__getitem__, query, state) for state in (a, b)]
    # What the first layer met in the first step depends on nothing that was rounded.
    np.testing.assert_array_equal(*(jax.tree.leaves(state["lhs"])[0][0, 0] for state in first))
    np.testing.assert_array_equal(*(jax.tree.leaves(state["rhs"])[0][:, 0] for state in first))
    # The rest differs by the rounding to 8 bits: a sum in place of the maximum would be several times as large.
    close(b, a, 0.2)
    assert all(float(x.max()) > 0 for x in jax.tree.leaves(a))


@pytest.mark.slow
def test_stochastic_rounding_is_repeatable_and_differs_by_step():
    a, b = (Trainer(small(quantization="int8")) for _ in range(2))
    assert losses(a, 3) == losses(b, 3)
    assert same(a.state, b.state)
    state, batch = a.state, a.data.batch(0)
    compiled = jax.jit(functools.partial(a.train_step.gradients, step=0))
    one = compiled(state, batch)[0]
    moved = type(state)(**{**vars(state), "step": state.step + 1})
    other = compiled(moved, batch)[0]
    assert not same(one, other)


@pytest.mark.slow
def test_schedule_changes_precision_at_its_steps():
    config = small(quantization="int8", quantization_start_step=2, quantization_stop_step=4)
    trainer, plain = Trainer(config), Trainer(small())
    first = [same(trainer.state.params, plain.state.params)]
    for _ in range(6):
        trainer.step()
        plain.step()
        first.append(same(trainer.state.params, plain.state.params))
    assert first == [True, True, True, False, False, False, False]
    assert sorted({stage for _, stage in trainer._compiled}) == [0, 1, 2]


@pytest.mark.slow
def test_a_step_that_is_not_finite_changes_nothing_and_names_the_tensor(tmp_path):
    trainer = Trainer(small(base_output_directory=str(tmp_path), run_name="run"))
    trainer.step()
    kernel = trainer.state.params["decoder"]["layers"]["mlp"]["wo"]["kernel"]
    trainer.state.params["decoder"]["layers"]["mlp"]["wo"]["kernel"] = kernel.at[0, 0, 0].set(jnp.nan)
    before = jax.tree.map(np.asarray, trainer.state)
    assert bool(trainer.step()["halted"])
    assert bool(trainer.step()["halted"])
    after = jax.tree.map(np.asarray, trainer.state)
    assert int(after.step) == 1
    np.testing.assert_equal(after.params, before.params)
    np.testing.assert_equal(after.opt_state, before.opt_state)
    text = explain_halt(trainer, 1, 7)
    assert "step 1 has loss nan" in text
    assert "the gradient of decoder/" in text
    assert str(tmp_path / "run" / "checkpoints" / "7") in text


@pytest.mark.slow
def test_without_the_guard_a_bad_step_is_left_out():
    trainer = Trainer(small(abort_on_nan_loss=False))
    good = trainer.state.params["token_embedder"]["embedding"]
    trainer.state.params["token_embedder"]["embedding"] = good * jnp.inf
    metrics = trainer.step()
    assert not bool(metrics["halted"])
    assert int(trainer.state.step) == 1


@pytest.mark.slow
def test_the_loss_of_padding_is_zero():
    trainer = Trainer(small())
    batch = {name: np.zeros_like(x) for name, x in trainer.data.batch(0).items()}
    found, _, losses, loss = gradients(trainer, trainer.state, batch)
    assert float(loss) == float(losses.weights) == 0
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(found))


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "lion"])
@pytest.mark.slow
def test_optimizers_learn(name):
    rate = {"adamw": 3e-3, "sgd": 1.0, "muon": 3e-3, "lion": 1e-3}[name]
    found = losses(Trainer(small(opt_type=name, learning_rate=rate, steps=12)), 12)
    assert found[-1] < found[0] - 0.1


def test_learning_rates():
    rate = learning_rate_schedule(small(steps=100, lr_schedule_type="wsd", wsd_decay_steps_fraction=0.2))
    at = [float(rate(step)) for step in (0, 9, 10, 79, 90, 100)]
    np.testing.assert_allclose(at, [3e-4, 3e-3, 3e-3, 3e-3, 1.65e-3, 3e-4], rtol=1e-5)
    constant = learning_rate_schedule(small(steps=100, lr_schedule_type="constant", warmup_steps_fraction=0.0))
    assert float(constant(0)) == float(constant(99)) == pytest.approx(3e-3)


def test_norms_and_biases_of_routers_do_not_decay():
    optimizer = make_optimizer(small(learning_rate=1.0, warmup_steps_fraction=0.0, adam_weight_decay=0.5))
    params = {"norm": {"scale": jnp.ones(4)}, "out": {"kernel": jnp.ones((4, 4))}, "router_bias": jnp.ones((2, 4))}
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    new = optax.apply_updates(params, updates)
    assert float(new["norm"]["scale"][0]) == float(new["router_bias"][0, 0]) == 1
    assert float(new["out"]["kernel"][0, 0]) == 0.5


@pytest.mark.slow
def test_masks_are_along_the_contraction_and_updated():
    config = small(
        weight_sparsity_n=2, weight_sparsity_m=4, weight_sparsity_start_step=2, weight_sparsity_update_step=3
    )
    trainer = Trainer(config)
    name = "decoder/layers/mlp/wo/kernel"
    seen = []
    for _ in range(6):
        trainer.step()
        seen.append(np.asarray(trainer.state.masks[name]))
    assert seen[0].all()
    assert seen[1].all()
    groups = seen[2].reshape(2, 16, 4, 32)
    assert (groups.sum(axis=2) == 2).all()
    assert (seen[2] == seen[3]).all()
    assert not (seen[4] == seen[5]).all()


@pytest.mark.parametrize("more", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.slow
def test_quantized_parameters_give_the_same_loss_bit_for_bit(more, tmp_path):
    trainer = Trainer(small(quantization="int8", use_qwix_quantization=True, **more))
    trainer.step()
    params = trainer.quantized_params()
    stored = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, octavo.QArray))
    assert sum(isinstance(x, octavo.QArray) for x in stored) == 7
    trained = trainer.evaluate()
    low = trainer.train_step.loss.at(0)[0]
    batches = [trainer.eval_data.batch(i) for i in range(2)]
    served = [jax.jit(low)(params, batch, 256.0, 1.0)[1] for batch in batches]
    assert float(sum(x.lm for x in served) / sum(x.weights for x in served)) == trained
    with CheckpointManager(tmp_path) as there:
        there.save(1, {"params": params})
    again = Trainer(
        small(load_parameters_path=str(tmp_path), checkpoint_is_quantized=True, quantization="int8w", **more)
    )
    kernel = again.state.params["decoder"]["layers"]["self_attention"]["query"]["kernel"]
    expected = octavo.dequantize(params["decoder"]["layers"]["self_attention"]["query"]["kernel"])
    np.testing.assert_array_equal(kernel, expected)
