"""How well number formats fit: against NumPy, in loops, with state, and without any influence on what is measured."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import octavo
from octavo.inspect import Stats, by_class, summarize, telemetry
from octavo.ops.telemetry import SUMS, fit
from tests.arrays import normal

INT8 = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")


WEIGHT, X = {"out": {"w": normal(0, 48, 32)}}, normal(1, 24, 48)


def linear(params, x, c=None):
    """A loss whose gradient with respect to the product is `c`."""
    out = x @ params["out"]["w"]
    return jnp.sum(out * normal(2, *out.shape) if c is None else out * c)


@functools.cache
def plain():
    """The telemetry of `linear` in int8."""
    return jax.jit(telemetry(linear, INT8))(WEIGHT, X)


@functools.partial(jax.jit, static_argnums=0)
def by_itself(how, x):
    return fit(x, how.quantize(x))


def same(a, b, rtol=1e-5):
    for name in SUMS:
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=rtol, err_msg=name)


def numpy_int8(x, axis):
    """Int8 along an axis, as a formula."""
    scale = np.max(np.abs(x), axis=axis, keepdims=True) / np.float32(127.5)
    codes = np.clip(np.round(x / scale), -128, 127)
    return scale, codes * scale


def test_one_product_by_hand():
    w, x, g = (np.asarray(a, np.float32) for a in (WEIGHT["out"]["w"], X, normal(2, 24, 32)))
    got = plain()
    assert list(got) == ["out/dot_general0"]
    found = got["out/dot_general0"]
    assert {name: (s.kind, s.qtype) for name, s in found.items()} == {
        "lhs": ("activation", "int8"),
        "rhs": ("weight", "int8"),
        "dlhs": ("gradient", "int8"),
        "drhs": ("gradient", "int8"),
    }
    row, column = numpy_int8(x, 1)[0], numpy_int8(w, 0)[0]
    # The forward's codes are used again, so the gradient is quantized with their scale in it.
    wanted = {"lhs": (x, 1), "rhs": (w, 0), "dlhs": (g * column, 1), "drhs": (g * row, 0)}
    for name, (values, axis) in wanted.items():
        scale, back = numpy_int8(values, axis)
        s = found[name]
        assert s.count == values.size
        assert s.saturated == 0
        assert abs(float(s.underflowed) - np.sum(back == 0)) <= 1
        np.testing.assert_allclose(s.signal, np.sum(values**2), rtol=1e-5)
        np.testing.assert_allclose(s.noise, np.sum((values - back) ** 2), rtol=1e-3)
        np.testing.assert_allclose(s.scale, np.sum(np.broadcast_to(scale, values.shape)), rtol=1e-5)
        np.testing.assert_allclose(s.largest_scale, np.max(scale), rtol=1e-6)
        row = summarize(got)["out/dot_general0"][name]
        np.testing.assert_allclose(row["to_noise"], np.linalg.norm(values) / np.linalg.norm(values - back), rtol=1e-3)
        np.testing.assert_allclose(row["sqnr_db"], 20 * np.log10(row["to_noise"]), rtol=1e-6)
        np.testing.assert_allclose(row["scale"], np.mean(np.broadcast_to(scale, values.shape)), rtol=1e-5)


def test_saturation_of_a_fixed_range():
    rule = octavo.QtRule(weight_qtype="int8", act_qtype="int8", act_calibration_method="fixed,-0.1,0.1")
    row = summarize(jax.jit(telemetry(linear, rule))(WEIGHT, X))["out/dot_general0"]
    assert abs(row["lhs"]["saturation"] - np.mean(np.abs(np.asarray(X)) > 0.1)) < 2e-3
    assert row["lhs"]["saturation"] > 0.9
    assert row["rhs"]["saturation"] == 0


@pytest.mark.parametrize(("std", "wanted"), [(1.0, 31.5), (1e-3, 11.0)])
def test_float8_activations_in_a_fixed_range(std, wanted):
    x = normal(1, 256, 1024, std=std)
    fixed = {f"{kind}_calibration_method": "fixed,-224,224" for kind in ("weight", "act", "bwd")}
    rule = octavo.QtRule(**dict.fromkeys(("weight_qtype", "act_qtype", "bwd_qtype"), "float8_e4m3fn"), **fixed)
    row = summarize(jax.jit(telemetry(linear, rule))({"out": {"w": normal(0, 1024, 8)}}, x))["out/dot_general0"]
    assert abs(row["lhs"]["sqnr_db"] - wanted) < 0.5


LAYERS = {"layers": {"w": normal(0, 3, 32, 32, std=0.2)}, "out": {"w": normal(1, 32, 16)}}
INPUT = normal(2, 24, 32)


def layer(h, w):
    return jnp.tanh(h @ w)


def scanned(params, x, layer=layer):
    h, _ = jax.lax.scan(lambda h, p: (layer(h, p["w"]), None), x, params["layers"])
    return jnp.mean((h @ params["out"]["w"]) ** 2)


def unrolled(params, x):
    for w in params["layers"]["w"]:
        x = layer(x, w)
    return jnp.mean((x @ params["out"]["w"]) ** 2)


@functools.cache
def flat_layers():
    return jax.jit(telemetry(unrolled, INT8))(LAYERS, INPUT)


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda f: f, id="scan"),
        pytest.param(jax.checkpoint, id="remat", marks=pytest.mark.slow),
        pytest.param(lambda f: jax.checkpoint(jax.jit(f)), id="remat of jit", marks=pytest.mark.slow),
    ],
)
def test_layers_of_a_scan_are_those_of_the_loop_unrolled(wrap):
    low, flat = (
        jax.jit(telemetry(functools.partial(scanned, layer=wrap(layer)), INT8, weights=0))(LAYERS, INPUT),
        flat_layers(),
    )
    assert set(low) == {"layers/dot_general0", "out/dot_general0"}
    assert set(flat) == {*(f"layers/dot_general{i}" for i in range(3)), "out/dot_general0"}
    for name in ("lhs", "rhs", "dlhs", "drhs"):
        same(low["out/dot_general0"][name], flat["out/dot_general0"][name], rtol=1e-3)
        for i in range(3):
            one = jax.tree.map(lambda x, i=i: x[i], low["layers/dot_general0"][name])
            same(one, flat[f"layers/dot_general{i}"][name], rtol=1e-3)


@pytest.mark.parametrize("fn", [scanned, pytest.param(unrolled, marks=pytest.mark.slow)])
def test_telemetry_changes_neither_loss_nor_gradients(fn):
    low, watched = octavo.quantized(fn, INT8), telemetry(fn, INT8)._low
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(watched.init, LAYERS, INPUT))
    plain = jax.jit(jax.value_and_grad(low))(LAYERS, INPUT)
    (loss, _), (grads, seen) = jax.jit(
        jax.value_and_grad(lambda p, s: watched.stateful(s)(p, INPUT), argnums=(0, 1), has_aux=True)
    )(LAYERS, zeros)
    assert seen["telemetry"]["out"]["dot_general0"]["dlhs"]["signal"] > 0
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), plain, (loss, grads))


@pytest.mark.slow
def test_aux_is_allowed_and_jit_is_eager():
    aux = lambda params, x: (linear(params, x), {"mean": jnp.mean(x)})  # noqa: E731
    eager = telemetry(aux, INT8, weights=0)(WEIGHT, X)
    for name, s in eager["out/dot_general0"].items():
        same(s, plain()["out/dot_general0"][name], rtol=1e-4)


def test_only_what_is_quantized_has_an_entry():
    weight_only = jax.eval_shape(telemetry(linear, octavo.QuantizationRule(weight_qtype="int4")), WEIGHT, X)
    assert {k: s.qtype for k, s in weight_only["out/dot_general0"].items()} == {"rhs": "int4"}
    qat = jax.jit(telemetry(linear, octavo.QuantizationRule(weight_qtype="int4", act_qtype="int8")))(WEIGHT, X)
    assert {k: s.qtype for k, s in qat["out/dot_general0"].items()} == {"lhs": "int8", "rhs": "int4"}
    assert set(by_class(qat)) == {"weight", "activation"}
    left = lambda params, x: jnp.sum(params["w"] @ x)  # noqa: E731
    swapped = jax.eval_shape(
        telemetry(left, octavo.QuantizationRule(weight_qtype="int4")), {"w": WEIGHT["out"]["w"].T}, X.T
    )
    assert [{k: s.kind for k, s in found.items()} for found in swapped.values()] == [{"lhs": "weight"}]


@pytest.mark.parametrize("qtype", [pytest.param("mxfp8", marks=pytest.mark.slow), "nvfp4"])
def test_block_formats(qtype):
    w, x = normal(0, 64, 32), normal(1, 16, 64)
    rule = octavo.QtRule(weight_qtype=qtype, act_qtype=qtype, bwd_qtype=qtype)
    found = jax.jit(telemetry(linear, rule))({"out": {"w": w}}, x)["out/dot_general0"]
    wanted = {"lhs": (x, {1: None}), "rhs": (w, {0: None}), "dlhs": (normal(2, 16, 32), {1: None})}
    tile = octavo.get_format(qtype).tile
    for name, (values, axes) in wanted.items():
        how = octavo.Quantizer(qtype, tiled_axes=dict.fromkeys(axes, tile))
        same(found[name], Stats(**by_itself(how, values), kind="", qtype=""), rtol=1e-4)


def test_delayed_scaling_uses_the_history():
    rules = octavo.recipe("te_fp8_delayedscaling", exclude=None)
    state = octavo.quantized(linear, rules).init(WEIGHT, X)
    watch = jax.jit(lambda state: telemetry(linear, rules).stateful(state)(WEIGHT, X))
    fresh = watch(state)["out/dot_general0"]
    assert set(fresh) == {"lhs", "rhs", "dlhs", "drhs"}
    assert fresh["lhs"].saturated == 0
    half = 0.5 * np.max(np.abs(X))
    known = jax.tree.map(lambda history: history.at[0].set(half), state)
    seen = summarize(watch(known))["out/dot_general0"]["lhs"]
    np.testing.assert_allclose(seen["scale"], half / 448, rtol=1e-5)
    np.testing.assert_allclose(seen["saturation"], np.mean(np.abs(np.asarray(X)) > half), rtol=1e-4)


def test_static_ranges_are_those_of_the_state():
    rule = octavo.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    low = octavo.quantized(linear, rule)
    _, state = jax.jit(low.stateful(low.init(WEIGHT, X)))(WEIGHT, X)
    seen = jax.jit(telemetry(linear, rule).stateful(state, update=False))(WEIGHT, 2 * X)
    largest = np.max(np.abs(np.asarray(X)))
    row = summarize(seen)["out/dot_general0"]["lhs"]
    np.testing.assert_allclose(row["scale"], largest / 127.5, rtol=1e-5)
    assert abs(row["saturation"] - np.mean(np.abs(2 * np.asarray(X)) > largest)) < 5e-3


def test_stochastic_rounding_needs_the_key_and_has_more_noise():
    rule = octavo.QtRule(**INT8_FIELDS, bwd_stochastic_rounding="uniform")
    with pytest.raises(ValueError, match="rounds stochastically and needs a random key"):
        jax.eval_shape(telemetry(linear, rule), WEIGHT, X)
    seen = summarize(jax.jit(telemetry(linear, rule).stateful(key=jax.random.key(0)))(WEIGHT, X))["out/dot_general0"]
    nearest = summarize(plain())["out/dot_general0"]
    assert 2 < nearest["dlhs"]["sqnr_db"] - seen["dlhs"]["sqnr_db"] < 4  # twice the noise is 3 dB
    assert seen["lhs"]["sqnr_db"] == pytest.approx(nearest["lhs"]["sqnr_db"])


INT8_FIELDS = {"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8"}


def experts(params, x):
    out = jax.lax.ragged_dot(x, params["experts"]["w"], jnp.asarray([10, 0, 7]))
    return jnp.sum(out * normal(5, *out.shape))


@functools.cache
def watched_experts():
    watch = jax.jit(telemetry(experts, INT8))
    return lambda x: watch({"experts": {"w": normal(0, 3, 32, 16)}}, x)["experts/ragged_dot0"]


class TestExperts:
    def test_rows_of_no_expert_do_not_count(self):
        x = normal(1, 24, 32)
        seen = watched_experts()(x)
        assert {name: int(s.count) for name, s in seen.items()} == {
            "lhs": 17 * 32,
            "rhs": 3 * 32 * 16,
            "dlhs": 17 * 16,
            "drhs": 17 * 16,
        }
        other = watched_experts()(x.at[17:].set(1e6))
        for name, s in seen.items():
            same(s, other[name])

    def test_the_gradient_has_a_scale_per_expert_and_column(self):
        x = normal(1, 24, 32)
        seen = watched_experts()(x)["drhs"]
        g = np.asarray(normal(5, 24, 16)) * numpy_int8(np.asarray(x), 1)[0]
        parts = [numpy_int8(g[rows], 0) for rows in (slice(0, 10), slice(10, 17))]
        noise = sum(np.sum((g[a:b] - back) ** 2) for (_, back), (a, b) in zip(parts, ((0, 10), (10, 17)), strict=True))
        np.testing.assert_allclose(seen.noise, noise, rtol=1e-3)
        np.testing.assert_allclose(seen.largest_scale, max(np.max(scale) for scale, _ in parts), rtol=1e-5)
        np.testing.assert_allclose(seen.scale, 10 * np.sum(parts[0][0]) + 7 * np.sum(parts[1][0]), rtol=1e-5)


def test_convolutions():
    def loss(params, x):
        out = jax.lax.conv_general_dilated(x, params["conv"]["w"], (1, 1), "SAME")
        return jnp.sum(out * normal(5, *out.shape))

    w, x = normal(0, 8, 4, 3, 3), normal(1, 2, 4, 6, 6)
    seen = jax.jit(telemetry(loss, INT8))({"conv": {"w": w}}, x)["conv/conv_general_dilated0"]
    wanted = {"lhs": x, "rhs": w}
    for name, values in wanted.items():
        how = octavo.Quantizer("int8", channelwise_axes=(0,))
        same(seen[name], Stats(**by_itself(how, values), kind="", qtype=""), rtol=1e-4)
    assert int(seen["dlhs"].count) == int(seen["drhs"].count) == 2 * 8 * 6 * 6
    assert all(35 < row["sqnr_db"] < 50 for row in summarize({"conv": seen})["conv"].values())


def test_two_activations_and_names():
    def loss(params, x):
        q, k = x @ params["q"]["w"], x @ params["k"]["w"]
        with jax.named_scope("attention"):
            return jnp.mean(jnp.einsum("qd,kd->qk", q, k) ** 2)

    params = {name: {"w": normal(i, 48, 32)} for i, name in enumerate("qk")}
    seen = jax.eval_shape(telemetry(loss, INT8), params, X)
    assert set(seen) == {"q/dot_general0", "k/dot_general0", "attention/einsum0"}
    assert {s.kind for n, s in seen["attention/einsum0"].items() if n in ("lhs", "rhs")} == {"activation"}


def test_a_branch_that_is_not_taken_has_seen_nothing():
    def loss(params, x, flag):
        a, b = (functools.partial(lambda name, x: x @ params[name]["w"], name) for name in "ab")
        return jnp.sum(jax.lax.cond(flag, a, b, x))

    params = {name: {"w": normal(i, 48, 32)} for i, name in enumerate("ab")}
    seen = jax.jit(telemetry(loss, INT8))(params, X, True)
    assert int(seen["a/dot_general0"]["lhs"].count) == X.size
    row = summarize(seen)["b/dot_general0"]["lhs"]
    assert all(math.isnan(value) for value in row.values())
    assert by_class(seen)["activation"]["worst_site"] == "a/dot_general0.lhs"


@pytest.mark.parametrize("check", [True, False])
def test_devices_of_a_shard_map_see_everything_together(check):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(params, x, c):
        return jax.lax.psum(linear(params, x, c), "d")

    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("d"), P("d")), out_specs=P(), check_vma=check)
    c = normal(2, 24, 32)
    rule = octavo.QuantizationRule(weight_qtype="int8", act_qtype="int8")
    many = summarize(jax.jit(telemetry(mapped, rule, weights=0))(WEIGHT, X, c))["out/dot_general0"]
    one = summarize(plain())["out/dot_general0"]
    for name in ("lhs", "rhs"):
        for ratio in ("saturation", "underflow", "sqnr_db", "scale") + ("largest_scale",) * check:
            np.testing.assert_allclose(many[name][ratio], one[name][ratio], rtol=1e-4, err_msg=f"{name} {ratio}")


def test_microbatches_add_up():
    watch = jax.jit(telemetry(linear, octavo.QuantizationRule(weight_qtype="int8", act_qtype="int8")))
    parts = [watch(WEIGHT, X[:12]), watch(WEIGHT, 3 * X[12:])]
    a, b = (p["out/dot_general0"]["lhs"] for p in parts)
    both = a + b
    assert int(both.count) == X.size
    np.testing.assert_allclose(both.signal, np.sum(np.asarray(X)[:12] ** 2) + 9 * np.sum(np.asarray(X)[12:] ** 2), 1e-5)
    assert both.largest_scale == b.largest_scale
    with pytest.raises(ValueError, match="activation in int8 and of weight in int8 cannot be added"):
        a + parts[0]["out/dot_general0"]["rhs"]


def test_classes_and_the_worst_products():
    outlier = jnp.ones((1, 32)).at[0, 0].set(1e4)  # takes the range of the second product's input for itself
    bad = lambda params, x: jnp.mean((jnp.tanh(x @ params["a"]["w"]) * outlier @ params["b"]["w"]) ** 2)  # noqa: E731
    params = {"a": {"w": normal(0, 48, 32)}, "b": {"w": normal(1, 32, 8)}}
    stats = jax.jit(telemetry(bad, INT8, weights=0))(params, X)
    rows, classes = summarize(stats), by_class(stats)
    assert list(classes) == ["weight", "activation", "gradient"]
    activation, lhs = classes["activation"], [rows[f"{name}/dot_general0"]["lhs"] for name in "ab"]
    # The outlier is nearly all of the signal, and it is hardly changed: only the underflow tells.
    assert activation["worst_site"] == "a/dot_general0.lhs"
    assert activation["worst_sqnr_db"] == lhs[0]["sqnr_db"] < lhs[1]["sqnr_db"]
    assert activation["worst_underflow_site"] == "b/dot_general0.lhs"
    assert activation["worst_underflow"] == lhs[1]["underflow"] > 0.9
    assert activation["sqnr_db"] == pytest.approx(np.mean([row["sqnr_db"] for row in lhs]))
    assert activation["to_noise"] == pytest.approx(10 ** (activation["sqnr_db"] / 20))
    assert activation["scale"] == pytest.approx(math.sqrt(lhs[0]["scale"] * lhs[1]["scale"]))
    sums = [stats[f"{name}/dot_general0"]["lhs"] for name in "ab"]
    share = float(sum(s.underflowed for s in sums)) / float(sum(s.count for s in sums))
    assert activation["underflow"] == pytest.approx(share)
    gradients = [row[name]["sqnr_db"] for row in rows.values() for name in ("dlhs", "drhs")]
    assert classes["gradient"]["worst_sqnr_db"] == min(gradients)


def test_the_worst_layer_of_a_scan_is_named():
    sums = {name: jnp.ones((3,)) for name in SUMS} | {"noise": jnp.asarray([1e-3, 0.1, 1e-2])}
    stats = {"layers/dot_general0": {"rhs": Stats(**sums, kind="weight", qtype="int8")}}
    found = by_class(stats)["weight"]
    assert (found["worst_site"], found["worst_sqnr_db"]) == ("layers/dot_general0[1].rhs", pytest.approx(10))
    assert found["sqnr_db"] == pytest.approx(20)
    deeper = jax.tree.map(lambda x: jnp.stack([x, x / 2]), stats)
    assert by_class(deeper)["weight"]["worst_site"] == "layers/dot_general0[0,1].rhs"


def test_an_exact_tensor_has_no_mean_ratio():
    sums = {name: jnp.ones(()) for name in SUMS} | {"noise": jnp.zeros(())}
    found = by_class({"a": {"rhs": Stats(**sums, kind="weight", qtype="int8")}})["weight"]
    assert found["worst_sqnr_db"] == math.inf
    assert math.isnan(found["sqnr_db"])


def test_a_quantized_function_and_a_provider_of_ones_own():
    class Halved(octavo.QtProvider):
        def dot_general(self, *args, **kwargs):
            return super().dot_general(*args, **kwargs) * 0.5

    provider = Halved([INT8])
    seen = jax.jit(telemetry(octavo.quantized(linear, provider)))(WEIGHT, X)["out/dot_general0"]
    same(seen["rhs"], plain()["out/dot_general0"]["rhs"])
    np.testing.assert_allclose(4 * seen["dlhs"].signal, plain()["out/dot_general0"]["dlhs"].signal, rtol=1e-4)
    assert not provider.telemetry
    with pytest.raises(ValueError, match="has its rules and weights already"):
        telemetry(octavo.quantized(linear, provider), INT8)


@pytest.mark.parametrize(
    ("out", "told"),
    [
        (lambda y: y, r"an array float32\[24, 32\]"),
        (lambda y: jnp.sum(y).astype(jnp.int32), r"an array int32\[\]"),
        (lambda y: {"loss": jnp.sum(y)}, "a dict"),
    ],
)
def test_what_is_no_loss_raises(out, told):
    def predict(params, x):
        return out(x @ params["out"]["w"])

    with pytest.raises(TypeError, match=rf"predict has to return a scalar loss, or \(loss, aux\), not {told}"):
        jax.eval_shape(telemetry(predict, INT8), WEIGHT, X)


def test_nothing_to_measure():
    with pytest.raises(ValueError, match="linear has no telemetry: its rules quantize no matmul"):
        jax.eval_shape(telemetry(linear, octavo.QuantizationRule(skip=True)), WEIGHT, X)


def test_state_of_telemetry_is_no_state_of_the_function():
    """What telemetry adds to the state has a collection of its own, so that a training state serves it unchanged."""
    assert octavo.quantized(linear, INT8).init(WEIGHT, X) == {}
    state = telemetry(linear, INT8)._low.init(WEIGHT, X)
    assert set(state) == {"telemetry"}
