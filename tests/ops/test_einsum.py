"""Any equation: against numpy.einsum, with QArrays, with a config, and its errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo import DotConfig
from octavo.calibration import AmaxHistory
from tests.cases import slow_except
from tests.ops.walk import dot_types

CASES = [
    ("ij,jk->ik", (3, 4), (4, 5)),
    ("ij,jk", (3, 4), (4, 5)),
    ("bij,bjk->bik", (2, 3, 4), (2, 4, 5)),
    ("...d,df->...f", (2, 3, 4), (4, 5)),
    ("...ij,...jk", (7, 3, 4), (1, 4, 5)),
    ("...ij,...jk->...ik", (2, 7, 3, 4), (7, 4, 5)),
    ("ij,jkl->ik", (3, 4), (4, 5, 6)),
    ("ii,ij->j", (4, 4), (4, 5)),
    ("iij,jk->ik", (4, 4, 3), (3, 5)),
    ("ij,ij->", (3, 4), (3, 4)),
    ("i,j->ij", (3,), (4,)),
    ("bqhd,bkhd->bhqk", (2, 3, 4, 5), (2, 6, 4, 5)),
    ("bhqk,bkhd->bqhd", (2, 4, 3, 6), (2, 6, 4, 5)),
    ("ijk->kj", (2, 3, 4)),
    ("ii->i", (4, 4)),
    ("ab,cb->ca", (2, 3), (4, 3)),
    ("abc,cd,de->abe", (2, 3, 4), (4, 5), (5, 6)),
    ("abcd,bdef,ce->fa", (2, 3, 4, 5), (3, 5, 6, 7), (4, 6)),
    ("bi,bi,bj->ij", (4, 3), (4, 3), (4, 5)),
    ("a b , b c -> a c", (2, 3), (3, 4)),
]


def data(shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]


QUICK = ("bqhd,bkhd->bhqk", "...ij,...jk->...ik", "abc,cd,de->abe", "ij,jkl->ik")


@pytest.mark.parametrize("equation", slow_except(QUICK, [e for e, *_ in CASES]))
def test_every_equation(equation):
    xs = data(next(shapes for e, *shapes in CASES if e == equation))
    want = np.einsum(equation.replace(" ", ""), *(np.asarray(x, np.float64) for x in xs))
    np.testing.assert_allclose(jax.jit(functools.partial(octavo.einsum, equation))(*xs), want, atol=1e-5)

    def square(xs):
        out = octavo.einsum(equation, *xs, config=DotConfig.qt("int8"))
        return jnp.sum(out**2), out

    grads, low = jax.jit(jax.grad(square, has_aux=True))(xs)
    assert low.shape == want.shape
    assert np.linalg.norm(low - want) <= 0.02 * np.linalg.norm(want)
    exact = jax.jit(jax.grad(lambda xs: jnp.sum(jnp.einsum(equation.replace(" ", ""), *xs) ** 2)))(xs)
    for a, b in zip(grads, exact, strict=True):
        assert np.linalg.norm(a - b) <= 0.06 * np.linalg.norm(b)


def test_operands_may_be_qarrays():
    x, w = data([(2, 3, 32), (32, 8)])
    for q in (octavo.quantize(w, "int8", channelwise_axes=(1,)), octavo.quantize(w, "nf4", tiled_axes={0: 16}).pack()):
        got = jax.jit(functools.partial(octavo.einsum, "bsd,df->bsf"))(x, q)
        np.testing.assert_allclose(got, jnp.einsum("bsd,df->bsf", x, q.dequantize()), atol=1e-4)
    low = octavo.einsum("bsd,df->bsf", x, q, config=DotConfig.qt("int8"))
    assert 0 < np.linalg.norm(low - got) < 0.02 * np.linalg.norm(got)  # x is in int8


def test_a_config_quantizes_in_the_order_of_the_call():
    x, w = data([(4, 8), (8, 4)])
    types = dot_types(lambda x, w: octavo.einsum("ab,bc->ca", x, w, config=DotConfig.qt("int8")), x, w)
    assert set(types) == {("int8", "int8", "int32")}
    out = jax.jit(lambda x, w: octavo.einsum("ab,bc->ca", x, w, config=DotConfig.weight_only("int2")))(x, w)
    right = octavo.quantize(w, "int2", channelwise_axes=(1,)).dequantize()
    np.testing.assert_allclose(out, (x @ right).T, atol=1e-5)


def test_lists_of_axes_and_dtypes():
    x, w = data([(3, 4), (4, 5)])
    np.testing.assert_allclose(octavo.einsum(x, [0, 1], w, [1, 2], [0, 2]), x @ w, atol=1e-5)
    np.testing.assert_allclose(octavo.einsum(x, [0, 1], w, [1, 2]), x @ w, atol=1e-5)
    bf16 = [a.astype(jnp.bfloat16) for a in (x, w)]
    low = jax.eval_shape(lambda *xs: octavo.einsum("ij,jk->ik", *xs, config=DotConfig.qt("int8")), *bf16)
    assert low.dtype == jnp.bfloat16
    assert octavo.einsum("ij,jk->ik", *bf16, preferred_element_type=jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize(
    ("equation", "shapes", "message"),
    [
        ("ij,jk->ik", [(3, 4)], "names 2 operands"),
        ("ij,jk->ik", [(3, 4), (4, 5, 6)], "does not fit"),
        ("ij,jk->iz", [(3, 4), (4, 5)], "in no operand"),
        ("ij,jk->ik", [(3, 4), (3, 5)], "has sizes"),
        ("i1,1k->ik", [(3, 4), (4, 5)], "does not fit"),
    ],
)
def test_bad_equations_raise(equation, shapes, message):
    with pytest.raises(ValueError, match=message):
        octavo.einsum(equation, *data(shapes))


class TestScaling:
    x, w, v, outer = data(((4, 8), (8, 6), (6, 5), (3,)))

    def test_bounds_of_the_one_contraction_are_those_of_a_dot(self):
        config = DotConfig.qt("int8")
        bounds = {"lhs": {"absmax": jnp.full((4, 1), 5.0)}, "rhs": {"absmax": jnp.full((1, 6), 4.0)}}
        dot = jax.jit(lambda scaling: octavo.dot(self.x, self.w, config=config, scaling=scaling))
        got = jax.jit(lambda s: octavo.einsum("bi,io->bo", self.x, self.w, config=config, scaling=s))(bounds)
        np.testing.assert_array_equal(got, dot(bounds))
        assert np.any(got != dot({}))

    def test_an_outer_product_takes_no_ranges(self):
        text, operands = "bi,k,ij->bjk", (self.x, self.outer, self.w)
        delayed = {"tracker": AmaxHistory(4), "per_tensor": True}
        config = DotConfig.qt("int8").with_operands(fwd_lhs=delayed)
        state = octavo.ops.init_einsum_scaling(config, text, *operands)
        assert list(state) == ["lhs"]  # of one contraction, not of two
        new = jax.jit(jax.grad(lambda s: jnp.sum(octavo.einsum(text, *operands, config=config, scaling=s))))(state)
        assert float(new["lhs"]["amax_history"].ravel()[0]) > 0

    def test_ranges_have_to_be_those_of_all_contractions(self):
        config, one = DotConfig.qt("int8"), {"lhs": {"absmax": jnp.ones((1, 1))}}
        with pytest.raises(ValueError, match=r"contracts 2 times, but scaling has the ranges of 1"):
            octavo.einsum("bi,ij,jk->bk", self.x, self.w, self.v, config=config, scaling=one)
        low = config.with_operands(fwd_lhs={"tracker": AmaxHistory(4), "per_tensor": True})
        with pytest.raises(ValueError, match=r"the trackers of \['lhs'\] need their state.*init_einsum_scaling"):
            octavo.einsum("bi,io->bo", self.x, self.w, config=low)
