"""Bugs of Qwix and AQT that touch interception, rules and parameters, each with a test that it is not here.

The letters are those by which the bugs were filed. B1, B4, B5, C1 and C9 stand in test_quantized.py, C11 in
test_state.py, B10 in tests/frameworks/test_linen.py and C10 in tests/frameworks/test_nnx.py.
"""

import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from tests.arrays import normal
from tests.cases import slow_except
from tests.ops.walk import dot_types, equations

W, X = {"w": normal(0, 256, 128)}, normal(1, 128, 256)


def product(params, x):
    return x @ params["w"]


def gradients(rule, fn=product):
    low = octavo.quantized(fn, rule)
    run = lambda p, x, key: jnp.sum(low.stateful(key=key)(p, x)[0] ** 2)  # noqa: E731
    return jax.jit(lambda p, x, key=None: jax.grad(run, argnums=(0, 1))(p, x, key))


def error(got, wanted):
    return float(jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted))


def float_gradients(fn=product, params=W, x=X):
    return jax.jit(jax.grad(lambda p, x: jnp.sum(fn(p, x) ** 2), argnums=(0, 1)))(params, x)


@pytest.mark.slow
@pytest.mark.parametrize("bwd", ["float8_e5m2", "int3", "int5"])
def test_b7_stochastic_rounding_of_gradients_happens_in_every_format(bwd):
    rule = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype=bwd, bwd_stochastic_rounding="uniform")
    run = gradients(rule)
    a, b, *rest = (run(W, X, jax.random.key(k))[0]["w"] for k in range(8))
    assert np.any(a != b)
    mean = sum([a, b, *rest]) / 8
    exact = float_gradients()[0]["w"]
    assert error(mean, exact) < 0.7 * error(a, exact)  # independent errors average out


@pytest.mark.slow
def test_b9_tiles_leave_no_product_of_the_backward_pass_in_float():
    rule = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", tile_size=128)
    types = set(dot_types(gradients(rule), W, X))
    assert types == {("int8", "int8", "int32")}
    for got, wanted in zip(jax.tree.leaves(gradients(rule)(W, X)), jax.tree.leaves(float_gradients()), strict=True):
        assert error(got, wanted) < 0.03


