"""Collectives of a step: weights gathered as codes, gradients reduced in eight bits, and the same training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.checkpoint import CheckpointError, CheckpointManager, CheckpointWarning
from octavo.hlo import partitioned_hlo, read_communication
from octavo.train.program import Program
from octavo.train.step import is_reset_on_remesh
from octavo.train.trainer import Trainer
from octavo.transform.state import GRADIENT_STATE
from tests.cases import slow_except
from tests.train.common import EXPERTS, small

pytestmark = [pytest.mark.standard_promotion, pytest.mark.usefixtures("shared_programs")]

FSDP = {
    "num_devices": 0,
    "base_num_decoder_layers": 1,
    "per_device_batch_size": 1,
    "base_emb_dim": 64,
    "base_mlp_dim": 256,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "sharding_tolerance": 0.5,
    "use_qwix_quantization": True,
}
COPIES = {**FSDP, "ici_data_parallelism": 4}
# An update of parameters where they are is no matter of collectives.
PLAIN = {"opt_type": "sgd", "gradient_clipping_threshold": 0.0}


@functools.cache
def _traffic(changes):
    program = Program(small(**{**FSDP, **PLAIN, **dict(changes)}), vocab_size=64)
    return read_communication(partitioned_hlo(program.lower()))


def traffic(**changes):
    """The collectives of a step, from the program of one device; each step is compiled once."""
    return _traffic(tuple(sorted((name, value) for name, value in changes.items() if value != "")))


@pytest.mark.parametrize("quantization", slow_except(("int8",), ("int8", "fp8_full", "deepseek_fp8")))
def test_weights_are_gathered_as_codes(quantization):
    wide, low = traffic(), traffic(quantization=quantization)
    assert low.weights() < 0.3 * wide.weights()
    assert low.by_dtype()["s8" if quantization == "int8" else "u8"] > 0.8 * low.weights()


@pytest.mark.slow
def test_codes_are_about_half_of_bfloat16():
    wide = traffic(dtype="bfloat16", weight_dtype="bfloat16").weights()
    for quantization in ("int8", "fp8_full", "deepseek_fp8"):
        assert traffic(quantization=quantization).weights() <= 0.55 * wide


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "deepseek_fp8"])
def test_experts_are_gathered_as_codes(quantization):
    shapes = {(4, 64, 32), (4, 32, 64)}
    gathered = [c for c in traffic(quantization=quantization, **EXPERTS).collectives if c.shape in shapes]
    assert len(gathered) >= 6
    assert {(c.kind, c.dtype) for c in gathered} == {("all-gather", "s8" if quantization == "int8" else "u8")}


EXPERT = {**EXPERTS, "ici_expert_parallelism": 4, "quantization": "int8", "dtype": "bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "sent"), [("int8", "s8"), ("float8_e4m3fn", "u8")])
def test_expert_dispatch_in_low_precision(dtype, sent):
    """Forward and where a layer is computed once more; what comes back, and gradients, are in the model's own dtype."""

    def dispatched(kind: str, **changes) -> int:
        # 32 tokens of each of the four devices that share experts, 64 wide.
        found = traffic(**EXPERT, **changes).collectives
        return sum(c.total for c in found if c.kind == "all-gather" and c.shape == (128, 64) and c.dtype == kind)

    wide, rest = dispatched("bf16"), dispatched("bf16", expert_dispatch_dtype=dtype)
    low = dispatched(sent, expert_dispatch_dtype=dtype)
    assert low > 0
    assert wide - rest == 2 * low


@pytest.mark.slow
def test_tokens_in_low_precision_train_as_in_float():
    """A token is rounded once more, as finely as its matmuls round it."""
    more = {**EXPERT, "dtype": "float32", "ici_data_parallelism": 1}
    wide = steps(**more)[0]
    for dtype in ("int8", "float8_e4m3fn"):
        low = steps(**more, expert_dispatch_dtype=dtype)[0]
        assert low != wide
        np.testing.assert_allclose(low, wide, rtol=5e-3)


@pytest.mark.slow
def test_weight_gradients_are_reduced_in_bfloat16_on_request():
    """As a step in bfloat16 does; all else that is sent stays."""
    half = {"dtype": "bfloat16", "quantization": "fp8_full"}
    wide, low = (traffic(**half, weight_gradient_accumulator=dtype) for dtype in ("", "bfloat16"))
    sums = [sum(c.total for c in t.collectives if c.kind != "all-gather" and c.total > 1000) for t in (wide, low)]
    assert sums[1] < 0.7 * sums[0]
    assert low.weights() == wide.weights()


