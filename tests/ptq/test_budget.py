"""Sensitivity against measured divergence, and assignments against brute force."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo.ptq import Option, assign, sensitivity

RULES = {name: octavo.QuantizationRule(weight_qtype=name, tile_size=16) for name in ("int3", "int4", "int8")}


def predict(params, x):
    def layer(h, w):
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    h, _ = jax.lax.scan(layer, x, params["layers"])
    return h @ params["head"]


@pytest.fixture(scope="module")
def problem():
    keys = jax.random.split(jax.random.key(1), 4)
    layers = {"up": jax.random.normal(keys[0], (2, 32, 64)) / 4, "down": jax.random.normal(keys[1], (2, 64, 32)) / 40}
    params = {"layers": layers, "head": jax.random.normal(keys[2], (32, 24)) / 3}
    return params, jax.random.normal(keys[3], (2, 256, 32))


def test_the_predicted_divergence_is_the_measured_one(problem):
    params, (x, other) = problem
    found = sensitivity(predict, params, RULES, [x], method="round")
    assert set(found) == {"layers/up", "layers/down", "head"}
    wanted = jax.nn.log_softmax(predict(params, other))
    for weight, options in found.items():
        path, rule = "head" if weight == "head" else "layers", RULES["int4"]
        low = octavo.convert(predict, params, x, rules=rule)
        leaf = weight.split("/")[-1]
        only = {**params, path: low[path] if weight == "head" else {**params["layers"], leaf: low["layers"][leaf]}}
        logs = jax.nn.log_softmax(octavo.served(predict)(only, other))
        measured = float(jnp.mean(jnp.sum(jnp.exp(wanted) * (wanted - logs), axis=-1)))
        assert 0.6 < options["int4"].kl / measured < 1.6, weight
        assert options["int3"].kl > 3 * options["int4"].kl
    assert found["head"]["int4"].nbytes <= 0.6 * found["head"]["int8"].nbytes


def table(seed, weights, formats=(3, 4, 8)):
    rng = np.random.default_rng(seed)
    costs = rng.lognormal(size=weights) * 10
    sizes = rng.integers(5, 50, size=weights)
    return {
        f"w{i}": {f"int{b}": Option(c * 4.0**-b, int(s) * b) for b in formats}
        for i, (c, s) in enumerate(zip(costs, sizes, strict=True))
    }


@pytest.mark.parametrize("seed", range(4))
def test_assignments_are_those_of_brute_force(seed):
    options, groups = table(seed, 6), [("w0", "w1"), ("w2", "w3")]
    least, most = (sum(pick(o.nbytes for o in own.values()) for own in options.values()) for pick in (min, max))
    for share in (0.1, 0.4, 0.8):
        budget = int(least + share * (most - least))
        chosen = assign(options, budget, groups=groups)
        assert chosen["w0"] == chosen["w1"]
        assert chosen["w2"] == chosen["w3"]
        tried = []
        for names in itertools.product(("int3", "int4", "int8"), repeat=4):
            every = dict(zip(options, (names[0], names[0], names[1], names[1], names[2], names[3]), strict=True))
            if sum(options[w][n].nbytes for w, n in every.items()) <= budget:
                tried.append(sum(options[w][n].kl for w, n in every.items()))
        assert sum(options[w][n].kl for w, n in chosen.items()) == pytest.approx(min(tried), rel=1e-9)


def test_many_weights_fit_their_budget():
    options = table(5, 200)
    budget = sum(own["int4"].nbytes for own in options.values())
    chosen = assign(options, budget)
    assert sum(options[w][n].nbytes for w, n in chosen.items()) <= budget
    uniform = sum(own["int4"].kl for own in options.values())
    assert sum(options[w][n].kl for w, n in chosen.items()) < 0.95 * uniform


def test_bad_budgets():
    options = table(0, 2)
    with pytest.raises(ValueError, match="the smallest formats need"):
        assign(options, 10)
    with pytest.raises(ValueError, match="a group has the weight 'w9', which has no options"):
        assign(options, 1000, groups=[("w0", "w9")])
    with pytest.raises(ValueError, match="have to agree, but have no option in common"):
        assign({"a": {"int4": Option(1, 1)}, "b": {"int8": Option(1, 1)}}, 100, groups=[("a", "b")])
