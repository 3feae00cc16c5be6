"""A small random model as a source."""

import functools

import jax
import numpy as np
import pytest

from octavo._tree import flatten_paths
from octavo.data import ByteTokenizer
from octavo.models import ModelConfig, init_params
from octavo.pretrained import Leaf, PretrainedModel

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


def source_of(config=SMALL, *, seed=0, dtype=np.float32, **fields):
    params = flatten_paths(init_params(config, jax.random.key(seed)))
    arrays = {path: np.asarray(x).astype(dtype) for path, x in params.items()}
    leaves = {
        path: Leaf(x.shape, str(x.dtype), functools.partial(lambda x: x, x), str(x.dtype)) for path, x in arrays.items()
    }
    origin = {"kind": "random", "path": "small", "name": "small", "max_length": 64}
    return PretrainedModel(config, leaves, ByteTokenizer(), origin=origin, **fields)


@pytest.fixture
def small():
    return source_of()
