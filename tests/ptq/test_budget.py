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


@pytest.mark.slow
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


@pytest.mark.slow
def test_budgets_of_a_two_layer_model_agree_with_brute_force():
    """Of all assignments that fit, the chosen one has the least measured divergence on data that it has not seen."""

    def run(params, x):
        return jnp.tanh(x @ params["up"]) @ params["down"]

    keys = jax.random.split(jax.random.key(2), 3)
    params = {"up": jax.random.normal(keys[0], (32, 64)) / 8, "down": jax.random.normal(keys[1], (64, 24)) / 4}
    x, other = jax.random.normal(keys[2], (2, 512, 32))
    options = sensitivity(run, params, RULES, [x], method="round")
    low = {name: octavo.convert(run, params, x, rules=rule) for name, rule in RULES.items()}
    logs = jax.jit(lambda params: jax.nn.log_softmax(run(params, other)))
    wanted = logs(params)
    sizes, measured = {}, {}
    for names in itertools.product(RULES, repeat=2):
        chosen = dict(zip(params, names, strict=True))
        sizes[names] = sum(options[w][n].nbytes for w, n in chosen.items())
        found = logs({w: low[n][w].dequantize(jnp.float32) for w, n in chosen.items()})
        measured[names] = float(jnp.mean(jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1)))
    mixed = 0
    for budget in sorted(sizes.values()):
        chosen = assign(options, budget)
        best = min((names for names in sizes if sizes[names] <= budget), key=measured.__getitem__)
        assert (chosen["up"], chosen["down"]) == best
        mixed += len(set(best)) > 1
    assert mixed >= 3


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
    with pytest.raises(ValueError, match="the predicted divergence of 'a' in int4 is nan: leave int4 out"):
        assign({"a": {"int3": Option(1, 1), "int4": Option(float("nan"), 2)}}, 100)
    with pytest.raises(ValueError, match="have to agree, but have no option in common"):
        assign({"a": {"int4": Option(1, 1)}, "b": {"int8": Option(1, 1)}}, 100, groups=[("a", "b")])
