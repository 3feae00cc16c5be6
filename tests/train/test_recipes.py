"""Every value of `quantization` trains the small models, dense and with experts, and quantizes what it should."""

import json

import jax
import numpy as np
import pytest

import octavo
from octavo.train.config import Config
from octavo.train.sources import load
from octavo.train.trainer import Trainer

pytestmark = pytest.mark.standard_promotion

AQT = ("int8", "int4", "fp8", "fp8_full", "fp8_e4m3", "fp8_e5m2", "fp4", "aqt_fp8_full")
WEIGHT_ONLY = ("int8w", "int4w")
FLOAT_GRADIENTS = ("qat_int8", "qat_int4", "intmp", "aqt_fp8")
CASES = [(name, True) for name in octavo.recipes()] + [(name, False) for name in AQT]
DENSE = ["self_attention/query", "self_attention/key", "self_attention/value", "self_attention/out"]


def configure(name: str, qwix: bool, model: str, folder) -> Config:
    table = folder / "bits.json"
    table.write_text(json.dumps({"__default__": {"w_bits": 8, "a_bits": 8}, ".*/query": {"w_bits": 4}}))
    words = [
        f"model_name={model}",
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


@pytest.mark.sampled(36)
@pytest.mark.parametrize("model", ["1m", "moe-1m"])
@pytest.mark.parametrize(("name", "qwix"), CASES, ids=[f"{name}-{'qwix' if q else 'aqt'}" for name, q in CASES])
@pytest.mark.slow
def test_it_trains(name, qwix, model, tmp_path):
    trainer = Trainer(configure(name, qwix, model, tmp_path))
    losses = [float(trainer.step()["learning/lm_loss"]) for _ in range(30)]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-3:]) < losses[0] - 0.5
    check_coverage(trainer, name, model)


def check_coverage(trainer: Trainer, name: str, model: str) -> None:
    rows = trainer.plan().rows
    mlp = ["wi_0", "wi_1", "wo"]
    parts = [*DENSE, *(f"{'moe_block' if model == 'moe-1m' else 'mlp'}/{part}" for part in mlp)]
    quantized = sorted(row.path for row in rows if row.reason is None)
    assert quantized == sorted(f"decoder/layers/{part}" for part in parts)
    share = sum(row.flops for row in rows if row.reason is None) / sum(row.flops for row in rows)
    found = trainer.verification
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
    dtypes = {x.dtype for x in jax.tree.leaves(trainer.state.params)}
    assert dtypes == {np.dtype("float32")}
