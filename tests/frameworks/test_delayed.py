"""Delayed scaling in injected operations: the einsum beside Flax's own, and stacked layers and stages."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo.calibration import AmaxHistory
from octavo.compat import maxtext
from octavo.compat.maxtext import Quantization
from octavo.frameworks.linen_ops import DotGeneral, Einsum
from octavo.rules import dot_config, recipe
from octavo.transform.state import GRADIENT_STATE
from tests.arrays import normal

pytestmark = pytest.mark.standard_promotion

KEY = jax.random.key(0)
EQUATION = "bti,ihd->bthd"


def config_of(name, **changes):
    config = dot_config(recipe(name, exclude=None)[0], lhs_weight=False, rhs_weight=True)
    assert config is not None
    return config.replace(**changes)


FP8 = config_of("te_fp8_delayedscaling")


def of_length(config, length):
    tracker = {"tracker": AmaxHistory(length)}
    return config.with_operands(fwd_lhs=tracker, fwd_rhs=tracker, dlhs_lhs=tracker, drhs_lhs=tracker)


class TestEinsum:
    x = normal(1, 4, 6, 16)
    w = normal(2, 16, 4, 8)
    g = normal(3, 4, 6, 4, 8)
    sizes = (1.0, 1.6, 0.5, 0.9, 3.0, 0.1)

    def run(self, op, w=None):
        """Outputs and gradients of steps whose operands grow and shrink, and the state that is left."""
        w = self.w if w is None else w
        state = op.init(KEY, EQUATION, self.x, w).get(GRADIENT_STATE, {})
        apply = lambda x, w, state: op.apply({GRADIENT_STATE: state}, EQUATION, x, w)  # noqa: E731

        @jax.jit
        def step(x, w, state, g):
            out, back = jax.vjp(apply, x, w, state)
            return out, back(g)

        seen = []
        for size in self.sizes:
            out, (dx, dw, state) = step(size * self.x, w / size, state, size * self.g)
            seen.append((out, dx, dw))
        return seen, state

    @pytest.mark.parametrize("length", [1024, 2])
    @pytest.mark.slow
    def test_agrees_with_flax_after_the_first_step(self, length):
        """The first step differs: Flax has a scale of 1 before it has seen anything, ours is the tensor's own.

        Gradients of what the history clips are zero by default, as for every clipped value, and not in Flax.
        """
        theirs, their_state = self.run(nn.Fp8Einsum(amax_history_length=length))
        ours, state = self.run(Einsum(of_length(FP8, length).replace(clip_gradient=False)))
        for a, b in zip(theirs[1:], ours[1:], strict=True):
            for x, y in zip(a, b, strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(x))))
        assert any(np.any(np.abs(x - y) > 1e-3) for x, y in zip(theirs[0], ours[0], strict=True))
        own = state["product0"]["scaling"]
        pairs = {"input": "lhs", "kernel": "rhs", "output_grad": "dlhs"}
        for flax, octavo_name in pairs.items():  # in another order: Flax overwrites the oldest
            history = np.sort(own[octavo_name]["amax_history"].ravel())
            np.testing.assert_array_equal(np.sort(their_state[f"{flax}_amax_history"]), history)

        clipped, _ = self.run(Einsum(of_length(FP8, length)))
        beyond = np.abs(self.sizes[1] * self.x) > np.max(np.abs(self.x))
        assert np.all(clipped[1][1][beyond] == 0)
        assert np.any(theirs[1][1][beyond] != 0)

    @pytest.mark.parametrize(
        ("name", "dtypes"),
        [
            ("te_fp8_delayedscaling", ("float8_e4m3fn", "float8_e5m2")),
            ("nanoo_fp8", ("float8_e4m3fnuz", "float8_e5m2fnuz")),
        ],
    )
    def test_the_einsum_of_a_quantization_multiplies_in_its_formats(self, name, dtypes):
        op = Quantization(recipe(name, exclude=None)).einsum(("embed", "mlp"))
        seen, state = self.run(op)
        assert {v["amax_history"].shape[0] for v in state["AqtDotGeneral_0"]["scaling"].values()} == {1024}
        out, dx, dw = seen[3]  # within the ranges that the steps before have left
        size = self.sizes[3]
        exact = (
            jnp.einsum(EQUATION, self.x, self.w),
            jnp.einsum("bthd,ihd->bti", self.g, self.w),
            size**2 * jnp.einsum("bti,bthd->ihd", self.x, self.g),
        )
        for wanted, got in zip(exact, (out, dx, dw), strict=True):
            assert 0 < jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted) < 0.15
        fwd = jax.make_jaxpr(lambda s: op.apply({GRADIENT_STATE: s}, EQUATION, self.x, self.w))(state)
        grad = jax.make_jaxpr(jax.grad(lambda s: jnp.sum(op.apply({GRADIENT_STATE: s}, EQUATION, self.x, self.w))))(
            state
        )
        assert f"{short(dtypes[0])}[16,4,8]" in str(fwd)
        assert f"{short(dtypes[1])}[4,6,4,8]" in str(grad)

    def test_nanoo_has_an_einsum(self):
        quant = maxtext.NANOOFp8Quantization()
        seen, state = self.run(quant.einsum(dtype=jnp.float32))
        wanted, _ = self.run(Einsum(config_of("nanoo_fp8")))
        jax.tree.map(np.testing.assert_array_equal, seen, wanted)
        assert state["fp8_einsum"]["product0"]["scaling"]["lhs"]["amax_history"].shape[0] == 1024
        low = quant.einsum(dtype=jnp.bfloat16)
        assert low.init_with_output(KEY, EQUATION, self.x, self.w)[0].dtype == jnp.bfloat16

    @pytest.mark.slow
    def test_each_contraction_has_a_history_of_its_own(self):
        op, x, v = Einsum(FP8), normal(10, 4, 8), normal(11, 6, 5)
        w = 3 * normal(12, 8, 6)
        operands = ("bi,ij,jk->bk", x, w, v)
        state = op.init(KEY, *operands)[GRADIENT_STATE]
        assert sorted(state) == ["product0", "product1"]
        new = jax.grad(lambda s: jnp.sum(op.apply({GRADIENT_STATE: s}, *operands)))(state)
        scaling = octavo.ops.init_einsum_scaling(FP8, *operands)
        fn = lambda s: jnp.sum(octavo.einsum(*operands, config=FP8, scaling=s))  # noqa: E731
        by_hand = jax.grad(fn)(scaling)
        for name, own in zip(sorted(new), by_hand, strict=True):
            jax.tree.map(np.testing.assert_array_equal, new[name]["scaling"], own)
        firsts = [s["rhs"]["amax_history"].ravel()[0] for s in by_hand]
        assert firsts[0] != firsts[1]

    @pytest.mark.parametrize("static", [True, "rhs", "both"])
    def test_static_ranges(self, static):
        config = octavo.DotConfig.qt("int8")
        op, product = Einsum(config, static=static), DotGeneral(config, static=static)
        numbers = (((2,), (0,)), ((), ()))
        variables, like = op.init(KEY, EQUATION, self.x, self.w), product.init(KEY, self.x, self.w, numbers)
        for size in (1.0, 3.0):
            variables = op.apply(variables, EQUATION, size * self.x, size * self.w, mutable="quant_stats")[1]
            like = product.apply(like, size * self.x, size * self.w, numbers, mutable="quant_stats")[1]
        jax.tree.map(np.testing.assert_array_equal, variables["quant_stats"]["product0"], like["quant_stats"])
        out = op.apply(variables, EQUATION, self.x, self.w)
        np.testing.assert_array_equal(out, product.apply(like, self.x, self.w, numbers))
        assert np.any(out != octavo.einsum(EQUATION, self.x, self.w, config=config))

    def test_it_is_converted_and_served(self):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                w = self.param("w", nn.initializers.lecun_normal(), (16, 4, 8))
                return Einsum(octavo.DotConfig.qt("int8"), static=True)(EQUATION, x, w)

        model = Model()
        variables = jax.jit(model.init)(KEY, self.x)
        variables |= model.apply(variables, self.x, mutable="quant_stats")[1]
        low = octavo.convert(model, variables, self.x)
        assert isinstance(low["params"]["w"], octavo.QArray)
        served = octavo.served(model)
        np.testing.assert_array_equal(jax.jit(served.apply)(low, self.x), jax.jit(model.apply)(variables, self.x))


def short(dtype):
    return dtype.replace("float8", "f8")
