"""Round trips: bit-exact, for every kind of leaf; retention and structure errors."""

import subprocess
import sys
import typing

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import octavo
from octavo.checkpoint import CheckpointError, CheckpointManager, CheckpointWarning, load

LOW = sorted(name for name in dir(ml_dtypes) if isinstance(getattr(ml_dtypes, name), type) and "info" not in name)
PLAIN = [*(np.dtype(char).name for char in "?hilHLefdF"), "longdouble"]


class Moments(typing.NamedTuple):
    count: typing.Any
    mu: typing.Any


def bits(x):
    return np.array(x, order="C")[..., None].view(np.uint8)


def patterns(name):
    """An array with every bit pattern of a small dtype, or many of a large one."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    if dtype.name == "bool":
        return np.array([True, False])
    if dtype.itemsize == 1:
        width = 1 << int("".join(c for c in name.split("_")[0] if c.isdigit()))
        if "int" in name and not name.startswith("u"):  # one element to a byte, sign extended
            return np.arange(-(width // 2), width // 2, dtype=np.int8).astype(dtype)
        return np.arange(width, dtype=np.uint8).view(dtype)
    if name == "longdouble":
        return np.array([0.1, -0.0, np.pi], dtype) / 3
    return np.random.default_rng(0).integers(0, 256, 4096, np.uint8).view(dtype)


def identical(a, b):
    assert type(a) is type(b)
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    np.testing.assert_array_equal(bits(a), bits(b))


def test_every_dtype_is_bit_exact(tmp_path):
    state = {name: patterns(name) for name in [*LOW, *PLAIN]}
    with CheckpointManager(tmp_path) as manager:
        manager.save(0, state)
        restored = manager.restore(state)
    assert len(LOW) >= 18
    for name in state:
        identical(restored.state[name], state[name])
    for name, array in load(tmp_path).state.items():
        identical(array, state[name])


def test_jax_arrays_of_low_precision_stay_jax_arrays(tmp_path):
    names = ["int4", "uint4", "float8_e4m3fn", "float4_e2m1fn", "bfloat16"]
    state = {name: jnp.asarray(patterns(name)) for name in names}
    with CheckpointManager(tmp_path) as manager:
        manager.save(0, state)
        restored = manager.restore(jax.eval_shape(lambda: state))
    for name in names:
        identical(restored.state[name], state[name])


def test_signs_of_zero_and_payloads_of_nan(tmp_path):
    payloads = np.array([0x7FC12345, 0xFFC00001, 0x7F800001, 0x80000000], np.uint32).view(np.float32)
    state = {
        "negative": np.full((5, 3), -0.0, np.float32),
        "bfloat16": np.full(9, -0.0, ml_dtypes.bfloat16),
        "nan": jnp.asarray(payloads),
        "float": -0.0,
    }
    with CheckpointManager(tmp_path) as manager:
        manager.save(0, state)
        restored = manager.restore(state).state
    assert np.signbit(restored["float"])
    for name in ("negative", "bfloat16", "nan"):
        identical(restored[name], state[name])


def test_keys_numbers_and_odd_shapes(tmp_path):
    state = {
        "keys": [jax.random.key(3), jax.random.split(jax.random.key(1, impl="rbg"), (2, 2))],
        "numbers": (True, -7, 0.1, 2 + 3j, np.float32(0.3), np.int8(-3)),
        "moments": Moments(jnp.int32(4), {"w": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "none": None}),
        "empty": {"array": np.zeros((0, 3), ml_dtypes.bfloat16), "dict": {}, "jax": jnp.zeros((2, 0), jnp.int8)},
        "strided": np.arange(20)[::3],
        "big endian": np.arange(3, dtype=">f4"),
        "": np.arange(2),
        "a/b": {"c.d": np.arange(3), "%": np.arange(4), "e" * 400: np.arange(5)},
    }
    with CheckpointManager(tmp_path) as manager:
        manager.save(12, state, {"tokens": 10**12, "name": "é", "loss": [0.1, None]})
        restored = manager.restore(state)
    assert (restored.step, restored.extra) == (12, {"tokens": 10**12, "name": "é", "loss": [0.1, None]})
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)
    state["big endian"] = state["big endian"].astype("<f4")
    for a, b in zip(jax.tree.leaves(restored.state), jax.tree.leaves(state), strict=True):
        if hasattr(b, "dtype"):
            identical(a, b)
        else:
            assert (type(a), a) == (type(b), b)


def test_qarrays_of_every_format(tmp_path):
    rng = np.random.default_rng(0)
    scale = jnp.asarray(rng.standard_normal((4, 4)), jnp.float32)
    state = {}
    for name, fmt in octavo.formats().items():
        codes = jnp.asarray(rng.integers(0, 2, (4, 64)).astype(fmt.storage))
        zero_dtype = getattr(fmt, "zero_dtype", None) or fmt.storage
        zero = jnp.asarray(np.ones((4, 1), zero_dtype)) if fmt.asymmetric else None
        state[name] = octavo.QArray(codes, scale, zero, fmt, dtype=jnp.bfloat16, padding=[(-1, 3)])
        packed = jnp.asarray(rng.integers(0, 256, (4, 8), np.uint8))
        state[f"{name}, packed"] = octavo.QArray(packed, scale, None, fmt, packed=(-1, 64))
    state["two scales"] = octavo.QArray(
        codes, scale.astype(jnp.float8_e4m3fn), None, fmt, outer_scale=jnp.ones((1, 1)), dtype=jnp.float32
    )
    state["plain"] = octavo.quantize(jnp.arange(8.0).reshape(2, 4), "int4")
    with CheckpointManager(tmp_path) as manager:
        manager.save(0, state)
        followed = manager.restore(state).state
        free = manager.restore().state
    for name, q in state.items():
        for found in (followed[name], free[name]):
            assert jax.tree.structure(found) == jax.tree.structure(q)
            jax.tree.map(identical, found, q)
    np.testing.assert_array_equal(free["plain"].dequantize(), state["plain"].dequantize())


def test_arrays_keep_their_sharding(tmp_path):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    state = {"w": jax.device_put(jnp.arange(8.0), spread), "count": jnp.int32(1)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(0, state)
        restored = manager.restore(state).state
    assert restored["w"].sharding == spread
    assert not restored["count"].committed
    np.testing.assert_array_equal(restored["w"], np.arange(8.0))


def test_an_asynchronous_save_is_a_snapshot(tmp_path):
    update = jax.jit(lambda x: x + 1, donate_argnums=0)
    numpy, device = np.zeros(200_000), jnp.zeros(200_000)
    with CheckpointManager(tmp_path, max_to_keep=None) as manager:
        for step in range(4):
            manager.save(step, {"numpy": numpy, "device": device})
            numpy += 1
            device = update(device)
        for step in range(4):
            state = manager.restore(step=step).state
            assert state["numpy"].min() == state["numpy"].max() == step
            assert state["device"].min() == state["device"].max() == step


def test_a_subtree_reads_only_its_own_files(tmp_path):
    params = {"decoder": {"w": jnp.arange(3.0)}, "bias": jnp.ones(2)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, Moments({"params": params}, jax.tree.map(jnp.zeros_like, params)), {"a": 1})
        restored = manager.restore(params, subtree="count/params")
        np.testing.assert_array_equal(restored.state["decoder"]["w"], np.arange(3.0))
    for chunk in (tmp_path / "5" / "state").glob("mu.*/0*"):
        chunk.write_bytes(b"\1" * chunk.stat().st_size)
    restored = load(tmp_path / "5", subtree="count/params/decoder")
    assert (restored.step, restored.extra) == (5, {"a": 1})
    np.testing.assert_array_equal(restored.state["w"], np.arange(3.0))
    np.testing.assert_array_equal(load(tmp_path, subtree="count/params/bias").state, np.ones(2))
    with pytest.raises(CheckpointError, match=r"5 has nothing at 'weights'; at the top it has count, mu"):
        load(tmp_path, subtree="weights")
    with pytest.raises(CheckpointError, match=r"mu\.bias/0 has other contents"):
        load(tmp_path, subtree="mu")


def test_max_to_keep_and_keep_period(tmp_path):
    with CheckpointManager(tmp_path, max_to_keep=2, keep_period=4, asynchronous=False) as manager:
        assert (manager.all_steps(), manager.latest_step(), manager.restore({})) == ([], None, None)
        for step in range(1, 11):
            manager.save(step, {"x": np.int64(step)})
        assert (manager.all_steps(), manager.latest_step()) == ([4, 8, 9, 10], 10)
        manager.save(7, {"x": np.int64(7)})  # After resuming from an earlier step: not deleted immediately.
        assert manager.all_steps() == [4, 7, 8, 9, 10]
        assert manager.restore(step=8).state["x"] == 8
    with CheckpointManager(tmp_path, max_to_keep=None, asynchronous=False) as manager:
        manager.save(11, {"x": np.int64(11)})
        assert manager.all_steps() == [4, 7, 8, 9, 10, 11]


def test_an_existing_step_is_replaced_with_force_only(tmp_path):
    with CheckpointManager(tmp_path, asynchronous=False) as manager:
        manager.save(1, {"x": np.int64(1)})
        with pytest.raises(CheckpointError, match=r"1 exists already; pass force=True to replace it"):
            manager.save(1, {"x": np.int64(2)})
        manager.save(1, {"x": np.int64(3)}, force=True)
        assert manager.restore().state["x"] == 3
        chunk = tmp_path / "1" / "state" / "x" / "0"
        chunk.write_bytes(b"\1" * chunk.stat().st_size)
        manager.save(1, {"x": np.int64(4)})
        assert manager.restore().state["x"] == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "1"]


@pytest.mark.parametrize(
    ("state", "extra", "text"),
    [
        (
            {"a": {"b": "text"}},
            {},
            r"a/b is a str; the state of a checkpoint holds arrays, PRNG keys, numbers and QArrays",
        ),
        ({"a": np.array(["x"])}, {}, r"a has dtype <U1, which is no number"),
        ({"a": 2**63}, {}, r"a is an integer of more than 64 bits"),
        ({"a": 1}, {"b": {1, 2}}, r"`extra` of step 3 holds what JSON cannot: .*set"),
    ],
)
def test_unsupported_states(tmp_path, state, extra, text):
    with CheckpointManager(tmp_path) as manager, pytest.raises(CheckpointError, match=text):
        manager.save(3, state, extra)
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]


def test_arguments(tmp_path):
    with pytest.raises(ValueError, match=r"max_to_keep=0 would keep no checkpoint"):
        CheckpointManager(tmp_path, max_to_keep=0)
    with pytest.raises(ValueError, match=r"keep_period=-1 is negative"):
        CheckpointManager(tmp_path, keep_period=-1)
    with CheckpointManager(tmp_path) as manager:
        assert repr(manager) == f"CheckpointManager({str(tmp_path)!r}, max_to_keep=3, keep_period=0)"
        with pytest.raises(ValueError, match=r"step=-1 is negative"):
            manager.save(-1, {})
    with pytest.raises(CheckpointError, match=r"is closed; make a new one"):
        manager.save(0, {})
    with pytest.raises(CheckpointError, match=r"holds no checkpoint: there is no such directory"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("like", "lines"),
    [
        ({"w": np.zeros((3, 2)), "n": 1}, ["4 leaves differ", "n: expected a Python int, found nothing"]),
        ({"w": np.zeros((2, 2)), "q": None, "k": None}, ["w: expected float64[2,2], found float64[2,3]"]),
        ({"w": np.zeros((2, 3), np.float32)}, ["w: expected float32[2,3], found float64[2,3]"]),
        ({"w": np.zeros((2, 3)), "k": jax.random.key(0, impl="rbg")}, ["k: expected key<rbg>[], found key<fry>[]"]),
        ({"w": 0.5}, ["w: expected a Python float, found float64[2,3]"]),
        (
            {"w": np.zeros((2, 3)), "q": octavo.quantize(jnp.ones((2, 2)), "int4")},
            ["2 leaves differ", "q: expected a QArray of int4, dtype=float32, found a QArray of int8"],
        ),
    ],
)
def test_a_structure_mismatch_lists_the_leaves(tmp_path, like, lines):
    q = octavo.quantize(jnp.ones((2, 2)), "int8")
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": np.ones((2, 3)), "k": jax.random.key(0), "q": q})
        with pytest.raises(CheckpointError, match="holds another state than is expected") as error:
            manager.restore(like)
    assert all(line in str(error.value) for line in lines), str(error.value)


def test_reinit(tmp_path):
    """Leaves of another shape, missing or superfluous ones; others are restored or raise."""
    reinit = lambda path: path[0] == "errors"  # noqa: E731
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": np.ones(3), "errors": {"a": np.ones(2), "b": np.ones(2), "d": np.ones(1)}})
        like = {"w": np.zeros(3), "errors": {"a": np.zeros(2), "b": np.zeros(4), "c": np.zeros(1)}}
        with pytest.warns(CheckpointWarning, match="has other shapes for 3 arrays that are reset, such as errors/b"):
            found = manager.restore(like, reinit=reinit).state
        assert jax.tree.map(lambda x: x.tolist(), found) == {
            "w": [1, 1, 1],
            "errors": {"a": [1, 1], "b": [0, 0, 0, 0], "c": [0]},
        }
        with pytest.raises(CheckpointError, match="1 leaf differs:\n  w: expected"), pytest.warns(CheckpointWarning):
            manager.restore({**like, "w": np.zeros(4)}, reinit=reinit)


def test_many_differences_are_truncated(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {str(i): i for i in range(20)})
        with pytest.raises(CheckpointError, match=r"20 leaves differ(.|\n)*and 12 more"):
            manager.restore({str(i): float(i) for i in range(20)})


def test_importing_does_not_import_orbax():
    code = "import sys, octavo.checkpoint; sys.exit('orbax' in sys.modules or 'tensorstore' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
