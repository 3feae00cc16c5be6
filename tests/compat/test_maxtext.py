"""The names of MaxText's quantizations.py: numerics against aqtp 0.9, rules, providers, and the table of the docs."""

import functools
import json
import re
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo.compat import aqt, maxtext
from octavo.rules import dot_config, mixed_precision
from octavo.train.config import ConfigError, load
from octavo.train.quantization import training_rules
from tests.arrays import normal
from tests.compat.test_aqt import PLAIN, data, off, three
from tests.docs.test_pages import table

theirs = pytest.importorskip("aqt.jax.v2.config", reason="the oracles group is not installed: pip install aqtp==0.9.0")
calibration = pytest.importorskip("aqt.jax.v2.calibration")

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def compare(their_config, our_config):
    """The largest relative difference of a value and of both gradients."""
    x, w, g = data((16, 128), (128, 32), (16, 32))
    want = three(lambda x, w: their_config(x, w, PLAIN), x, w, g)
    got = three(lambda x, w: octavo.dot(x, w, config=our_config), x, w, g)
    return [off(a, b) for a, b in zip(got, want, strict=True)]


@pytest.mark.parametrize("bounds", [(), (6.0, 5.0, 4.0, 3.0, 2.0, 7.0)])
def test_aqt_fp8_full_has_the_numerics_of_its_builder(bounds):
    """Residuals in e5m2, as gradients are: with e4m3 the gradients are 6.6 % apart."""
    their_config = theirs.config_v4(fwd_bits="e4m3", dlhs_bits="e5m2", drhs_bits="e5m2")
    theirs.set_stochastic_rounding(their_config, False, False, implementation="jax.uniform")
    operands = [q for m in ("fwd", "dlhs", "drhs") for q in (getattr(their_config, m).dg_quantizer,)]
    sides = [side for q in operands for side in (q.lhs, q.rhs)]
    for i, side in enumerate(sides):
        side.calib_shared_axes = "per_tensor"
        if bounds:
            side.calibration = functools.partial(calibration.ConstantCalibration, bound=bounds[i])
    config = types.SimpleNamespace(quantization="aqt_fp8_full", constant_bound_config=bounds)
    ours = maxtext.configure_quantization(config).config
    ours = ours if isinstance(ours, octavo.DotConfig) else dot_config(ours[0], lhs_weight=False, rhs_weight=True)
    assert ours.dlhs.rhs.qtype.name == ours.drhs.rhs.qtype.name == "float8_e5m2"
    assert max(compare(their_config, ours.replace(clip_gradient=False))) < 1e-5


TABLES = {
    "weights": {"w_bits": 4},
    "both": {"w_bits": 8, "a_bits": 8},
    "clipped": {"w_bits": 4, "a_bits": 8, "w_scale": 0.8, "a_scale": 0.9},
    "tiles": {"w_bits": 4, "a_bits": 8, "tile_size": 64},
}


@pytest.mark.parametrize("name", TABLES)
def test_intmp_has_the_numerics_of_its_builder(name, tmp_path):
    """AQT's arithmetic, and gradients with the low-bit weights: `dot_general_make` has use_fwd_quant=True."""
    entry = TABLES[name]
    their_config = theirs.dot_general_make(lhs_bits=entry.get("a_bits"), rhs_bits=entry["w_bits"])
    quantizer = their_config.fwd.dg_quantizer
    for side, key in ((quantizer.lhs, "a_scale"), (quantizer.rhs, "w_scale")):
        if key in entry:
            side.calibration = functools.partial(calibration.AbsMaxCalibration, clipping_scale=entry[key])
    path = tmp_path / "bits.json"
    path.write_text(json.dumps({maxtext.DEFAULT: entry}))
    config = types.SimpleNamespace(quantization="intmp", quant_cfg_path=str(path))
    (rule,) = maxtext.configure_quantization(config).config
    ours = dot_config(rule, lhs_weight=False, rhs_weight=True)
    if name == "tiles":
        tiled = pytest.importorskip("aqt.jax.v2.tiled_dot_general")
        sides = [
            tiled.TensorTiling(
                contraction_axes=[tiled.AxisTiling(axis=a, tile_size=64, tile_count=None)], remaining_axes=[]
            )
            for a in (1, 0)
        ]
        cfg, plain = tiled.Cfg(lhs=sides[0], rhs=sides[1]), their_config
        their_config = lambda x, w, numbers: tiled.tiled_dot_general(cfg, x, w, numbers, dot_general=plain)  # noqa: E731
    assert max(compare(their_config, ours)) < 1e-5


