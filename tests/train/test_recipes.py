"""Every value of `quantization` quantizes what it should of the small models, and trains what they are made of."""

import json

import jax
import numpy as np
import pytest

import octavo
from octavo.train.config import Config
from octavo.train.setup import Setup
from octavo.train.sources import load
from octavo.train.trainer import Trainer

pytestmark = pytest.mark.standard_promotion

AQT = ("int8", "int4", "fp8", "fp8_full", "fp8_e4m3", "fp8_e5m2", "fp4", "aqt_fp8_full")
WEIGHT_ONLY = ("int8w", "int4w")
FLOAT_GRADIENTS = ("qat_int8", "qat_int4", "intmp", "aqt_fp8")
CASES = [(name, True) for name in octavo.recipes()] + [(name, False) for name in AQT]
every = pytest.mark.parametrize(
    ("name", "qwix"), CASES, ids=[f"{name}-{'qwix' if qwix else 'aqt'}" for name, qwix in CASES]
)
ATTENTION = [f"self_attention/{part}" for part in ("query", "key", "value", "out")]
MLP = ("wi_0", "wi_1", "wo")


def configure(name: str, qwix: bool, folder, *more: str) -> Config:
    table = folder / "bits.json"
    table.write_text(json.dumps({"__default__": {"w_bits": 8, "a_bits": 8}, ".*/query": {"w_bits": 4}}))
    words = [
        *more,
        f"quantization={name}",
        f"use_qwix_quantization={qwix}",
        "dataset_type=synthetic",
        "per_device_batch_size=4",
        "max_target_length=128",
        "steps=30",
        "learning_rate=3e-3",
        "quantization_local_shard_count=1",
        "num_devices=1",
    ]
    words += [f"quant_cfg_path={table}"] if name == "intmp" else []
    words += ["constant_bound_config=16,4,0.1,4,0.1,16"] if name == "aqt_fp8_full" and not qwix else []
    return load(words, environ={}).config


@pytest.mark.sampled(18)
@every
def test_it_quantizes_every_product_of_the_layers(name, qwix, tmp_path):
    check_coverage(Setup(configure(name, qwix, tmp_path, "model_name=1m"), vocab_size=256), name, "mlp")


@pytest.mark.slow
@every
def test_it_trains(name, qwix, tmp_path):
    """Attention, experts, and an expert that sees all tokens, a dense block: every kind of product in one program."""
    trainer = Trainer(configure(name, qwix, tmp_path, "model_name=moe-1m", "shared_experts=1"))
    losses = [float(trainer.step()["learning/lm_loss"]) for _ in range(30)]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-3:]) < losses[0] - 0.5
    check_coverage(trainer.setup, name, "moe_block", "moe_block/shared_experts")
    dtypes = {x.dtype for x in jax.tree.leaves(trainer.state.params)}
    assert dtypes == {np.dtype("float32")}


def check_coverage(setup: Setup, name: str, *blocks: str) -> None:
    rows = setup.plan().rows
    parts = [*ATTENTION, *(f"{block}/{part}" for block in blocks for part in MLP)]
    quantized = sorted(row.path for row in rows if row.reason is None)
    assert quantized == sorted(f"decoder/layers/{part}" for part in parts)
    share = sum(row.flops for row in rows if row.reason is None) / sum(row.flops for row in rows)
    found = setup.verify()
    if name in WEIGHT_ONLY:
        assert found.flops("weight_only", backward=False) / found.flops(backward=False) == pytest.approx(share)
        return
    assert found.forward == pytest.approx(share)
    if name in FLOAT_GRADIENTS:
        assert found.backward == 0
    elif name == "switchback":
        assert found.backward == pytest.approx(share / 2, rel=0.05)
    elif name == "te_nvfp4":
        # Rotating the operands of the weight gradient is a product in float, too.
        low = found.flops("native", backward=True) + found.flops("emulated", backward=True)
        assert low == pytest.approx(2 * sum(row.flops for row in rows if row.reason is None), rel=0.05)
    else:
        assert found.backward == pytest.approx(share, rel=0.05)
