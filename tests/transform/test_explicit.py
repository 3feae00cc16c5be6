"""Shardings that are part of the types: mesh axes that are explicit, and operands that are reduced."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import octavo
from octavo import DotConfig, Matmul, Operand
from octavo.compat.maxtext import manual_quantize
from octavo.qarray import shardings
from tests.arrays import normal

ROWS = ("data", "fsdp")
REDUCED = P(None, "tensor", reduced={"data", "fsdp"})
UNREDUCED = P(None, "tensor", unreduced={"data", "fsdp"})
STORED = P("fsdp", "tensor")
INT8 = octavo.recipe("int8", exclude=None)


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


X, W = normal(0, 8, 4, 64), normal(1, 64, 128) / 8


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 3)


@pytest.fixture(autouse=True)
def on_mesh(mesh):
    with jax.set_mesh(mesh):
        yield


def put(x, spec):
    """An array of this type; `reduced` is no place that an array can be put at, but what a program makes of it."""
    return jax.jit(lambda x: reshard(x, spec))(jax.device_put(x, P(*spec.partitions)))


def plain(tree):
    """The values of arrays, summed where they are unreduced."""
    return jax.tree.map(lambda x: np.asarray(reshard(x, P())), tree)


def close(got, want, rtol):
    for a, b in zip(jax.tree.leaves(plain(got)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max())


def away(fn, *args):
    """A function's result without any mesh."""
    with jax.set_mesh(jax.make_mesh((1,), ("one",), axis_types=(AxisType.Auto,))):
        return jax.tree.map(np.asarray, jax.jit(fn)(*jax.tree.map(np.asarray, args)))


def mlp(params, x, use=None):
    """Two products, of which the second sums over devices; the weights are used as they lie, or brought together."""
    typed = isinstance(jax.typeof(x).sharding, NamedSharding) and bool(jax.typeof(x).sharding.spec[0])
    bring = (lambda w, spec: w) if use is None or not typed else reshard
    wide, back = bring(params["wi"], use), bring(params["wo"], use and P("tensor", None, reduced=use.reduced))
    where = (lambda spec: {"out_sharding": spec}) if typed else lambda spec: {}
    x = jnp.einsum("bsd,df->bsf", x, wide, **where(P(ROWS, None, "tensor")))
    return jnp.einsum("bsf,fd->bsd", jnp.tanh(x), back, **where(P(ROWS, None, None)))


PARAMS = {"wi": W, "wo": normal(2, 128, 64) / 8}
SPECS = {"wi": STORED, "wo": P("tensor", "fsdp")}
USES = {"as stored": None, "brought": P(None, "tensor"), "reduced": REDUCED}


def both(rules, use):
    """Loss and gradients on the mesh and off it."""
    low = octavo.quantized(lambda params, x: jnp.mean(mlp(params, x, use) ** 2), rules)
    run = jax.value_and_grad(low, argnums=(0, 1))
    placed = {name: jax.device_put(w, SPECS[name]) for name, w in PARAMS.items()}
    got = jax.jit(run)(placed, jax.device_put(X, P(ROWS)))
    return got, away(run, PARAMS, X)


@pytest.mark.parametrize("use", [SLOW("as stored"), SLOW("brought"), "reduced"])
def test_a_function_is_quantized_as_without_a_mesh(use):
    got, want = both(INT8, USES[use])
    close(got, want, 1e-6)
    assert {name: jax.typeof(g).sharding.spec for name, g in got[1][0].items()} == SPECS


RECIPES = (
    "int4", "int8w", "qat_int8", "fp8", "fp8_full", "mxfp8", "nvfp4", "deepseek_fp8", "switchback", "aqt_fp8_full",
    "te_fp8_currentscaling",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "use"), list(zip(RECIPES, itertools.cycle(USES), strict=False)))
def test_other_recipes(name, use):
    close(*both(octavo.recipe(name, exclude=None), USES[use]), 2e-6)


