"""Rules and schedules from the configuration."""

import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import octavo
from octavo.calibration import AbsMax
from octavo.models import ModelConfig, abstract_params, apply
from octavo.pretrained import Request, export_model, open_model
from octavo.rules import QtRule, QuantizationRule, dot_config, rules_to_json
from octavo.train import train
from octavo.train import trainer as trainer_module
from octavo.train.config import ConfigError
from octavo.train.quantization import training_rules, training_schedule, with_communication
from octavo.train.trainer import Trainer
from tests.train.common import small


def compiled(rule):
    return dot_config(rule, lhs_weight=False, rhs_weight=True)


def formats(rule):
    """The formats of the six operands."""
    found = compiled(rule)
    operands = (o for m in (found.fwd, found.dlhs, found.drhs) for o in (m.lhs, m.rhs))
    return tuple(None if o is None else o.qtype.name for o in operands)


def test_no_quantization_has_no_rules():
    assert training_rules(small()) == ()
    assert training_schedule(small()).stages == ((0, ()),)


@pytest.mark.parametrize("qwix", [True, False])
@pytest.mark.parametrize("name", octavo.recipes())
def test_every_recipe_quantizes_weights_under_both_flags(name, qwix, tmp_path):
    table = tmp_path / "bits.json"
    table.write_text(json.dumps({"__default__": {"w_bits": 8, "a_bits": 8}}))
    more = {"quant_cfg_path": str(table)} if name == "intmp" else {}
    exclude, *rules = training_rules(small(quantization=name, use_qwix_quantization=qwix, **more))
    assert exclude.skip
    assert exclude.matches("decoder/layers/moe_block/router", "dot_general", weights=True)
    for rule in rules:
        assert formats(rule)[1] is not None


def test_qwix_numerics_round_to_nearest_and_reuse_codes():
    rule = compiled(training_rules(small(quantization="int8", use_qwix_quantization=True))[-1])
    assert rule.dlhs.residual == rule.drhs.residual == "reuse"
    assert str(rule.dlhs.lhs.rounding) == "Nearest()"


def test_aqt_numerics_round_gradients_stochastically_and_quantize_residuals_again():
    rule = compiled(training_rules(small(quantization="int8"))[-1])
    assert rule.dlhs.residual == rule.drhs.residual == "original"
    assert rule.dlhs.rhs is not None
    assert rule.drhs.rhs is not None
    assert str(rule.dlhs.lhs.rounding) == str(rule.drhs.lhs.rounding) == "Stochastic()"


def test_fp8_of_aqt_is_delayed_scaling():
    assert training_rules(small(quantization="fp8"))[-1] == octavo.recipe("fp8_gpu")[-1]
    assert training_rules(small(quantization="fp8", use_qwix_quantization=True))[-1] == octavo.recipe("fp8")[-1]


@pytest.mark.parametrize("qwix", [True, False])
def test_calibration_methods(qwix):
    fixed = small(
        quantization="fp8_full",
        use_qwix_quantization=qwix,
        weight_quantization_calibration_method="fixed,-224,224",
        act_quantization_calibration_method="fixed,-112,112",
        bwd_quantization_calibration_method="absmax,0.5",
    )
    rule = compiled(training_rules(fixed)[-1])
    assert (rule.fwd.rhs.calibration.high, rule.fwd.lhs.calibration.high) == (224, 112)
    assert rule.dlhs.lhs.calibration == AbsMax(0.5)


def test_one_method_sets_all_three():
    rule = compiled(training_rules(small(quantization="int8", quantization_calibration_method="rms,4"))[-1])
    for matmul in (rule.fwd, rule.dlhs, rule.drhs):
        assert type(matmul.lhs.calibration).__name__ == type(matmul.rhs.calibration).__name__ == "Rms"


@pytest.mark.parametrize("qwix", [True, False])
def test_local_shards(qwix):
    def drhs(count):
        config = small(quantization="int8", use_qwix_quantization=qwix, quantization_local_shard_count=count)
        return compiled(training_rules(config)[-1]).drhs

    assert drhs(0).lhs is None
    assert drhs(4).lhs.tile == 1 / 4
    assert drhs(1).lhs is not None


def test_constant_bounds():
    bounds = (6.0, 5.0, 4.0, 3.0, 2.0, 1.0)
    rule = compiled(training_rules(small(quantization="aqt_fp8_full", constant_bound_config=bounds))[-1])
    operands = (o for m in (rule.fwd, rule.dlhs, rule.drhs) for o in (m.lhs, m.rhs))
    assert tuple(o.calibration.bound for o in operands) == bounds


