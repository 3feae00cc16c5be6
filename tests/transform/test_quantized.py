"""`quantized` under and over the transformations of JAX, compared with calling the operations by hand."""

import concurrent.futures
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import octavo
from octavo.rules import dot_config
from tests.arrays import normal
from tests.cases import REPRESENTATIVE, slow_except
from tests.ops.walk import dot_types

INT8 = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
CONFIG = dot_config(INT8, lhs_weight=False, rhs_weight=True)
assert CONFIG is not None


def by_hand(x, w):
    """What every quantized product here must be, bit for bit."""
    return octavo.dot(x, w, config=CONFIG)


PARAMS = {"a": {"w": normal(0, 16, 32)}, "b": {"w": normal(1, 32, 8)}}
SQUARE = {"w": normal(3, 16, 16)}
X = normal(2, 4, 16)


def mlp(params, x, dot=jnp.dot):
    return dot(jnp.tanh(dot(x, params["a"]["w"])), params["b"]["w"])


def loss(params, x, dot=jnp.dot):
    return jnp.sum(mlp(params, x, dot) ** 2)


def chain(params, bias, x):
    """Matmuls in a scan, a nested jit, a branch and rematerialized; all of them close over the bias."""
    x = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w + bias), None), x, jnp.stack([params["w"]] * 2))[0]
    x = jax.jit(lambda x: x @ params["w"] + bias)(x)
    x = jax.lax.cond(x.sum() > 0, lambda x: x @ params["w"] + bias, lambda x: x * bias, x)
    return jax.checkpoint(lambda x: x @ params["w"] + bias)(x)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for got, wanted in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(got, wanted)


class TestUnder:
    """Transformations applied to the quantized function."""

    low = staticmethod(octavo.quantized(mlp, INT8))

    def test_eager_is_the_ops_by_hand(self):
        low = octavo.quantized(lambda params, x: x @ params["w"], INT8)
        same(low(SQUARE, X), by_hand(X, SQUARE["w"]))

    def test_jit(self):
        same(jax.jit(self.low)(PARAMS, X), jax.jit(lambda p, x: mlp(p, x, by_hand))(PARAMS, X))

    def test_gradients_of_both_arguments(self):
        low = octavo.quantized(loss, INT8)
        ours = jax.jit(jax.value_and_grad(low, argnums=(0, 1)))(PARAMS, X)
        same(ours, jax.jit(jax.value_and_grad(lambda p, x: loss(p, x, by_hand), argnums=(0, 1)))(PARAMS, X))

    def test_vmap_over_examples(self):
        xs = normal(3, 5, 4, 16)
        ours = jax.jit(jax.vmap(self.low, in_axes=(None, 0)))(PARAMS, xs)
        same(ours, jax.jit(lambda xs: jnp.stack([mlp(PARAMS, x, by_hand) for x in xs]))(xs))

    def test_remat(self):
        low = octavo.quantized(loss, INT8)
        same(jax.jit(jax.grad(jax.checkpoint(low)))(PARAMS, X), jax.jit(jax.grad(low))(PARAMS, X))

    def test_scan_over_batches(self):
        xs = normal(3, 5, 4, 16)
        ours = jax.jit(lambda xs: jax.lax.scan(lambda c, x: (c, self.low(PARAMS, x)), 0, xs)[1])(xs)
        one = jax.jit(lambda x: mlp(PARAMS, x, by_hand))
        for got, x in zip(ours, xs, strict=True):
            same(got, one(x))

    def test_shardings_and_donation(self, mesh):
        place = NamedSharding(mesh, P("d"))
        x = jax.device_put(normal(2, 8, 16), place)
        low = octavo.quantized(lambda params, x: x @ params["w"], INT8)
        out = jax.jit(low, in_shardings=(None, place), out_shardings=place, donate_argnums=1)(SQUARE, x)
        assert out.sharding == place
        assert x.is_deleted()
        same(np.asarray(out), np.asarray(jax.jit(by_hand)(normal(2, 8, 16), SQUARE["w"])))

    def test_explicit_meshes_keep_their_types(self):
        mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)

        def fn(dot):
            def run(params, x):
                x = jax.sharding.reshard(jnp.tanh(dot(x, params["a"]["w"], out_sharding=P("d", "m"))), P("d", None))
                return dot(x, params["b"]["w"], out_sharding=P("d", None))

            return run

        hand = lambda x, w, out_sharding: octavo.dot(x, w, config=CONFIG, out_sharding=out_sharding)  # noqa: E731
        with jax.set_mesh(mesh):
            params = {"a": {"w": jax.device_put(PARAMS["a"]["w"], P(None, "m"))}, "b": PARAMS["b"]}
            x = jax.device_put(normal(2, 8, 16), P("d", None))
            grads = [
                jax.jit(jax.grad(lambda p, x, f=f: jnp.sum(f(p, x) ** 2)))(params, x)
                for f in (octavo.quantized(fn(jnp.dot), INT8), fn(hand))
            ]
        same(*jax.tree.map(np.asarray, grads))
        assert jax.typeof(grads[0]["a"]["w"]).sharding.spec == P(None, "m")

    def test_export_to_accelerators_has_int8_products(self):
        for platform in ("tpu", "cuda"):
            exported = jax.export.export(jax.jit(self.low), platforms=[platform])(PARAMS, X)
            assert exported.mlir_module().count("stablehlo.dot_general") == 2
            assert "(tensor<4x16xi8>, tensor<16x32xi8>) -> tensor<4x32xi32>" in exported.mlir_module()


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


