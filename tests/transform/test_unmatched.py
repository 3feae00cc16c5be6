"""A rule that matches no matmul is an error, wherever the matmuls are."""

import jax
import jax.numpy as jnp
import pytest

import octavo

TYPO = octavo.QtRule(module_path="dwn", weight_qtype="int8", act_qtype="int8")
RIGHT = octavo.QtRule(module_path="down", weight_qtype="int8", act_qtype="int8")
PARAMS, X = {"down": jnp.eye(4)}, jnp.ones((2, 4))


def matmul(params, x):
    return x @ params["down"]


def inner_jit(params, x):
    return jax.jit(matmul)(params, x)


def in_scan(params, x):
    return jax.lax.scan(lambda x, _: (jax.jit(matmul)(params, x), None), x, None, length=2)[0]


PROGRAMS = {
    "plain": matmul,
    "jit": jax.jit(matmul),
    "inner jit": inner_jit,
    "jit in jit": jax.jit(inner_jit),
    "remat": jax.checkpoint(inner_jit),
    "scan": in_scan,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_matched_raises_at_every_call(name):
    low = octavo.quantized(PROGRAMS[name], TYPO)
    for _ in range(2):
        with pytest.raises(ValueError, match="would change nothing: no rule matches any of its 1 matmuls, at 'down'"):
            low(PARAMS, X)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_match_is_found_again_where_the_body_was_traced_before(name):
    low = octavo.quantized(PROGRAMS[name], RIGHT)
    first, second = low(PARAMS, X), low(PARAMS, X)
    assert (first == second).all()


def test_what_is_printed_names_the_function_and_its_rules():
    assert repr(octavo.quantized(matmul, RIGHT)) == f"<matmul quantized by [{RIGHT!r}]>"


def test_a_matmul_of_complex_numbers_alone_raises():
    with pytest.raises(ValueError, match="would change nothing: complex64 x complex64 is not a matmul of floats"):
        octavo.quantized(matmul, RIGHT)({"down": jnp.eye(4, dtype=jnp.complex64)}, X.astype(jnp.complex64))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_only_custom_derivatives_raises_and_names_inside_custom(wrap):
    @jax.custom_vjp
    def dot(w, x):
        return x @ w

    dot.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, g: (r[1].T @ g, g @ r[0].T))
    fn = lambda params, x: wrap(dot)(params["down"], x)  # noqa: E731
    with pytest.raises(
        ValueError, match=r"in the body of a custom_vjp function: 1 calls, at 'down'.*inside_custom=True"
    ):
        octavo.quantized(fn, RIGHT)(PARAMS, X)
    with pytest.raises(ValueError, match=r"rule 0 matches only matmuls that are not rewritten.*inside_custom=True"):
        octavo.plan(fn, RIGHT, PARAMS, X)
    octavo.quantized(fn, RIGHT.replace(inside_custom=True))(PARAMS, X)