@pytest.mark.slow
def test_histories_of_delayed_scaling_stay_where_they_are():
    rules = octavo.recipe("te_fp8_delayedscaling", exclude=None)

    def loss(params, x):
        return jnp.mean(jax.lax.scan(jax.checkpoint(lambda x, p: (mlp(p, x), None)), x, params)[0] ** 2)

    stacked = jax.tree.map(lambda w: jnp.stack([w, w / 2]), PARAMS)
    low = octavo.quantized(loss, rules)

    def run(params, x, state):
        value = lambda params, state: low.stateful(state)(params, x)  # noqa: E731
        return jax.value_and_grad(value, argnums=(0, 1), has_aux=True)(params, state)

    state = away(low.init, stacked, X)
    placed = {name: jax.device_put(w, P(None, *SPECS[name])) for name, w in stacked.items()}
    close(jax.jit(run)(placed, jax.device_put(X, P(ROWS)), state), away(run, stacked, X, state), 2e-6)


# A product whose weight is reduced: the gradient is unreduced, as that of a float product is.

CONFIGS = {
    "int8": DotConfig.qt("int8"),
    "float8": DotConfig.qt("float8_e4m3fn", "float8_e5m2"),
    "tiles": DotConfig.qt("int8", tile=32),
    "squares": DotConfig.qt("float8_e4m3fn", tile=32, square=True),
    "zero points": DotConfig.qt("int8").with_operands(fwd={"calibration": "minmax"}),
    "clipped": DotConfig.qt("int8").with_operands(fwd={"calibration": "fixed,1"}),
    "sparse": DotConfig.qt("int8").replace(sparsity=(2, 4)),
    "smooth": DotConfig(Matmul(Operand("int8"), Operand("int8"), smooth=0.5)),
    "rotated": DotConfig(Matmul(Operand("int8"), Operand("int8"), rotate=16)),
    "moved scales": DotConfig(Matmul(Operand("int8"), Operand("int8", dequant="other"))),
    "searched": DotConfig.qat("int8", calibration="mse"),
}
QUICK = ("int8", "clipped")


def product(config, w, x):
    """A mean whose cotangent does not depend on the result: its codes are the same in all programs."""
    typed = bool(jax.typeof(w).sharding.spec.partitions[1])
    where = {"out_sharding": P(ROWS, None, "tensor")} if typed else {}
    out = octavo.einsum("bsd,df->bsf", x, w, config=config, **where)
    return jnp.mean(out * normal(3, *out.shape))


@pytest.mark.parametrize("spec", [SLOW(STORED, id="stored"), pytest.param(REDUCED, id="reduced")])
@pytest.mark.parametrize("name", [n if n in QUICK else SLOW(n) for n in CONFIGS])
def test_gradients_have_the_type_of_a_float_product(name, spec):
    run = jax.value_and_grad(functools.partial(product, CONFIGS[name]), argnums=(0, 1))
    # The sums of a rotation are exact, in any order, on values of few bits.
    w, x = (jnp.round(64 * a) / 64 if name == "rotated" else a for a in (W, X))
    got = jax.jit(run)(put(w, spec), put(x, P(ROWS, None, None)))
    like = jax.eval_shape(jax.grad(functools.partial(product, None), argnums=(0, 1)), put(W, spec), put(X, P(ROWS)))
    assert [jax.typeof(g).sharding.spec for g in got[1]] == [g.sharding.spec for g in like]
    assert jax.typeof(got[1][0]).sharding.spec == (UNREDUCED if spec is REDUCED else STORED)
    close(got, away(run, w, x), 1e-6)


def test_an_unreduced_gradient_is_not_summed_first():
    """The point of it: what is sent is what the user asks for when they reshard the gradient."""
    grad = jax.jit(jax.grad(functools.partial(product, CONFIGS["int8"])))
    text = grad.lower(put(W, REDUCED), put(X, P(ROWS, None, None))).compile().as_text()
    sums = re.findall(r"(\w+\[[\d,]*\])\S* all-reduce\(", text)
    assert sums  # ranges of the gradient, over the rows of all devices
    assert not [shape for shape in sums if shape.endswith("[64,64]")], sums