def test_exclusion_is_visible_and_can_be_overridden():
    def skipped(**changes):
        rules = training_rules(small(quantization="int8", **changes))
        return [rule.module_path for rule in rules if rule.skip]

    assert len(skipped()) == 1
    assert skipped(quantization_exclude="none") == []
    assert skipped(quantization_exclude=".*/mlp/.*") == [".*/mlp/.*"]


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.slow
def test_first_and_last_layers_stay_in_float(scan):
    config = small(
        quantization="int8",
        base_num_decoder_layers=6,
        quantization_first_layers=1,
        quantization_last_layers=1,
        unscanned_last_layers=2,
        scan_layers=scan,
    )
    rows = Trainer(config).plan().rows
    inside = ["layers"] if scan else ["layers_0", "layers_1", "layers_2"]
    found = {row.path.split("/")[1] for row in rows if row.path.startswith("decoder/") and row.reason is None}
    assert found == {*inside, "last_layers_0"}
    kept = {row.path.split("/")[1] for row in rows if row.reason == "a rule leaves it alone" and "mlp" in row.path}
    assert kept == {"first_layers_0", "last_layers_1"}


def test_own_rules(tmp_path):
    path = tmp_path / "rules.json"
    path.write_text(rules_to_json([QtRule(weight_qtype="int8")]))
    assert training_rules(small(quantization_rules_path=str(path))) == (QtRule(weight_qtype="int8"),)


@pytest.mark.parametrize(
    "changes", [{"reduce_axes": ("data", "fsdp")}, {"reduce_axes": ("fsdp",), "reduce_feedback": True}]
)
def test_own_rules_add_up_gradients_once(tmp_path, changes):
    path = tmp_path / "rules.json"
    path.write_text(rules_to_json([QtRule(weight_qtype="int8", reduce_qtype="int8", **changes)]))
    mesh = {"num_devices": 8, "ici_data_parallelism": 2, "ici_fsdp_parallelism": 4}
    schedule, spec = training_schedule(small(quantization_rules_path=str(path))), PartitionSpec(("data", "fsdp"))
    there = jax.make_mesh((2, 4), ("data", "fsdp"))
    told = with_communication(schedule, small(**mesh), there, spec)
    assert told.stages[0][1][0].reduce_axes == changes["reduce_axes"]
    with pytest.raises(
        ConfigError, match="gradient_reduce_dtype=int8 reduces all gradients over 'data', with error feedback"
    ):
        with_communication(schedule, small(**mesh, gradient_reduce_dtype="int8"), there, spec)


def test_manual_quantization_is_for_experts():
    config = small(
        quantization="fp8_full",
        use_qwix_quantization=True,
        use_manual_quantization=True,
        weight_quantization_calibration_method="fixed,-224,224",
        num_experts=2,
        base_moe_mlp_dim=32,
    )
    assert training_rules(config)[-1].op_names == ("ragged_dot", "gmm")


def test_schedule_begins_late_and_ends_early():
    schedule = training_schedule(small(quantization="int8", quantization_start_step=2, quantization_stop_step=5))
    assert [begin for begin, _ in schedule.stages] == [0, 2, 5]
    assert [bool(rules) for _, rules in schedule.stages] == [False, True, False]


def test_training_fields_of_mixed_precision(tmp_path):
    table = tmp_path / "bits.json"
    table.write_text(json.dumps({"__default__": {"w_bits": 8, "a_bits": 8, "g_bits": 4, "g_rounding": "stochastic"}}))
    rule = compiled(training_rules(small(quantization="intmp", quant_cfg_path=str(table)))[-1])
    assert rule.dlhs.lhs.qtype.name == "int4"
    assert str(rule.dlhs.lhs.rounding) == "Stochastic()"


def test_rules_print_and_are_frozen():
    rule = training_rules(small(quantization="int8", use_qwix_quantization=True))[-1]
    assert isinstance(rule, QuantizationRule)
    assert eval(repr(rule), {"QtRule": QtRule}) == rule


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "nvfp4", "te_mxfp8", "int8", "deepseek_fp8"])
def test_every_recipe_takes_local_shards(name):
    """Formats with blocks of their own contract in pieces already."""
    rules = training_rules(small(quantization=name, use_qwix_quantization=True, quantization_local_shard_count=8))
    assert compiled(rules[-1]).drhs.lhs is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization": "intmp"}, "quantization=intmp has its ranges from quant_cfg_path"),
        ({"quantization": "aqt_fp8_full", "constant_bound_config": (1.0,) * 6}, "ranges from constant_bound_config"),
    ],
)
def test_ranges_come_from_one_place(changes, message, tmp_path):
    table = tmp_path / "bits.json"
    table.write_text("{}")
    more = {"quant_cfg_path": str(table)} if changes["quantization"] == "intmp" else {}
    with pytest.raises(ValueError, match=message):
        training_rules(small(weight_quantization_calibration_method="rms,3", **changes, **more))


