"""Weights of GGUF files as kernels multiply them: the same values in fewer bytes, and the same answers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo import QArray, kernels
from octavo.models import ModelConfig, init_params
from octavo.pretrained import PretrainedModel, gguf, open_model
from octavo.pretrained.kernel_layout import packed_for_kernels
from octavo.serve import Engine, SamplingParams
from tests.files.common import dequantized

CONFIG = ModelConfig(
    vocab_size=64,
    emb_dim=256,
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=256,
    tied_logits=True,
    scan_layers=False,
)
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@functools.cache
def source():
    params = jax.jit(init_params, static_argnums=0)(CONFIG, jax.random.key(0))
    return PretrainedModel.from_params(CONFIG, params, origin={"name": "small"})


@pytest.fixture(params=["q4_0", "q4_k_m", "q6_k"])
def model(request, tmp_path):
    gguf.write_model(source(), request.param, tmp_path / "model.gguf")
    return open_model(tmp_path / "model.gguf")


def test_values_are_the_same(model):
    for path, leaf in model.leaves.items():
        wanted, got = leaf.load(), leaf.load_codes()
        if isinstance(wanted, QArray):
            assert np.array_equal(np.asarray(dequantized(got)), np.asarray(dequantized(wanted))), path
        elif isinstance(got, QArray):
            np.testing.assert_allclose(np.asarray(dequantized(got)), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
        else:
            assert np.array_equal(got, wanted)
        if path.endswith("kernel"):
            bits = got.qvalue.nbytes * 8 / np.prod(leaf.shape)
            assert bits == (4 if leaf.stored in ("Q4_0", "Q4_K") else 8), path


@pytest.mark.skipif(not kernels.available(), reason=kernels.status())
def test_the_engine_decodes_them_by_kernels(model):
    engine = Engine(model, max_length=16, chunk=8)
    assert engine.programs.decoding.startswith("CPU kernels")
    exact = Engine(CONFIG, model.params(), max_length=16, chunk=8)
    pairs = zip(engine.generate([[1, 2, 3]], GREEDY), exact.generate([[1, 2, 3]], GREEDY), strict=True)
    for a, b in pairs:
        assert a.token == b.token
        assert abs(a.logprob - b.logprob) < 1e-4


def test_what_has_no_such_layout_is_left_as_it_is():

    for name, shape in (("int4", (4, 3)), ("fp8", (4, 8)), ("int4", (2, 4, 8))):
        q = octavo.quantize(jnp.ones(shape), name, channelwise_axes=(0,))
        kept = packed_for_kernels(q)
        assert (kept.qtype, kept.packed) == (q.qtype, None)
