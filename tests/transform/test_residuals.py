"""Residuals in few bits, against JAX's gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import octavo
from octavo import QtRule
from octavo.transform import residuals

RULE = QtRule(residual_qtype="int8")


def norm(x, weight):
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * weight[None]


def layer(p, x):
    """A norm, a gated MLP, causal attention and a dropout-like mask, on rows of 64."""
    y = norm(x, p["norm"])
    x = x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]
    scores = jnp.where(jnp.tril(jnp.ones((x.shape[-2],) * 2, bool)), x @ jnp.swapaxes(x, -1, -2) / 8, -1e9)
    x = x + jax.nn.softmax(scores) @ x
    return jax.nn.relu(x) + jax.nn.gelu(x)


def parameters(*stack):
    shapes = {"norm": (64,), "gate": (64, 128), "up": (64, 128), "down": (128, 64)}
    keys = jax.random.split(jax.random.key(0), 4)
    values = {n: jax.random.normal(k, (*stack, *s)) / 8 for (n, s), k in zip(shapes.items(), keys, strict=True)}
    return values | {"norm": 1 + values["norm"]}


X = jax.random.normal(jax.random.key(1), (32, 64))


def single(params, x):
    return jnp.sum(jnp.sin(layer(params, x)))


def scanned(params, x):
    return jnp.sum(jnp.sin(jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)[0]))


def rematerialized(policy, params, x):
    step = jax.checkpoint(lambda x, p: (layer(p, x), None), policy=policy)
    return jnp.sum(jnp.sin(jax.lax.scan(step, x, params)[0]))


def error(got, want):
    """The largest relative error of a gradient in the Euclidean norm."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs)


def gradients(fn, *args, rule=RULE):
    both = jax.jit(lambda *a: [jax.value_and_grad(f, argnums=(0, 1))(*a) for f in (fn, octavo.quantized(fn, rule))])
    (want, exact), (value, low) = both(*args)
    np.testing.assert_array_equal(value, want)  # the forward pass is exact
    return low, exact


SAVE_CODES = jax.checkpoint_policies.save_only_these_names(octavo.ops.RESIDUAL)


@pytest.mark.parametrize(
    "fn",
    [scanned, functools.partial(rematerialized, None), functools.partial(rematerialized, SAVE_CODES)],
    ids=["scan", "remat", "policy"],
)
def test_layers(fn):
    assert 0 < error(*gradients(fn, parameters(2), X)) < 0.02


def test_stored_as_it_is_the_gradient_is_exact(monkeypatch):
    monkeypatch.setattr(residuals, "SMALL", 10**9)
    for got, want in zip(*map(jax.tree.leaves, gradients(single, parameters(), X)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_vmap():
    params, x = parameters(), jnp.stack([X, X + 1])
    low = jax.jit(jax.vmap(jax.grad(octavo.quantized(single, RULE)), (None, 0)))(params, x)
    want = jax.jit(jax.vmap(jax.grad(single), (None, 0)))(params, x)
    assert error(low, want) < 0.02


def distributed(kind):
    """A loss of sequences sharded over a mesh, and the arguments."""
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type, axis_type))
    params, x = parameters(), jnp.stack([X, X + 1, X - 1, X])
    every = lambda params, x: jnp.sum(jax.vmap(lambda x: single(params, x))(x))  # noqa: E731
    specs = {"norm": P(), "gate": P(None, "model"), "up": P(None, "model"), "down": P("model")}
    if kind != "auto":
        specs = dict.fromkeys(specs, P())
    if kind == "shard_map":
        local = lambda params, x: jax.lax.psum(every(params, x), ("data", "model"))  # noqa: E731
        low = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(("data", "model"))), out_specs=P())
    else:
        low = every
        params = {n: jax.device_put(v, NamedSharding(mesh, specs[n])) for n, v in params.items()}
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
    return mesh, every, low, params, x


@pytest.mark.parametrize("kind", ["auto", "shard_map", "explicit"])
def test_mesh(kind):
    mesh, every, low, params, x = distributed(kind)
    want = jax.jit(jax.grad(every))(*jax.device_get((params, x)))
    with jax.set_mesh(mesh):
        got = jax.jit(jax.grad(octavo.quantized(low, RULE)))(params, x)
    assert error(jax.device_get(got), want) < 0.02


def kept(fn, *args, rule=RULE):
    return [saved.values for saved in octavo.plan(fn, [rule], *args).residuals]


W = {"w": jax.random.normal(jax.random.key(2), (64, 64))}


def test_error_of_one_operation_is_that_of_the_format():
    """d sum(x**3) / dx = 3 x**2: with an error of at most half a step in x, 1/254 of the largest value of a row."""
    fn = lambda params, x: jnp.sum((x @ params["w"]) ** 3)  # noqa: E731
    low, want = (jax.jit(jax.grad(f, argnums=1))(W, X) for f in (octavo.quantized(fn, RULE), fn))
    y = X @ W["w"]
    step = jnp.max(jnp.abs(y), axis=1, keepdims=True) / 127
    bound = (3 * (jnp.abs(y) * step + step**2 / 4)) @ jnp.abs(W["w"]).T
    assert jnp.all(jnp.abs(low - want) <= bound + 1e-3)
    assert jnp.any(low != want)