def test_a_method_that_a_recipe_cannot_have_raises():
    with pytest.raises(ValueError, match="calibration"):
        training_rules(small(quantization="fp8_gpu", weight_quantization_calibration_method="fixed,-1,1"))


def test_a_run_of_aqt_int8_generates_without_a_key():
    """Only its gradients are rounded stochastically."""
    rules = training_rules(small(quantization="int8"))
    assert compiled(rules[-1]).stochastic
    sizes = {"emb_dim": 16, "num_layers": 1, "num_query_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_dim": 32}
    model = ModelConfig(vocab_size=50, scan_layers=False, **sizes)
    served = octavo.served(functools.partial(apply, model), rules)
    tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    assert jax.eval_shape(served, abstract_params(model), tokens)[0].shape == (1, 4, 50)


def test_scales_of_saved_parameters_are_replicated_on_request(monkeypatch):
    """`replicate_quant_scale`, for a parameter that is sharded along its channels."""
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    weight = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, PartitionSpec(None, "fsdp")))

    def scale_spec(replicate):
        trainer = types.SimpleNamespace(
            config=small(replicate_quant_scale=replicate, save_quantized_params_path="x", quantization="int8"),
            loss=lambda params, x: jnp.sum(x @ params["w"]),
            loss_arguments=({"w": weight}, jnp.ones((2, 8))),
            rules=[QuantizationRule(weight_qtype="int8")],
            is_single_device=False,
            state=types.SimpleNamespace(params={"w": weight}, masks=None, quant={}),
        )
        monkeypatch.setattr(trainer_module, "apply_masks", lambda params, masks: params)
        return Trainer.quantized_params(trainer)["w"].scale.sharding.spec

    assert scale_spec(False) == PartitionSpec(None, "fsdp")
    assert scale_spec(True) == PartitionSpec()


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_a_run_trains_scales_and_is_served_with_them(tmp_path):
    method = {"weight_quantization_calibration_method": "lsq", "gradient_accumulation_steps": 2}
    config = small(quantization="qat_int4", base_output_directory=str(tmp_path), steps=2, learning_rate=1e-2, **method)
    train(config, log=lambda text: None)
    source = open_model(tmp_path / "test")
    learned = source.state["learned_scales"]["decoder"]["layers_1"]["mlp"]["wo"]["kernel"]["scale"]
    weight = source.leaves["decoder/layers_1/mlp/wo/kernel"].load()
    searched = octavo.Quantizer("int4", channelwise_axes=(1,), calibration="mse").quantize(jnp.asarray(weight)).scale
    assert float(jnp.abs(learned / searched - 1).mean()) > 0.01
    export_model("octavo", source, tmp_path / "low", Request("trained"))
    low = open_model(tmp_path / "low")
    stored = low.leaves["decoder/layers_1/mlp/wo/kernel"].load().scale
    np.testing.assert_allclose(stored, np.abs(learned), rtol=1e-6)  # the range is that of the magnitude
    run, tokens = functools.partial(apply, source.config), jnp.arange(24).reshape(2, 12)
    trained = octavo.quantized(run, source.rules, weights=0).stateful(source.state)
    expected = jax.jit(lambda params: trained(params, tokens)[0][0])(source.params("float32"))
    served = jax.jit(octavo.served(run, source.rules))
    np.testing.assert_array_equal(served(low.params("float32"), tokens)[0], expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"quantization_start_step": 3},
            r"quantization_start_step=3 does not combine with learned scales \(lsq\): they begin",
        ),
        ({"gradient_reduce_dtype": "int8"}, "gradient_reduce_dtype=int8 does not combine with learned scales"),
        ({"act_quantization_calibration_method": "lsq"}, "lsq learns the scales of weights"),
    ],
)
def test_keys_that_do_not_combine_with_learned_scales(changes, message):
    method = {"weight_quantization_calibration_method": "lsq"}
    with pytest.raises(ConfigError, match=message):
        training_schedule(small(quantization="qat_int4", **{**method, **changes}))
