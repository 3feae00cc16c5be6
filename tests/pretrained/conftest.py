"""A small random model as a source."""

import functools

import jax
import pytest

from octavo.data import ByteTokenizer
from octavo.models import ModelConfig, init_params
from octavo.pretrained import PretrainedModel

SMALL = ModelConfig(
    vocab_size=256,
    emb_dim=64,
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=128,
    scan_layers=False,
)


@functools.cache
def source_of(config=SMALL):
    origin = {"kind": "random", "path": "small", "name": "small", "max_length": 64}
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(0))
    return PretrainedModel.from_params(config, params, tokenizer=ByteTokenizer(), origin=origin)


@pytest.fixture
def small():
    return source_of()
