"""Static ranges, delayed scaling and stochastic rounding: state that goes in and comes out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import octavo
from tests.arrays import normal

STATIC = octavo.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)


PARAMS = {"a": {"w": normal(0, 16, 32)}, "b": {"w": normal(1, 32, 8)}}


def mlp(params, x):
    return jnp.tanh(x @ params["a"]["w"]) @ params["b"]["w"]


def step(low, state, params, *args, **options):
    """One compiled call of a function with state."""
    return jax.jit(lambda state, params, *args: low.stateful(state, **options)(params, *args))(state, params, *args)


def absmax(x):
    """The statistic of one batch: its largest magnitude."""
    return np.max(np.abs(np.asarray(x)))


def test_statistics_are_a_plain_tree_of_the_pages_structure():
    state = octavo.quantized(mlp, STATIC).init(PARAMS, normal(2, 4, 16))
    stat = {"count": jnp.asarray(0), "sum_of_absmax": jnp.zeros((1, 1))}
    wanted = {"quant_stats": {"a": {"dot_general0_lhs": stat}, "b": {"dot_general0_lhs": stat}}}
    assert jax.tree.structure(state) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, state, wanted)


@pytest.mark.slow
def test_statistics_accumulate_over_batches_of_other_sizes_and_lengths():
    """C11: Qwix's statistics have the shape of one sequence length."""
    low = octavo.quantized(mlp, STATIC)
    batches = [normal(i, *shape, 16) for i, shape in enumerate(((2, 5), (3, 7), (1, 2)))]
    state = low.init(PARAMS, batches[0])
    for x in batches:
        _, state = step(low, state, PARAMS, x)
    stat = state["quant_stats"]["a"]["dot_general0_lhs"]
    assert int(stat["count"]) == 3
    assert stat["sum_of_absmax"].shape == (1, 1, 1)
    np.testing.assert_allclose(stat["sum_of_absmax"].item(), sum(map(absmax, batches)), rtol=1e-6)


def test_frozen_statistics_quantize_by_the_mean_range():
    low = octavo.quantized(lambda params, x: x @ params["a"]["w"], STATIC)
    x = jnp.clip(normal(2, 4, 16), -1, 1) * jnp.asarray([[1.0], [2.0], [3.0], [2.0]])
    assert absmax(x) == 3
    _, state = step(low, low.init(PARAMS, x), PARAMS, x)
    other = 3 * normal(5, 6, 16)
    out, after = step(low, state, PARAMS, other, update=False)
    jax.tree.map(np.testing.assert_array_equal, state, after)
    config = octavo.DotConfig.qat("int8")
    bounds = {"lhs": {"absmax": jnp.full((1, 1), absmax(x), jnp.float32)}}
    by_hand = jax.jit(lambda x, w: octavo.dot(x, w, config=config, scaling=bounds))(other, PARAMS["a"]["w"])
    np.testing.assert_array_equal(out, by_hand)


def test_a_range_that_was_never_calibrated_is_an_error():
    low = octavo.quantized(mlp, STATIC)
    x = normal(2, 4, 16)
    with pytest.raises(ValueError, match="dot_general0_lhs at 'a' has a static scale that was never calibrated"):
        low.stateful(low.init(PARAMS, x), update=False)(PARAMS, x)
    frozen = jax.jit(lambda state: low.stateful(state, update=False)(PARAMS, x)[0])
    assert np.isnan(frozen(low.init(PARAMS, x))).all()  # where no error can be raised


def test_calling_without_state_says_how():
    with pytest.raises(ValueError, match=r"keeps state \(quant_stats\).*q\.init.*q\.stateful"):
        octavo.quantized(mlp, STATIC)(PARAMS, normal(2, 4, 16))


def test_state_of_another_function_raises():
    low = octavo.quantized(mlp, STATIC)
    x = normal(2, 4, 16)
    with pytest.raises(ValueError, match="the state has no quant_stats/b/dot_general0_lhs"):
        low.stateful({"quant_stats": {"a": low.init(PARAMS, x)["quant_stats"]["a"]}})(PARAMS, x)


def test_axes_that_keep_a_scale_of_their_own():
    rule = STATIC.replace(act_batch_axes=(0,))
    low = octavo.quantized(mlp, rule)
    state = low.init(PARAMS, normal(2, 4, 6, 16))
    assert state["quant_stats"]["a"]["dot_general0_lhs"]["sum_of_absmax"].shape == (1, 6, 1)
    with pytest.raises(ValueError, match=r"have the shape \(1, 6, 1\), but this input gives \(1, 7, 1\)"):
        low.stateful(state)(PARAMS, normal(2, 4, 7, 16))


