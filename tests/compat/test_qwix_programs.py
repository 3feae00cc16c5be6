"""Programs of Qwix's users, run by Qwix and by Octavo: the same structure and numerics, or a clear error."""

import functools

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

import octavo
from octavo.frameworks.linen_ops import DotGeneral
from tests.arrays import normal
from tests.cases import slow_except

pytestmark = [
    pytest.mark.standard_promotion,
    # Qwix asks Flax for old names.
    pytest.mark.filterwarnings(
        "ignore:.*VariableState:DeprecationWarning",
        "ignore:.*iter_modules:DeprecationWarning",
        "ignore:'.value' access:DeprecationWarning",
    ),
]

KEY = jax.random.key(0)
X = normal(1, 2, 4, 16)
INT8 = {"weight_qtype": "int8", "act_qtype": "int8"}
STATIC = {**INT8, "act_static_scale": True, "act_batch_axes": (0,)}
LIBRARIES = (octavo, qwix)


def qt(lib, model, **rule):
    return lib.quantize_model(model, lib.QtProvider([lib.QtRule(**rule)]))


def ptq(lib, model, *inputs, **rule):
    return lib.quantize_model(model, lib.PtqProvider([lib.QuantizationRule(**rule)]), *inputs)


def shapes(tree):
    """Paths, shapes and dtypes of the leaves, by names that both libraries have."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): (x.shape, x.dtype) for path, x in leaves}


# Static ranges.


def test_a_static_range_holds_the_largest_token():
    x = X.at[0, 1].multiply(100.0)
    model = qt(octavo, nn.Dense(8), **INT8, act_static_scale=True)
    variables = model.init(KEY, x)
    _, stats = model.apply(variables, x, mutable="quant_stats")
    out = model.apply({**variables, **stats}, x)
    wanted = nn.Dense(8).apply({"params": variables["params"]}, x)
    assert np.linalg.norm((out - wanted)[0, 1]) < 0.02 * np.linalg.norm(wanted[0, 1])


def test_a_static_range_is_averaged_over_steps_only():
    model = octavo.quantized(
        lambda params, x: x @ params["w"], octavo.QtRule(**INT8, act_static_scale=True, act_calibration_method="minmax")
    )
    args = {"w": jnp.eye(4)}, jnp.asarray([[1.0, -1, 0, 0], [0, 3, 0, -5]])
    state = model.init(*args)
    for scale in (1.0, 3.0):
        _, state = model.stateful(state)(args[0], args[1] * scale)
    stats = state["quant_stats"]["dot_general0_lhs"]
    assert (stats["sum_of_min"].item(), stats["sum_of_max"].item()) == (-20.0, 12.0)


class Layers(nn.Module):
    """A dot with two contracted axes, an einsum with a parameter of the model itself, and a convolution."""

    @nn.compact
    def __call__(self, x):
        x = nn.DenseGeneral((2, 8), name="heads")(x)
        x = nn.DenseGeneral(16, axis=(-2, -1), name="out")(x)
        x = jnp.einsum("btd,do->bto", x, self.param("w", nn.initializers.normal(), (16, 16)))
        return nn.Conv(8, (3,))(x)


@pytest.mark.parametrize(
    ("model", "axes", "method"),
    [
        (nn.Dense(8), (0,), "absmax"),
        (nn.Dense(8), (0,), "minmax"),
        pytest.param(Layers(), (), "absmax", marks=pytest.mark.slow),
    ],
    ids=lambda case: case if isinstance(case, str) else type(case).__name__,
)
def test_linen_ptq_takes_static_ranges_as_parameters(model, axes, method):
    rule = {**STATIC, "act_batch_axes": axes, "act_calibration_method": method}
    params = jax.jit(model.init)(KEY, X)["params"]
    outs, trees, starts = [], [], []
    for lib in LIBRARIES:
        trained = qt(lib, model, **rule)
        stats = trained.apply(trained.init(KEY, X), X, mutable="quant_stats")[1]["quant_stats"]
        served = ptq(lib, model, **rule)
        abstract = jax.eval_shape(served.init, KEY, X)
        assert list(abstract) == ["params"]
        low = lib.quantize_params(params, abstract["params"], stats)
        outs.append(trained.apply({"params": params, "quant_stats": stats}, X))
        starts.append(served.init_with_output(KEY, X)[0])
        trees.append(shapes(low))
        # What Qwix serves differs from what it trained in single codes.
        limit = {"rtol": 0} if lib is octavo else {"atol": 0.01 * np.max(np.abs(outs[-1])), "rtol": 0}
        np.testing.assert_allclose(served.apply({"params": low}, X), outs[-1], **limit)
    ours, theirs = ({k: v for k, v in tree.items() if "kernel" not in k} for tree in trees)
    assert ours == theirs
    assert sum("_lhs_scale" in k for k in ours) == sum("bias" not in k for k in shapes(params))
    np.testing.assert_allclose(outs[0], outs[1], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(starts[0], starts[1], rtol=1e-6, atol=1e-6)


def test_static_ranges_that_were_never_measured_or_have_no_place_raise():
    trained, served = qt(octavo, nn.Dense(8), **STATIC), ptq(octavo, nn.Dense(8), **STATIC)
    variables = jax.jit(trained.init)(KEY, X)
    abstract = jax.eval_shape(served.init, KEY, X)["params"]
    with pytest.raises(ValueError, match=r"'dot_general0_lhs' was never calibrated.*mutable='quant_stats'"):
        octavo.quantize_params(variables["params"], abstract, variables["quant_stats"])
    dynamic = jax.eval_shape(ptq(octavo, nn.Dense(8), **INT8).init, KEY, X)["params"]
    with pytest.raises(ValueError, match=r"no static range 'dot_general0_lhs'.*act_static_scale=True"):
        octavo.quantize_params(variables["params"], dynamic, variables["quant_stats"])


# Providers.


def test_a_provider_changes_rules_inputs_and_outputs():
    def provider(lib):
        class Provider(lib.QtProvider):
            def _init_rule(self, rule):
                return super()._init_rule(rule.__class__(module_path=rule.module_path, weight_qtype="int4"))

            def process_model_inputs(self, model, model_args, model_kwargs):
                model, args, kwargs = super().process_model_inputs(model, model_args, model_kwargs)
                return model, [2 * x for x in args], kwargs

            def process_model_output(self, method_name, model_output):
                return super().process_model_output(method_name, {method_name: model_output})

        return Provider([lib.QtRule(**INT8)])

    variables = jax.jit(nn.Dense(8).init)(KEY, X)
    linen = [lib.quantize_model(nn.Dense(8), provider(lib)).apply(variables, X) for lib in LIBRARIES]
    np.testing.assert_allclose(linen[0]["__call__"], linen[1]["__call__"], rtol=1e-5, atol=1e-6)
    dense = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    dense.kernel.set_value(variables["params"]["kernel"])
    out = octavo.quantize_model(dense, provider(octavo), X)(X)["__call__"]
    np.testing.assert_allclose(out, linen[1]["__call__"], rtol=1e-5, atol=1e-6)
    function = octavo.quantized(lambda params, x: x @ params, provider(octavo))
    assert list(function(jnp.ones((16, 8)), X)) == ["<lambda>"]


class Two(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.einsum("btd,btd->bt", nn.Dense(16)(x), x)


@pytest.mark.parametrize("base", ["QtProvider", "QuantizationProvider"])
def test_a_provider_names_the_functions_that_it_replaces(base):
    def provider(lib):
        class Provider(getattr(lib, base)):
            def get_intercept_map(self):
                return super().get_intercept_map() | {"jax.lax.dot_general": self.product}

            def product(self, lhs, rhs, dimension_numbers, *args, **kwargs):
                rule, op_id = self._get_current_rule_and_op_id("dot_general")
                assert rule is not None
                assert op_id == "dot_general0"
                return 2 * jax.lax.dot_general(lhs, rhs, dimension_numbers, *args, **kwargs)

        return Provider([lib.QtRule(**INT8)])

    variables = jax.jit(Two().init)(KEY, X)
    out = octavo.quantize_model(Two(), provider(octavo)).apply(variables, X)
    if base == "QuantizationProvider":  # an einsum that has no function of its own is a dot_general
        np.testing.assert_allclose(out, 4 * Two().apply(variables, X), rtol=1e-5)
    else:
        np.testing.assert_allclose(out, qwix.quantize_model(Two(), provider(qwix)).apply(variables, X), rtol=2e-5)


def test_what_a_provider_cannot_replace_raises():
    with pytest.raises(TypeError, match=r"Bad\.get_interceptors would never be called.*get_intercept_map"):
        type("Bad", (octavo.QtProvider,), {"get_interceptors": lambda self: []})
    with pytest.raises(TypeError, match=r"Bad\.nn_param would never be called"):
        type("Bad", (octavo.PtqProvider,), {"nn_param": lambda self, *args: None})
    cls = type("Bad", (octavo.QtProvider,), {"get_intercept_map": lambda self: {"jax.nn.gelu": jax.nn.relu}})
    with pytest.raises(ValueError, match=r"names 'jax\.nn\.gelu', which is not replaced.*get_current_rule"):
        cls([octavo.QtRule(**INT8)])
    only = type("Only", (octavo.QtProvider,), {"get_intercept_map": lambda self: {"jax.lax.ragged_dot": self.gmm}})
    assert octavo.plan(nn.Dense(8), only([octavo.QtRule(**INT8)]), X).rows[0].reason == (
        "the provider does not replace dot_general"
    )


class Author(nn.Module):
    """A model whose author calls the provider."""

    provider: object

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(), (16, 8))
        dot = self.provider.dot_general(x, w, (((2,), (0,)), ((), ())))
        return dot + self.provider.einsum("btd,do->bto", x, w)


def test_operations_of_a_provider_called_by_a_model():
    outs, variables = [], None
    for lib in LIBRARIES:
        model = Author(lib.QtProvider([lib.QtRule(**INT8)]))
        variables = model.init(KEY, X) if variables is None else variables
        outs.append(model.apply(variables, X))
    np.testing.assert_allclose(*outs, rtol=1e-5, atol=1e-6)
    provider = octavo.QtProvider([octavo.QtRule(**INT8)])
    np.testing.assert_array_equal(octavo.quantize_model(Author(provider), provider).apply(variables, X), outs[0])
    other = octavo.QtProvider([octavo.QtRule(module_path="mlp", **INT8)])
    with pytest.raises(ValueError, match=r"outside of a quantized model.*no rule for dot_general.*quantize_model"):
        Author(other).apply(variables, X)


# Initialization and methods of Linen models.


def test_linen_init_is_quantized():
    for make in (qt, ptq):
        outs = []
        for lib in LIBRARIES:
            model = make(lib, nn.Dense(8), weight_qtype="int4", act_qtype="int8")
            out, variables = jax.jit(model.init_with_output)(KEY, X)
            np.testing.assert_allclose(out, model.apply(variables, X), rtol=1e-6, atol=1e-6)
            outs.append(out)
        np.testing.assert_allclose(*outs, rtol=1e-5, atol=1e-6)


class Asks(nn.Module):
    """Asks for its rule, as code around a kernel does, and decodes with a cache that it makes at initialization."""

    @nn.compact
    def __call__(self, x):
        if octavo.get_current_rule("gmm") is None:
            raise ValueError("no rule")
        attend = nn.MultiHeadDotProductAttention(num_heads=2, decode=True)
        return attend(nn.Dropout(0.5, deterministic=False)(x))


def test_rules_are_known_at_linen_init():
    skipped = octavo.QtRule(module_path=".*/query", skip=True)
    provider = octavo.QtProvider([skipped, octavo.QtRule(**INT8), octavo.QtRule(module_path="head", **INT8)])
    model = octavo.quantize_model(Asks(), provider)
    variables = jax.eval_shape(model.init, {"params": KEY, "dropout": KEY}, X)
    assert variables["cache"]["MultiHeadDotProductAttention_0"]["cached_key"].shape == (2, 4, 2, 8)
    assert [rule.module_path for rule in provider.get_unused_rules()] == ["head"]


def test_a_method_of_an_unbound_linen_model():
    class Model(nn.Module):
        def loss(self, a, b):
            return jnp.mean((a - b) ** 2)

        def __call__(self, x):
            return x

    assert qt(octavo, Model(), **INT8).loss(X, X) == 0


# Post-training quantization.


@pytest.mark.parametrize(("qtype", "head"), [("mxfp8", 8), ("mxfp4", 32), ("nvfp4", 16)])
def test_ptq_of_heads_that_are_not_longer_than_a_block(qtype, head):
    x = normal(10, 1, 2, 16)
    model = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=2 * head)
    variables = jax.jit(model.init)(KEY, x)
    served = ptq(octavo, model, weight_qtype=qtype)
    low = octavo.quantize_params(variables["params"], jax.eval_shape(served.init, KEY, x)["params"])
    assert low["out"]["kernel"].array.scale.shape == (2, 1, 16)
    trained = jax.jit(qt(octavo, model, weight_qtype=qtype).apply)(variables, x)
    np.testing.assert_array_equal(jax.jit(served.apply)({"params": low}, x), trained)


class Computed(nn.Module):
    @nn.compact
    def __call__(self, x):
        shaped = self.param("shaped", nn.initializers.normal(), (4, 4, 8)).reshape(16, 8)
        scaled = self.param("scaled", nn.initializers.normal(), (16, 8)) * 0.5
        halves = [self.param(name, nn.initializers.normal(), (16, 4)) for name in ("left", "right")]
        return x @ shaped + x @ scaled + x @ jnp.concatenate(halves, axis=1)


def test_ptq_says_which_weights_stay_in_float():
    served = ptq(octavo, Computed(), weight_qtype="int8")
    with pytest.warns(UserWarning, match=r"scaled stored in float: .*; left, right stored in float: .*concatenated"):
        low = jax.eval_shape(served.init, KEY, X)["params"]
    assert {name for name, leaf in low.items() if isinstance(leaf, octavo.WithAux)} == {"shaped"}
    rows = octavo.plan(Computed(), octavo.PtqProvider(octavo.QuantizationRule(weight_qtype="int8")), X).rows
    sizes = {row.weight: (row.bytes_before, row.bytes_after, row.note is None) for row in rows}
    assert sizes == {"shaped": (512, 160, True), "scaled": (512, 512, False), "left": (512, 512, False)}
    rows = octavo.plan(Computed(), octavo.QtProvider(octavo.QuantizationRule(weight_qtype="int8")), X).rows
    assert [(row.bytes_after, row.note) for row in rows] == [(160, None)] * 3


def test_a_ptq_model_raises_for_float_weights():
    variables = jax.jit(nn.Dense(8).init)(KEY, X)
    with pytest.raises(ValueError, match=r"unquantized param"):
        ptq(qwix, nn.Dense(8), **INT8).apply(variables, X)
    with pytest.raises(
        ValueError, match=r"'kernel' is in float.*takes it as int8.*quantize_params.*octavo\.QtProvider"
    ):
        ptq(octavo, nn.Dense(8), **INT8).apply(variables, X)


def test_quantized_parameters_have_no_boxes():
    model = nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.normal(), ("a", "b")))
    params = nn.unbox(model.init(KEY, X)["params"])
    trees = []
    for lib in LIBRARIES:
        abstract = jax.eval_shape(ptq(lib, model, **INT8).init, KEY, X)["params"]
        assert abstract["kernel"].array.scale.names == (None, "b")
        low = lib.quantize_params(params, abstract)
        trees.append((low["kernel"].array.qvalue, low["kernel"].array.scale))
    jax.tree.map(np.testing.assert_array_equal, *trees)


def test_quantized_nnx_parameters_are_variables_with_sharding_names():
    def model():
        metadata = {"out_sharding": ("a", "b"), "eager_sharding": False}
        return nnx.Linear(16, 8, kernel_metadata=metadata, rngs=nnx.Rngs(0))

    params = nnx.to_pure_dict(nnx.state(model(), nnx.Param))
    trees, names, outs = [], [], []
    for lib in LIBRARIES:
        low = ptq(lib, model(), X, **INT8)
        state = nnx.state(low, nnx.Param)
        names.append({path: v.get_metadata().get("out_sharding") for path, v in nnx.to_flat_state(state)})
        abstract = nnx.eval_shape(lambda lib=lib: ptq(lib, model(), jnp.zeros(X.shape), **INT8))
        updated = lib.quantize_params(params, abstract)
        trees += [nnx.to_pure_dict(state), updated]
        nnx.update(abstract, updated)
        outs += [low(X), abstract(X)]
    assert names[0] == names[1]
    assert names[0]["kernel", "array", "scale"] == (None, "b")
    for tree in trees[1:]:
        jax.tree.map(np.testing.assert_array_equal, tree, trees[0])
    for out in outs[1:]:
        np.testing.assert_allclose(out, outs[0], rtol=1e-6, atol=1e-6)


def test_flax_serializes_quantized_parameters():
    states = []
    for lib in LIBRARIES:
        variables = jax.jit(ptq(lib, nn.Dense(8), **INT8).init)(KEY, X)
        states.append(flax.serialization.to_state_dict(variables))
        back = flax.serialization.from_bytes(variables, flax.serialization.to_bytes(variables))
        assert jax.tree.structure(back) == jax.tree.structure(variables)
        jax.tree.map(np.testing.assert_array_equal, back, variables)
    jax.tree.map(np.testing.assert_array_equal, *states)
    low = octavo.quantize(jnp.ones((4, 32)), "nvfp4")
    back = flax.serialization.from_bytes(low, flax.serialization.to_bytes(low))
    np.testing.assert_array_equal(back.outer_scale, low.outer_scale)


# QArrays and operations.


def test_types_compare_with_names_and_dtypes():
    q, rule = octavo.quantize(X, "int8"), octavo.QtRule(weight_qtype=jnp.int8, act_qtype="float8_e4m3fn")
    for qtype in (q.qtype, rule.weight_qtype):
        for equal in (jnp.int8, "int8", np.dtype("int8")):
            assert qtype == equal
            assert not qtype != equal  # noqa: SIM202
        assert jnp.int8 == qtype
        assert all(qtype != other for other in (jnp.int4, "int4", 8))
    assert rule.act_qtype == jnp.float8_e4m3fn
    assert hash(rule.act_qtype) == hash("float8_e4m3fn")
    assert octavo.rules.rules_from_yaml(octavo.rules.rules_to_yaml([rule])) == (rule,)


def test_tile_shapes_and_replace():
    found = []
    for lib in LIBRARIES:
        q = lib.quantize(X, "int8", channelwise_axes=(0,), tiled_axes={2: 8}, calibration_method="minmax")
        new = q.replace(scale=2 * q.scale, zero_point=None)
        found.append((q.scale_tile_shape, q.zero_point_tile_shape, new.zero_point_tile_shape))
        np.testing.assert_array_equal(new.scale, 2 * q.scale)
    assert found[0] == found[1] == ((1, 4, 8), (1, 4, 8), None)
    with pytest.raises(ValueError, match=r"rank"):
        octavo.quantize(X, "int8").replace(scale=jnp.ones(3))


def test_dot_takes_options_by_position_and_scalars():
    for case in ("matrix", "left", "right"):
        outs = []
        for lib in LIBRARIES:
            q, two = lib.quantize(X[0], "int8", channelwise_axes=(0,)), jnp.float32(2)
            args = {"matrix": (q, lib.quantize(X[1].T, "int8")), "left": (two, q), "right": (q, two)}[case]
            outs.append(lib.dot(*args, None, jnp.bfloat16))
            assert outs[-1].dtype == jnp.bfloat16
        np.testing.assert_allclose(*(x.astype(jnp.float32) for x in outs), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("tiles", slow_except(({0: 8, 1: 8},), ({0: 8, 1: 8}, {1: 4}, {0: 2})))
def test_tiles_by_axis_are_those_of_weights_and_activations(tiles):
    x = normal(11, 8, 16)
    variables, runs = jax.jit(nn.Dense(24).init)(KEY, x), []
    for lib, extra in ((octavo, {"arithmetic": "qwix"}), (qwix, {})):
        model = qt(lib, nn.Dense(24), **INT8, tile_size=tiles, **extra)
        run = jax.value_and_grad(lambda v, model=model: jnp.sum(model.apply(v, x) ** 2))
        runs.append(jax.tree.leaves(jax.jit(run)(variables)))
        low = ptq(lib, nn.Dense(24), **INT8, tile_size=tiles, **extra)
        stored = lib.quantize_params(variables["params"], jax.eval_shape(low.init, KEY, x)["params"])
        runs[-1] += [stored["kernel"].array.scale, low.apply({"params": stored}, x)]
    for got, wanted in zip(*runs, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_tiles_by_axis_in_gradients():
    x = normal(12, 8, 16)
    w = normal(13, 16, 24)
    raw = {
        f"{g}_{field}": value
        for g in ("dlhs", "drhs")
        for field, value in (("tile_size", {0: 4, 1: 8}), ("residual_qtype", "int8"))
    }
    grads = []
    for lib, extra in ((octavo, {"arithmetic": "qwix"}), (qwix, {})):
        model = qt(
            lib,
            nn.Dense(24, use_bias=False),
            **INT8,
            bwd_qtype="int8",
            tile_size={0: 8, 1: 8},
            additional_qt_config=raw,
            **extra,
        )
        loss = lambda w, x, model=model: jnp.sum(jnp.sin(model.apply({"params": {"kernel": w}}, x)))  # noqa: E731
        grads.append(jax.jit(jax.grad(loss, (0, 1)))(w, x))
    for got, wanted in zip(*grads, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"tile=\{2: 4\}: the operand has 2 axes, not \[2\]"):
        octavo.dot(x, w, config=octavo.DotConfig.qat("int8", tile={2: 4}))


def test_ragged_dot_general_takes_qwix_dimension_numbers():
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
    outs = []
    for lib in LIBRARIES:
        lhs = lib.quantize(X[0], "int8", channelwise_axes=(0,))
        rhs = lib.quantize(jnp.ones((2, 16, 8)), "int8", channelwise_axes=(2,))
        outs.append(lib.ragged_dot_general(lhs, rhs, jnp.asarray([1, 3]), dimension_numbers=numbers))
    np.testing.assert_allclose(*outs, rtol=1e-6)
    with pytest.raises(TypeError, match=r"ragged_dot_dimension_numbers, or dimension_numbers"):
        octavo.ragged_dot_general(X[0], jnp.ones((2, 16, 8)), jnp.asarray([1, 3]))


def test_integers_without_a_preferred_type_are_summed_in_int32():
    a = jnp.full((4, 300), 100, jnp.int8)
    dot = functools.partial(octavo.dot_general, a, a, (((1,), (1,)), ((), ())))
    assert int(dot()[0, 0]) == int(octavo.dot(a, a.T)[0, 0]) == int(octavo.einsum("ik,jk->ij", a, a)[0, 0]) == 3_000_000
    assert int(octavo.ragged_dot(a, a.T[None], jnp.asarray([4]))[0, 0]) == 3_000_000
    window = octavo.conv_general_dilated(a[:1, None], a[:1, None], (1,), "VALID")
    assert int(window[0, 0, 0]) == 3_000_000
    for dtype in (jnp.int4, jnp.uint4, jnp.int16):
        b = jnp.full((4, 300), 7, dtype)
        for out in (octavo.dot(b, b.T), octavo.ragged_dot(b, b.T[None], jnp.asarray([4]))):
            assert (out.dtype, int(out[0, 0])) == (jnp.int32, 14_700)


@pytest.mark.parametrize(
    ("equation", "left", "right"),
    slow_except(
        [("bth,bsh->bts", (6, 4, 16), (3, 5, 16))],
        [
            ("bij,bjk->bik", (1, 4, 16), (3, 16, 8)),
            ("...ij,...jk->...ik", (3, 1, 4, 16), (2, 16, 8)),
            ("ij,jk->ik", (4, 1), (16, 8)),
            ("bth,bsh->bts", (6, 4, 16), (3, 5, 16)),
            ("bth,sbh->tbs", (2, 4, 16), (5, 6, 16)),
        ],
    ),
)
def test_einsum_broadcasts_as_qwix_does(equation, left, right):
    """Axes of size one, and shorter axes of the result, whose values are repeated."""
    x, w = jax.random.normal(KEY, left), jax.random.normal(jax.random.key(1), right)
    for channels in (None, (0,), (1,)):
        outs = []
        for lib in LIBRARIES:
            low = [a if channels is None else lib.quantize(a, "int8", channelwise_axes=channels) for a in (x, w)]
            outs.append(lib.einsum(equation, *low))
        np.testing.assert_allclose(*outs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("left", "right"), [((4, 4), (16, 8)), ((4, 4), (6, 8))])
def test_contracted_axes_of_different_sizes_raise(left, right):
    with pytest.raises(ValueError, match=r"index 'j' has sizes 4 and .*jnp\.repeat before it is quantized"):
        octavo.einsum("ij,jk->ik", jnp.ones(left), jnp.ones(right))


# What was trained is what is served.


def _static_weight(x):
    model = nn.Dense(8, dot_general_cls=functools.partial(DotGeneral, INT8_DOT, static="both"))
    variables = jax.jit(model.init)(KEY, x)
    return model, (), {**variables, **model.apply(variables, x, mutable="quant_stats")[1]}


def _delayed_weight(x, by_rules):
    rules = octavo.recipe("te_fp8_delayedscaling", exclude=None)
    config = octavo.rules.dot_config(rules[0], lhs_weight=False, rhs_weight=True)
    model, dot = nn.Dense(8), functools.partial(DotGeneral, config)
    trained = octavo.quantize_model(model, rules) if by_rules else nn.Dense(8, dot_general_cls=dot)
    variables = jax.jit(trained.init)(KEY, x)
    grads = jax.jit(jax.grad(lambda v: jnp.sum(trained.apply(v, x))))(variables)
    return trained, rules if by_rules else (), {**grads, "params": variables["params"]}


INT8_DOT = octavo.DotConfig.qt("int8")


@pytest.mark.parametrize("kind", ["static", "delayed by rules", "delayed by an operation"])
def test_remembered_ranges_of_weights_are_converted(kind):
    trained, rules, variables = _static_weight(X) if kind == "static" else _delayed_weight(X, "rules" in kind)
    variables = {**variables, "params": jax.tree.map(lambda w: 0.3 * w, variables["params"])}
    model = nn.Dense(8) if rules else trained
    low = octavo.convert(model, variables, X, rules=rules)
    served = octavo.served(model, rules)
    np.testing.assert_array_equal(jax.jit(served.apply)(low, X), jax.jit(trained.apply)(variables, X))
    measured = octavo.quantize(variables["params"]["kernel"], low["params"]["kernel"].qtype)
    assert float(low["params"]["kernel"].scale.max() / measured.scale.max()) == pytest.approx(1 / 0.3, rel=1e-3)


def test_remembered_ranges_of_a_function_and_of_scanned_layers():
    rules = octavo.recipe("te_fp8_delayedscaling", exclude=None)

    def fn(params, x):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, params["w"])[0]

    low, params = octavo.quantized(fn, rules), {"w": normal(15, 2, 4, 4)}
    x = jnp.ones((2, 4))
    state = low.init(params, x)
    state = jax.jit(jax.grad(lambda state: jnp.sum(low.stateful(state)(params, x)[0])))(state)
    smaller = {"w": 0.3 * params["w"]}
    codes = octavo.convert(fn, smaller, x, rules=rules, state=state)["w"]
    wanted = octavo.convert(fn, params, x, rules=rules)["w"].scale  # of the step that is remembered
    np.testing.assert_array_equal(codes.scale, wanted)
    fresh = octavo.convert(fn, smaller, x, rules=rules, state=low.init(params, x))["w"]  # nothing is remembered
    np.testing.assert_array_equal(fresh.scale, octavo.convert(fn, smaller, x, rules=rules)["w"].scale)
    with pytest.raises(TypeError, match=r"among its variables"):
        octavo.convert(nn.Dense(8), nn.Dense(8).init(KEY, X), X, rules=rules, state=state)


def _two_layers(params, x):
    return jax.nn.relu(x @ params["up"]) @ params["down"]


class TwoLayers(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.relu(nn.Dense(16)(x)))


ACTIVATION_RULES = {
    "static": (octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", act_static_scale=True),),
    "delayed": octavo.recipe("te_fp8_delayedscaling", exclude=None),
}


@pytest.mark.parametrize("kind", ACTIVATION_RULES)
def test_remembered_ranges_of_activations_are_served(kind):
    """Inputs three times as large as those of training are clipped as in training; weights have shrunk since."""
    rules, y = ACTIVATION_RULES[kind], 3 * X
    params = {"up": normal(16, X.shape[-1], 16), "down": normal(17, 16, 8)}
    low = octavo.quantized(_two_layers, rules)
    state = low.init(params, X)
    if kind == "static":
        state = low.stateful(state)(params, X)[1]
    else:
        state = jax.jit(jax.grad(lambda state: jnp.sum(low.stateful(state)(params, X)[0])))(state)
    params = jax.tree.map(lambda w: 0.3 * w, params)
    want = jax.jit(lambda params, x: low.stateful(state, update=False)(params, x)[0])(params, y)
    codes = octavo.convert(_two_layers, params, X, rules=rules, state=state)
    np.testing.assert_array_equal(jax.jit(octavo.served(_two_layers, rules, state=state))(codes, y), want)
    np.testing.assert_array_equal(jax.jit(octavo.served(_two_layers, rules, state=state))(params, y), want)
    with pytest.raises(ValueError, match="with the state of training"):
        octavo.served(_two_layers, rules)(codes, y)
    if kind == "delayed":
        assert not np.array_equal(jax.jit(octavo.served(_two_layers, rules, state={}))(codes, y), want)
    with pytest.raises(TypeError, match="among its variables"):
        octavo.served(TwoLayers(), rules, state=state)


@pytest.mark.parametrize("kind", ACTIVATION_RULES)
def test_remembered_ranges_of_activations_are_served_by_models(kind):
    rules, y = ACTIVATION_RULES[kind], 3 * X
    trained = octavo.quantize_model(TwoLayers(), rules)
    variables = jax.jit(trained.init)(KEY, X)
    if kind == "static":
        variables = {**variables, **trained.apply(variables, X, mutable="quant_stats")[1]}
    else:
        grads = jax.jit(jax.grad(lambda v: jnp.sum(trained.apply(v, X))))(variables)
        variables = {**grads, "params": variables["params"]}
    low = octavo.convert(TwoLayers(), variables, X, rules=rules)
    served = octavo.served(TwoLayers(), rules)
    want = jax.jit(trained.apply)(variables, y)
    np.testing.assert_array_equal(jax.jit(served.apply)(low, y), want)
    if kind == "delayed":
        without = {name: tree for name, tree in low.items() if name == "params"}
        assert not np.array_equal(jax.jit(served.apply)(without, y), want)
