"""AQT's way in: operations injected into layers, converted and served bit for bit as they were trained."""

import functools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import octavo
from octavo.compat import aqt, maxtext
from octavo.frameworks.linen_ops import ConvGeneralDilated, DotGeneral, Einsum
from octavo.rules import mixed_precision
from tests.arrays import normal
from tests.cases import slow_except

pytestmark = pytest.mark.standard_promotion

KEY = jax.random.key(0)
X = normal(1, 4, 16, 16, 3)
CONFIGS = {
    "int8": octavo.DotConfig.qt("int8"),
    "int4": octavo.DotConfig.qt("int4", "int8"),
    "fp8": octavo.DotConfig.qt("float8_e4m3fn", "float8_e5m2"),
    "weights": octavo.DotConfig.weight_only("int4"),
    "aqt": aqt.config_v4(8, 8, 8),
    "mixed": mixed_precision(
        {"__default__": {"w_bits": 8, "a_bits": 8}, ".*second": {"w_bits": 4, "tile_size": 16}}, exclude=None
    ),
}


class Experts(nn.Module):
    """Rows in order, a group for each expert."""

    config: object

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(batch_axis=0), (3, x.shape[-1], 16))
        sizes = jnp.asarray([x.shape[0] // 2, x.shape[0] // 4, x.shape[0] // 4], jnp.int32)
        return octavo.ragged_dot(x, w, sizes, config=self.config)


class Model(nn.Module):
    config: object
    conv: bool = True
    experts: bool = True
    static: bool = False

    @nn.compact
    def __call__(self, x):
        dot = functools.partial(DotGeneral, self.config, static=self.static)
        if self.conv:
            cls = functools.partial(ConvGeneralDilated, self.config, static=self.static)
            x = nn.relu(nn.Conv(8, (3, 3), strides=2, conv_general_dilated_cls=cls)(x))
        x = x.reshape(-1, 32)
        x = nn.relu(nn.Dense(64, dot_general_cls=dot, name="first")(x))
        x = nn.Dense(32, dot_general_cls=dot, name="second")(x)
        if self.experts:
            x = Experts(self.config)(x)
        return x


def trained(model, x=X):
    variables = jax.jit(model.init)(KEY, x)
    noise = lambda w: w + 0.1 * normal(w.size, *w.shape)  # noqa: E731
    return {**variables, "params": jax.tree.map(noise, variables["params"])}


def model_of(name):
    tables = name == "mixed"
    return Model(CONFIGS[name], conv=not tables, experts=not tables)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("int8", "mixed") else pytest.mark.slow) for n in CONFIGS]
)
@pytest.mark.slow
def test_served_logits_are_trained_logits_bit_for_bit(name):
    model = model_of(name)
    variables = trained(model)
    converted = octavo.convert(model, variables, X)
    kernel = converted["params"]["second"]["kernel"]
    assert isinstance(kernel, octavo.QArray)
    if name == "mixed":
        assert (kernel.qtype.name, kernel.scale.shape) == ("int4", (4, 32))
    if name not in ("mixed",):
        assert isinstance(converted["params"]["Conv_0"]["kernel"], octavo.QArray)
        assert isinstance(converted["params"]["Experts_0"]["w"], octavo.QArray)
        assert converted["params"]["Experts_0"]["w"].scale.shape == (3, 1, 16)
    served = octavo.served(model)
    np.testing.assert_array_equal(jax.jit(served.apply)(converted, X), jax.jit(model.apply)(variables, X))
    # No float weights are left that could be read: zeroing what remains of the products' weights is not possible.
    floats = [x for x in jax.tree.leaves(converted["params"]) if x.dtype == jnp.float32 and x.ndim >= 2]
    assert all(1 in x.shape or x.shape == kernel.scale.shape for x in floats)  # scales


@pytest.mark.parametrize("name", slow_except(["int8"], ["int8", "fp8", "int4", "weights"]))
def test_nnx_layers_serve_what_they_trained(name):
    dot = functools.partial(octavo.dot_general, config=CONFIGS[name])
    model = nnx.Linear(32, 16, dot_general=dot, rngs=nnx.Rngs(0))
    x = normal(10, 8, 32)
    served = octavo.quantize_model(model, octavo.PtqProvider(()), x)
    assert isinstance(served.kernel, octavo.WithAux)
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(served, x), nnx.jit(lambda m, x: m(x))(model, x))