@pytest.mark.slow
def test_weight_gradients_summed_in_bfloat16_train_as_those_in_float32():
    curves = [
        steps(quantization="fp8_full", weight_gradient_accumulator=dtype, ici_data_parallelism=1)[0]
        for dtype in ("", "bfloat16")
    ]
    assert curves[0] != curves[1]
    np.testing.assert_allclose(*curves, rtol=5e-3)


@pytest.mark.slow
def test_float8_is_gathered_in_float_on_request():
    wide = traffic().weights()
    assert traffic(quantization="fp8_full", quantized_all_gather=False).weights() > 0.9 * wide


def steps(count=6, **changes):
    """The first losses of a trainer, and the trainer; each is trained once."""
    return _steps(count, tuple(sorted((name, value) for name, value in changes.items() if value != "")))


@functools.cache
def _steps(count, changes):
    trainer = Trainer(small(**{**COPIES, **dict(changes)}))
    losses = [float(trainer.step()["learning/loss"]) for _ in range(count)]
    return losses, trainer


@pytest.mark.slow
def test_a_quantized_all_reduce_trains_as_one_in_float():
    exact, _ = steps(quantization="int8")
    losses, trainer = steps(quantization="int8", gradient_reduce_dtype="int8")
    assert losses[0] == pytest.approx(exact[0], rel=1e-6)
    assert losses != exact
    np.testing.assert_allclose(losses, exact, rtol=3e-3)
    lost = jax.tree.leaves(trainer.state.errors)
    assert all(x.shape[0] == 4 for x in lost)
    assert any(jnp.any(x != 0) for x in lost)
    without, trainer = steps(quantization="int8", gradient_reduce_dtype="int8", gradient_reduce_error_feedback=False)
    assert not jax.tree.leaves(trainer.state.errors)
    assert without[:2] == losses[:2]
    assert without != losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [{"ici_data_parallelism": 2, "ici_tensor_parallelism": 2}, {**EXPERTS, "ici_expert_parallelism": 2}],
    ids=["data, fsdp, tensor", "experts"],
)
def test_weight_gradients_are_reduce_scattered_in_eight_bits(mesh):
    """In less than a third of what a reduce-scatter in four bytes takes, which is half of an all-reduce."""
    wide, low = (traffic(quantization="int8", gradient_scatter_dtype=dtype, **mesh) for dtype in ("", "int8"))
    share = {"all-reduce": 0.5, "reduce-scatter": 1.0}
    sums = [sum(share.get(c.kind, 0) * c.total for c in t.collectives) for t in (wide, low)]
    codes = sum(c.total for c in low.collectives if c.kind == "all-to-all" and c.dtype == "s8")
    assert 0 < codes < 0.3 * (sums[0] - sums[1])
    assert low.weights() == wide.weights()


@pytest.mark.slow
def test_a_quantized_reduce_scatter_trains_as_one_in_float():
    more = {**EXPERTS, "quantization": "int8", "ici_data_parallelism": 2}
    exact, _ = steps(**more)
    losses, trainer = steps(**more, gradient_scatter_dtype="int8")
    assert losses[0] == pytest.approx(exact[0], rel=1e-6)
    assert losses != exact
    np.testing.assert_allclose(losses, exact, rtol=3e-3)
    assert not trainer.state.quant
    fed, trainer = steps(**more, gradient_scatter_dtype="int8", gradient_scatter_error_feedback=True)
    assert fed[:2] == losses[:2]
    assert fed != losses
    lost = jax.tree.leaves(trainer.state.quant)
    assert len(lost) == 7
    # On each device what it lost itself.
    assert all(x.sharding.shard_shape(x.shape)[1] == 1 and jnp.any(x != 0) for x in lost)