class TestOver:
    """Transformations inside the function that is quantized."""

    def check(self, fn, reference, *args):
        low = octavo.quantized(fn, INT8)
        same(jax.jit(low)(*args), jax.jit(reference)(*args))
        types = dot_types(low, *args)
        assert types
        assert all(t == ("int8", "int8", "int32") for t in types), types

    def test_jit(self):
        fn = lambda dot: lambda params, x: jax.jit(lambda w, x: dot(x, w))(params["a"]["w"], x)  # noqa: E731
        self.check(fn(jnp.dot), fn(by_hand), PARAMS, X)

    def test_nested_jit_keeps_shardings_and_donates(self, mesh):
        place = NamedSharding(mesh, P("d"))
        inner = jax.jit(lambda w, x: x @ w, in_shardings=(None, place), out_shardings=place, donate_argnums=1)
        x = jax.device_put(normal(2, 8, 16), place)
        out = octavo.quantized(lambda params, x: inner(params["w"], x), INT8)(SQUARE, x)
        assert out.sharding == place
        assert x.is_deleted()
        same(np.asarray(out), np.asarray(jax.jit(by_hand)(normal(2, 8, 16), SQUARE["w"])))

    def test_nested_jit_is_compiled_once(self):
        inner = jax.jit(lambda w, x: x @ w)
        low = octavo.quantized(lambda params, x: inner(params["a"]["w"], x), INT8)
        low(PARAMS, X)
        with jax.log_compiles(False):
            compiled = []
            jax.monitoring.register_event_duration_secs_listener(
                lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
            )
            low(PARAMS, X)
        assert compiled == []

    @pytest.mark.parametrize("remat", [False, True])
    def test_scan_over_stacked_layers(self, remat):
        params = {"layers": {"w": normal(0, 3, 16, 16)}}

        def fn(dot):
            def run(params, x):
                body = lambda c, layer: (jnp.tanh(dot(c, layer["w"])), None)  # noqa: E731
                return jax.lax.scan(jax.checkpoint(body) if remat else body, x, params["layers"])[0]

            return run

        self.check(fn(jnp.dot), fn(by_hand), params, X)
        grad = lambda dot: jax.jit(jax.grad(lambda p, x: jnp.sum(dot(p, x) ** 2)))  # noqa: E731
        same(grad(octavo.quantized(fn(jnp.dot), INT8))(params, X), grad(fn(by_hand))(params, X))

    def test_loop_that_indexes_a_stack(self):
        params = {"w": normal(0, 3, 16, 16)}

        def fn(dot):
            return lambda params, x: jax.lax.fori_loop(0, 3, lambda i, c: jnp.tanh(dot(c, params["w"][i])), x)

        self.check(fn(jnp.dot), fn(by_hand), params, X)

    def test_while_loop(self):
        params = {"w": normal(0, 16, 16)}

        def fn(dot):
            small = lambda c: jnp.sum(jnp.abs(c)) < 1e3  # noqa: E731
            return lambda params, x: jax.lax.while_loop(small, lambda c: c + dot(c, params["w"]), x)

        self.check(fn(jnp.dot), fn(by_hand), params, X)

    def test_cond(self):
        def fn(dot):
            branches = [lambda w, x: dot(x, w), lambda w, x: dot(-x, w)]
            return lambda params, x: jax.lax.cond(x[0, 0] > 0, *branches, params["a"]["w"], x)

        self.check(fn(jnp.dot), fn(by_hand), PARAMS, X)

    def test_vmap(self):
        params = {"w": normal(0, 3, 16, 8)}
        low = octavo.quantized(lambda params, x: jax.vmap(lambda w: x @ w)(params["w"]), INT8)
        wanted = jax.jit(jax.vmap(lambda w: by_hand(X, w)))(params["w"])
        np.testing.assert_allclose(jax.jit(low)(params, X), wanted, rtol=1e-6)
        assert dot_types(low, params, X) == [("int8", "int8", "int32")] * 2

    def test_shard_map(self, mesh):
        def fn(dot):
            body = lambda params, x: jnp.tanh(dot(x, params["a"]["w"]))  # noqa: E731
            return jax.shard_map(body, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))

        x = normal(2, 16, 16)
        self.check(fn(jnp.dot), fn(by_hand), PARAMS, x)
        grad = lambda f: jax.jit(jax.grad(lambda p, x: jnp.sum(f(p, x) ** 2)))  # noqa: E731
        same(grad(octavo.quantized(fn(jnp.dot), INT8))(PARAMS, x), grad(fn(by_hand))(PARAMS, x))

    def test_no_tracers_are_kept(self):
        low = octavo.quantized(chain, octavo.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True))

        def run(params, bias, x):
            state = low.init(params, bias, x)
            return low.stateful(state)(params, bias, x)

        with jax.checking_leaks():
            jax.make_jaxpr(run)(SQUARE, jnp.ones((1, 16)), X)

    def test_grad_inside_quantizes_all_three_products(self):
        low = octavo.quantized(jax.grad(loss, argnums=(0, 1)), INT8)
        types = dot_types(low, PARAMS, X)
        assert len(set(types)) == 1
        assert types[0] == ("int8", "int8", "int32")
        float_grad = jax.jit(jax.grad(loss, argnums=(0, 1)))(PARAMS, X)
        for got, wanted in zip(jax.tree.leaves(jax.jit(low)(PARAMS, X)), jax.tree.leaves(float_grad), strict=True):
            error = jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted)
            assert 0 < error < 0.05

    def test_grad_inside_of_qat_keeps_gradients_in_float(self):
        rule = octavo.QuantizationRule(weight_qtype="int8", act_qtype="int8")
        types = dot_types(octavo.quantized(jax.grad(loss), rule), PARAMS, X)
        # Each int8 product stands once per platform branch.
        assert sorted(set(types)) == [("float32", "float32", "float32"), ("int8", "int8", "int32")]
        assert types.count(("float32", "float32", "float32")) == 3

    def test_custom_derivatives_are_left_alone_unless_a_rule_opens_them(self):
        @jax.custom_vjp
        def product(w, x):
            return x @ w

        product.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, g: (7 * r[1].T @ g, g @ r[0].T))
        fn = lambda params, x: product(params["a"]["w"], x) @ params["b"]["w"]  # noqa: E731
        low = octavo.quantized(fn, INT8)
        assert ("float32", "float32", "float32") in dot_types(low, PARAMS, X)
        plain = jax.jit(jax.grad(lambda p: jnp.sum(low(p, X))))(PARAMS)["a"]["w"]
        opened = octavo.quantized(fn, INT8.replace(inside_custom=True))
        assert ("float32", "float32", "float32") not in dot_types(opened, PARAMS, X)
        other = jax.jit(jax.grad(lambda p: jnp.sum(opened(p, X))))(PARAMS)["a"]["w"]
        np.testing.assert_allclose(plain, 7 * other, rtol=0.05, atol=0.5)  # its own derivative, and the true one

    def test_custom_jvp_functions_pass(self):
        fn = lambda dot: lambda params, x: jax.nn.relu(dot(x, params["a"]["w"]))  # noqa: E731
        self.check(fn(jnp.dot), fn(by_hand), PARAMS, X)

    def test_pallas_kernels_are_left_alone(self):
        from jax.experimental import pallas as pl

        def kernel(x, w, o):
            o[...] = x[...] @ w[...]

        call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((4, 32), jnp.float32), interpret=True)
        fn = lambda params, x: call(x, params["a"]["w"]) @ params["b"]["w"]  # noqa: E731
        low = octavo.quantized(fn, INT8)
        same(jax.jit(low)(PARAMS, X), jax.jit(lambda p, x: by_hand(call(x, p["a"]["w"]), p["b"]["w"]))(PARAMS, X))