class NnxModel(nnx.Module):
    """A convolution, a dense layer and experts, all with configs of their own."""

    def __init__(self, config, dense, rngs):
        self.config = config
        conv = functools.partial(octavo.conv_general_dilated, config=config)
        self.conv = nnx.Conv(3, 8, (3, 3), strides=2, conv_general_dilated=conv, rngs=rngs)
        self.dense = nnx.Linear(32, 64, dot_general=functools.partial(octavo.dot_general, config=dense), rngs=rngs)
        self.experts = nnx.Param(nnx.initializers.lecun_normal(batch_axis=0)(rngs.params(), (2, 64, 16)))

    def __call__(self, x):
        x = nnx.relu(self.dense(nnx.relu(self.conv(x)).reshape(-1, 32)))
        sizes = jnp.asarray([x.shape[0] // 4, 3 * x.shape[0] // 4], jnp.int32)
        return octavo.ragged_dot(x, self.experts[...], sizes, config=self.config)


@pytest.mark.parametrize(
    ("name", "dense"),
    [
        pytest.param(name, dense, marks=() if name == "int8" else pytest.mark.slow)
        for name, dense in (
            ("int8", octavo.DotConfig.weight_only("int4", tile=16)),  # mixed precision, with tiles
            ("int4", CONFIGS["int4"]),
            ("fp8", CONFIGS["fp8"]),
        )
    ],
)
@pytest.mark.slow
def test_nnx_models_serve_what_they_trained(name, dense):
    model = NnxModel(CONFIGS[name], dense, nnx.Rngs(0))
    served = octavo.quantize_model(model, octavo.PtqProvider(()), X)
    for param in (served.conv.kernel, served.dense.kernel, served.experts):
        assert isinstance(param, octavo.WithAux)
    run = nnx.jit(lambda model, x: model(x))
    np.testing.assert_array_equal(run(served, X), run(model, X))


def test_frozen_scales_of_weights_whose_values_still_change():
    model = nn.Dense(8, use_bias=False, dot_general_cls=functools.partial(DotGeneral, CONFIGS["int8"], static="rhs"))
    x = normal(11, 4, 16)
    variables = jax.jit(model.init)(KEY, x)
    assert variables["quant_stats"]["DotGeneral_0"]["rhs"]["sum_of_absmax"].shape == (1, 8)
    _, stats = model.apply(variables, x, mutable="quant_stats")
    frozen = {**variables, **stats}
    kernel = variables["params"]["kernel"]
    bounds = {"rhs": {"absmax": jnp.max(jnp.abs(kernel), axis=0, keepdims=True)}}
    moved = {**frozen, "params": {"kernel": 0.5 * kernel}}
    wanted = octavo.dot(x, 0.5 * kernel, config=CONFIGS["int8"], scaling=bounds)
    np.testing.assert_array_equal(model.apply(moved, x), wanted)


@pytest.mark.parametrize("replicate", [False, True])
def test_names_of_sharded_axes_go_to_codes_and_scales(replicate):
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    config = octavo.DotConfig.weight_only("int8", tile=8)
    model = nn.Dense(8, kernel_init=init, dot_general_cls=functools.partial(DotGeneral, config))
    x = normal(12, 4, 16)
    variables = jax.jit(model.init)(KEY, x)
    kernel = octavo.convert(model, variables, x, replicate_scale=replicate)["params"]["kernel"]
    assert kernel.qvalue.names == ("embed", "mlp")
    assert kernel.scale.names == ((None, None) if replicate else ("embed", "mlp"))  # two tiles along the first axis
    converted = octavo.convert(model, variables, x)
    np.testing.assert_array_equal(octavo.served(model).apply(converted, x), model.apply(variables, x))


@pytest.mark.slow
def test_training_falls_and_gradients_flow_through_conv_dense_and_experts():
    model = Model(CONFIGS["int8"])
    params = jax.jit(model.init)(KEY, X)["params"]
    loss = lambda p: jnp.mean((model.apply({"params": p}, X) - 1) ** 2)  # noqa: E731
    step = jax.jit(lambda p: jax.tree.map(lambda w, g: w - 0.05 * g, p, jax.grad(loss)(p)))
    grads = jax.grad(loss)(params)
    assert all(np.any(g != 0) for g in jax.tree.leaves(grads))
    before = loss(params)
    for _ in range(10):
        params = step(params)
    assert loss(params) < 0.7 * before


class TestModes:
    model = Model(CONFIGS["int8"], experts=False, static=True)

    @pytest.mark.slow
    def test_calibrate_convert_serve_with_static_ranges(self):
        variables = trained(self.model)
        assert set(variables["quant_stats"]) == {"Conv_0", "first", "second"}
        for seed in range(2):
            x = normal(seed, *X.shape)
            _, stats = self.model.apply(variables, x, mutable="quant_stats")
            variables = {**variables, **stats}
        converted = octavo.convert(self.model, variables, X)
        served = octavo.served(self.model)
        np.testing.assert_array_equal(jax.jit(served.apply)(converted, X), jax.jit(self.model.apply)(variables, X))

    def test_never_calibrated_is_an_error(self):
        with pytest.raises(ValueError, match="read before anything was measured"):
            self.model.apply(jax.jit(self.model.init)(KEY, X), X)

    def test_names(self):
        quant = maxtext.configure_quantization(types.SimpleNamespace(quantization="int8"), "serve")
        assert maxtext.in_serve_mode(quant)
        assert not maxtext.in_convert_mode(quant)
        assert not maxtext.in_serve_mode(None)
        with pytest.raises(ValueError, match="a mode is one of train, calibrate, convert, serve; got 'sreve'"):
            maxtext.get_quant_mode("sreve")

    def test_quantized_parameters_are_matched_and_removed(self):
        model = Model(CONFIGS["int8"], experts=False)
        variables = trained(model)
        converted = octavo.convert(model, variables, X)
        left = maxtext.remove_quantized_params(variables["params"], converted["params"])
        assert isinstance(left["first"]["kernel"], dict)
        np.testing.assert_array_equal(left["first"]["bias"], variables["params"]["first"]["bias"])
        with pytest.raises(ValueError, match="quantized parameters without a float one"):
            maxtext.match_aqt_and_unquantized_param(converted["params"], {"other": jnp.ones(3)})


def test_a_function_is_converted_and_served():
    params = {"w": normal(13, 32, 16)}
    fn = lambda params, x: jnp.tanh(octavo.einsum("bi,io->bo", x, params["w"], config=CONFIGS["int8"]))  # noqa: E731
    x = normal(14, 8, 32)
    low = octavo.convert(fn, params, x)
    np.testing.assert_array_equal(jax.jit(octavo.served(fn))(low, x), jax.jit(fn)(params, x))
    rule = octavo.QuantizationRule(weight_qtype="int8", act_qtype="int8")
    plain = lambda params, x: x @ params["w"]  # noqa: E731
    low = octavo.convert(plain, params, x, rules=rule)
    wanted = jax.jit(octavo.quantized(plain, rule))(params, x)
    np.testing.assert_array_equal(jax.jit(octavo.served(plain, rule))(low, x), wanted)


@pytest.mark.parametrize("replicate", [False, True])
def test_codes_and_scales_lie_where_the_parameter_lay(replicate):
    mesh = jax.make_mesh((8,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))
    w = jax.device_put(normal(15, 32, 16), NamedSharding(mesh, P(None, "m")))
    fn = lambda params, x: octavo.dot(x, params["w"], config=CONFIGS["int8"])  # noqa: E731
    low = octavo.convert(fn, {"w": w}, jnp.ones((4, 32)), replicate_scale=replicate, donate=True)["w"]
    assert low.qvalue.sharding.spec == P(None, "m")
    assert low.scale.sharding.spec == (P() if replicate else P(None, "m"))
    assert w.is_deleted()


def test_nnx_models_say_how_they_are_converted():
    with pytest.raises(TypeError, match=r"quantize_model\(model, octavo.PtqProvider\(rules\), \*inputs\)"):
        octavo.convert(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), {}, X)


@pytest.mark.slow
def test_stochastic_gradients_need_a_stream_and_evaluation_does_not():
    """AQT asks for random numbers even to evaluate."""
    model = Model(CONFIGS["aqt"], experts=False)
    variables = trained(model)
    model.apply(variables, X)
    loss = lambda v, **k: jnp.sum(model.apply(v, X, **k) ** 2)  # noqa: E731
    a, b = (jax.grad(loss)(variables, rngs={"stochastic_rounding": jax.random.key(k)}) for k in (0, 1))
    assert np.any(a["params"]["first"]["kernel"] != b["params"]["first"]["kernel"])
    with pytest.raises(ValueError, match="key"):
        jax.grad(loss)(variables)


def test_one_injected_operation_shared_by_two_layers():
    """AQT's own MlpBlock breaks when it is converted: both layers share one variable."""

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            dot = DotGeneral(CONFIGS["int8"])
            return nn.Dense(8, dot_general=dot)(nn.relu(nn.Dense(32, dot_general=dot)(x)))

    model, x = Mlp(), normal(16, 4, 16)
    variables = trained(model, x)
    converted = octavo.convert(model, variables, x)
    np.testing.assert_array_equal(jax.jit(octavo.served(model).apply)(converted, x), jax.jit(model.apply)(variables, x))


def touching(fn, *args):
    """The primitives of a program that read or make a float array of the weight's size, wherever they are."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    big = lambda v: getattr(v.aval, "size", 0) == 32 * 48 and jnp.issubdtype(v.aval.dtype, jnp.floating)  # noqa: E731
    names = {e.primitive.name for e in every_equation(jaxpr) if any(map(big, (*e.invars, *e.outvars)))}
    return names | ({"input"} if any(map(big, jaxpr.jaxpr.invars)) else set())


def every_equation(jaxpr):
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for sub in value if isinstance(value, tuple | list) else (value,):
                if hasattr(sub, "eqns") or hasattr(getattr(sub, "jaxpr", None), "eqns"):
                    yield from every_equation(sub)


@pytest.mark.parametrize("name", ["int8", "aqt"])
def test_aqt_16_a_served_program_has_no_float_weight_and_does_not_quantize_it(name):
    """AQT declares the float parameter when it serves, and quantizes it once more."""
    model = nn.Dense(48, dot_general_cls=functools.partial(DotGeneral, CONFIGS[name]))
    x = normal(17, 8, 32)
    variables = jax.jit(model.init)(KEY, x)
    assert {"input", "octavo_quantize"} <= touching(model.apply, variables, x)  # as it is trained
    served, low = octavo.served(model), octavo.convert(model, variables, x)
    assert touching(served.apply, low, x) == set()
    made = jax.eval_shape(served.init, KEY, x)["params"]
    floats = [leaf.shape for leaf in jax.tree.leaves(made) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert sorted(floats) == [(1, 48), (48,)]  # scales and the bias


def test_einsum_is_injected():
    model = Einsum(CONFIGS["int8"])
    x, w = normal(18, 4, 8), normal(19, 8, 2)
    out = model.apply({}, "bi,io->bo", x, w)
    np.testing.assert_array_equal(out, octavo.einsum("bi,io->bo", x, w, config=CONFIGS["int8"]))
    with pytest.raises(ValueError, match="static is True, False, 'lhs', 'rhs' or 'both', got 'left'"):
        Einsum(CONFIGS["int8"], static="left").init(KEY, "bi,io->bo", x, w)


class TestDelayedScaling:
    config = octavo.rules.dot_config(
        octavo.recipe("te_fp8_delayedscaling", exclude=None)[0], lhs_weight=False, rhs_weight=True
    )

    def test_histories_are_kept_in_the_gradient_and_merge_by_maximum(self):
        model = nn.Dense(8, use_bias=False, dot_general_cls=functools.partial(DotGeneral, self.config))
        x = normal(20, 8, 16)
        variables = jax.jit(model.init)(KEY, x)
        grad = jax.jit(jax.grad(lambda v, x: jnp.sum(model.apply(v, x) ** 2)))
        grads = [grad(variables, part) for part in (x[:4], x[4:])]
        whole = grad(variables, x)
        merged = octavo.accumulate_gradients(*grads)
        history = lambda g: g["_overwrite_with_gradient"]["DotGeneral_0"]["scaling"]["lhs"]["amax_history"]  # noqa: E731
        np.testing.assert_array_equal(history(merged), history(whole))
        assert float(jnp.max(history(merged))) == float(jnp.max(jnp.abs(x)))
        np.testing.assert_allclose(
            merged["params"]["kernel"], grads[0]["params"]["kernel"] + grads[1]["params"]["kernel"]
        )

    def test_error_feedback_does_not_merge(self):
        grads = {
            "params": jnp.ones(1),
            "_overwrite_with_gradient": {"scaling": {"error_feedback": {"error": jnp.ones(1)}}},
        }
        with pytest.raises(
            ValueError, match="by reduce_feedback, passes from one microbatch to the next: overwrite it"
        ):
            octavo.accumulate_gradients(grads, grads)

    def test_the_next_step_reads_the_history(self):
        model = nn.Dense(8, use_bias=False, dot_general_cls=functools.partial(DotGeneral, self.config))
        x = normal(21, 8, 16)
        variables = jax.jit(model.init)(KEY, x)
        grads = jax.grad(lambda v: jnp.sum(model.apply(v, x) ** 2))(variables)
        after = octavo.overwrite_with_gradients(variables, grads)
        np.testing.assert_array_equal(after["params"]["kernel"], variables["params"]["kernel"])
        small = model.apply(after, 0.01 * x)  # quantized by the range of the step before
        dynamic = model.apply(variables, 0.01 * x)
        assert np.any(small != dynamic)


class TestConfigure:
    @pytest.mark.parametrize(
        ("name", "kind", "forward"),
        slow_except(
            [("int8", "AqtQuantization", "int8"), ("fp8", "Fp8Quantization", None)],
            [
                ("int8", "AqtQuantization", "int8"),
                ("aqt_fp8", "AqtQuantization", "float8_e4m3fn"),
                ("aqt_fp8_full", "AqtQuantization", "float8_e4m3fn"),
                ("fp8_full", "QwixQuantization", "float8_e4m3fn"),
                ("int4w", "Quantization", "int4"),
                ("te_mxfp8", "Quantization", "mxfp8"),
                ("fp8", "Fp8Quantization", None),
                ("nanoo_fp8", "NANOOFp8Quantization", None),
            ],
        ),
    )
    def test_every_kind_trains_a_layer(self, name, kind, forward):
        config = types.SimpleNamespace(quantization=name, quantization_local_shard_count=2)
        quant = maxtext.configure_quantization(config)
        assert type(quant).__name__ == kind
        model = nn.Dense(32, use_bias=False, dot_general_cls=quant.dot_general_cls(("embed", "mlp")))
        x = normal(22, 64, 32)
        variables = jax.jit(model.init)(KEY, x)
        rngs = {"stochastic_rounding": KEY}
        grads = jax.jit(jax.grad(lambda v: jnp.sum(model.apply(v, x, rngs=rngs) ** 2)))(variables)
        exact = jax.grad(lambda p: jnp.sum((x @ p) ** 2))(variables["params"]["kernel"])
        error = jnp.linalg.norm(grads["params"]["kernel"] - exact) / jnp.linalg.norm(exact)
        assert 0 < error < (0.25 if name == "int4w" else 0.12)
        if forward is not None:
            seen = [row.fwd for row in octavo.plan(model, (), x).rows]
            assert seen[0].endswith(forward)

    def test_constant_bounds(self):
        config = types.SimpleNamespace(quantization="aqt_fp8_full", constant_bound_config=[1, 2, 3, 4, 5, 6])
        dot = maxtext.configure_quantization(config).config
        assert [m.calibration.bound for x in (dot.fwd, dot.dlhs, dot.drhs) for m in (x.lhs, x.rhs)] == [
            1,
            2,
            3,
            4,
            5,
            6,
        ]
        with pytest.raises(ValueError, match="six bounds"):
            maxtext.configure_quantization(
                types.SimpleNamespace(quantization="aqt_fp8_full", constant_bound_config=[1])
            )

    def test_mixed_precision_from_a_file(self, tmp_path):
        path = tmp_path / "bits.json"
        path.write_text('{"__default__": {"w_bits": 8}, "first": {"w_bits": 4}}')
        config = types.SimpleNamespace(quantization="intmp", quant_cfg_path=str(path))
        quant = maxtext.configure_quantization(config)
        model = Model(quant.config, conv=False, experts=False)
        params = octavo.convert(model, trained(model), X)["params"]
        assert (params["first"]["kernel"].qtype.name, params["second"]["kernel"].qtype.name) == ("int4", "int8")
        with pytest.raises(ValueError, match="needs quant_cfg_path"):
            maxtext.configure_quantization(types.SimpleNamespace(quantization="intmp"))

    def test_nothing_and_a_typo(self):
        assert maxtext.configure_quantization(types.SimpleNamespace(quantization="")) is None
        with pytest.raises(ValueError, match="quantization='int9' is no recipe: did you mean"):
            maxtext.configure_quantization(types.SimpleNamespace(quantization="int9"))


@pytest.mark.parametrize("fields", [{"rotate": 32}, {"sparsity": (2, 4)}])
def test_a_weight_that_is_rotated_or_masked_before_it_is_rounded_is_served_as_it_was_trained(fields):
    def product(params, x):
        return x @ params["w"]

    keys = jax.random.split(jax.random.key(0))
    params, x = {"w": jax.random.normal(keys[0], (128, 64))}, jax.random.normal(keys[1], (8, 128)).at[:, 3].mul(50.0)
    rules = octavo.QuantizationRule(weight_qtype="int8", act_qtype="int8", scope="weights", **fields)
    trained = jax.jit(octavo.quantized(product, rules))(params, x)
    with pytest.warns(UserWarning, match="w stored in float: it is rotated or masked before it is quantized"):
        low = octavo.convert(product, params, x, rules=rules)
    np.testing.assert_array_equal(jax.jit(octavo.served(product, rules))(low, x), trained)


class TestMaxTextModes:
    """`configure_quantization(config, mode)`, as in MaxText: train, convert once, serve without the float kernel."""

    class Model(nn.Module):
        quant: object

        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8, name="dense", dot_general_cls=self.quant.dot_general_cls(("embed", "mlp")))(x)
            w = self.param("w", nn.initializers.lecun_normal(), (8, 4))
            return self.quant.einsum(("mlp", "out"))("bi,io->bo", x, w)

    def model(self, mode, replicate=False):
        config = types.SimpleNamespace(quantization="int8", replicate_quant_scale=replicate)
        return self.Model(maxtext.configure_quantization(config, mode))

    def test_convert_stores_codes_and_serve_multiplies_them(self):
        x = normal(23, 4, 16)
        params = self.model("train").init(KEY, x)
        trained = self.model("train").apply(params, x)
        out, stored = self.model("convert").apply(params, x, mutable="aqt")
        np.testing.assert_array_equal(out, trained)
        frozen = stored["aqt"]["dense"]["AqtDotGeneral_0"]["qrhs"]["frozen"]
        assert (
            frozen.qtype.name == stored["aqt"]["AqtEinsum_0"]["AqtDotGeneral_0"]["qrhs"]["frozen"].qtype.name == "int8"
        )
        left = maxtext.remove_quantized_params(params["params"], stored["aqt"])
        assert left["dense"]["kernel"] == {}
        assert left["dense"]["bias"].shape == (8,)
        zeros = jax.tree.map(jnp.zeros_like, params["params"]) | {
            "dense": left["dense"] | {"kernel": jnp.zeros((16, 8))}
        }
        served = self.model("serve").apply({"params": zeros, **stored}, x)
        np.testing.assert_array_equal(served, trained)
        with pytest.raises(
            ValueError, match=r"AqtDotGeneral_0' serves codes of the collection 'aqt', which was not given"
        ):
            self.model("serve").apply(params, x)

    @pytest.mark.parametrize("replicate", [False, True])
    def test_served_variables_have_the_names_of_their_axes(self, replicate):
        made = jax.eval_shape(self.model("serve", replicate).init, KEY, jnp.ones((4, 16)))["aqt"]
        frozen = made["dense"]["AqtDotGeneral_0"]["qrhs"]["frozen"]
        assert frozen.qvalue.names == ("embed", "mlp")
        assert frozen.scale.names == ((None, None) if replicate else (None, "mlp"))

    def test_modes_of_flax_float8_raise(self):
        with pytest.raises(ValueError, match="store no weights: 'serve' is for AQT's configs"):
            maxtext.configure_quantization(types.SimpleNamespace(quantization="fp8"), "serve")
