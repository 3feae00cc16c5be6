"""Kinds of models, loop or scan, remat, transformations and recipes, in pairs.

The result is bit for bit that of a function with the same structure that calls Octavo's operations by hand, and
`verify` says that no product is left out.
"""

import itertools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import octavo
from octavo.rules import dot_config
from tests.arrays import normal
from tests.cases import slow_except

pytestmark = pytest.mark.standard_promotion

DEPTH, WIDTH, HIDDEN = 2, 16, 32
X = normal(1, 32, WIDTH)  # four rows for each of eight devices

RECIPES = {
    "int8_qt": octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8"),
    "int8_qat": octavo.QuantizationRule(weight_qtype="int8", act_qtype="int8"),
    "fp8": octavo.QtRule(weight_qtype="float8_e4m3fn", act_qtype="float8_e4m3fn", bwd_qtype="float8_e5m2"),
    "int4_weights": octavo.QuantizationRule(weight_qtype="int4"),
}
# The kinds of products forward and backward. CPUs widen float8 codes before they multiply.
KINDS_OF_PRODUCTS = {
    "int8_qt": ("native", "native"),
    "int8_qat": ("native", "float"),
    "fp8": ("emulated", "emulated"),
    "int4_weights": ("weight_only", "float"),
}


def weights():
    """Stacked weights, the same for all kinds of models."""
    up, down = jax.random.split(jax.random.key(0))
    scale = WIDTH**-0.5
    return {
        "up": scale * jax.random.normal(up, (DEPTH, WIDTH, HIDDEN)),
        "down": scale * jax.random.normal(down, (DEPTH, HIDDEN, WIDTH)),
    }


def layer(up, down, x):
    return x + down(jnp.tanh(up(x)))


def reference(scanned, remat, config):
    """A function that multiplies by hand, of stacked weights."""
    dot = lambda w: lambda x: octavo.dot(x, w, config=config)  # noqa: E731
    body = lambda x, w: (layer(dot(w["up"]), dot(w["down"]), x), None)  # noqa: E731
    body = jax.checkpoint(body) if remat else body

    def run(stack, x):
        if scanned:
            return jax.lax.scan(body, x, stack)[0]
        for i in range(DEPTH):
            x, _ = body(x, jax.tree.map(lambda w, i=i: w[i], stack))
        return x

    return run


def function(scanned, remat, rule):
    body = lambda x, w: (layer(lambda x: x @ w["up"], lambda x: x @ w["down"], x), None)  # noqa: E731
    body = jax.checkpoint(body) if remat else body

    def run(params, x):
        if scanned:
            return jax.lax.scan(body, x, params)[0]
        for i in range(DEPTH):
            x, _ = body(x, params[i])
        return x

    low = octavo.quantized(run, rule)
    split = lambda stack: [jax.tree.map(lambda w, i=i: w[i], stack) for i in range(DEPTH)]  # noqa: E731
    return lambda stack, x: low(stack if scanned else split(stack), x)


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        dense = lambda n, name: nn.Dense(n, use_bias=False, name=name)  # noqa: E731
        return layer(dense(HIDDEN, "up"), dense(WIDTH, "down"), x), None


class LinenModel(nn.Module):
    scanned: bool
    remat: bool

    @nn.compact
    def __call__(self, x):
        cls = nn.remat(LinenLayer) if self.remat else LinenLayer
        if self.scanned:
            cls = nn.scan(cls, variable_axes={"params": 0}, split_rngs={"params": True}, length=DEPTH)
            return cls(name="layers")(x, None)[0]
        for i in range(DEPTH):
            x, _ = cls(name=f"layer{i}")(x, None)
        return x


def linen(scanned, remat, rule):
    model = octavo.quantize_model(LinenModel(scanned, remat), rule)

    def run(stack, x):
        leaf = lambda w: {name: {"kernel": value} for name, value in w.items()}  # noqa: E731
        one = lambda i: leaf(jax.tree.map(lambda w: w[i], stack))  # noqa: E731
        params = {"layers": leaf(stack)} if scanned else {f"layer{i}": one(i) for i in range(DEPTH)}
        return model.apply({"params": params}, x)

    return run


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return layer(self.up, self.down, x)