@pytest.mark.slow
def test_a_result_that_is_left_unreduced():
    config = CONFIGS["int8"]
    x, w = put(normal(3, 8, 64), P("data", "tensor")), put(W, P("tensor", None))
    run = lambda x, w: octavo.dot(x, w, config=config, out_sharding=P("data", None, unreduced={"tensor"}))  # noqa: E731
    out = jax.jit(run)(x, w)
    assert jax.typeof(out).sharding.spec == P("data", None, unreduced={"tensor"})
    close(out, away(lambda x, w: octavo.dot(x, w, config=config), x, w), 1e-6)
    grads = jax.jit(jax.grad(lambda x, w: jnp.sum(reshard(run(x, w), P("data", None))), argnums=(0, 1)))(x, w)
    close(grads, away(jax.grad(lambda x, w: jnp.sum(octavo.dot(x, w, config=config)), argnums=(0, 1)), x, w), 1e-6)


def test_what_is_unreduced_cannot_be_rounded():
    said = "an array that is unreduced over 'fsdp' holds partial sums, which cannot be quantized: reduce it"
    for use in (
        lambda w: octavo.quantize(w, "int8").qvalue,
        lambda w: octavo.dot(X, w, config=CONFIGS["int8"]),
        lambda w: octavo.fake_quant(w, "int8"),
    ):
        with pytest.raises(ValueError, match=said):
            jax.eval_shape(lambda w, use=use: use(reshard(w, P(None, None, unreduced={"fsdp"}))), W)


# In a shard_map.


@pytest.mark.parametrize("axes", [("data", "fsdp", "tensor"), ("data",)], ids=["all axes", "one axis"])
@pytest.mark.parametrize("how", [SLOW("float"), "quantized", SLOW("manual")])
def test_reduced_in_a_shard_map(how, axes):
    """Over all axes, or over one with the others explicit."""
    dot = {
        "float": lambda w, x: x @ w,
        "quantized": octavo.quantized(lambda params, x: x @ params, INT8),
        "manual": lambda w, x: octavo.dot(x, manual_quantize(w, "fixed,-4,4")),
    }[how]
    types = []

    def local(w, x):
        w = jax.lax.pcast(w, "data", to="reduced")
        grad = jax.grad(lambda w: jnp.sum(dot(w, x) ** 2))(w)
        types.extend(map(jax.typeof, (w, grad)))
        return jax.lax.psum(grad, "data")

    place = P(None, "tensor" if "tensor" in axes else None)
    run = jax.shard_map(local, in_specs=(place, P("data")), out_specs=place, axis_names=set(axes))
    got = jax.jit(run)(jax.device_put(W, P(None, "tensor")), jax.device_put(X, P("data")))
    assert types[0].mat.reduced == types[1].mat.unreduced == {"data"}
    # Each device rounds the gradients of its own rows.
    grads = [away(jax.grad(lambda w, x: jnp.sum(dot(w, x) ** 2)), W, x) for x in jnp.split(X, 2)]
    close(got, sum(grads), 1e-6)


# Arrays in low precision.


@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("dequantized", [SLOW(True), False])
def test_manual_quantize_of_a_reduced_weight(qtype, dequantized):
    def loss(w, x):
        q = manual_quantize(w, "fixed,-1,1", qtype)
        out = jnp.einsum("bsd,df->bsf", x, q.dequantize()) if dequantized else octavo.einsum("bsd,df->bsf", x, q)
        return jnp.mean(out**2)

    w, run = put(W, REDUCED), jax.value_and_grad(loss)
    q = jax.jit(lambda w: manual_quantize(w, "fixed,-1,1", qtype))(w)
    assert jax.typeof(q.qvalue).sharding.spec == REDUCED
    got = jax.jit(run)(w, jax.device_put(X, P(ROWS)))
    assert jax.typeof(got[1]).sharding.spec == UNREDUCED
    close(got, away(run, W, X), 1e-6)