def seed_config(**changes):
    values = {
        "use_qwix_quantization": True,
        "use_batch_split_schedule": False,
        "quantization_local_shard_count": 2,
        "weight_quantization_calibration_method": "fixed,-224,224",
        "act_quantization_calibration_method": "absmax",
        "bwd_quantization_calibration_method": "absmax",
        "weight_sparsity_n": 2,
        "weight_sparsity_m": 4,
    }
    return types.SimpleNamespace(**{**values, **changes})


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="logits")(nn.Dense(16, name="layers_0")(x))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Decoder(name="decoder")(x)


@pytest.mark.parametrize("name", ["int4", "int8", "fp8", "fp8_full", "fp8_gpu", "fp8_nanoo"])
def test_maybe_quantize_model(name):
    model, x = Model(), jnp.ones((4, 16))
    low = maxtext.maybe_quantize_model(model, seed_config(quantization=name))
    variables = jax.eval_shape(low.init, jax.random.key(0), x)
    assert ("_overwrite_with_gradient" in variables) == (name in ("fp8_gpu", "fp8_nanoo"))
    (rule,) = maxtext.get_quantization_rule(seed_config(quantization=name))
    assert rule.module_path == "decoder/.*layers.*"
    assert rule.sparsity == ((2, 4) if name == "fp8_full" else None)


def test_a_model_is_left_alone_where_the_config_says_so():
    model = Model()
    for changes in (
        {"use_qwix_quantization": False, "quantization": "int8"},
        {"use_batch_split_schedule": True, "quantization": "fp8_full"},
        {"quantization": ""},
    ):
        assert maxtext.maybe_quantize_model(model, seed_config(**changes)) is model
    with pytest.raises(ValueError, match="quantization='intmp' has no rule in MaxText"):
        maxtext.get_qt_provider(seed_config(quantization="intmp"))
    with pytest.raises(ValueError, match="under AQT only"):
        maxtext.get_quantization_rule(seed_config(quantization="int8", quantization_local_shard_count=0))


NAMES = """
DEFAULT _W_BITS _A_BITS _W_SCALE _A_SCALE _TILE_SIZE Quantization _tiling_fn _rhs_axis_metadata_wrapper AqtQuantization
QwixQuantization QwixDotGeneral QwixEinsum Fp8Quantization _Fp8EinsumWrapper Fp8Einsum NANOOFp8Quantization
_get_int8_quant_config ConstantBoundConfig _build_const_scale_config PerTensorScales _build_per_tensor_config
_get_aqt_fp8_default_config _get_aqt_fp8_quant_config _dot_general_make _get_default_mp_config
_get_mixed_precision_quant_config _get_quant_config in_convert_mode in_serve_mode get_quant_mode
match_aqt_and_unquantized_param _get_aqt_key_paths remove_quantized_params NvidaFp8Provider NANOOFp8Provider
get_fp8_full_qwix_rule_w_sparsity get_quantization_rule get_qt_provider maybe_quantize_model _cast_reduced_from
_make_scale_tensor _get_max_min manual_quantize
"""
"""Every name that MaxText's quantizations.py defines."""


USED = """
quant_dg quant_mode replicate_scale quant_mode_str train convert serve act_calibration_method weight_calibration_method
bwd_calibration_method amax_history_length e4m3_dtype e5m2_dtype dtype fwd_lhs_bound fwd_rhs_bound dlhs_lhs_bound
dlhs_rhs_bound drhs_lhs_bound drhs_rhs_bound fwd_lhs fwd_rhs dlhs_lhs dlhs_rhs drhs_lhs drhs_rhs calibration_method
manual_quantize DotGeneral config_v3 LocalAqt config_v4 dot_general_make set_stochastic_rounding ConstantCalibration
AbsMaxCalibration calib_shared_axes per_tensor Cfg TensorTiling AxisTiling TRAIN CONVERT SERVE AqtDotGeneral AqtEinsum
NONE CALIBRATION_AND_VALUE use_legacy_freezer QTensor DotGeneralQtConfig dot_general_qt SparsityRule QtRule QtProvider
quantize_model QArray Fp8DirectDotGeneralOp Fp8Einsum NANOOFp8DotGeneralOp fp8_ops
"""
"""The arguments and modes of those names, and what quantizations.py uses of AQT, Qwix and Flax."""


