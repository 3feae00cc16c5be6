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