class TestWeights:
    @pytest.mark.parametrize(
        "use",
        [
            lambda w: w.T.T,
            lambda w: w.reshape(4, 4, 8).reshape(16, 8),
            lambda w: w.astype(jnp.bfloat16).astype(jnp.float32),
            lambda w: jnp.concatenate([w[:8], w[8:]]),
            lambda w: jnp.split(w, 2, axis=0)[0].repeat(2, axis=0),
            lambda w: w * 2.0,
            lambda w: w / jnp.linalg.norm(w, axis=0, keepdims=True),
            lambda w: jax.lax.stop_gradient(w),
            lambda w: jnp.stack([w, w])[0],
        ],
    )
    def test_a_weight_is_followed(self, use):
        rule = octavo.QuantizationRule(weight_qtype="int8")  # weight-only: nothing happens to an activation
        sites = octavo.quantized(lambda params, x: x @ use(params["l"]["w"]), rule).sites(
            {"l": {"w": normal(0, 16, 8)}}, X
        )
        assert [(s.leaf, s.path, s.weights) for s in sites] == [("l/w", "l", (False, True))]

    def test_b4_an_activation_of_a_weights_shape_is_no_weight(self):
        square = {"w": normal(0, 16, 16)}
        x = normal(1, 16, 16)
        sites = octavo.quantized(lambda params, x: x @ x @ params["w"], "int8").sites(square, x)
        assert [s.leaf for s in sites] == [None, "w"]

    def test_a_row_looked_up_is_an_activation_and_a_matrix_picked_is_a_weight(self):
        params = {"table": normal(0, 10, 16), "experts": normal(1, 3, 16, 8)}
        fn = lambda params, ids: params["table"][ids] @ params["experts"][ids[0]]  # noqa: E731
        (site,) = octavo.quantized(fn, "int8").sites(params, jnp.asarray([1, 2]))
        assert site.leaf == "experts"
        assert site.weights == (False, True)

    def test_a_weight_on_the_left(self):
        low = octavo.quantized(lambda params, x: params["a"]["w"].T @ x.T, INT8)
        config = dot_config(INT8, lhs_weight=True, rhs_weight=False)
        same(jax.jit(low)(PARAMS, X), jax.jit(lambda p, x: octavo.dot(p["a"]["w"].T, x.T, config=config))(PARAMS, X))

    def test_weights_can_be_named(self):
        fn = lambda p, q, x: x @ p + x @ q  # noqa: E731
        w = PARAMS["a"]["w"]
        assert [s.leaf for s in octavo.quantized(fn, "int8", weights="q").sites(w, w, X)] == [None, "q"]
        assert [s.leaf for s in octavo.quantized(fn, "int8", weights=(0, 1)).sites(w, w, X)] == ["p", "q"]
        chosen = octavo.quantized(fn, "int8", weights=lambda name, leaf: leaf.shape == (16, 32))
        assert [s.leaf for s in chosen.sites(w, w, X)] == ["p", "q"]

    def test_unnamed_weights_are_an_error_that_names_the_fix(self):
        with pytest.raises(ValueError, match=r"which argument holds the weights.*weights="):
            octavo.quantized(lambda p, x: x @ p["w"], INT8)(PARAMS["a"], X)

    def test_closed_over_arrays_are_weights(self):
        w = PARAMS["a"]["w"]
        low = octavo.quantized(lambda x: x @ w, octavo.QuantizationRule(weight_qtype="int8"))
        config = octavo.DotConfig.weight_only("int8")
        same(jax.jit(low)(X), jax.jit(lambda x: octavo.dot(x, w, config=config))(X))

    def test_collections_beside_params_are_no_weights(self):
        variables = {"params": {"w": normal(0, 16, 16)}, "cache": {"k": normal(1, 16, 16)}}
        fn = lambda variables, x: x @ variables["cache"]["k"] @ variables["params"]["w"]  # noqa: E731
        assert [s.leaf for s in octavo.quantized(fn, "int8").sites(variables, X)] == [None, "w"]


