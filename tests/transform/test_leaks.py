"""Nothing outlives its function: constants that are closed over, programs, rules of other threads."""

import copy
import gc
import pickle
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from tests.cases import slow_except

INT8 = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
PARAMS, X = {"w": jnp.eye(8)}, jnp.arange(16.0).reshape(2, 8)


def closure(number, wrap):
    """A function that closes over an array, and a weak reference to the array."""
    constant = jnp.full((8, 8), float(number))
    return wrap(lambda params, x: jnp.sum((x @ constant) @ params["w"])), weakref.ref(constant)


USES = {
    "eager": (lambda f: f, lambda low: low(PARAMS, X)),
    "inner jit": (jax.jit, lambda low: low(PARAMS, X)),
    "jit": (lambda f: f, lambda low: jax.jit(low)(PARAMS, X)),
    "gradient": (jax.jit, lambda low: jax.grad(low)(PARAMS, X)),
    "plan": (jax.jit, lambda low: octavo.plan(low, None, PARAMS, X)),
}


@pytest.mark.parametrize("name", slow_except(["gradient"], USES))
def test_constants_are_freed_with_the_function(name):
    wrap, use = USES[name]
    kept = []
    for number in range(3):
        fn, constant = closure(number, wrap)
        use(octavo.quantized(fn, INT8))
        kept.append(constant)
        del fn
    gc.collect()
    jax.clear_caches()
    gc.collect()
    assert [constant() is None for constant in kept] == [True] * 3


def requantize(times):
    for _ in range(times):
        octavo.quantized(lambda params, x: x @ params["w"], INT8).sites(PARAMS, X)


def growth(times):
    """The number of objects that remain after quantizing new functions this often."""
    requantize(20)
    gc.collect()
    before = len(gc.get_objects())
    requantize(times)
    gc.collect()
    return len(gc.get_objects()) - before


def test_quantizing_again_and_again_keeps_nothing():
    # JAX's own caches are bounded, and far from full here: what they keep of a function is a few hundred objects.
    jax.clear_caches()
    assert growth(50) < 50 * 10


def test_a_jit_that_is_made_in_each_call_is_freed_after_it():
    bodies = []

    def fn(params, x):
        def body(params, x):
            return x @ params["w"]

        bodies.append(weakref.ref(body))
        return jax.jit(body)(params, x)

    low = octavo.quantized(fn, INT8)
    for _ in range(3):
        low(PARAMS, X)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(5):
        low(PARAMS, X)
    gc.collect()
    assert len(gc.get_objects()) - before < 5 * 20, "programs of jits that are gone are kept"
    assert [body() for body in bodies] == [None] * 8
    kept = jax.jit(lambda params, x: x @ params["w"])
    traced = []
    low = octavo.quantized(lambda params, x: traced.append(1) or kept(params, x), INT8)
    low(PARAMS, X)
    (programs,) = low._cache.values()
    low(PARAMS, X)
    assert [len(each) for each in low._cache.values()] == [1], "a jit that lives on is compiled once"
    assert next(iter(low._cache.values())) is programs


def inner_jit(params, x):
    return jax.jit(jnp.matmul)(x, params["w"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda low: pickle.loads(pickle.dumps(low))], ids=["copy", "pickle"])
def test_a_function_that_has_run_is_copied_without_its_programs(copied):
    low = octavo.quantized(inner_jit, INT8)
    expected = low(PARAMS, X)
    np.testing.assert_array_equal(copied(low)(PARAMS, X), expected)


@pytest.mark.slow
def test_ten_thousand_functions_are_quantized_in_flat_memory():
    requantize(2500)
    middle = resident()
    requantize(7500)
    assert resident() - middle < 64 * 2**20


def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_threads_have_rules_of_their_own():
    """Two threads quantize one function by different rules at the same time."""
    fn = jax.jit(lambda params, x: jnp.tanh(x) @ params["w"])
    rules = {"int8": INT8, "int4": octavo.QtRule(weight_qtype="int4", act_qtype="int4")}
    expected = {name: np.asarray(octavo.quantized(fn, rule)(PARAMS, X)) for name, rule in rules.items()}
    assert (expected["int8"] != expected["int4"]).any()
    start, wrong = threading.Barrier(2), []

    def work(name):
        start.wait()
        for _ in range(10):
            if (np.asarray(octavo.quantized(fn, rules[name])(PARAMS, X)) != expected[name]).any():
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in rules]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