@pytest.mark.slow
def test_error_feedback_is_restored_on_the_same_mesh_and_reset_on_another(tmp_path):
    more = {"quantization": "int8", "gradient_scatter_dtype": "int8", "gradient_scatter_error_feedback": True}
    _, first = steps(2, **more, ici_data_parallelism=2)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(2, first.state)
        # The arguments of a step are donated: this is what comes next.
        following = float(first.step()["learning/loss"]), float(first.step()["learning/loss"])
        same = Trainer(small(**{**COPIES, **more, "ici_data_parallelism": 2}))
        same.resume(checkpoints.restore(same.state, reinit=is_reset_on_remesh).state)
        assert (float(same.step()["learning/loss"]), float(same.step()["learning/loss"])) == following
        other = Trainer(small(**{**COPIES, **more, "ici_data_parallelism": 1, "ici_tensor_parallelism": 2}))
        with pytest.raises(CheckpointError, match="7 leaves differ"):
            checkpoints.restore(other.state)
        assert len(jax.tree.leaves(other.state.quant)) == 7
        with pytest.warns(CheckpointWarning, match="has other shapes for 7 arrays that are reset"):
            other.resume(checkpoints.restore(other.state, reinit=is_reset_on_remesh).state)
        assert not any(jnp.any(x != 0) for x in jax.tree.leaves(other.state.quant))
        assert float(other.step()["learning/loss"]) == pytest.approx(following[0], rel=1e-4)


@pytest.mark.slow
def test_error_feedback_passes_between_microbatches():
    """What arrives of two parts and what is lost in the end are the gradient; what the first lost counts once."""
    more = {"quantization": "int8", "gradient_accumulation_steps": 2, "per_device_batch_size": 2}
    more |= {"base_num_decoder_layers": 2}
    low = {"gradient_scatter_dtype": "int8", "gradient_scatter_error_feedback": True}
    found = []
    for changes in (low, {}):
        trainer = Trainer(small(**{**FSDP, **more, **changes}))
        gradients = jax.jit(functools.partial(trainer.train_step.gradients, step=0))
        found.append(gradients(trainer.state, trainer.batch(0))[:2])
    (sent, quant), (exact, _) = found
    lost = quant[GRADIENT_STATE]["decoder"]["layers"]["mlp"]
    for name in ("wi_0", "wi_1", "wo"):
        arrived, whole = (tree["decoder"]["layers"]["mlp"][name]["kernel"] for tree in (sent, exact))
        rest, size = lost[name]["dot_general0"]["error_feedback"]["error"].sum(1), float(jnp.abs(whole).max())
        assert float(jnp.abs(arrived - whole).max()) > 1e-4 * size
        np.testing.assert_allclose(arrived + rest, whole, rtol=0, atol=1e-5 * size)


@pytest.mark.slow
def test_quantized_all_reduce_and_reduce_scatter_combine():
    more = {"quantization": "int8", "ici_data_parallelism": 2, "gradient_reduce_dtype": "int8"}
    more |= {"base_num_decoder_layers": 2}
    exact, losses = (steps(**more, gradient_scatter_dtype=dtype)[0] for dtype in ("", "int8"))
    assert losses != exact
    np.testing.assert_allclose(losses, exact, rtol=3e-3)


@pytest.mark.slow
def test_replicas_reduce_gradients_in_a_quarter_of_the_bytes():
    # Two copies of a model on one device each: all that is sent is gradients, and a few numbers.
    two = {**COPIES, "base_num_decoder_layers": 2, "ici_data_parallelism": 2, "num_devices": 2}
    wide, low = (
        read_communication(partitioned_hlo(Program(small(**two, gradient_reduce_dtype=dtype), vocab_size=64).lower()))
        for dtype in ("", "int8")
    )
    assert 0 < low.total() < 0.3 * wide.total()


@pytest.mark.slow
def test_a_batch_in_halves_trains_as_a_whole_one():
    """A token's scales are its own, and those of a weight do not depend on rows: only sums are in another order.

    How evenly tokens are spread over experts is a property of a half, so that it is left out of the loss.
    """
    more = {"load_balance_loss_weight": 0.0, **EXPERTS, "quantization": "int8", "use_qwix_quantization": True}
    whole, halves = (Trainer(small(**more, use_batch_split_schedule=split)) for split in (False, True))
    # A token that another expert is chosen for ends the comparison after a few steps.
    losses = [[float(t.step()["learning/loss"]) for _ in range(3)] for t in (whole, halves)]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)
    np.testing.assert_allclose(*losses, rtol=1e-3)
    assert halves.verify().share() == pytest.approx(whole.verify().share())
