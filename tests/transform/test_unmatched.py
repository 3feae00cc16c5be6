"""A rule that matches no matmul is an error, wherever the matmuls are."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

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


@pytest.mark.parametrize("rules", [[], ()], ids=["list", "tuple"])
def test_no_rules_at_all_raise(rules):
    with pytest.raises(ValueError, match="there are no rules, so nothing would be quantized: give the name of a rec"):
        octavo.quantized(matmul, rules)
    with pytest.raises(ValueError, match="there are no rules"):
        octavo.quantize_model(nn.Dense(4), rules)
    assert (octavo.quantized(matmul, rules, on_unmatched="ignore")(PARAMS, X) == X).all()


def test_served_and_converted_functions_raise():
    with pytest.raises(ValueError, match="would change nothing: no rule matches"):
        octavo.served(matmul, TYPO)(PARAMS, X)
    with pytest.raises(ValueError, match="would change nothing: no rule matches"):
        octavo.convert(matmul, PARAMS, X, rules=TYPO)


class Linen(nn.Module):
    jit: bool

    def setup(self):
        self.down = (nn.jit(nn.Dense) if self.jit else nn.Dense)(4, use_bias=False)

    def __call__(self, x):
        return self.down(x)

    def head(self, x):
        return self.down(x)

    def twice(self, x):
        return 2 * x


class Nnx(nnx.Module):
    def __init__(self):
        self.down = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.down(x)


class Equinox(eqx.Module):
    down: eqx.nn.Linear

    @eqx.filter_jit
    def __call__(self, x):
        return self.down(x[0])


def linen(jit):
    return lambda rule: octavo.quantize_model(Linen(jit), rule).apply({"params": {"down": {"kernel": jnp.eye(4)}}}, X)


MODELS = {
    "linen": linen(False),
    "linen jit": linen(True),
    "linen init": lambda rule: octavo.quantize_model(Linen(True), rule).init(jax.random.key(0), X),
    "linen convert": lambda rule: octavo.convert(Linen(False), Linen(False).init(jax.random.key(0), X), X, rules=rule),
    "nnx": lambda rule: octavo.quantize_model(Nnx(), rule)(X),
    "equinox jit": lambda rule: octavo.quantize_model(Equinox(eqx.nn.Linear(4, 4, key=jax.random.key(0))), rule)(X),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_call_of_a_model_raises(name):
    with pytest.raises(ValueError, match="would change nothing: no rule matches any of its 1 matmuls, at 'down"):
        MODELS[name](TYPO)
    MODELS[name](RIGHT)


def test_other_methods_warn_only_if_nothing_else_matches_and_they_have_a_matmul(recwarn):
    variables = Linen(False).init(jax.random.key(0), X)
    low = octavo.quantize_model(Linen(False), TYPO)
    low.apply(variables, X, method="twice")
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"quantizing Linen\.head would change nothing"):
        low.apply(variables, X, method="head")
