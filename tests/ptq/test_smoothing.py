"""SmoothQuant and AWQ: the same function in float, with less error in low precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo.ptq import Fold, awq, smooth

FOLDS = [Fold("norm", ("q", "k"))]


def predict(params, x):
    h = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True)) * params["norm"][None]
    return jnp.concatenate([h @ params["q"], h @ params["k"]], axis=1)


@pytest.fixture(scope="module")
def problem():
    """Some channels of the norm are large, as in language models."""
    keys = jax.random.split(jax.random.key(0), 4)
    norm = jnp.exp(jax.random.normal(keys[0], (32,))).at[jnp.asarray([3, 17])].set(40.0)
    params = {"norm": norm, "q": jax.random.normal(keys[1], (32, 16)), "k": jax.random.normal(keys[2], (32, 8))}
    return params, jax.random.normal(keys[3], (200, 32))


def test_smoothing_is_the_paper_s_formula_and_keeps_the_function(problem):
    params, x = problem
    new = smooth(predict, params, [x[:100], x[100:]], FOLDS, alpha=0.7)
    inputs = np.asarray(x) / np.sqrt(np.mean(np.asarray(x) ** 2, axis=1, keepdims=True)) * np.asarray(params["norm"])
    weight = np.abs(np.concatenate([params["q"], params["k"]], axis=1)).max(axis=1)
    wanted = np.abs(inputs).max(axis=0) ** 0.7 / weight**0.3
    np.testing.assert_allclose(params["norm"] / new["norm"], wanted, rtol=1e-4)
    np.testing.assert_allclose(new["k"], np.asarray(params["k"]) * wanted[:, None], rtol=1e-4)
    np.testing.assert_allclose(predict(new, x), predict(params, x), rtol=1e-3, atol=1e-3)


def test_static_w8a8_after_smoothing(problem):
    params, x = problem
    rule = octavo.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True, per_tensor=True)

    def error(p):
        low = octavo.quantized(predict, rule)
        _, state = low.stateful(low.init(p, x))(p, x)
        return float(jnp.mean((low.stateful(state, update=False)(p, x)[0] - predict(params, x)) ** 2))

    assert error(smooth(predict, params, [x], FOLDS)) < 0.3 * error(params)


def test_awq_keeps_the_function_and_lowers_the_error(problem):
    params, x = problem
    rule = octavo.QuantizationRule(weight_qtype="int3", tile_size=16)
    quantizers = octavo.quantized(predict, rule).stored_quantizers(params, x)
    new = awq(predict, params, [x], FOLDS, quantizers)
    wanted = predict(params, x)
    np.testing.assert_allclose(predict(new, x), wanted, rtol=1e-3, atol=2e-3)
    run = octavo.served(predict, rule)
    errors = [float(jnp.mean((run(octavo.convert(predict, p, x, rules=rule), x) - wanted) ** 2)) for p in (new, params)]
    assert errors[0] < 0.8 * errors[1]


def test_bad_folds(problem):
    params, x = problem
    with pytest.raises(ValueError, match="there is no parameter 'nrm' to scale; there are k, norm, q"):
        smooth(predict, params, [x], [Fold("nrm", ("q",))])
    with pytest.raises(ValueError, match=r"the inputs of 'norm' were not observed"):
        smooth(predict, params, [x], [Fold("q", ("norm",))])
    with pytest.raises(ValueError, match="'q' has 512 values, but its weights 32 inputs"):
        smooth(predict, params, [x], [Fold("q", ("k",))])
    with pytest.raises(ValueError, match="alpha is between 0"):
        smooth(predict, params, [x], FOLDS, alpha=2)