@pytest.mark.parametrize(("mark", "names"), [("names", NAMES), ("used", USED)])
def test_every_name_of_quantizations_py_has_a_row_that_runs(mark, names):
    rows = [row.strip("| ").split(" | ") for row in table(mark, "from-maxtext.md")]
    names = names.split()
    found = [word for row in rows for name in re.findall("`([^`]+)`", row[0]) for word in name.split(".")[-1:]]
    found = [word for name in found for word in re.findall(r"\w+", name)]
    assert list(dict.fromkeys(found)) == names
    space = {"maxtext": maxtext, "aqt": aqt, "octavo": octavo, "jnp": jnp, "nn": nn, "config": seed_config}
    space |= {"q": octavo.quantize(jnp.ones((2, 2)), "int8"), "mixed_precision": mixed_precision}
    space |= {"x": jnp.ones((2, 2)), "w": jnp.ones((2, 2))}
    for row in rows:
        for expression in re.findall("`([^`]+)`", row[1]):
            found = eval(expression, space)
            assert found is not None, row
            assert found is not False, row
    if mark == "names":
        public = {name for name in names if not name.startswith("_")}
        assert public <= set(maxtext.__all__)


def test_arguments_by_position_are_those_of_quantizations_py():
    quant = maxtext.AqtQuantization(aqt.config_v3(), "serve", True)
    assert (quant.quant_dg, quant.quant_mode, quant.replicate_scale) == (aqt.config_v3(), "serve", True)
    assert quant == maxtext.AqtQuantization(quant_dg=aqt.config_v3(), quant_mode="serve", replicate_scale=True)
    methods = ("absmax", "fixed,-224,224", "rms,7")
    given = maxtext.QwixQuantization(*methods).config
    assert [repr(o.calibration) for o in (given.fwd.lhs, given.fwd.rhs, given.dlhs.lhs)] == [
        "AbsMax()", "Fixed(low=-224.0, high=224.0)", "Rms(factor=7.0)"
    ]  # fmt: skip
    with pytest.raises(TypeError, match=r"quant_dg is a config of octavo.compat.aqt.*got aqt\.jax"):
        maxtext.AqtQuantization(theirs.config_v3())
    with pytest.raises(ValueError, match="two names of one argument"):
        maxtext.AqtQuantization(aqt.config_v3(), quant_dg=aqt.config_v4(fwd_bits=4))
    x, w = data((4, 16), (16, 8))
    for quant in (maxtext.Fp8Quantization(), maxtext.NANOOFp8Quantization()):
        for op, dtype in (
            (quant.einsum(jnp.bfloat16), jnp.bfloat16),
            (quant.einsum(dtype=jnp.bfloat16), jnp.bfloat16),
            (quant.einsum(("embed", "mlp")), jnp.float32),
        ):
            run = functools.partial(op.init_with_output, jax.random.key(0), "bi,io->bo")
            assert jax.eval_shape(run, x, w)[0].dtype == dtype


def test_fp8_einsum_has_the_histories_and_the_rounding_of_flax():
    x, w = data((4, 16), (16, 8))
    runs, trees = [], []
    for module in (maxtext.Fp8Einsum(16), nn.Fp8Einsum(16)):
        variables = module.init(jax.random.key(0), "bi,io->bo", x, w)
        loss = lambda v, x, w, module=module: jnp.sum(jnp.sin(module.apply(v, "bi,io->bo", x, w)))  # noqa: E731
        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
        variables = step(variables, x, w)[1][0]  # histories of a first step
        runs.append(jax.tree.leaves(step(variables, x, w)))
        trees.append(jax.tree.structure(variables))
    assert trees[0] == trees[1]
    for ours, flax in zip(*runs, strict=True):
        np.testing.assert_allclose(ours, flax, rtol=1e-5, atol=1e-5)
    narrow = maxtext.Fp8Einsum(e4m3_dtype=jnp.float8_e5m2)
    assert off(*(m.init_with_output(jax.random.key(0), "bi,io->bo", x, w)[0] for m in (narrow, nn.Fp8Einsum()))) > 0.01


KEYS = """
act_quantization_calibration_method bwd_quantization_calibration_method constant_bound_config quant_cfg_path
quantization_local_shard_count use_batch_split_schedule use_qwix_quantization weight_quantization_calibration_method
weight_sparsity_m weight_sparsity_n weight_sparsity_start_step weight_sparsity_update_step
int8 intmp fp8 nanoo_fp8 aqt_fp8 aqt_fp8_full te_* int4 fp8_full fp8_gpu fp8_nanoo
"""
"""Every key of a configuration that quantizations.py reads, and every value of `quantization` that it knows."""


