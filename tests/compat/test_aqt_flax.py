"""AQT's Flax modules, the programs of its README and its Flax example, and the tables of names against aqtp."""

import functools
import importlib
import types
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from octavo.compat import aqt, aqt_flax
from octavo.compat.aqt_flax import FreezerMode, QuantMode
from tests.arrays import normal
from tests.docs.test_pages import table

theirs = pytest.importorskip("aqt.jax.v2.config", reason="the oracles group is not installed: pip install aqtp==0.9.0")
their_flax = pytest.importorskip("aqt.jax.v2.flax.aqt_flax")

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # aqtp 0.9 converts arrays to dtypes implicitly
]

KEY = jax.random.key(0)
X = normal(1, 8, 12)


# Names.


def flax_modules():
    """The modules of `aqt.jax.v2.flax`, without tests and examples, which need TensorFlow."""
    folder = Path(their_flax.__file__).parent
    found = [path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py")]
    found = [path for path in found if "examples" not in path.parts and not path.name.endswith(("_test", "__init__"))]
    return sorted(".".join(path.parts) for path in found)


def public_names(module):
    """The names that a module offers, without those of `typing` and of other modules."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and getattr(value, "__module__", "") != "typing"
    }


def cells(mark):
    rows = [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in table(mark, "from-aqt.md")]
    return [(*row[:-2], name, row[-1]) for row in rows for name in row[-2].replace("`", "").split(", ")]


def test_every_public_name_of_the_config_has_a_row():
    rows = cells("config")
    here = dict(rows)
    assert len(rows) == len(here)
    assert set(here) == public_names(theirs)
    for name, text in here.items():
        assert hasattr(aqt, name) != text.startswith("not here"), (name, text)


def test_every_public_name_of_the_flax_modules_has_a_row():
    rows = cells("flax")
    here = {(module.strip("`"), name): text for module, name, text in rows}
    assert len(rows) == len(here)
    wanted = {
        (module, name)
        for module in flax_modules()
        for name in public_names(importlib.import_module(f"aqt.jax.v2.flax.{module}"))
    }
    assert set(here) == wanted
    for (_, name), text in here.items():
        offered = hasattr(aqt if "in `octavo.compat.aqt`" in text else aqt_flax, name)
        assert offered or text.startswith("not here"), (name, text)


def test_fields_are_those_of_aqt():
    legacy = {"lhs_init", "lhs_scale_init", "rhs_init", "rhs_scale_init", "tiling_fn"}
    for name in ("AqtDotGeneral", "AqtEinsum", "AqtConvGeneralDilated"):
        missing = set(getattr(their_flax, name).__dataclass_fields__) - set(
            getattr(aqt_flax, name).__dataclass_fields__
        )
        assert missing <= legacy, name
    assert {m.name: m.value for m in QuantMode} == {m.name: m.value for m in their_flax.QuantMode}
    assert {m.name: m.value for m in FreezerMode} == {m.name: m.value for m in their_flax.FreezerMode}


def test_types_and_promotion():
    config = aqt.config_v4()
    assert isinstance(config, aqt.DotGeneral)
    assert isinstance(config.fwd, aqt.DotGeneralRaw)
    assert isinstance(config.fwd.lhs, aqt.Tensor)
    half, full = X.astype(jnp.bfloat16), X
    for pair in ((half, half), (half, full), (full, half)):
        got, wanted = (module.aqt_promote_dtype(*pair) for module in (aqt_flax, their_flax))
        assert [x.dtype for x in got] == [x.dtype for x in wanted]


# The program of the README.


class MlpBlock(nn.Module):
    config: aqt.DotGeneral | None
    lib: types.ModuleType = aqt_flax

    @nn.compact
    def __call__(self, inputs):
        dot_general = self.lib.AqtDotGeneral(self.config)
        x = nn.Dense(dot_general=dot_general, features=inputs.shape[-1] * 4)(inputs)
        return nn.Dense(dot_general=dot_general, features=inputs.shape[-1])(nn.relu(x))


def test_the_readme():
    inputs = X[:3, :4]
    variables = jax.jit(MlpBlock(None).init)(KEY, inputs)
    wanted = MlpBlock(None).apply(variables, inputs)
    config, their_config = (lib.fully_quantized(fwd_bits=8, bwd_bits=8) for lib in (aqt, theirs))
    rngs = {"params": jax.random.key(2)}
    got = MlpBlock(config).apply(variables, inputs, rngs=rngs)
    assert jax.tree.structure(MlpBlock(config).init(KEY, inputs)) == jax.tree.structure(variables)
    error = jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted)
    assert 0 < error < 0.03
    np.testing.assert_allclose(got, MlpBlock(their_config, their_flax).apply(variables, inputs, rngs=rngs), rtol=1e-5)


# The program of the Flax example: training, calibration, conversion, serving.


class Example(nn.Module):
    """A layer with tiles, and an einsum whose left operand is the weight."""

    lib: types.ModuleType
    config: types.ModuleType
    weights: str = "TRAIN"
    activations: str = "TRAIN"
    static: bool = False

    @nn.compact
    def __call__(self, x):
        lib, config = self.lib, self.config.fully_quantized(use_stochastic_rounding=False, use_fwd_quant=False)
        swapped = self.config.fully_quantized(use_stochastic_rounding=False, use_fwd_quant=False)
        if self.static and self.config is aqt:
            config = aqt.set_fwd_calibration(config, aqt.MeanOfAbsMaxCalibration)
        kept = {"use_legacy_freezer": False, "prng_name": None}
        kept |= {f"{side}_freeze_mode": lib.FreezerMode.CALIBRATION for side in ("lhs", "rhs")}
        values = lib.FreezerMode.CALIBRATION_AND_VALUE
        weights, activations = lib.QuantMode[self.weights], lib.QuantMode[self.activations]
        modes = {"lhs_quant_mode": activations, "rhs_quant_mode": weights, **kept, "rhs_freeze_mode": values}
        dot = functools.partial(lib.AqtDotGeneral, config, **modes)
        x = nn.Dense(10, dot_general_cls=dot)(nn.relu(nn.Dense(16, dot_general_cls=dot)(x)))
        modes = {"lhs_quant_mode": weights, "rhs_quant_mode": activations, **kept, "lhs_freeze_mode": values}
        einsum = lib.AqtEinsum(
            swapped, assert_eqn="bc,ab->ac", assert_lhs_shape=(10, 10), assert_rhs_shape=(None, 10), **modes,
            tile_sizes={"b": 5},
        )  # fmt: skip
        return einsum("bc,ab->ac", jnp.identity(10), x)


def test_the_flax_example_is_served_as_it_is_trained():
    example = functools.partial(Example, aqt_flax, aqt)
    params, wanted = example().init(KEY, X)["params"], jnp.sin(X[:, :10])
    optimizer = optax.sgd(0.1, 0.9)

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((example().apply({"params": p}, X) - wanted) ** 2))(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    for _ in range(8):
        params, state, loss = step(params, state)
        losses.append(loss)
    assert losses[-1] < 0.9 * losses[0]
    _, stored = example("CONVERT").apply({"params": params}, X, mutable="aqt")
    paths = {"/".join(str(k.key) for k in path if hasattr(k, "key")) for path, _ in jax.tree_util.tree_leaves_with_path(
        stored["aqt"]
    )}  # fmt: skip
    assert {path.rpartition("/")[0] for path in paths} == {
        "Dense_0/AqtDotGeneral_0/qrhs", "Dense_1/AqtDotGeneral_0/qrhs", "AqtEinsum_0/AqtDotGeneral_0/qlhs",
    }  # fmt: skip
    served = example("SERVE").apply({"params": params, **stored}, X)
    np.testing.assert_allclose(served, example().apply({"params": params}, X), rtol=1e-6)
    # The weights that are served are those that are stored.
    zeros = jax.tree.map(jnp.zeros_like, params) | {
        name: {"bias": params[name]["bias"], "kernel": jnp.zeros_like(params[name]["kernel"])} for name in params
    }
    np.testing.assert_array_equal(example("SERVE").apply({"params": zeros, **stored}, X), served)


@pytest.mark.slow
def test_the_flax_example_is_that_of_aqt():
    ours, peer = (functools.partial(Example, *libs) for libs in ((aqt_flax, aqt), (their_flax, theirs)))
    params = jax.jit(ours().init)(KEY, X)
    for a, b in zip(
        jax.tree.leaves(jax.grad(lambda p: jnp.sum(jnp.sin(ours().apply(p, X))))(params)),
        jax.tree.leaves(jax.grad(lambda p: jnp.sum(jnp.sin(peer().apply(p, X))))(params)),
        strict=True,
    ):
        # Tiles of the einsum's gradient are those of AQT only.
        assert np.linalg.norm(a - b) < 0.02 * np.linalg.norm(b)
    np.testing.assert_allclose(ours().apply(params, X), peer().apply(params, X), rtol=1e-4, atol=1e-5)
    stored, wanted = (lib("CONVERT").apply(params, X, mutable="aqt")[1]["aqt"] for lib in (ours, peer))
    for name in ("Dense_0", "Dense_1"):
        a, b = (tree[name]["AqtDotGeneral_0"]["qrhs"]["frozen"] for tree in (stored, wanted))
        np.testing.assert_array_equal(a.qvalue, b.qvalue)
        np.testing.assert_array_equal(a.scale, b.scale[0])
    np.testing.assert_allclose(
        ours("SERVE").apply({**params, "aqt": stored}, X),
        peer("SERVE").apply({**params, "aqt": wanted}, X),
        rtol=1e-4,
        atol=1e-5,
    )


def test_static_ranges_are_calibrated_converted_and_served():
    def dense(mode):
        config = aqt.set_fwd_calibration(aqt.config_v4(dlhs_bits=None), aqt.MeanOfAbsMaxCalibration)
        modes = {"lhs_quant_mode": QuantMode[mode], "rhs_quant_mode": QuantMode[mode]}
        modes |= {"lhs_freeze_mode": FreezerMode.CALIBRATION, "rhs_freeze_mode": FreezerMode.CALIBRATION_AND_VALUE}
        return nn.Dense(6, dot_general_cls=functools.partial(aqt_flax.AqtDotGeneral, config, **modes))

    variables = jax.jit(dense("CALIBRATE").init)(KEY, X)
    with pytest.raises(ValueError, match="a static range of lhs that was never calibrated"):
        dense("TRAIN").apply(variables, X)
    for factor in (1.0, 2.0):
        _, new = dense("CALIBRATE").apply(variables, factor * X, mutable="aqt")
        variables |= new
    stat = variables["aqt"]["AqtDotGeneral_0"]["qlhs_range"]
    assert int(stat["count"]) == 2
    out, stored = dense("CONVERT").apply(variables, X, mutable="aqt")
    scale = stored["aqt"]["AqtDotGeneral_0"]["qlhs"]["frozen"]["scale"]
    np.testing.assert_allclose(scale, [[1.5 * jnp.max(jnp.abs(X)) / 127.5]], rtol=1e-6)
    given = {"params": variables["params"], **stored}
    np.testing.assert_array_equal(dense("SERVE").apply(given, X), out)
    # Scales are those of calibration, whatever is served.
    rows = [dense("SERVE").apply(given, X[i : i + 1]) for i in range(2)]
    np.testing.assert_array_equal(jnp.concatenate(rows), out[:2])


def test_what_aqt_asserts_raises():
    config = aqt.config_v4()
    stored = {"rhs_freeze_mode": FreezerMode.CALIBRATION_AND_VALUE}
    dense = lambda **fields: nn.Dense(4, dot_general_cls=functools.partial(aqt_flax.AqtDotGeneral, config, **fields))  # noqa: E731
    params = jax.jit(nn.Dense(4).init)(KEY, X)
    with pytest.raises(ValueError, match=r"rhs_freeze_mode is NONE: use FreezerMode.CALIBRATION_AND_VALUE"):
        dense(rhs_quant_mode=QuantMode.CONVERT).apply(params, X, mutable="aqt")
    with pytest.raises(ValueError, match="apply the model in mode CONVERT"):
        dense(rhs_quant_mode=QuantMode.SERVE, **stored).apply(params, X)
    einsum = functools.partial(aqt_flax.AqtEinsum, config)
    args = KEY, "bi,io->bo", X, jnp.ones((12, 3))
    with pytest.raises(ValueError, match="assert_eqn is 'ab,bc->ac'"):
        einsum(assert_eqn="ab,bc->ac").init(*args)
    with pytest.raises(ValueError, match=r"has the shape \(8, 12\), but assert_lhs_shape is \(None, 10\)"):
        einsum(assert_lhs_shape=(None, 10)).init(*args)
    with pytest.raises(ValueError, match="tile_sizes names 'z'"):
        einsum(tile_sizes={"z": 2}).init(*args)
    with pytest.raises(ValueError, match="a tile_count or a tile_size"):
        aqt_flax.AxisTiling(0)


def test_a_layer_of_the_readme_cannot_share_a_stored_weight():
    class Shared(nn.Module):
        mode: QuantMode

        @nn.compact
        def __call__(self, x):
            modes = {"rhs_quant_mode": self.mode, "rhs_freeze_mode": FreezerMode.CALIBRATION_AND_VALUE}
            dot = aqt_flax.AqtDotGeneral(aqt.config_v4(), **modes)
            return nn.Dense(12, dot_general=dot)(nn.Dense(6, dot_general=dot)(x))

    params = jax.jit(Shared(QuantMode.TRAIN).init)(KEY, X)
    with pytest.raises(ValueError, match="give each layer its own, by dot_general_cls"):
        Shared(QuantMode.CONVERT).apply(params, X, mutable="aqt")


def test_a_convolution():
    config = aqt.conv_general_dilated_make(2, 8, 8)
    x = normal(10, 2, 6, 6, 3)

    def conv(mode):
        stored = {"rhs_quant_mode": mode, "rhs_freeze_mode": FreezerMode.CALIBRATION_AND_VALUE}
        kind = functools.partial(aqt_flax.AqtConvGeneralDilated, config, **stored)
        return nn.Conv(4, (3, 3), conv_general_dilated_cls=kind)

    params = jax.jit(conv(QuantMode.TRAIN).init)(KEY, x)
    wanted = conv(QuantMode.TRAIN).apply(params, x)
    exact = nn.Conv(4, (3, 3)).apply(params, x)
    assert 0 < jnp.linalg.norm(wanted - exact) < 0.02 * jnp.linalg.norm(exact)
    _, stored = conv(QuantMode.CONVERT).apply(params, x, mutable="aqt")
    np.testing.assert_allclose(conv(QuantMode.SERVE).apply({**params, **stored}, x), wanted, rtol=1e-5, atol=1e-6)
