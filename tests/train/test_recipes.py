"""Every value of `quantization` quantizes each matmul that it should; one of each family trains."""

import json

import jax
import numpy as np
import pytest

import octavo
from octavo.train.config import Config
from octavo.train.program import Program
from octavo.train.trainer import Trainer
from tests.cases import slow_except
from tests.train.common import small

pytestmark = pytest.mark.standard_promotion

AQT = ("int8", "int4", "fp8", "fp8_full", "fp8_e4m3", "fp8_e5m2", "fp4", "aqt_fp8_full")
WEIGHT_ONLY = ("int8w", "int4w")
FLOAT_GRADIENTS = ("qat_int8", "qat_int4", "intmp", "aqt_fp8", "bitnet")
NAMES = [f"{name}-qwix" for name in octavo.recipes()] + [f"{name}-aqt" for name in AQT]
# One for each mechanism: stochastic integers, float8 with delayed scaling, tiles, blocks of two levels with a rotation,
# weights alone.
FAMILIES = ("int8-aqt", "fp8_gpu-qwix", "deepseek_fp8-qwix", "quartet2-qwix", "int4w-qwix")
ATTENTION = [f"self_attention/{part}" for part in ("query", "key", "value", "out")]
MLP = ("wi_0", "wi_1", "wo")
# Tiles of 128 by 128 need matrices of that size.
SIZES = {"base_emb_dim": 128, "base_mlp_dim": 128, "base_moe_mlp_dim": 128, "head_dim": 64}


def configure(name: str, folder, **changes) -> Config:
    recipe, _, numerics = name.rpartition("-")
    if recipe == "intmp":
        table = folder / "bits.json"
        table.write_text(json.dumps({"__default__": {"w_bits": 8, "a_bits": 8}, ".*/query": {"w_bits": 4}}))
        changes["quant_cfg_path"] = str(table)
    if name == "aqt_fp8_full-aqt":
        changes["constant_bound_config"] = (16.0, 4.0, 0.1, 4.0, 0.1, 16.0)
    return small(**SIZES, quantization=recipe, use_qwix_quantization=numerics == "qwix", **changes)


@pytest.mark.parametrize("name", slow_except(("int8-qwix", "te_nvfp4-qwix"), NAMES))
def test_it_quantizes_every_matmul_of_the_layers(name, tmp_path):
    check_coverage(Program(configure(name, tmp_path), vocab_size=256), name, "mlp")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_it_trains(name, tmp_path):
    """Attention, experts, and an expert that sees all tokens: every kind of matmul in one program."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "shared_experts": 1}
    trainer = Trainer(configure(name, tmp_path, **experts, learning_rate=1e-2, steps=16))
    losses = [float(trainer.step()["learning/lm_loss"]) for _ in range(16)]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-3:]) < losses[0] - 0.5
    check_coverage(trainer, name, "moe_block", "moe_block/shared_experts")
    dtypes = {x.dtype for x in jax.tree.leaves(trainer.state.params)}
    assert dtypes == {np.dtype("float32")}


def check_coverage(program: Program, name: str, *blocks: str) -> None:
    recipe, rows = name.rpartition("-")[0], program.plan().rows
    parts = [*ATTENTION, *(f"{block}/{part}" for block in blocks for part in MLP)]
    quantized = sorted(row.path for row in rows if row.reason is None)
    assert quantized == sorted(f"decoder/layers/{part}" for part in parts)
    share = sum(row.flops for row in rows if row.reason is None) / sum(row.flops for row in rows)
    found = program.verify()
    if recipe in WEIGHT_ONLY:
        assert found.flops("weight_only", backward=False) / found.flops(backward=False) == pytest.approx(share)
        return
    assert found.forward == pytest.approx(share)
    if recipe in FLOAT_GRADIENTS:
        assert found.backward == 0
    elif recipe == "switchback":
        assert found.backward == pytest.approx(share / 2, rel=0.05)
    elif recipe in ("te_nvfp4", "mxfp4_hadamard", "quartet2", "tetrajet2"):
        # Rotating the operands of a gradient is a matmul in float, too.
        low = found.flops("native", backward=True) + found.flops("emulated", backward=True)
        assert low == pytest.approx(2 * sum(row.flops for row in rows if row.reason is None), rel=0.05)
    else:
        assert found.backward == pytest.approx(share, rel=0.05)