@pytest.mark.parametrize("calibration", [SLOW("absmax"), "fixed,1"])
def test_fake_quant_passes_an_unreduced_gradient(calibration):
    how = octavo.Quantizer("int8", channelwise_axes=(1,), calibration=calibration)
    run = jax.grad(lambda w, x: jnp.sum((x @ octavo.fake_quant(w, how)) ** 2))
    got = jax.jit(run)(put(W, REDUCED), jax.device_put(X, P(ROWS)))
    assert jax.typeof(got).sharding.spec == UNREDUCED
    close(got, away(run, W, X), 1e-5)


@pytest.mark.parametrize("qtype", ["int8", *map(SLOW, ("int4", "mxfp8", "nvfp4", "nf4"))])
@pytest.mark.parametrize("spec", [STORED, REDUCED, P(None, (*ROWS, "tensor"))], ids=["stored", "reduced", "columns"])
def test_codes_lie_as_the_array(qtype, spec):
    round_trip = jax.jit(lambda w: octavo.quantize(w, qtype).dequantize())
    got = round_trip(put(W, spec))
    tiles = octavo.quantize(W, qtype).tile_shape[1] > W.shape[1] // 8 and spec.partitions[1] == (*ROWS, "tensor")
    assert tiles or jax.typeof(got).sharding.spec == spec
    np.testing.assert_array_equal(plain(got), away(round_trip, W))


@pytest.mark.parametrize("method", ["percentile,99", *map(SLOW, ("rms,3", "absmean", "mse", "minmax"))])
def test_calibrations(method):
    scale = lambda w: octavo.quantize(w, "int8", channelwise_axes=(1,), calibration_method=method).scale  # noqa: E731
    close(jax.jit(scale)(put(W, REDUCED)), away(scale, W), 1e-6)


@pytest.mark.slow
def test_converted_weights_are_served():
    low = octavo.convert(mlp, PARAMS, X, rules=INT8)
    there = {
        name: jax.device_put(q, shardings(q, NamedSharding(jax.sharding.get_mesh(), SPECS[name])))
        for name, q in low.items()
    }
    got = jax.jit(octavo.served(mlp, INT8))(there, jax.device_put(X, P(ROWS)))
    assert jax.typeof(got).sharding.spec == P(ROWS, None, None)
    close(got, away(octavo.served(mlp, INT8), low, X), 1e-6)


@pytest.mark.slow
def test_codes_are_what_is_gathered():
    rules = [octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", gather_axes=("fsdp",))]
    places = {name: NamedSharding(jax.sharding.get_mesh(), spec) for name, spec in SPECS.items()}
    low = octavo.quantized(lambda params, x: jnp.mean(mlp(params, x) ** 2), rules, shardings=places)
    run = jax.jit(jax.value_and_grad(low))
    args = {name: jax.device_put(w, SPECS[name]) for name, w in PARAMS.items()}, jax.device_put(X, P(ROWS))
    gathered = re.findall(r"= (\w+)\[64,64\]\S* all-gather\(", run.lower(*args).compile().as_text())
    assert set(gathered) == {"s8"}
    close(
        run(*args),
        away(jax.value_and_grad(octavo.quantized(lambda params, x: jnp.mean(mlp(params, x) ** 2), rules)), PARAMS, X),
        1e-6,
    )


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P("tensor", None, None, None), P(None, None, None, None, reduced={"data"})])
def test_convolutions(spec):
    """A float convolution of a reduced kernel has no type in JAX; a quantized one has."""
    x, w = normal(4, 8, 3, 8, 8), normal(5, 4, 3, 3, 3)

    def loss(w, x):
        features = "tensor" if jax.typeof(w).sharding.spec.partitions[0] else None
        typed = bool(jax.typeof(x).sharding.spec.partitions[0])
        where = {"out_sharding": P("data", features, None, None)} if typed else {}
        return jnp.mean(octavo.conv_general_dilated(x, w, (1, 1), "SAME", config=CONFIGS["int8"], **where) ** 2)

    got = jax.jit(jax.grad(loss))(put(w, spec), jax.device_put(x, P("data")))
    assert jax.typeof(got).sharding.spec == P(*spec.partitions, unreduced=spec.reduced)
    close(got, away(jax.grad(loss), w, x), 1e-6)
