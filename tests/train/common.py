"""Small configurations that train in a moment."""

import jax
import numpy as np

from octavo.train.config import Config

SMALL = {
    "base_emb_dim": 32,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 1,
    "head_dim": 16,
    "base_mlp_dim": 64,
    "base_num_decoder_layers": 2,
    "max_target_length": 32,
    "per_device_batch_size": 8,
    "dataset_type": "synthetic",
    "steps": 8,
    "eval_steps": 2,
    "learning_rate": 3e-3,
    "quantization_metrics_interval": 0,
    "enable_tensorboard": False,
    "quantization_local_shard_count": 1,
    "run_name": "test",
    "num_devices": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 32}


def small(**changes) -> Config:
    """A model of some thousand parameters on the synthetic language."""
    return Config(**{**SMALL, **changes})


def words(**changes) -> list[str]:
    """The same as words of the command line."""
    return [f"{name}={value}" for name, value in {**SMALL, **changes}.items()]


def same(a, b) -> bool:
    """Whether two trees are equal bit by bit."""
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
