"""Providers: what may be overridden, and what an overriding operation can ask for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from tests.arrays import normal

INT8 = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")


PARAMS = {"a": {"w": normal(0, 16, 16)}, "b": {"w": normal(1, 16, 16)}}
X = normal(2, 4, 16)


def mlp(params, x):
    return jnp.einsum("bi,io->bo", x @ params["a"]["w"], params["b"]["w"])


class Noting(octavo.QuantizationProvider):
    """Notes what it is asked, and computes in float."""

    def __init__(self, rules):
        super().__init__(rules)
        self.asked = []

    def dot_general(self, lhs, rhs, dimension_numbers, **kwargs):
        self.asked.append(self._get_current_rule_and_op_id("dot_general"))
        return 2 * jax.lax.dot_general(lhs, rhs, dimension_numbers, **kwargs)

    def einsum(self, subscripts, lhs, rhs, **kwargs):
        self.asked.append((octavo.get_current_rule("einsum"), subscripts))
        return 3 * jnp.einsum(subscripts, lhs, rhs)


def test_overrides_replace_matched_operations():
    provider = Noting([INT8])
    out = octavo.quantized(mlp, provider)
    # Overriding makes it stateful in principle; without any state it is called like any other function.
    np.testing.assert_allclose(out(PARAMS, X), 6 * mlp(PARAMS, X), rtol=1e-5)
    assert (INT8, "dot_general0") in provider.asked
    assert (INT8, "ab,bc->ac") in provider.asked


def test_unmatched_operations_are_not_asked_about():
    provider = Noting([INT8.replace(module_path="b")])
    np.testing.assert_allclose(octavo.quantized(mlp, provider)(PARAMS, X), 3 * mlp(PARAMS, X), rtol=1e-5)
    assert {rule.module_path for rule, _ in provider.asked} == {"b"}


def test_the_default_can_be_called():
    class Doubled(octavo.QtProvider):
        def dot_general(self, *args, **kwargs):
            return 2 * super().dot_general(*args, **kwargs)

    fn = lambda params, x: x @ params["a"]["w"]  # noqa: E731
    ours, plain = octavo.quantized(fn, Doubled([INT8])), octavo.quantized(fn, INT8)
    np.testing.assert_array_equal(jax.jit(ours)(PARAMS, X), 2 * jax.jit(plain)(PARAMS, X))


@pytest.mark.parametrize("name", ["conv_general_dilated", "ragged_dot", "gmm"])
def test_every_operation_can_be_overridden(name):
    called = []
    override = {name: lambda self, lhs, rhs, *args, **kwargs: called.append(name) or jnp.zeros(out_shape)}
    provider = type("Zeros", (octavo.QtProvider,), override)([INT8])
    sizes = jnp.asarray([2, 2], jnp.int32)
    fns = {
        "conv_general_dilated": (
            lambda params, x: jax.lax.conv(x, params, (1,), "SAME"),
            (8, 4, 3),
            (2, 4, 6),
            (2, 8, 6),
        ),
        "ragged_dot": (lambda params, x: jax.lax.ragged_dot(x, params, sizes), (2, 8, 5), (4, 8), (4, 5)),
        "gmm": (lambda params, x: octavo.gmm(x, params, sizes), (2, 8, 5), (4, 8), (4, 5)),
    }
    fn, weight, x, out_shape = fns[name]
    out = octavo.quantized(fn, provider)(normal(0, *weight), normal(1, *x))
    assert called
    assert out.shape == out_shape
    assert not out.any()


def test_a_result_of_the_wrong_shape_is_named():
    class Wrong(octavo.QtProvider):
        def dot_general(self, *args, **kwargs):
            return jnp.zeros((1, 1))

    with pytest.raises(ValueError, match=r"dot_general0 at 'a' must give the shape \(4, 16\), but gave \(1, 1\)"):
        octavo.quantized(mlp, Wrong([INT8]))(PARAMS, X)


class Counting(octavo.QtProvider):
    """Keeps a count under each operation's name."""

    def dot_general(self, *args, **kwargs):
        count = self.get_state("calls", lambda: jnp.zeros((), jnp.int32))
        self.set_state("calls", count + 1)
        return super().dot_general(*args, **kwargs)


def test_state_of_an_override_goes_in_and_comes_out_of_scans():
    fn = lambda params, x: jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, params["w"])[0]  # noqa: E731
    low = octavo.quantized(fn, Counting([INT8]))
    stack = {"w": normal(0, 3, 16, 16)}
    state = low.init(stack, X)
    np.testing.assert_array_equal(state["quant_stats"]["dot_general0_calls"], [0, 0, 0])
    run = jax.jit(lambda state: low.stateful(state)(stack, X))
    for _ in range(2):
        _, state = run(state)
    np.testing.assert_array_equal(state["quant_stats"]["dot_general0_calls"], [2, 2, 2])


def test_asking_outside_of_an_operation_is_an_error():
    with pytest.raises(RuntimeError, match="no operation is being replaced"):
        octavo.QtProvider([INT8]).make_key()
    assert octavo.get_current_rule() is None


def test_unused_rules():
    never = INT8.replace(module_path="never")
    provider = octavo.QtProvider([never, INT8])
    jax.eval_shape(octavo.quantized(mlp, provider), PARAMS, X)
    assert provider.get_unused_rules() == [never]