def test_masks_have_one_bit_and_are_exact():
    def fn(params, x, key):
        keep = jax.random.bernoulli(key, 0.9, x.shape)
        return jnp.sum(jax.nn.relu(jnp.where(keep, x @ params["w"], 0.0)))

    low, want = (jax.jit(jax.grad(f))(W, X, jax.random.key(0)) for f in (octavo.quantized(fn, RULE), fn))
    saved = kept(fn, W, X, jax.random.key(0))
    assert ("1 bit 32x64", "1 bit 32x64") in saved
    assert error(low, want) < 0.01


def test_saturated_softmax():
    """Probabilities of 1 have no gradient: their codes must be exactly 1, or the small rest is multiplied."""
    fn = lambda params, x: jnp.sum(jax.nn.softmax(30 * (x @ params["w"])) @ jnp.sin(params["w"]))  # noqa: E731
    low, want = (jax.jit(jax.grad(f))(W, X) for f in (octavo.quantized(fn, RULE), fn))
    assert error(low, want) < 0.05


@pytest.mark.parametrize(
    "fn",
    [lambda y: 1 / y, jnp.log, lambda y: jnp.sqrt(y), lambda y: (2 * y) ** -1.5, lambda y: 3 / (1 + jnp.exp(-y))],
    ids=["divide", "log", "sqrt", "power", "logistic"],
)
def test_small_divisors_are_not_rounded_to_zero(fn):
    """One value of a block is large, so that the codes of the others would be zero."""
    x = jnp.abs(X).at[:, 0].set(1e4) + 0.1
    loss = lambda params, x: jnp.sum(fn(x @ params["w"]))  # noqa: E731
    low, want = (jax.jit(jax.grad(f))({"w": jnp.eye(64)}, x) for f in (octavo.quantized(loss, RULE), loss))
    assert error(low, want) < 0.02


def test_plan():
    rule = RULE.replace(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
    plan = octavo.plan(scanned, [rule], parameters(2), X)
    first, second, *_ = plan.residuals
    assert first.values == ("int8 32x64", "float32 32x1")
    assert second.values == ("int8 32x128", "int8 32x128")
    assert (second.times, second.bytes_after) == (2, 2 * 2 * 32 * (128 + 4))
    assert "residuals at (top): int8 32x128, int8 32x128, 160.0 KiB -> 16.5 KiB in 2 executions" in str(plan)


def test_rules_choose_by_path():
    def fn(params, x):
        with jax.named_scope("float"):
            x = jnp.sin(x @ params["w"])
        with jax.named_scope("low"):
            return jnp.sum(jnp.sin(x @ params["w"]))

    rules = [QtRule(module_path="float", skip=True, optional=True), RULE]
    plan = octavo.plan(fn, rules, W, X)
    assert [saved.path for saved in plan.residuals] == ["low", "low"]
    assert not octavo.plan(fn, [RULE.replace(residual_qtype=None, weight_qtype="int8")], W, X).residuals


def test_format_without_negative_values():
    with pytest.raises(ValueError, match="uint8 has no negative values"):
        QtRule(residual_qtype="uint8")


def test_training_reaches_the_loss_of_float():
    target = jax.random.normal(jax.random.key(5), (32, 64))
    loss = lambda params, x: jnp.mean((layer(params, x) - target) ** 2)  # noqa: E731

    def trained(fn, params):
        def descend(params, _):
            return jax.tree.map(lambda p, g: p - 0.05 * g, params, jax.grad(fn)(params, X)), None

        return loss(jax.lax.scan(descend, params, None, 100)[0], X)

    fns = loss, octavo.quantized(loss, RULE)
    start, want, low = jax.jit(lambda p: [loss(p, X), *(trained(fn, p) for fn in fns)])(parameters())
    assert want < 0.7 * start
    assert abs(low - want) < 0.01 * want


def test_second_derivatives_raise():
    low = octavo.quantized(lambda params, x: jnp.sum(jnp.sin(x @ params["w"])), RULE)
    with pytest.raises(NotImplementedError, match="residuals in low precision have no second derivative"):
        jax.grad(lambda params, x: jnp.sum(jax.grad(low, argnums=1)(params, x) ** 2))(W, X)


def test_symbolic_shapes():
    (batch,) = jax.export.symbolic_shape("batch")
    low = jax.jit(jax.grad(octavo.quantized(lambda params, x: jnp.sum(jnp.sin(x @ params["w"])), RULE)))
    exported = jax.export.export(low)(W, jax.ShapeDtypeStruct((batch, 64), jnp.float32))
    np.testing.assert_allclose(exported.call(W, X)["w"], low(W, X)["w"], rtol=1e-5, atol=1e-5)
