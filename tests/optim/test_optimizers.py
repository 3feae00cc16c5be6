"""Optimizers with moments in few bits, against Optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from octavo import optim
from octavo.checkpoint import CheckpointManager, load
from tests.arrays import normal
from tests.cases import slow_except

pytestmark = pytest.mark.standard_promotion
PAIRS = {
    "adamw": (lambda **k: optim.adamw(1e-2, **k), optax.adamw(1e-2)),
    "lion": (lambda **k: optim.lion(1e-3, **k), optax.lion(1e-3)),
    "sgd": (lambda **k: optim.sgd(1e-2, 0.9, nesterov=True, **k), optax.sgd(1e-2, 0.9, nesterov=True)),
    "muon": (lambda **k: optim.muon(1e-2, **k), optax.contrib.muon(1e-2)),
}
by_optimizer = pytest.mark.parametrize("name", PAIRS)


def tree(seed=0, **shapes):
    shapes = shapes or {"w": (64, 128), "stack": (3, 64, 32), "embedding": (128, 64), "bias": (32,)}
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def init(optimizer, params):
    return jax.jit(optimizer.init)(params)


def step(optimizer):
    @jax.jit
    def run(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return run


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@by_optimizer
def test_the_first_step_is_that_of_optax(name):
    """The moments before it are zero, which every map represents."""
    make, reference = PAIRS[name]
    params, grads = tree(), tree(1)
    found, state = step(make())(params, init(make(), params), grads)
    expected, state_reference = step(reference)(params, init(reference, params), grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), found, expected)
    floats = optim.dequantize_state(state)
    assert jax.tree.structure(floats) == jax.tree.structure(state_reference)
    for a, b in zip(jax.tree.leaves(floats), jax.tree.leaves(state_reference), strict=True):
        largest = np.max(np.abs(b), initial=0)
        np.testing.assert_allclose(a, b, atol=0.01 * largest, rtol=1e-6)


@by_optimizer
def test_moments_that_are_all_in_float_are_those_of_optax(name):
    make, reference = PAIRS[name]
    found, expected = tree(), tree()
    optimizer = make(min_size=10**9)
    state, state_reference = init(optimizer, found), init(reference, found)
    run, run_reference = step(optimizer), step(reference)
    for i in range(3):
        found, state = run(found, state, tree(i))
        expected, state_reference = run_reference(expected, state_reference, tree(i))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def test_small_and_excluded_parameters_stay_in_float():
    params = tree(w=(64, 64), embedding=(128, 64), bias=(32,), final_norm=(8192,), head=(8192,))
    state = optim.adamw(1e-3).init(params)[0]
    low = {name for name, moment in state.mu.items() if optim.is_moment(moment)}
    assert low == {name for name, moment in state.nu.items() if optim.is_moment(moment)} == {"w", "head"}
    state = init(optim.adamw(1e-3, min_size=1, exclude=""), params)[0]
    assert all(optim.is_moment(moment) for moment in state.mu.values())


@pytest.mark.parametrize(
    ("moments", "decades", "worst"),
    [("dynamic8", 3, 0.05), ("float8", 3, 0.05), ("linear8", 1, 0.05), ("dynamic4", 0, 0.1)],
)
def test_a_quadratic_converges(moments, decades, worst):
    """f(w) = sum of c (w - target)^2; the gradients of a block have a range of as many decades as the curvatures c.

    bitsandbytes' map rounds second moments to zero here, and divides by them.
    """
    target = normal(0, 64, 64)
    curvature = 10 ** jax.random.uniform(jax.random.key(1), (64, 64), minval=-decades, maxval=0)
    optimizer = optim.adamw(optax.cosine_decay_schedule(0.05, 300), b2=0.99, weight_decay=0.0, moments=moments)

    def body(carry, _):
        w, state = carry
        updates, state = optimizer.update(curvature * (w - target), state, w)
        return (optax.apply_updates(w, updates), state), None

    run = jax.jit(lambda w, state: jax.lax.scan(body, (w, state), None, length=300)[0][0])
    w = jnp.zeros((64, 64))
    assert float(jnp.max(jnp.abs(run(w, optimizer.init(w)) - target))) < worst


@pytest.mark.parametrize("moments", optim.MOMENTS)
def test_chunks_give_the_same_state_as_the_array_at_once(moments, monkeypatch):
    params, grads = tree(w=(3, 128, 128), head=(8192,)), tree(1, w=(3, 128, 128), head=(8192,))
    optimizer = optim.adamw(1e-2, moments=moments)
    state = init(optimizer, params)
    results = []
    for size in (2**9, 2**30):
        monkeypatch.setattr("octavo.optim.quantized._CHUNK", size)
        run = step(optimizer)
        text = run.lower(params, state, grads).as_text()
        assert ("while" in text) == (size == 2**9)
        results.append(run(*run(params, state, grads), grads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), results[0][0], results[1][0])
    codes = [[x for x in jax.tree.leaves(r[1]) if x.dtype == jnp.uint8] for r in results]
    assert all(np.mean(np.asarray(a) == np.asarray(b)) > 0.99 for a, b in zip(*codes, strict=True))


@pytest.mark.parametrize("moments", optim.MOMENTS)
def test_a_step_allocates_no_float_copy_of_the_state(moments):
    params = jax.eval_shape(lambda: tree(w=(8, 512, 512)))
    optimizer = optim.adamw(1e-3, moments=moments)
    # As in a training step, the gradients are temporary: 4 bytes per parameter. Two moments in float would be 8 more.
    run = jax.jit(lambda p, s: optimizer.update(jax.tree.map(lambda x: jnp.sin(x), p), s, p), donate_argnums=(0, 1))
    state = jax.eval_shape(optimizer.init, params)
    sizes = run.lower(params, state).compile().memory_analysis()
    count = params["w"].size
    assert sizes.temp_size_in_bytes < 5.5 * count
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) < 0.27 * 8 * count


@pytest.mark.parametrize("moments", slow_except(("dynamic4", "float8"), optim.MOMENTS))
def test_a_resumed_run_is_equal_bit_for_bit(moments, tmp_path):
    params = tree()
    optimizer = optim.adamw(1e-2, moments=moments)
    run = step(optimizer)
    params, state = run(params, init(optimizer, params), tree(1))
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"params": params, "state": state})
        manager.wait_until_finished()
    restored = load(tmp_path, {"params": params, "state": state}).state
    assert_same(restored, {"params": params, "state": state})
    assert_same(run(params, state, tree(2)), run(restored["params"], restored["state"], tree(2)))
    # Without a structure it opens as nested dictionaries, whose moments are dequantized as any other.
    floats = optim.dequantize_state(load(tmp_path).state["state"])
    if moments != "float8":
        np.testing.assert_array_equal(floats["0"]["mu"]["w"], state[0].mu["w"].dequantize())


@by_optimizer
def test_a_state_opens_as_float_and_back(name):
    make, reference = PAIRS[name]
    params = tree()
    params, state = step(make())(params, init(make(), params), tree(1))
    floats = optim.dequantize_state(state)
    step(reference)(params, floats, tree(2))
    back = optim.quantize_state_like(floats, like=state)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    same = jax.tree.map(lambda a, b: np.mean(np.isclose(a, b, rtol=1e-6)), back, state)
    assert min(jax.tree.leaves(same)) > 0.999


@pytest.mark.parametrize(("moments", "explicit"), [("dynamic8", True), ("dynamic4", False), ("float8", False)])
def test_on_a_mesh_moments_are_sharded_as_their_parameters(moments, explicit, monkeypatch):
    monkeypatch.setattr("octavo.optim.quantized._CHUNK", 2**12)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Explicit if explicit else AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    params, grads = tree(w=(2, 64, 64)), tree(1, w=(2, 64, 64))
    optimizer = optim.adamw(1e-2, moments=moments)
    expected, expected_state = step(optimizer)(params, init(optimizer, params), grads)
    with jax.set_mesh(mesh):
        placed, grads = jax.device_put((params, grads), sharding)
        state = init(optimizer, params)
        state = jax.tree.map(
            lambda x: jax.device_put(x, sharding if x.ndim == 3 else NamedSharding(mesh, PartitionSpec())), state
        )
        compiled = step(optimizer).lower(placed, state, grads).compile()
        found, new = compiled(placed, state, grads)
    assert not [word for word in ("all-gather", "all-to-all", "collective-permute") if word in compiled.as_text()]
    codes = jax.tree.leaves(new[0].mu)[0]
    assert codes.sharding.is_equivalent_to(sharding, 3)
    np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-5, atol=1e-6)
    same = jax.tree.map(lambda a, b: np.mean(np.asarray(a) == np.asarray(b)), new, expected_state)
    assert min(jax.tree.leaves(same)) > 0.99


def test_unknown_formats_raise():
    with pytest.raises(ValueError, match="unknown format of moments 'dynamic9': did you mean 'dynamic8'"):
        optim.adamw(1e-3, moments="dynamic9")