def test_asymmetric_statistics_keep_both_ends():
    low = octavo.quantized(mlp, STATIC.replace(act_calibration_method="minmax"))
    state = low.init(PARAMS, normal(2, 4, 16))
    assert set(state["quant_stats"]["a"]["dot_general0_lhs"]) == {"count", "sum_of_min", "sum_of_max"}


def scanned(params, x):
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, params["w"])[0]


def looped(params, x):
    turn = lambda c: (c[0] + 1, jnp.tanh(c[1] @ params["w"][c[0]]))  # noqa: E731
    return jax.lax.while_loop(lambda c: c[0] < 3, turn, (0, x))[1]


STACK = {"w": normal(0, 3, 16, 16)}


def test_each_layer_of_a_scan_has_statistics_of_its_own():
    low = octavo.quantized(scanned, STATIC)
    x = normal(2, 4, 16)
    out, state = jax.jit(lambda s: low.stateful(s)(STACK, x))(low.init(STACK, x))
    stat = state["quant_stats"]["dot_general0_lhs"]
    np.testing.assert_array_equal(stat["count"], [1, 1, 1])
    # The second layer has seen what the first one gave.
    first = octavo.quantized(lambda params, x: jnp.tanh(x @ params["w"]), STATIC)
    layer = {"w": STACK["w"][0]}
    y, _ = step(first, first.init(layer, x), layer, x)
    np.testing.assert_allclose(stat["sum_of_absmax"][:2].ravel(), [absmax(x), absmax(y)], rtol=1e-6)
    assert out.shape == x.shape


def test_a_loop_shares_one_range_over_its_turns():
    low = octavo.quantized(looped, STATIC)
    x = normal(2, 4, 16)
    _, state = step(low, low.init(STACK, x), STACK, x)
    assert int(state["quant_stats"]["dot_general0_lhs"]["count"]) == 3


def test_branches_keep_each_others_state():
    def fn(params, x, flag):
        return jax.lax.cond(flag, lambda: x @ params["a"]["w"], lambda: -x @ params["a"]["w"])

    low = octavo.quantized(fn, STATIC)
    x = normal(2, 4, 16)
    state = low.init(PARAMS, x, jnp.asarray(True))
    run = jax.jit(lambda state, flag: low.stateful(state)(PARAMS, x, flag))
    for flag in (True, True, False):
        _, state = run(state, jnp.asarray(flag))
    counts = {name: int(stat["count"]) for name, stat in state["quant_stats"]["a"].items()}
    assert counts == {"dot_general0_lhs": 1, "dot_general1_lhs": 2}  # lax.cond puts the branch for False first


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_nested_calls_pass_state_through(wrap):
    low = octavo.quantized(lambda params, x: wrap(mlp)(params, x), STATIC)
    x = normal(2, 4, 16)
    plain = octavo.quantized(mlp, STATIC)
    (out, state), (wanted, stats) = (step(q, q.init(PARAMS, x), PARAMS, x) for q in (low, plain))
    np.testing.assert_allclose(out, wanted, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), state, stats)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [("d",), ("d", "replicated")])