class TestQArrayWeights:
    """A model's weights in low precision, consumed in place of arrays."""

    def quantized(self, params, fn, rule, *args):
        how = octavo.quantized(fn, rule).stored_quantizers(params, *args)
        low = lambda path, w: how[name].quantize(w) if (name := "/".join(k.key for k in path)) in how else w  # noqa: E731
        return jax.jit(lambda params: jax.tree_util.tree_map_with_path(low, params))(params)

    @pytest.mark.parametrize("act", [None, "int8"])
    def test_what_is_trained_is_served_bit_for_bit(self, act):
        rule = octavo.QuantizationRule(weight_qtype="int8", act_qtype=act)
        params = self.quantized(PARAMS, mlp, rule, X)
        assert isinstance(params["a"]["w"], octavo.QArray)
        low = octavo.quantized(mlp, rule)
        same(jax.jit(low)(params, X), jax.jit(low)(PARAMS, X))

    def test_stacked_layers_have_scales_of_their_own(self):
        """C1: Qwix lays scales out for one layer and fails in the scan."""
        stacked = {"w": normal(0, 3, 16, 16)}
        fn = lambda params, x: jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, params["w"])[0]  # noqa: E731
        rule = octavo.QuantizationRule(weight_qtype="int8", act_qtype="int8")
        params = self.quantized(stacked, fn, rule, X)
        assert params["w"].scale.shape == (3, 1, 16)
        low = octavo.quantized(fn, rule)
        same(jax.jit(low)(params, X), jax.jit(low)(stacked, X))

    def test_tied_embeddings(self):
        """C9: a table that is looked up and multiplied, transposed."""
        tied = {"embed": {"table": normal(0, 10, 16)}}
        fn = lambda params, ids: params["embed"]["table"][ids] @ params["embed"]["table"].T  # noqa: E731
        rule = octavo.QuantizationRule(weight_qtype="int8")
        ids = jnp.asarray([3, 1, 9])
        params = self.quantized(tied, fn, rule, ids)
        table = params["embed"]["table"]
        assert table.scale.shape == (10, 1)
        out = jax.jit(octavo.quantized(fn, rule))(params, ids)
        # The lookup and the product are exact; only the order of float sums differs between one program and two.
        np.testing.assert_allclose(out, jax.jit(lambda q: octavo.dot(q.dequantize()[ids], q.T))(table), rtol=1e-5)

    def test_heads_split_by_a_reshape(self):
        params = {"w": normal(0, 16, 32)}

        def fn(params, x):
            return jnp.einsum("bd,dhk->bhk", x, params["w"].reshape(16, 4, 8))

        rule = octavo.QuantizationRule(weight_qtype="int4", tile_size=8)
        stored = self.quantized(params, fn, rule, X)
        assert stored["w"].scale.shape == (2, 32)
        low = octavo.quantized(fn, rule)
        same(jax.jit(low)(stored, X), jax.jit(low)(params, X))

    def test_packed_int4_slices_and_indexes(self):
        params = {"w": normal(0, 3, 16, 32)}
        fn = lambda params, x: jax.lax.fori_loop(0, 3, lambda i, c: c + x @ params["w"][i][:, :16], x)  # noqa: E731
        rule = octavo.QuantizationRule(weight_qtype="int4")
        stored = {"w": jax.jit(lambda q: q.pack())(self.quantized(params, fn, rule, X)["w"])}
        low = octavo.quantized(fn, rule)
        same(jax.jit(low)(stored, X), jax.jit(low)(params, X))

    def test_a_use_that_is_no_product_reads_the_values(self):
        w = octavo.quantize(PARAMS["a"]["w"], "int8", channelwise_axes=(1,))
        low = octavo.quantized(lambda params, x: jnp.sum(params["w"] ** 2) + x @ params["w"], "int8w")
        wanted = jax.jit(lambda x, w: jnp.sum(w.dequantize() ** 2) + octavo.dot(x, w))(X, w)
        same(jax.jit(low)({"w": w}, X), wanted)

    def test_shard_map_with_quantized_weights(self, mesh):
        """B5: weights inside shard_map."""
        body = lambda params, x: x @ params["w"]  # noqa: E731
        fn = jax.shard_map(body, mesh=mesh, in_specs=({"w": P(None, "d")}, P()), out_specs=P(None, "d"))
        w = octavo.quantize(PARAMS["a"]["w"], "int8", channelwise_axes=(1,))
        low = octavo.quantized(fn, octavo.QuantizationRule(weight_qtype="int8", act_qtype="int8"))
        wanted = jax.jit(lambda x: octavo.dot(octavo.quantize(x, "int8", channelwise_axes=(0,)), w))(X)
        same(jax.jit(low)({"w": w}, X), wanted)


