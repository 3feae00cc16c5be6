"""The convolutional example trains in every precision that it offers, and serves what it trained."""

import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
from octavo.examples import mnist
from tests.cases import slow_except
from tests.conftest import DATA
from tests.ops.walk import dot_types

pytestmark = pytest.mark.standard_promotion


@pytest.mark.parametrize(
    ("name", "most_bits"), slow_except([("int8", 8.5)], [("float", 32), ("int8", 8.5), ("int4w", 4.5)])
)
def test_a_short_run_learns_and_serves_what_it_learned(name, most_bits, capsys):
    pytest.importorskip("sklearn")
    (found,) = mnist.main([f"quantization={name}", "epochs=3", "batch=64"])
    assert found.served == found.trained > 85
    assert 32 * found.served_bytes / found.float_bytes <= most_bits
    printed = capsys.readouterr().out
    assert f"trained   {found.trained:.2f} % of 899 held-out digits" in printed
    assert f"served    {found.served:.2f} %, the same logits bit for bit" in printed
    assert f"{found.float_bytes:,} bytes trained, {found.served_bytes:,} served" in printed
    assert "Next: python -m octavo.examples.mnist quantization=" in printed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4", "fp8"])
def test_converted_weights_give_the_logits_of_the_float_ones_bit_for_bit(name):
    model, x = mnist.Cnn(mnist.CONFIGS[name]), jax.random.uniform(jax.random.key(1), (5, 8, 8, 1))
    params = jax.jit(model.init)(jax.random.key(0), x)["params"]
    served, stored = mnist.convert(model, params, x)
    assert all(mnist.is_quantized(layer["kernel"]) for layer in stored.values())
    want, got = jax.jit(model.apply)({"params": params}, x), jax.jit(served.apply)({"params": stored}, x)
    np.testing.assert_array_equal(got, want)


def test_calibrated_ranges_are_served(monkeypatch):
    start = lambda model, data, **_: jax.jit(model.init)(jax.random.key(0), data[0])["params"]  # noqa: E731
    monkeypatch.setattr(mnist, "train", start)
    data = np.asarray(jax.random.uniform(jax.random.key(1), (6, 8, 8, 1))), jnp.zeros(6, jnp.int32)
    model = mnist.Cnn(mnist.CONFIGS["int8"], static=True)
    stats = mnist.calibrate(model, start(model, data), data[0], steps=3, batch=4)["quant_stats"]
    assert set(stats) == {"Conv_0", "Conv_1", "Dense_0", "Dense_1"}
    assert {int(layer[op]["lhs"]["count"]) for layer in stats.values() for op in layer} == {3}
    # Compares the logits of the calibrated model, bit for bit, with those of the served one.
    assert mnist.run("int8", (data, data), epochs=1, batch=4, seed=0, steps=3).served >= 0


def test_products_and_gradients_are_int8():
    model, x = mnist.Cnn(mnist.CONFIGS["int8"]), jnp.ones((2, 8, 8, 1))
    params = jax.jit(model.init)(jax.random.key(0), x)["params"]
    types = dot_types(jax.grad(mnist.loss), params, model, x, jnp.zeros(2, jnp.int32), static_argnums=1)
    assert len(types) >= 3 * len(params)
    assert set(types) == {("int8", "int8", "int32")}


def test_logits_that_differ_are_an_error(monkeypatch):
    start = lambda model, data, **_: jax.jit(model.init)(jax.random.key(0), data[0])["params"]  # noqa: E731
    monkeypatch.setattr(mnist, "train", start)
    monkeypatch.setattr(mnist, "convert", lambda model, params, x: (model, jax.tree.map(lambda p: 2 * p, params)))
    data = jax.random.uniform(jax.random.key(1), (4, 8, 8, 1)), jnp.zeros(4, jnp.int32)
    with pytest.raises(AssertionError, match="the served logits are not those of the trained model"):
        mnist.run("float", (data, data), epochs=1, batch=2, seed=0)


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("quantisation=int8", "there is no argument 'quantisation=int8'; did you mean 'quantization'? Known: batch, "),
        ("--epoch=3", "there is no argument '--epoch=3'; did you mean 'epochs', "),
        ("quantization=int9", "there is no quantization=int9; did you mean 'int8', "),
        ("quantization=zzz", "there is no quantization=zzz; Known: float, fp8, int4, int4w, int8"),
        ("epochs=0", "epochs=0 is not a whole number from 1 up: try epochs=20"),
        ("seed=one", "seed=one is not a whole number from 0 up: try seed=0"),
        ("batch=9999", "batch=9999 is not a whole number from 1 to 898: try batch=32"),
        ("seed", "'seed' needs a value: seed=0"),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(arg, message, capsys):
    pytest.importorskip("sklearn")
    with pytest.raises(SystemExit) as stopped:
        mnist.main([arg])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1


def test_help_names_every_argument_and_choice(capsys):
    assert mnist.main(["--help"]) == []
    printed = capsys.readouterr().out
    for name in (*mnist.DEFAULTS, *mnist.CONFIGS):
        assert name in printed


def test_missing_flax_is_named(monkeypatch):
    for name in ("flax", "flax.linen"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit, match=r"pip install 'octavo\[examples,flax\]'"):
        runpy.run_path(mnist.__file__)


def test_missing_scikit_learn_is_named(monkeypatch):
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit, match=r"pip install 'octavo\[examples\]'"):
        mnist.digits()


@pytest.mark.codegen  # hundreds of steps: unoptimized, they take three times as long
def test_low_precision_is_as_accurate_as_float():
    pytest.importorskip("sklearn")
    mean = {}
    for name in ("float", "int8", "int4"):
        found = mnist.main([f"quantization={name}", "seeds=3"])
        assert all(f.served == f.trained for f in found)
        mean[name] = np.mean([f.served for f in found])
    assert mean["float"] > 98
    assert abs(mean["int8"] - mean["float"]) < 0.3
    assert abs(mean["int4"] - mean["float"]) < 1.5


def test_the_files_of_mnist(tmp_path, capsys):
    images, labels = np.arange(2 * 28 * 28).astype(np.uint8).reshape(2, 28, 28), np.array([3, 1], np.uint8)
    for part in ("train", "t10k"):
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            (tmp_path / f"{part}-{kind}-ubyte").write_bytes(head + array.tobytes())
    for x, y in mnist.mnist(str(tmp_path)):
        assert x.shape == (2, 28, 28, 1)
        np.testing.assert_array_equal(np.round(255 * x[..., 0]), images)
        np.testing.assert_array_equal(y, labels)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x09abc")
    for folder, text in ((tmp_path, "is no idx file"), (tmp_path / "none", "make data ARGS=mnist")):
        with pytest.raises(SystemExit):
            mnist.main([f"data={folder}"])
        assert text in capsys.readouterr().err


@pytest.mark.data("mnist")
def test_mnist_itself_calibrated_and_served():
    """Seeds 0 to 4: float 86.8 to 89.9 % (sigma 1.5), int8 87.8 to 89.7 %; pairs differ by 0.6 (one sigma)."""
    options = [f"data={DATA / 'mnist'}", "examples=1000", "epochs=2", "batch=50", "calibrate=2"]
    found = {name: mnist.main([f"quantization={name}", *options])[0] for name in ("float", "int8")}
    assert all(run.served == run.trained > 84 for run in found.values())
    assert abs(found["int8"].served - found["float"].served) < 1.8