def settings(words, rules):
    """What a key of the table changes besides the types of the matmuls."""
    config = dot_config(rules[-1], lhs_weight=False, rhs_weight=True)
    if "shard_count" in words:
        assert config.drhs.lhs.tile == 1 / 4
    if "use_qwix" in words:
        assert config.dlhs.residual == "reuse"
        assert not config.stochastic
    if words == "quantization=int8":
        assert config.stochastic
    if "constant_bound" in words:
        operands = [o for m in (config.fwd, config.dlhs, config.drhs) for o in (m.lhs, m.rhs)]
        assert [o.calibration.bound for o in operands] == [6, 5, 4, 3, 2, 1]
    if "calibration_method" in words:
        found = [repr(o.calibration) for o in (config.fwd.rhs, config.fwd.lhs, config.dlhs.lhs, config.drhs.lhs)]
        assert found == ["Fixed(low=-224.0, high=224.0)", "Rms(factor=7.0)", *["AbsMax(factor=0.9)"] * 2]
    if "quant_cfg_path" in words:
        assert config.fwd.rhs.tile == 64


def test_every_key_and_value_of_quantizations_py_has_a_row_that_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bits.json").write_text(json.dumps({maxtext.DEFAULT: {"w_bits": 4, "a_bits": 8, "tile_size": 64}}))
    rows = [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in table("keys", "from-maxtext.md")]
    named = {name for row in rows for name in re.findall("`([^`]+)`", row[0])}
    assert set(KEYS.split()) == named - {'quantization=""'}
    for _, words, *wanted in (row[:5] for row in rows):
        config = load(["run_name=a", *words.strip("`").split()], environ={}).config
        rules = training_rules(config)
        if not rules:
            assert wanted == ["float"] * 3
            continue
        shapes = {"w": jax.ShapeDtypeStruct((256, 64), jnp.float32)}, jax.ShapeDtypeStruct((64, 256), jnp.float32)
        (row,) = octavo.plan(lambda params, x: x @ params["w"], rules, *shapes).rows
        assert [row.fwd, row.dlhs, row.drhs] == wanted, words
        settings(words.strip("`"), rules)
    with pytest.raises(ConfigError, match="quantization=int9: did you mean 'int8'"):
        load(["quantization=int9"], environ={})


@pytest.mark.parametrize(
    "name", ["int8", "fp8", "nanoo_fp8", "aqt_fp8", "aqt_fp8_full", "te_mxfp8", "fp8_full", "int4"]
)
def test_every_value_of_the_seed_makes_a_quantization(name):
    quant = maxtext.configure_quantization(seed_config(quantization=name))
    assert callable(quant.dot_general_cls(("embed", "mlp")))
    assert quant.einsum(("embed", "mlp")) is not None


def test_stored_codes_are_those_of_aqt():
    """The collection of a model in mode "convert", in structure and values, and what both then serve."""
    flax = pytest.importorskip("aqt.jax.v2.flax.aqt_flax")
    x = data((4, 16))[0]
    params = nn.Dense(8).init(jax.random.key(0), x)

    def dense(mode, ours):
        if ours:
            config = types.SimpleNamespace(quantization="int8")
            return nn.Dense(8, dot_general_cls=maxtext.configure_quantization(config, mode).dot_general_cls())
        options = {"lhs_freeze_mode": flax.FreezerMode.NONE, "rhs_freeze_mode": flax.FreezerMode.CALIBRATION_AND_VALUE}
        kind = functools.partial(
            flax.AqtDotGeneral,
            theirs.config_v3(drhs_bits=8),
            rhs_quant_mode=flax.QuantMode[mode.upper()],
            use_legacy_freezer=False,
            prng_name=None,
            **options,
        )
        return nn.Dense(8, dot_general_cls=kind)

    outs, frozen = [], []
    for ours in (True, False):
        _, stored = dense("convert", ours).apply(params, x, mutable="aqt")
        frozen.append(stored["aqt"]["AqtDotGeneral_0"]["qrhs"]["frozen"])
        outs.append(dense("serve", ours).apply({**params, **stored}, x))
    np.testing.assert_array_equal(frozen[0].qvalue, frozen[1].qvalue)
    np.testing.assert_array_equal(frozen[0].scale, frozen[1].scale[0])
    np.testing.assert_allclose(*outs, rtol=1e-6)


def test_operations_of_fp8_full():
    quant = maxtext.QwixQuantization(weight_calibration_method="fixed,-224,224")
    dense = nn.Dense(8, dot_general_cls=quant.dot_general_cls())
    x = normal(0, 4, 16)
    out, variables = dense.init_with_output(jax.random.key(1), x)
    want = octavo.dot(x, variables["params"]["kernel"], config=quant.config)
    np.testing.assert_array_equal(out, want)
    for module in (maxtext.QwixEinsum(quant.config), maxtext.Fp8Einsum()):
        shape = jax.eval_shape(
            lambda m=module: m.init_with_output(jax.random.key(0), "bi,io->bo", x, jnp.ones((16, 8)))
        )
        assert shape[0].shape == (4, 8)
