"""Every recipe: what it is made of, and that it trains."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo._config import Config
from octavo.calibration import AmaxHistory
from octavo.rules import (
    SENSITIVE,
    QtRule,
    QuantizationRule,
    Recipe,
    dot_config,
    find,
    get_recipe,
    mixed_precision,
    recipe,
    recipes,
    register_recipe,
)
from tests.cases import REPRESENTATIVE, slow_except

PLAIN = (((1,), (0,)), ((), ()))
E4M3, E5M2, E4M3Z, E5M2Z, E2M1 = (
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn",
)  # fmt: skip
TABLE = {"__default__": {"w_bits": 8, "a_bits": 8}, ".*/query": {"w_bits": 4, "tile_size": 128, "w_scale": 0.8}}
# fwd lhs, fwd rhs; dlhs gradient, drhs gradient; residuals
FORMATS = {
    "int8": ("int8", "int8", "int8", "int8", "reuse"),
    "int4": ("int4", "int4", "int4", "int4", "reuse"),
    "fp4": (E2M1, E2M1, E2M1, E2M1, "reuse"),
    "fp8": (E4M3, E4M3, E4M3, E4M3, "reuse"),
    "fp8_e4m3": (E4M3, E4M3, E4M3, E4M3, "reuse"),
    "fp8_e5m2": (E5M2, E5M2, E5M2, E5M2, "reuse"),
    "fp8_full": (E4M3, E4M3, E5M2, E5M2, "reuse"),
    "fp8_gpu": (E4M3, E4M3, E5M2, E5M2, "reuse"),
    "fp8_nanoo": (E4M3Z, E4M3Z, E5M2Z, E5M2Z, "reuse"),
    "nanoo_fp8": (E4M3Z, E4M3Z, E5M2Z, E5M2Z, "reuse"),
    "int8w": (None, "int8", None, None, "original"),
    "int4w": (None, "int4", None, None, "original"),
    "intmp": ("int8", "int8", None, None, "reuse"),
    "aqt_fp8": (E4M3, E4M3, None, None, "original"),
    "aqt_fp8_full": (E4M3, E4M3, E5M2, E5M2, "original"),
    "te_fp8_delayedscaling": (E4M3, E4M3, E5M2, E5M2, "reuse"),
    "te_fp8_currentscaling": (E4M3, E4M3, E5M2, E5M2, "reuse"),
    "te_mxfp8": ("mxfp8", "mxfp8", "mxfp8", "mxfp8", "original"),
    "te_nvfp4": ("nvfp4", "nvfp4", "nvfp4", "nvfp4", "original"),
    "te_nvfp4_no_rht": ("nvfp4", "nvfp4", "nvfp4", "nvfp4", "original"),
    "qat_int8": ("int8", "int8", None, None, "original"),
    "qat_int4": ("int8", "int4", None, None, "original"),
    "mxfp8": ("mxfp8", "mxfp8", "mxfp8", "mxfp8", "original"),
    "mxfp4": ("mxfp4", "mxfp4", "mxfp4", "mxfp4", "original"),
    "nvfp4": ("nvfp4", "nvfp4", "nvfp4", "nvfp4", "original"),
    "deepseek_fp8": (E4M3, E4M3, E4M3, E4M3, "reuse"),
    "switchback": ("int8", "int8", "int8", None, "reuse"),
    "quartet2": ("nvfp4", "nvfp4", "nvfp4", "nvfp4", "requantize"),
    "tetrajet2": ("nvfp4", "nvfp4", "nvfp4", "nvfp4", "requantize"),
    "mxfp4_hadamard": ("mxfp4", "mxfp4", "mxfp4", "mxfp4", "original"),
    "bitnet": ("int8", "ternary", None, None, "original"),
}  # fmt: skip
ALIASES = {"fp8_e4m3": "fp8", "te_fp8_delayedscaling": "fp8_gpu", "nanoo_fp8": "fp8_nanoo", "te_mxfp8": "mxfp8"}
DELAYED = ("fp8_gpu", "te_fp8_delayedscaling", "fp8_nanoo", "nanoo_fp8")


def rules_of(name):
    return recipe(name, config=TABLE) if name == "intmp" else recipe(name)


def config_of(name, **weights):
    return dot_config(rules_of(name)[-1], **{"lhs_weight": False, "rhs_weight": False, **weights})


def qtype(operand):
    return None if operand is None else operand.qtype.name


def test_every_name_is_there():
    assert set(FORMATS) <= set(recipes(aliases=True))
    assert set(recipes(aliases=True)) - set(recipes()) == set(ALIASES)
    assert list(recipes()) == sorted(recipes())


@pytest.mark.parametrize("name", FORMATS)
def test_formats_on_either_side(name):
    act, weight, dlhs, drhs, residual = FORMATS[name]
    config = config_of(name, rhs_weight=True)
    found = (config.fwd.lhs, config.fwd.rhs, config.dlhs.lhs, config.drhs.lhs)
    assert tuple(map(qtype, found)) == (act, weight, dlhs, drhs)
    assert config.dlhs.residual == residual
    mirror = config_of(name, lhs_weight=True)
    assert (mirror.fwd.lhs, mirror.fwd.rhs, mirror.dlhs, mirror.drhs) == (
        config.fwd.rhs, config.fwd.lhs, config.drhs, config.dlhs,
    )  # fmt: skip
    assert config_of(name) is None, "products of two activations stay in float"


def test_recipes_differ_and_aliases_do_not():
    rules = [get_recipe(name).rules for name in recipes()]
    assert len(set(rules)) == len(rules)
    for name, target in ALIASES.items():
        assert get_recipe(name).alias_of == target
        assert recipe(name) == recipe(target)
        assert f"alias_of={target!r}" in repr(get_recipe(name))


@functools.partial(jax.jit, static_argnums=3)
def gradients(x, w, scaling, config):
    def loss(x, w, scaling):
        out = octavo.dot_general(x, w, PLAIN, config=config, key=jax.random.key(0), scaling=scaling)
        return jnp.mean(out**2)

    return jax.grad(loss, (0, 1, 2))(x, w, scaling)


@pytest.mark.parametrize("name", slow_except((*REPRESENTATIVE, "fp8_gpu"), [n for n in FORMATS if n not in ALIASES]))
def test_it_trains(name):
    config = config_of(name, rhs_weight=True)
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((128, 256), (256, 128)))
    scaling = octavo.ops.init_scaling(config, x, w, PLAIN)
    assert bool(scaling) == (name in DELAYED)
    grads = gradients(x, w, scaling, config)
    plain = gradients(x, w, {}, None)[:2]
    # Few bits are rough (three levels of normal values by half); a wrong axis or scale would be off by more than the
    # gradient's own size.
    bits = min(o.qtype.bits for m in (config.fwd, config.dlhs) for o in (m.lhs, m.rhs) if o is not None)
    for got, want in zip(grads[:2], plain, strict=True):
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < {2: 0.55, 4: 0.35}.get(bits, 0.15)


@pytest.mark.parametrize("name", FORMATS)
def test_it_survives_json(name):
    for rule in rules_of(name):
        assert Config.from_json(rule.to_json()) == rule
    assert Config.from_json(get_recipe(name).to_json()) == get_recipe(name)


@pytest.mark.parametrize("name", FORMATS)
def test_it_says_what_it_is(name):
    found = get_recipe(name)
    assert re.fullmatch(r"[A-Z].*\.", found.summary)
    assert re.search(r"https://|arXiv:\d{4}\.\d{5}|Specification", found.source)


def test_delayed_scaling_remembers_all_four():
    config = config_of("te_fp8_delayedscaling", rhs_weight=True)
    operands = (config.fwd.lhs, config.fwd.rhs, config.dlhs.lhs, config.drhs.lhs)
    assert all(o.tracker == AmaxHistory(length=1024) and o.per_tensor for o in operands)


def test_deepseek_tiles():
    config = config_of("deepseek_fp8", rhs_weight=True)
    assert (config.fwd.lhs.tile, config.fwd.lhs.square) == (128, False)
    assert (config.fwd.rhs.tile, config.fwd.rhs.square) == (128, True)
    assert (config.drhs.residual, config.drhs.rhs.tile, config.drhs.lhs.tile) == ("requantize", 128, 128)


def test_nvfp4_rounds_gradients_stochastically_and_rotates_that_of_the_weight():
    config = config_of("te_nvfp4", rhs_weight=True)
    assert config.fwd.rhs.square
    assert config.dlhs.lhs.rounding.stochastic
    assert config.drhs.lhs.rounding.stochastic
    assert (config.fwd.rotate, config.dlhs.rotate, config.drhs.rotate) == (None, None, 16)
    assert config_of("te_nvfp4_no_rht", rhs_weight=True).drhs.rotate is None


def test_switchback_keeps_the_weight_gradient_in_float():
    config = config_of("switchback", rhs_weight=True)
    assert config.fwd.rhs.per_tensor
    assert not config.fwd.lhs.per_tensor
    assert config.drhs == octavo.Matmul(residual="original")


@pytest.mark.parametrize(
    ("path", "excluded"),
    [
        ("decoder/moe/router", True), ("layers_0/gate_logits/kernel", True), ("token_embedder", True),
        ("lm_head", True),
        ("model/embed_tokens", True), ("decoder/logits_dense", True), ("Embed_0", True), ("layers/router_1/w", True),
        ("layers/mlp/gate_proj", False), ("layers/mlp/gate", False), ("layers/routers_mlp", False),
        ("embedding_projection/up", False), ("decoder/layers/mlp/wi", False),
    ],
)  # fmt: skip
def test_what_is_left_out_by_default(path, excluded):
    rule = find(recipe("int8"), path, "dot_general", weights=True)
    assert rule.skip == excluded
    assert rule.optional == excluded


def test_left_out_by_choice():
    assert recipe("int8", exclude=None) == (
        QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", scope="weights"),
    )
    assert recipe("int8", exclude="head")[0] == QuantizationRule(module_path="head", skip=True, optional=True)
    assert recipe("int8")[0].module_path == SENSITIVE
    with pytest.raises(ValueError, match=r"module_path='\('"):
        recipe("int8", exclude="(")


def test_fields_can_be_changed():
    rule = recipe("fp8_full", ".*/layers/.*", weight_calibration_method="fixed,-224,224", op_names=("gmm",))[-1]
    assert (rule.module_path, rule.weight_calibration_method, rule.op_names) == (
        ".*/layers/.*",
        "fixed,-224,224",
        ("gmm",),
    )
    assert recipe("int8", scope="all")[-1].scope == "all"


def test_tiles_are_for_matmuls_only():
    for name in ("deepseek_fp8", "te_mxfp8", "te_nvfp4", "te_nvfp4_no_rht", "mxfp8", "mxfp4", "nvfp4"):
        assert find(recipe(name, exclude=None), "a", "conv_general_dilated", weights=True) is None
        for op in ("dot_general", "einsum", "ragged_dot", "gmm"):
            assert find(recipe(name, exclude=None), "a", op, weights=True)
    assert find(recipe("int8", exclude=None), "a", "conv_general_dilated", weights=True)


def test_experts_are_not_rotated():
    rules = recipe("te_nvfp4", exclude=None)
    x, w, sizes = jnp.ones((32, 32)), jnp.ones((2, 32, 16)), jnp.asarray([16, 16], jnp.int32)
    config = dot_config(find(rules, "a", "ragged_dot", weights=True), lhs_weight=False, rhs_weight=True)
    grad = jax.grad(lambda w: jnp.sum(octavo.ragged_dot(x, w, sizes, config=config, key=jax.random.key(0))))
    assert np.allclose(jax.jit(grad)(w), 16, rtol=0.1)
    assert [rule.op_names for rule in recipe("te_nvfp4", exclude=None, op_names=("einsum",))] == [("einsum",)]
    assert [rule.optional for rule in rules] == [True, False]


def test_errors():
    with pytest.raises(ValueError, match=r"recipe\('mxfp8'\) is not for 'conv_general_dilated'; it is for dot_general"):
        recipe("mxfp8", op_names=("gmm", "conv_general_dilated"))
    with pytest.raises(ValueError, match="unknown recipe 'int88': did you mean 'int8'"):
        recipe("int88")
    with pytest.raises(ValueError, match=r"recipe\('int8'\): QtRule has no field 'tilesize'; did you mean 'tile_size'"):
        recipe("int8", tilesize=128)
    with pytest.raises(ValueError, match=r"recipe\('deepseek_fp8'\): tile_size=64 would not be read: fwd"):
        recipe("deepseek_fp8", tile_size=64)
    with pytest.raises(ValueError, match=r"weight_qtype='int8' but fwd\.rhs is float8_e4m3fn"):
        recipe("deepseek_fp8", weight_qtype="int8")
    with pytest.raises(ValueError, match="config= is for the recipe 'intmp'"):
        recipe("int8", config=TABLE)
    with pytest.raises(ValueError, match=r"recipe 'intmp' is a table of bits by layer: pass config=\{"):
        recipe("intmp")


def test_registering(monkeypatch):
    monkeypatch.setattr("octavo.rules.registry._recipes", {})
    mine = Recipe(name="mine", summary="Mine.", source="-", rules=(QtRule(weight_qtype="int8"),), exclude=None)
    assert register_recipe(mine) is mine
    assert recipes() == ("mine",)
    assert recipe("mine") == (QtRule(weight_qtype="int8"),)
    with pytest.raises(ValueError, match="a recipe named 'mine' exists"):
        register_recipe(mine)
    with pytest.raises(ValueError, match="exclude='\\['"):
        mine.replace(exclude="[")


def test_mixed_precision(tmp_path):
    file = tmp_path / "mixed.json"
    file.write_text(json.dumps({**TABLE, ".*/out": {"w_bits": None, "a_bits": None}, ".*/query": TABLE[".*/query"]}))
    rules = recipe("intmp", config=file)
    path = "decoder/attention/query"
    query = find(rules, path, "dot_general", weights=True)
    assert (query.weight_qtype, query.act_qtype, query.tile_size) == ("int4", "int8", 128)
    assert query.weight_calibration_method == "absmax,0.8"
    assert find(rules, "decoder/attention/out", "dot_general", weights=True).skip
    assert find(rules, "decoder/mlp/wi", "dot_general", weights=True).weight_qtype == "int8"
    assert find(rules, "lm_head", "dot_general", weights=True).skip
    # A later entry of the table wins, and one that names a layer wins over what is left out by default.
    later = mixed_precision({".*/key": {"w_bits": 8}, ".*/(key|logits)": {"w_bits": 4}})
    assert find(later, "a/key", "dot_general", weights=True).weight_qtype == "int4"
    assert find(later, "a/logits", "dot_general", weights=True).weight_qtype == "int4"
    assert mixed_precision({"__default__": {"w_bits": 8, "tile_size": -1}})[-1].tile_size is None


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({".*": {"wbits": 8}}, "intmp: '.*' has an unknown key 'wbits'; did you mean 'w_bits'"),
        ({".*": 8}, "a mapping such as"),
        ({".*": {"a_bits": 8}}, "a_bits=8 but no w_bits"),
        ({".*/q": {"w_bits": 9}}, "intmp: '.*/q': weight_qtype='int9'"),
        ({"(": {"w_bits": 8}}, r"intmp path='\('"),
    ],
)
def test_mixed_precision_errors(table, message):
    with pytest.raises(ValueError, match=message):
        mixed_precision(table)


def test_mixed_precision_for_training():
    """The fields beyond MaxText's: bits, clipping, rounding and tiles of gradients."""
    table = {
        "__default__": {"w_bits": 8, "a_bits": 8, "g_bits": 8, "g_rounding": "stochastic"},
        ".*/wo": {"g_bits": 4, "g_scale": 0.9, "g_rounding": "nearest", "g_tile_size": 64},
        ".*/key": {"g_bits": None, "g_rounding": None} | {"w_bits": 4},
    }
    with pytest.raises(ValueError, match=r"intmp: '\.\*/key' has g_rounding=None but no g_bits; set g_bits too"):
        mixed_precision(table, exclude=None)
    del table[".*/key"]
    wo, rest = mixed_precision(table, exclude=None)
    assert (rest.bwd_qtype, rest.bwd_stochastic_rounding) == ("int8", "uniform")
    assert (wo.bwd_qtype, wo.bwd_stochastic_rounding, wo.bwd_weight_grad_tile_size) == ("int4", None, 64)
    assert wo.bwd_calibration_method == "absmax,0.9"
    with pytest.raises(ValueError, match="g_rounding='up'; it is one of nearest, stochastic"):
        mixed_precision({"__default__": {"w_bits": 8, "a_bits": 8, "g_bits": 8, "g_rounding": "up"}})