class TestCaches:
    """B1: versions of one function never see each other."""

    def test_b1_float_and_two_quantized_versions_through_one_inner_jit(self):
        inner = jax.jit(lambda w, x: x @ w)
        fn = lambda params, x: inner(params["a"]["w"], x)  # noqa: E731
        exact = fn(PARAMS, X)
        int8 = octavo.quantized(fn, INT8)
        e5m2 = octavo.quantized(fn, octavo.QtRule(weight_qtype="float8_e5m2", act_qtype="float8_e5m2"))
        first, second = int8(PARAMS, X), e5m2(PARAMS, X)
        same(fn(PARAMS, X), exact)
        assert 0 < jnp.max(jnp.abs(first - exact)) < jnp.max(jnp.abs(second - exact))
        same(int8(PARAMS, X), first)

    def test_matmul_operator_and_numpy_functions_are_seen(self):
        for fn in (lambda params, x: x @ params["w"], lambda params, x: jnp.matmul(x, params["w"])):
            types = dot_types(octavo.quantized(fn, INT8), PARAMS["a"], X)
            assert set(types) == {("int8", "int8", "int32")}


class TestNothingSilently:
    def test_no_rule_matches(self):
        rule = INT8.replace(module_path="encoder/.*")
        with pytest.raises(ValueError, match=r"would change nothing: no rule matches any of its 2 .* 'a/w', 'b/w'"):
            octavo.quantized(mlp, rule)(PARAMS, X)

    def test_nothing_to_multiply(self):
        with pytest.raises(ValueError, match="it has no matmul"):
            octavo.quantized(lambda params: params["a"]["w"] + 1, INT8)(PARAMS)

    def test_it_can_be_a_warning_or_nothing(self):
        rule = INT8.replace(module_path="encoder/.*")
        with pytest.warns(UserWarning, match="would change nothing"):
            out = octavo.quantized(mlp, rule, on_unmatched="warn")(PARAMS, X)
        same(out, mlp(PARAMS, X))
        same(octavo.quantized(mlp, rule, on_unmatched="ignore")(PARAMS, X), mlp(PARAMS, X))

    def test_not_a_function(self):
        with pytest.raises(TypeError, match=r"use octavo\.quantize_model"):
            octavo.quantized(3, INT8)

    def test_integer_products_are_left_alone_and_say_so(self):
        fn = lambda params, x: (x @ params["a"]["w"], jnp.arange(4) @ jnp.arange(4))  # noqa: E731
        reasons = [s.reason for s in octavo.quantized(fn, INT8).sites(PARAMS, X)]
        assert reasons == [None, "int32 x int32 is not a matmul of floats"]


