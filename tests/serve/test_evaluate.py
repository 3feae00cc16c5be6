"""The measures of an evaluation are their formulas, and say nothing where nothing differs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pretrained import convert_model, weight_rules
from octavo.pretrained.model import Leaf, PretrainedModel
from octavo.serve import KVConfig
from octavo.serve import evaluate as module
from octavo.serve.evaluate import evaluate, layer_outputs
from tests.pretrained.conftest import SMALL, source_of

pytestmark = pytest.mark.standard_promotion

TEXT = np.random.default_rng(0).integers(0, 255, 150).tolist()
LOGITS = np.zeros((3, 64, SMALL.vocab_size), np.float32)


def converted(source, asked):
    params, _ = convert_model(source, weight_rules(asked, source.config))
    leaves = {p: Leaf(x.shape, "float32", lambda x=x: x) for p, x in params.items()}
    return PretrainedModel(source.config, leaves, source.tokenizer, origin=source.origin)


@pytest.fixture(scope="module")
def source():
    return source_of(SMALL)


@pytest.fixture(scope="module")
def pair(source):
    return source, converted(source, "int4")


def reference(source, length):
    """Log probabilities of every window, one at a time and without padding."""
    rows = []
    for start in range(0, len(TEXT), length):
        window = [255, *TEXT[start : start + length]]
        logits = jax.jit(source.function())(source.params(), jnp.asarray([window[:-1]]))[0][0]
        rows.append((np.asarray(jax.nn.log_softmax(logits), np.float64), np.asarray(window[1:])))
    return rows


def test_a_short_text_is_a_small_batch(source, monkeypatch):
    """Logits of so small a vocabulary would fit for a thousand windows, and the text has three."""
    shapes = []
    monkeypatch.setattr(module, "_forward", lambda source, kv: lambda tokens: shapes.append(tokens.shape) or LOGITS)
    assert evaluate(source, TEXT, length=64).tokens == len(TEXT)
    assert shapes == [(3, 64)]


@pytest.mark.slow
def test_against_the_formulas(pair):
    float_model, low = pair
    found = evaluate(low, TEXT, against=float_model, length=64)
    mine, other = reference(low, 64), reference(float_model, 64)
    nll = np.concatenate([-logs[np.arange(len(t)), t] for logs, t in mine])
    base = np.concatenate([-logs[np.arange(len(t)), t] for logs, t in other])
    kl = np.concatenate([np.sum(np.exp(b) * (b - a), -1) for (a, _), (b, _) in zip(mine, other, strict=True)])
    same = np.concatenate([a.argmax(-1) == b.argmax(-1) for (a, _), (b, _) in zip(mine, other, strict=True)])
    assert found.tokens == len(TEXT) == nll.size
    close = {"rel_tol": 1e-4}
    assert math.isclose(found.perplexity.mean, math.exp(nll.mean()), **close)
    assert math.isclose(found.perplexity.error, math.exp(nll.mean()) * nll.std(ddof=1) / math.sqrt(nll.size), **close)
    assert math.isclose(found.reference_perplexity.mean, math.exp(base.mean()), **close)
    assert math.isclose(found.log_ratio.mean, (nll - base).mean(), rel_tol=1e-3, abs_tol=1e-6)
    assert math.isclose(found.kl.mean, kl.mean(), rel_tol=1e-3)
    assert math.isclose(found.same_top.mean, same.mean(), abs_tol=1e-9)
    assert math.isclose(found.rms_change, np.sqrt(np.mean((np.exp(-nll) - np.exp(-base)) ** 2)), rel_tol=1e-3)
    assert [name for name, _ in found.layers] == ["layers_0", "layers_1", "logits"]
    assert all(10 < ratio < 40 for _, ratio in found.layers)
    text = str(found)
    assert "perplexity" in text
    assert "KL divergence" in text


@pytest.mark.slow
def test_a_model_does_not_differ_from_itself(source):
    found = evaluate(source, TEXT, against=source, length=64)
    assert found.kl.mean == 0
    assert found.log_ratio.mean == 0
    assert found.rms_change == 0
    assert found.same_top.mean == 1
    assert all(ratio == math.inf for _, ratio in found.layers)


@pytest.mark.slow
def test_the_last_layer_is_what_the_logits_come_from(source):
    tokens = jnp.asarray([TEXT[:16]])
    outputs = jax.jit(layer_outputs, static_argnums=0)(source.config, source.params(), tokens)
    np.testing.assert_allclose(outputs["logits"], source.function()(source.params(), tokens)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kv", [KVConfig(), KVConfig.of("int8"), KVConfig.of("fp8")])
def test_with_a_cache(source, kv):
    found = evaluate(source, TEXT, kv=kv, length=64, against=source, layers=False)
    off = abs(found.perplexity.mean / found.reference_perplexity.mean - 1)
    assert off < (1e-5 if kv.keys is None else 5e-3)
    assert (found.kl.mean > 1e-7) == (kv.keys is not None)


@pytest.mark.slow
def test_what_cannot_be_compared_says_so(source):
    with pytest.raises(ValueError, match="too short"):
        evaluate(source, [])
    with pytest.raises(ValueError, match="outside of the model's vocabulary of 256"):
        evaluate(source, [3, 999])
    with pytest.raises(ValueError, match="the vocabularies differ: 256 and 300 tokens"):
        evaluate(source, TEXT, against=source_of(SMALL.replace(vocab_size=300)))
