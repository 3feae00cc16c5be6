"""A rotated model computes the same logits, and has no outliers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo.models import apply
from octavo.pretrained import (
    PretrainedModel,
    Request,
    convert_model,
    export_model,
    hadamard,
    open_model,
    rotated,
    weight_rules,
)
from octavo.pretrained.convert import logits
from octavo.pretrained.rotation import random_rotation
from tests.cases import slow_except
from tests.pretrained.conftest import SMALL, source_of

EXPERTS = {"num_experts": 4, "experts_per_token": 2, "moe_mlp_dim": 24, "shared_experts": 1, "shared_gate": True}
CASES = {
    "llama": {},
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "gated_mlp": False, "emb_dim": 48},
    "qwen3": {"qk_norm": True, "tied_logits": False, "num_kv_heads": 1},
    "experts": {**EXPERTS, "first_dense_layers": 1},
}


def perturbed(config):
    """A model whose norms and biases are not ones and zeros."""
    source = source_of(config)
    rng = np.random.default_rng(0)
    params = {
        path: leaf.load() + 0.3 * rng.normal(size=leaf.shape).astype(np.float32) * (len(leaf.shape) < 2)
        for path, leaf in source.leaves.items()
    }
    return PretrainedModel.from_params(config, params, tokenizer=source.tokenizer, origin=source.origin)


@pytest.mark.parametrize("case", slow_except(["biases"], list(CASES)))
def test_logits_are_the_same_and_weights_are_not(case):
    source = perturbed(SMALL.replace(**CASES[case]))
    low = rotated(source)
    tokens = jnp.arange(24).reshape(2, 12) % 256
    expected, found = (jax.jit(apply, static_argnums=0)(s.config, s.params(), tokens)[0] for s in (source, low))
    np.testing.assert_allclose(found, expected, atol=2e-5 * float(jnp.abs(expected).max()))
    assert not low.config.tied_logits
    same = {path for path, leaf in source.leaves.items() if np.array_equal(leaf.load(), low.leaves[path].load())}
    kept = ("query/bias", "key/bias", "wi_0/bias", "query_norm/scale", "key_norm/scale")
    assert all(path.endswith(kept) for path in same)


@pytest.mark.parametrize("size", [1, 6, 16, 36])
def test_rotations_are_orthogonal_and_spread_every_axis(size):
    q = random_rotation(size, seed=1)
    np.testing.assert_allclose(q.T @ q, np.eye(size), atol=1e-12)
    assert not np.array_equal(q, random_rotation(size, seed=2)) or size == 1
    if size == 16:
        np.testing.assert_allclose(np.abs(q), 0.25)


@pytest.mark.slow
def test_outliers_of_the_hidden_states_cost_less_after_rotation():
    source = perturbed(SMALL)
    params = {path: np.array(leaf.load()) for path, leaf in source.leaves.items()}
    # A channel of the residual stream that all writers make large and all readers scale down.
    for path, value in params.items():
        if path.endswith(("/wo/kernel", "/out/kernel", "embedding")):
            value[..., 5] *= 30
        elif path.endswith(("query/kernel", "key/kernel", "value/kernel", "wi_0/kernel", "wi_1/kernel")):
            value[5] *= 30
    source = PretrainedModel.from_params(source.config, params, tokenizer=source.tokenizer, origin=source.origin)
    tokens, kl = 7 * jnp.arange(400)[None] % 256, []
    wanted = jax.nn.log_softmax(jax.jit(source.function())(source.params(), tokens)[0])
    for model in (source, rotated(source)):
        rules = weight_rules("int4:g64", model.config, head="float")
        low, _ = convert_model(model, rules)
        quantized = PretrainedModel.from_params(model.config, low, tokenizer=source.tokenizer, origin=source.origin)
        found = jax.nn.log_softmax(jax.jit(quantized.function())(quantized.params(), tokens)[0])
        kl.append(float(jnp.mean(jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1))))
    assert kl[1] < 0.5 * kl[0]


def test_other_norms_raise():
    with pytest.raises(ValueError, match=r"norm='layer': only models with RMS norms before attention"):
        rotated(source_of(SMALL.replace(norm="layer")))
    with pytest.raises(ValueError, match="norm_place='post'"):
        rotated(source_of(SMALL.replace(norm_place="post")))


@pytest.mark.parametrize(
    "blocks", slow_except([{"inputs": 32, "keys": 16}], [{"inputs": 32, "keys": 16}, {"mlp": 128}])
)
def test_rotations_while_the_model_runs_cancel(blocks, tmp_path):
    source = perturbed(SMALL)
    low = hadamard(source, **blocks)
    tokens = jnp.arange(24).reshape(2, 12) % 256
    expected, found = (jax.jit(apply, static_argnums=0)(s.config, s.params(), tokens)[0] for s in (source, low))
    np.testing.assert_allclose(found, expected, atol=2e-5 * float(jnp.abs(expected).max()))
    moved = {p for p, leaf in source.leaves.items() if not np.array_equal(leaf.load(), low.leaves[p].load())}
    assert {path.split("/")[-2] for path in moved} == (
        {"query", "key", "value", "out", "wi_0", "wi_1", "wo"} if "inputs" in blocks else {"wo"}
    )
    # The config is stored with the weights, and no other program could run these.
    export_model("octavo", low, tmp_path / "low", Request("mxfp4", head="float"))
    assert open_model(tmp_path / "low").config == low.config
    with pytest.raises(ValueError, match="no architecture of other programs has hadamard"):
        export_model("gguf", low, tmp_path / "low.gguf", Request("int8"))


def test_rules_do_not_quantize_the_rotations():
    """They are additions: a rule for all matmuls has the same as without them."""
    low, tokens = hadamard(source_of(), inputs=32, keys=16), jnp.zeros((1, 8), jnp.int32)
    rule = octavo.QuantizationRule(weight_qtype="int8", act_qtype="int8")
    sites = [
        octavo.quantized(functools.partial(logits, m.config), rule).sites(m.params(), tokens)
        for m in (source_of(), low)
    ]
    assert [(s.path, s.op_id, s.quantized) for s in sites[1]] == [(s.path, s.op_id, s.quantized) for s in sites[0]]


def test_what_cannot_be_rotated_by_blocks():
    with pytest.raises(ValueError, match="hadamard_inputs is a power of two that divides 64, 64, 128; got 48"):
        hadamard(source_of(), inputs=48)
    with pytest.raises(ValueError, match="the inputs of experts are not rotated"):
        hadamard(source_of(SMALL.replace(**EXPERTS)), inputs=32)
    with pytest.raises(ValueError, match="rotated or fused already"):
        hadamard(hadamard(source_of(), keys=16), mlp=128)
    with pytest.raises(ValueError, match="has Hadamard rotations already"):
        rotated(hadamard(source_of(), mlp=128))