class TestOperations:
    def test_einsum_is_distinguished_from_dot_general(self):
        fn = lambda params, x: (jnp.einsum("bi,io->bo", x, params["a"]["w"]), x @ params["a"]["w"])  # noqa: E731
        low = octavo.quantized(fn, INT8.replace(op_names=("einsum",)))
        assert [(s.op, s.config is not None) for s in low.sites(PARAMS, X)] == [
            ("einsum", True),
            ("dot_general", False),
        ]

    def test_conv(self):
        params, x = {"k": normal(0, 3, 3, 4, 8)}, normal(1, 2, 8, 8, 4)

        def fn(conv, **config):
            numbers = ("NHWC", "HWIO", "NHWC")
            return lambda params, x: conv(x, params["k"], (1, 1), "SAME", dimension_numbers=numbers, **config)

        low = octavo.quantized(fn(jax.lax.conv_general_dilated), INT8)
        same(jax.jit(low)(params, x), jax.jit(fn(octavo.conv_general_dilated, config=CONFIG))(params, x))

    @pytest.mark.parametrize("name", ["ragged_dot", "gmm"])
    def test_experts(self, name):
        params, x, sizes = {"w": normal(0, 3, 16, 8)}, normal(1, 12, 16), jnp.asarray([4, 3, 5], jnp.int32)
        plain = jax.lax.ragged_dot if name == "ragged_dot" else octavo.gmm
        low = octavo.quantized(lambda params, x: plain(x, params["w"], sizes), INT8.replace(op_names=(name,)))
        wanted = jax.jit(lambda params, x: octavo.ragged_dot(x, params["w"], sizes, config=CONFIG))(params, x)
        same(jax.jit(low)(params, x), wanted)
        assert [s.op for s in low.sites(params, x)] == [name]

    def test_attention_products_take_the_activations_type_and_their_modules_path(self):
        params = {"attn": {n: {"kernel": normal(i, 16, 16)} for i, n in enumerate(("q", "k", "v"))}}

        def fn(params, x):
            q, k, v = (x @ params["attn"][n]["kernel"] for n in ("q", "k", "v"))
            return jax.nn.softmax(q @ k.T) @ v

        sites = octavo.quantized(fn, INT8).sites(params, X)
        assert [(s.path, s.weights) for s in sites[3:]] == [("attn", (False, False))] * 2
        assert all(s.config.fwd.lhs.qtype.name == "int8" for s in sites)
        skipped = octavo.quantized(fn, INT8.replace(scope="weights")).sites(params, X)
        assert [s.config is None for s in skipped] == [False] * 3 + [True] * 2

    def test_named_scopes_name_products_without_weights(self):
        def fn(params, x):
            with jax.named_scope("head"):
                y = x @ x.T
            return y, x @ params["a"]["w"]

        assert [s.path for s in octavo.quantized(fn, INT8).sites(PARAMS, X)] == ["head", "a"]

    def test_preferred_type_is_kept(self):
        fn = lambda params, x: jnp.dot(x, params["w"], preferred_element_type=jnp.float32)  # noqa: E731
        half = {"w": PARAMS["a"]["w"].astype(jnp.bfloat16)}
        assert jax.eval_shape(octavo.quantized(fn, INT8), half, X.astype(jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.parametrize("argnums", [1, (0, 1)])
def test_grad_of_a_ragged_dot_inside_is_quantized(argnums):
    params = {"w": normal(0, 2, 16, 8)}
    x, sizes = normal(1, 12, 16), jnp.asarray([5, 4])

    def loss(params, x):
        return jnp.sum(jax.lax.ragged_dot(x, params["w"], sizes) ** 2)

    low = octavo.quantized(jax.grad(loss, argnums), INT8)
    assert [row.fwd for row in octavo.plan(low, None, params, x).rows] == ["int8 x int8"] * len(low.sites(params, x))
    got, want = jax.jit(low)(params, x), jax.grad(loss, argnums)(params, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert 0 < jnp.linalg.norm(a - b) < 0.03 * jnp.linalg.norm(b)
    if argnums == 0:
        with pytest.raises(NotImplementedError, match="no second derivative"):
            jax.grad(lambda p: jnp.sum(low(p, x)["w"]))(params)


FORWARD_MODES = {
    "jvp": lambda f, p: jax.jvp(f, (p,), (p,)),
    "jvp in jit": lambda f, p: jax.jit(lambda p: jax.jvp(f, (p,), (p,)))(p),
    "jvp of jit": lambda f, p: jax.jvp(jax.jit(f), (p,), (p,)),
    "linearize": lambda f, p: jax.linearize(jax.jit(f), p)[1](p),
    "jacfwd": lambda f, p: jax.jacfwd(f)(p),
    "jacfwd of jit": lambda f, p: jax.jacfwd(jax.jit(f))(p),
    "hessian": lambda f, p: jax.hessian(lambda p: f(p).sum())(p),
    "scan": lambda f, p: jax.jvp(lambda p: jax.lax.scan(lambda c, _: (c, f(p)), 0.0, None, length=2)[1], (p,), (p,)),
}  # fmt: skip


@pytest.mark.parametrize("mode", FORWARD_MODES)
def test_forward_mode_raises_with_the_reason(mode):
    low = octavo.quantized(lambda params, x: x @ params["w"], INT8)
    message = r"no forward-mode derivative .* use jax.vjp, jax.grad or jax.jacrev|no second derivative"
    with pytest.raises(NotImplementedError, match=message):
        FORWARD_MODES[mode](lambda params: low(params, jnp.ones((2, 4))), {"w": jnp.eye(4)})


@pytest.mark.parametrize("name", slow_except(REPRESENTATIVE, [name for name in octavo.recipes() if name != "intmp"]))
def test_forward_mode_raises_and_debug_nans_is_silent_in_every_recipe(name):
    params, x = {"w": jnp.eye(64) + 0.1}, jnp.ones((4, 64))
    low = octavo.quantized(lambda params, x: x @ params["w"], name)
    state = low.init(params, x)
    run = lambda params: low.stateful(state, key=jax.random.key(0))(params, x)[0].sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        jax.jvp(jax.jit(run), (params,), (params,))
    with jax.debug_nans(True):
        jax.jit(jax.grad(run))(params)


@pytest.mark.parametrize("rule", [INT8, "mxfp8"], ids=["int8", "mxfp8"])
def test_debug_nans_finds_the_users_nan_and_not_ours(rule):
    params, x = {"w": jnp.eye(32)}, jnp.ones((2, 32))
    low = octavo.quantized(lambda params, x: x @ params["w"], rule)
    with jax.debug_nans(True):
        jax.grad(lambda params: jnp.sum(low(params, x)))(params)
        with pytest.raises(FloatingPointError):
            low(params, x / jnp.zeros((2, 32)) * 0)


def test_weights_survive_the_vmap_of_a_cond():
    def branches(params, x, c):
        return jax.vmap(lambda c: jax.lax.cond(c, lambda p: x @ p["w"], lambda p: -x @ p["w"], params))(c)

    low = octavo.quantized(branches, INT8)
    args = {"w": jnp.eye(4)}, jnp.ones((2, 4)), jnp.asarray([True, False])
    assert [(site.leaf, site.reason) for site in low.sites(*args)] == [("w", None)] * 2
    np.testing.assert_allclose(low(*args), branches(*args), atol=0.02)


def test_a_convolution_that_cannot_have_tiles_is_a_row_and_the_rest_is_quantized():
    def fn(params, x, image):
        return x @ params["w"] + jax.lax.conv_general_dilated(image, params["k"], (1, 1), "SAME").mean()

    rule = octavo.QuantizationRule(weight_qtype="int8", act_qtype="int8", tile_size=4)
    args = {"w": jnp.eye(8), "k": jnp.ones((1, 1, 3, 3))}, jnp.ones((2, 8)), jnp.ones((1, 1, 4, 4))
    rows = {row.weight: row for row in octavo.plan(fn, rule, *args).rows}
    assert rows["w"].reason is None
    assert rows["k"].reason.startswith("fwd.lhs has tiles of 4, but a convolution has one scale per example")
    assert octavo.quantized(fn, rule)(*args).shape == (2, 8)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "remat"])
def test_constants_that_a_function_closes_over_are_freed(wrap):
    def use(seed):
        w = normal(seed, 8, 8)
        low = octavo.quantized(wrap(lambda params, x: x @ w @ params), INT8)
        jax.grad(lambda params: jnp.sum(low(params, jnp.ones((2, 8)))))(jnp.eye(8))
        return weakref.ref(w)

    freed = [use(seed) for seed in range(2)]
    gc.collect()
    assert [ref() for ref in freed] == [None] * 2


def test_two_threads_with_different_rules_do_not_disturb_each_other():
    params, x = {"w": normal(0, 16, 16)}, jnp.ones((2, 16))
    rules = [octavo.QuantizationRule(weight_qtype=name, act_qtype=name) for name in ("int8", "int4")]
    run = lambda rule: octavo.quantized(jax.jit(lambda params, x: x @ params["w"]), rule)(params, x)  # noqa: E731
    alone = [run(rule) for rule in rules]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        together = list(pool.map(run, rules * 4))
    for number, out in enumerate(together):
        np.testing.assert_array_equal(out, alone[number % 2])