@pytest.mark.parametrize(("groups", "bwd"), [(2, "int8"), *slow_except([], [(2, None), (4, None), (4, "int8")])])
def test_c4_gradients_of_grouped_and_depthwise_convolutions(groups, bwd):
    params, x = {"k": normal(0, 3, 3, 4 // groups, 8)}, normal(1, 2, 6, 6, 4)

    def conv(params, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, params["k"], (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    rule = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype=bwd)
    got, wanted = gradients(rule, conv)(params, x), float_gradients(conv, params, x)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert 0 < error(g, w) < 0.05


@pytest.mark.slow
def test_c5_weight_only_experts_and_convolutions():
    sizes = jnp.asarray([3, 5], jnp.int32)
    experts, rows = {"w": normal(0, 2, 16, 8)}, normal(1, 8, 16)
    ragged = lambda params, x: jax.lax.ragged_dot(x, params["w"], sizes)  # noqa: E731
    conv = lambda params, x: jax.lax.conv(x, params["w"], (1,), "SAME")  # noqa: E731
    for fn, params, x in ((ragged, experts, rows), (conv, {"w": normal(0, 8, 4, 3)}, normal(1, 2, 4, 9))):
        for act in (None, "int4"):  # none, and another one than the weight's
            low = octavo.quantized(fn, octavo.QuantizationRule(weight_qtype="int8", act_qtype=act))
            assert 0 < error(jax.jit(low)(params, x), jax.jit(fn)(params, x)) < (0.02 if act is None else 0.15)


@pytest.mark.parametrize(
    "settings",
    [
        {"act_calibration_method": "minmax"},
        pytest.param({"weight_qtype": "nf4", "tile_size": 64}, marks=pytest.mark.slow),
        pytest.param({"weight_qtype": "int3"}, marks=pytest.mark.slow),
    ],
)
def test_c6_quantized_backward_of_asymmetric_and_emulated_types(settings):
    rule = octavo.QtRule(**{"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8", **settings})
    coarse = "weight_qtype" in settings
    for got, wanted in zip(jax.tree.leaves(gradients(rule)(W, X)), jax.tree.leaves(float_gradients()), strict=True):
        assert 0 < error(got, wanted) < (0.35 if coarse else 0.02)


@pytest.mark.standard_promotion
def test_c12_einsum_of_three_operands_in_a_module():
    class Chain(nn.Module):
        @nn.compact
        def __call__(self, x):
            a, b = (self.param(n, nn.initializers.normal(), (16, 16)) for n in "ab")
            return jnp.einsum("bi,ij,jk->bk", x, a, b)

    rule = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
    model, low = Chain(), octavo.quantize_model(Chain(), rule)
    x = normal(0, 4, 16)
    variables = model.init(jax.random.key(0), x)
    assert 0 < error(jax.jit(low.apply)(variables, x), jax.jit(model.apply)(variables, x)) < 0.05
    types = dot_types(lambda v: low.apply(v, x), variables)
    assert set(types) == {("int8", "int8", "int32")}


def test_two_weights_of_one_shape_are_both_recognised():
    """Qwix's find_param gives up on two candidates."""
    params = {"a": normal(0, 16, 16), "b": normal(1, 16, 16)}
    fn = lambda params, x: x @ (params["a"] * jnp.exp(-params["b"])) @ params["b"]  # noqa: E731
    sites = octavo.quantized(fn, octavo.QuantizationRule(weight_qtype="int8")).sites(params, normal(2, 4, 16))
    assert [(s.leaf, s.config is not None) for s in sites] == [("a", True), ("b", True)]


def test_settings_that_do_not_exist_raise():
    """Qwix takes any name in additional_qt_config, and any op, type or calibration in a rule."""
    with pytest.raises(ValueError, match="lhs_qtyp"):
        octavo.QtRule(weight_qtype="int8", act_qtype="int8", additional_qt_config={"lhs_qtyp": "int4"})
    for field, value in (("op_names", ("dot_generl",)), ("weight_qtype", "int88"), ("act_calibration_method", "absmx")):
        with pytest.raises(ValueError, match=field):
            octavo.QtRule(**{"weight_qtype": "int8", "act_qtype": "int8", field: value})


def test_settings_reach_convolutions_and_experts():
    """Qwix drops additional_qt_config for conv, and calibrations, tiles and static ranges for ragged_dot."""
    fixed = octavo.QuantizationRule(
        weight_qtype="int8", act_qtype="int8", weight_calibration_method="fixed,0.5", act_calibration_method="fixed,0.5"
    )
    other = octavo.QtRule(
        weight_qtype="int8",
        act_qtype="int8",
        additional_qt_config={"lhs_calibration_method": "fixed,0.5", "rhs_calibration_method": "fixed,0.5"},
    )
    sizes = jnp.asarray([3, 5], jnp.int32)
    ragged = (lambda params, x: jax.lax.ragged_dot(x, params["w"], sizes), {"w": normal(0, 2, 16, 8)}, normal(1, 8, 16))
    conv = (lambda params, x: jax.lax.conv(x, params["w"], (1,), "SAME"), {"w": normal(0, 8, 4, 3)}, normal(1, 2, 4, 9))
    for fn, params, x in (ragged, conv):
        clipped = jax.jit(fn)({"w": np.clip(params["w"], -0.5, 0.5)}, np.clip(x, -0.5, 0.5))
        for rule in (fixed, other):
            assert error(jax.jit(octavo.quantized(fn, rule))(params, x), clipped) < 0.02


def test_precision_and_preferred_type_reach_the_product():
    """Qwix drops both when it quantizes."""
    half = {"w": W["w"].astype(jnp.bfloat16)}
    fn = lambda params, x: jax.lax.dot(  # noqa: E731
        x, params["w"], precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    low = octavo.quantized(fn, octavo.QuantizationRule(weight_qtype="int8"))
    jaxpr = jax.make_jaxpr(low)(half, X.astype(jnp.bfloat16))
    products = list(equations(jaxpr, ("dot_general",)))
    assert {e.params["precision"] for e in products} == {(jax.lax.Precision.HIGHEST,) * 2}
    assert jaxpr.out_avals[0].dtype == jnp.float32


@pytest.mark.standard_promotion
@pytest.mark.parametrize("kind", ["function", "linen"])
def test_aqt_19_nothing_is_replaced_and_threads_do_not_meet(kind):
    """AQT and Qwix exchange `jax.lax.dot_general` for all threads while a function is traced."""
    originals = jax.lax.dot_general, jax.numpy.einsum, jax.lax.conv_general_dilated
    meet, seen, found = threading.Barrier(2, timeout=60), [], {}

    class Model(nn.Module):
        width: int

        @nn.compact
        def __call__(self, x):
            return run({"w": self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], self.width))}, x)

    def run(params, x):
        seen.append((jax.lax.dot_general, jax.numpy.einsum, jax.lax.conv_general_dilated))
        if threading.current_thread() is not threading.main_thread():
            meet.wait()  # both are in the middle of a trace
        return x @ params["w"]

    def low(rule, width):
        if kind == "function":
            return {"w": normal(width, 256, width)}, octavo.quantized(lambda params, x: run(params, x), rule)
        model = octavo.quantize_model(Model(width), rule)
        return {"params": {"w": normal(width, 256, width)}}, model.apply

    rules = {
        "int8": octavo.QuantizationRule(weight_qtype="int8", act_qtype="int8"),
        "e4m3": octavo.QuantizationRule(weight_qtype="e4m3", act_qtype="e4m3"),
    }
    widths = {"int8": 64, "e4m3": 32}

    def work(name):
        params, fn = low(rules[name], widths[name])
        found[name] = jax.jit(fn)(params, X)

    threads = [threading.Thread(target=work, args=(name,)) for name in rules]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert all(now == originals for now in seen)
    assert (jax.lax.dot_general, jax.numpy.einsum, jax.lax.conv_general_dilated) == originals
    for name, rule in rules.items():
        w = normal(widths[name], 256, widths[name])
        config = octavo.rules.dot_config(rule, lhs_weight=False, rhs_weight=True)
        wanted = jax.jit(lambda x, w, config=config: octavo.dot(x, w, config=config))(X, w)
        np.testing.assert_array_equal(found[name], wanted)
