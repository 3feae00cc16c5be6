"""A conversion quantizes each parameter as training would, in pieces or whole, and says what it did."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo import QArray, Quantizer
from octavo._tree import unflatten_paths
from octavo.pretrained import convert, convert_model, param_quantizers, weight_rules
from octavo.pretrained.model import on_device, storage_name
from tests.cases import slow_except
from tests.pretrained.conftest import SMALL, source_of

pytestmark = pytest.mark.standard_promotion

FORMATS = ["int8", "int4", "int3", "int2", "nf4", "fp8", "fp4", "mxfp4", "mxfp8", "nvfp4", "int4:g64", "int4:g32:mse"]


def tree(params):
    return unflatten_paths({path: on_device(x, "float32") for path, x in params.items()})


def logits(source, params, tokens):
    return jax.jit(source.function())(params, tokens)[0]


@pytest.mark.parametrize("asked", slow_except(["int8"], FORMATS))
def test_every_matrix_is_quantized_and_the_model_runs_with_it(small, asked):
    params, summary = convert_model(small, weight_rules(asked, small.config))
    matrices = [p for p in params if p.endswith(("kernel", "embedding"))]
    assert all(isinstance(params[p], QArray) for p in matrices)
    assert all(not isinstance(params[p], QArray) for p in params if p not in matrices)
    stored = sum(x.nbytes for x in params.values())
    assert summary.after == stored < summary.before == 4 * small.size
    assert math.isclose(summary.bits_per_weight, 8 * stored / small.size)
    tokens = jnp.arange(12)[None] * 7 % 256
    low = logits(small, tree(params), tokens)
    # The reference: the same products of the floats that the codes stand for.
    floats = {p: on_device(x, "float32").dequantize() if isinstance(x, QArray) else x for p, x in params.items()}
    np.testing.assert_allclose(low, logits(small, tree(floats), tokens), rtol=2e-4, atol=2e-4)
    assert not np.allclose(low, logits(small, small.params(), tokens), rtol=2e-4, atol=2e-4)


@pytest.mark.slow
def test_more_bits_are_better(small):
    tokens = jnp.arange(24)[None] * 5 % 256
    wanted = logits(small, small.params(), tokens)

    def error(asked):
        params, _ = convert_model(small, weight_rules(asked, small.config))
        return float(jnp.linalg.norm(logits(small, tree(params), tokens) - wanted))

    errors = [error(asked) for asked in ("int8", "int4", "int3", "int2")]
    assert errors == sorted(errors)
    assert errors[0] < 0.02 * float(jnp.linalg.norm(wanted))


@pytest.mark.parametrize("asked", slow_except(["int4", "nvfp4"], ["int8", "int4", "nf4", "nvfp4", "fp8"]))
def test_pieces_make_the_same_codes_as_the_whole(monkeypatch, asked):
    hows = param_quantizers(SMALL, weight_rules(asked, SMALL))
    x = np.random.default_rng(0).normal(size=(128, 64)).astype(np.float32)
    how = hows["decoder/layers_0/mlp/wo/kernel"]
    whole, ratio = convert.quantize_array(x, how)
    monkeypatch.setattr(convert, "_PIECE", 1000)
    pieces, other = convert.quantize_array(x, how)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(pieces), strict=True):
        np.testing.assert_array_equal(a, b)
    assert math.isclose(ratio, other, rel_tol=1e-5)
    exact = jax.jit(lambda x: how.quantize(x).dequantize())(x)
    np.testing.assert_array_equal(on_device(whole, "float32").dequantize(), exact)
    assert math.isclose(ratio, 10 * math.log10(np.sum(x**2) / np.sum((np.asarray(exact) - x) ** 2)), rel_tol=1e-4)


def test_codes_below_eight_bits_are_packed_along_the_contraction(small):
    params, _ = convert_model(small, weight_rules("int4", small.config, head="int4"))
    kernel, table = params["decoder/layers_0/mlp/wo/kernel"], params["token_embedder/embedding"]
    assert kernel.shape == (128, 64)
    assert kernel.qvalue.shape == (64, 64)
    assert kernel.scale.shape == (4, 64)
    assert table.qvalue.shape == (256, 32)
    assert table.scale.shape == (256, 2)


def test_the_embedding_of_an_untied_model_is_stored_as_its_logits_are():
    config = SMALL.replace(tied_logits=False)
    hows = param_quantizers(config, weight_rules("int8", config))
    assert hows["decoder/logits_dense/kernel"] == Quantizer("int8", channelwise_axes=(1,))
    assert hows["token_embedder/embedding"] == Quantizer("int8", channelwise_axes=(0,))


@pytest.mark.slow
def test_experts_are_converted_and_routers_are_not():
    config = SMALL.replace(num_experts=4, experts_per_token=2, moe_mlp_dim=32)
    source = source_of(config)
    params, _ = convert_model(source, weight_rules("int8", config))
    assert [isinstance(params[p], QArray) for p in params if "moe_block/router" in p] == [False, False]
    experts = [p for p in params if "moe_block/w" in p]
    assert len(experts) == 6
    assert all(isinstance(params[p], QArray) for p in experts)
    tokens = jnp.arange(12)[None]
    close = logits(source, tree(params), tokens) - logits(source, source.params(), tokens)
    assert float(jnp.abs(close).max()) < 0.3


def test_the_head_is_ones_own_choice(small):
    def kind(**options):
        params, _ = convert_model(small, weight_rules("int4", small.config, **options))
        return storage_name(params["token_embedder/embedding"])

    assert kind() == "int8"
    assert kind(head="int4") == "int4 g32"
    assert kind(head="float") == "float32"


def test_rules_from_a_file_may_mix(small, tmp_path):
    rules = [
        {"module_path": ".*/mlp/wo", "weight_qtype": "int8"},
        {"module_path": ".*/mlp/.*", "weight_qtype": "int4", "tile_size": 32},
    ]
    (tmp_path / "mixed.json").write_text(json.dumps(rules))
    params, summary = convert_model(small, weight_rules(str(tmp_path / "mixed.json"), small.config))
    kinds = {p: storage_name(x) for p, x in params.items()}
    assert kinds["decoder/layers_1/mlp/wo/kernel"] == "int8"
    assert kinds["decoder/layers_1/mlp/wi_0/kernel"] == "int4 g32"
    assert kinds["decoder/layers_1/self_attention/out/kernel"] == "float32"
    assert summary.kinds["int8"] == 2 * 128 * 64


def test_each_parameter_has_a_line_and_the_end_a_summary(small):
    lines = []
    _, summary = convert_model(small, weight_rules("int8", small.config), log=lines.append)
    assert len(lines) == len(small.leaves)
    line = next(line for line in lines if "layers_1/mlp/wo" in line)
    assert "float32 -> int8" in line
    assert "0.03 MiB ->     0.01 MiB" in line
    assert " dB" in line
    assert "bits per weight" in str(summary)
    assert "peak memory" in str(summary)
    assert summary.worst[0][1] <= summary.worst[-1][1]


def test_what_cannot_be_asked_for_says_what_can(small):
    with pytest.raises(ValueError, match="'int9' is not a number format: did you mean"):
        weight_rules("int9", small.config)
    with pytest.raises(ValueError, match=r"was trained in float: name a number format"):
        weight_rules("trained", small.config)
    with pytest.raises(FileNotFoundError, match=r"there is no file of rules nowhere\.json"):
        weight_rules("nowhere.json", small.config)
    with pytest.raises(ValueError, match="mxfp4 has groups of 32: leave :g64 out"):
        weight_rules("mxfp4:g64", small.config)
    with pytest.raises(ValueError, match="'int99' is not a number format for the head"):
        weight_rules("int4", small.config, head="int99")


@pytest.mark.slow
def test_a_last_group_that_is_not_full_is_filled_up():
    source = source_of(SMALL.replace(mlp_dim=72))
    params, _ = convert_model(source, weight_rules("int4", source.config))
    kernel = params["decoder/layers_0/mlp/wo/kernel"]
    assert kernel.shape == (72, 64)
    assert kernel.scale.shape == (3, 64)
    tokens = jnp.arange(12)[None]
    exact = {p: on_device(x, "float32").dequantize() if isinstance(x, QArray) else x for p, x in params.items()}
    wanted = logits(source, tree(exact), tokens)
    np.testing.assert_allclose(logits(source, tree(params), tokens), wanted, rtol=2e-4, atol=2e-4)