class NnxModel(nnx.Module):
    def __init__(self, scanned, remat, rngs):
        self.scanned, self.remat = scanned, remat
        if scanned:
            self.layers = nnx.vmap(NnxLayer, in_axes=0)(rngs.split(DEPTH))
        else:
            self.layers = nnx.List([NnxLayer(rngs) for _ in range(DEPTH)])

    def __call__(self, x):
        call = lambda x, layer: layer(x)  # noqa: E731
        call = nnx.remat(call) if self.remat else call
        if self.scanned:
            return nnx.scan(call, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        for one in self.layers:
            x = call(x, one)
        return x


def of_nnx(scanned, remat, rule):
    model = octavo.quantize_model(NnxModel(scanned, remat, nnx.Rngs(0)), rule, X)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def run(stack, x):
        leaf = lambda w: {name: {"kernel": value} for name, value in w.items()}  # noqa: E731
        one = lambda i: leaf(jax.tree.map(lambda w: w[i], stack))  # noqa: E731
        layers = leaf(stack) if scanned else {i: one(i) for i in range(DEPTH)}
        state = nnx.State({"layers": layers})
        flat = jax.tree.leaves(state)
        filled = jax.tree.unflatten(jax.tree.structure(params), flat)
        return nnx.merge(graph, filled, rest)(x)

    return run


class EqxLayer(eqx.Module):
    up: jax.Array
    down: jax.Array

    def __call__(self, x):
        return layer(lambda x: x @ self.up, lambda x: x @ self.down, x)


class EqxModel(eqx.Module):
    layers: EqxLayer | list[EqxLayer]
    remat: bool = eqx.field(static=True)

    def __call__(self, x):
        body = lambda x, layer: (layer(x), None)  # noqa: E731
        body = jax.checkpoint(body) if self.remat else body
        if not isinstance(self.layers, list):
            return jax.lax.scan(body, x, self.layers)[0]
        for one in self.layers:
            x, _ = body(x, one)
        return x


def equinox(scanned, remat, rule):
    def run(stack, x):
        one = lambda i: EqxLayer(stack["up"][i], stack["down"][i])  # noqa: E731
        layers = EqxLayer(stack["up"], stack["down"]) if scanned else [one(i) for i in range(DEPTH)]
        return octavo.quantize_model(EqxModel(layers, remat), rule)(x)

    return run


KINDS = {"function": function, "linen": linen, "nnx": of_nnx, "equinox": equinox}


def jitted(fn):
    return jax.jit(fn)


def gradients(fn):
    return jax.jit(jax.value_and_grad(lambda stack, x: jnp.sum(fn(stack, x) ** 2), argnums=(0, 1)))


def mapped(fn):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    total = lambda stack, x: jax.lax.psum(jnp.sum(fn(stack, x) ** 2), "d")  # noqa: E731
    whole = jax.shard_map(total, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    return jax.jit(jax.value_and_grad(whole))


WAYS = {"jit": jitted, "grad": gradients, "shard_map": mapped}


def check(kind, scanned, remat, way, recipe):
    rule = RECIPES[recipe]
    config = dot_config(rule, lhs_weight=False, rhs_weight=True)
    fn, stack = WAYS[way](KINDS[kind](scanned, remat, rule)), weights()
    hand = WAYS[way](reference(scanned, remat, config))
    jax.tree.map(np.testing.assert_array_equal, fn(stack, X), hand(stack, X))
    seen = octavo.verify(fn, stack, X)
    forward, backward = KINDS_OF_PRODUCTS[recipe]
    assert seen.share(forward, backward=False) == 1.0
    if way != "jit" and not remat:
        assert seen.share(backward, backward=True) == 1.0
    # With remat the backward pass computes forward products again: all are those of the function by hand.
    rows = lambda v: sorted((p.backward, p.kind, p.lhs, p.rhs, p.count) for p in v.matmuls)  # noqa: E731
    assert rows(seen) == rows(octavo.verify(hand, stack, X))


# Every pair of a kind, a structure, remat, a transformation and a recipe is in one of these.
CASES = """
    function scan remat grad int8_qt
    linen scan plain shard_map int8_qt
    nnx loop remat grad fp8
    equinox loop remat shard_map int8_qat
    equinox scan plain grad int4_weights
    linen loop remat jit int4_weights
    nnx scan plain jit int8_qat
    function loop plain jit fp8
    equinox loop plain jit int8_qt
    function scan remat shard_map int4_weights
    linen scan remat grad int8_qat
    linen scan plain shard_map fp8
    nnx scan plain shard_map int4_weights
    function loop remat grad int8_qat
    nnx scan plain jit int8_qt
    equinox loop plain shard_map fp8
""".strip().splitlines()
CASES = [tuple(case.split()) for case in CASES]
QUICK = CASES[:5]


def test_every_pair_is_covered():
    values = [KINDS, ("loop", "scan"), ("plain", "remat"), WAYS, RECIPES]
    for (i, first), (j, second) in itertools.combinations(enumerate(values), 2):
        assert {(case[i], case[j]) for case in CASES} == set(itertools.product(first, second))


@pytest.mark.parametrize(("kind", "loop", "remat", "way", "recipe"), slow_except(QUICK, CASES))
def test_matrix(kind, loop, remat, way, recipe):
    check(kind, loop == "scan", remat == "remat", way, recipe)