def test_devices_of_a_shard_map_average_their_statistics(axes):
    mesh = jax.make_mesh((8,) if len(axes) == 1 else (4, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
    fn = jax.shard_map(mlp, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    x = normal(2, 16, 16)
    low, plain = octavo.quantized(fn, STATIC), octavo.quantized(mlp, STATIC)
    _, state = step(low, low.init(PARAMS, x), PARAMS, x)
    _, wanted = step(plain, plain.init(PARAMS, x), PARAMS, x)
    # The second layer's own inputs differ by the range they were quantized by; the first one's do not.
    np.testing.assert_allclose(
        state["quant_stats"]["a"]["dot_general0_lhs"]["sum_of_absmax"],
        wanted["quant_stats"]["a"]["dot_general0_lhs"]["sum_of_absmax"],
        rtol=1e-6,
    )


def test_training_with_statistics():
    rule = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", act_static_scale=True)
    low = octavo.quantized(mlp, rule)
    x, target = normal(2, 64, 16), normal(3, 64, 8)

    @jax.jit
    def step(params, state):
        def loss(params):
            out, new = low.stateful(state)(params, x)
            return jnp.mean((out - target) ** 2), new

        (value, state_), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state_, value

    params, state = PARAMS, low.init(PARAMS, x)
    losses = []
    for _ in range(10):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert losses[-1] < 0.5 * losses[0]
    assert int(state["quant_stats"]["a"]["dot_general0_lhs"]["count"]) == 10


def test_delayed_scaling_keeps_its_history_in_the_gradient():
    low = octavo.quantized(mlp, octavo.recipe("te_fp8_delayedscaling"))
    x = normal(2, 4, 16)
    state = low.init(PARAMS, x)
    assert set(state) == {"_overwrite_with_gradient"}
    grads = jax.jit(jax.grad(lambda s: jnp.sum(low.stateful(s)(PARAMS, x)[0] ** 2)))(state)
    assert jax.tree.structure(grads) == jax.tree.structure(state)
    history = grads["_overwrite_with_gradient"]["a"]["dot_general0"]["lhs"]
    assert float(jnp.max(jnp.abs(x))) in [float(v) for leaf in jax.tree.leaves(history) for v in leaf.ravel()]


class TestStochasticRounding:
    rule = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", bwd_stochastic_rounding="uniform")

    def grad(self, fn, params, x):
        """The gradients of parameters as a function of the key."""
        low = octavo.quantized(fn, self.rule)
        grad = jax.grad(lambda p, key: jnp.sum(low.stateful(key=key)(p, x)[0] ** 2))
        return jax.jit(lambda key: grad(params, key))

    def test_it_needs_a_key(self):
        low, x = octavo.quantized(mlp, self.rule), normal(2, 4, 16)
        with pytest.raises(ValueError, match=r"rounds stochastically and needs a random key.*stateful\(key=key\)"):
            jax.eval_shape(jax.grad(lambda params: jnp.sum(low(params, x))), PARAMS)
        forward = octavo.quantized(
            mlp, [self.rule.replace(fwd=octavo.Matmul(None, octavo.Operand("int8", rounding="stochastic")))]
        )
        with pytest.raises(ValueError, match=r"dot_general0 at 'a' rounds stochastically and needs a random key"):
            jax.eval_shape(forward, PARAMS, x)

    def test_a_forward_pass_needs_no_key_where_only_gradients_round_stochastically(self):
        x, nearest = normal(2, 4, 16), self.rule.replace(bwd_stochastic_rounding=None)
        got, want = (octavo.quantized(mlp, rule)(PARAMS, x) for rule in (self.rule, nearest))
        np.testing.assert_array_equal(got, want)

    def test_the_key_decides(self):
        x = normal(2, 4, 16)
        a, b, c = map(self.grad(mlp, PARAMS, x), map(jax.random.key, (0, 0, 1)))
        np.testing.assert_array_equal(a["a"]["w"], b["a"]["w"])
        assert np.any(a["a"]["w"] != c["a"]["w"])

    @pytest.mark.parametrize("fn", [scanned, looped])
    def test_every_layer_has_noise_of_its_own(self, fn):
        # Equal layers with equal inputs have equal gradients, but for the noise.
        same = {"w": jnp.zeros((3, 16, 16))}
        fn = {scanned: _parallel_scan, looped: _parallel_loop}[fn]
        x = normal(2, 4, 16)
        grads = self.grad(fn, same, x)(jax.random.key(0))["w"]
        exact = jax.jit(jax.grad(lambda p: jnp.sum(fn(p, x) ** 2)))(same)["w"]
        np.testing.assert_array_equal(exact[0], exact[1])
        assert np.any(grads[0] != grads[1])


def _parallel_scan(params, x):
    return 1 + jax.lax.scan(lambda c, w: (c + x @ w, None), jnp.zeros_like(x), params["w"])[0] + 0.3 * x


def _parallel_loop(params, x):
    body = lambda c: (c[0] + 1, c[1] + x @ params["w"][c[0]])  # noqa: E731
    return 1 + jax.lax.fori_loop(0, 3, lambda i, c: body((i, c))[1], jnp.zeros_like(x)) + 0.3 * x


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_init_runs_no_effects_of_the_function(wrap):
    seen = []

    def fn(params, x):
        wrap(lambda x: jax.debug.callback(lambda x: seen.append(1), x))(x)
        return x @ params["w"]

    rule = octavo.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    low, args = octavo.quantized(fn, rule), ({"w": jnp.eye(4)}, jnp.ones((2, 4)))
    state = low.init(*args)
    jax.effects_barrier()
    assert seen == []
    low.stateful(state)(*args)
    jax.effects_barrier()
    assert seen == [1]
