"""Meshes: axis sizes, shardings, errors, and that a step computes the same on any of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import octavo
from octavo.checkpoint import CheckpointManager
from octavo.models import apply
from octavo.train.__main__ import main as run
from octavo.train.config import ConfigError
from octavo.train.mesh import axis_sizes, make_mesh
from octavo.train.program import Program, abstract_train_state
from octavo.train.sharding import (
    axis_rules,
    batch_spec,
    logical_axes,
    param_specs,
    partition_spec,
    shard_balance,
)
from octavo.train.telemetry import Telemetry
from octavo.train.trainer import Trainer
from tests.train.common import EXPERTS, small, words

pytestmark = pytest.mark.standard_promotion

MESHES = {
    "fsdp8": {"ici_fsdp_parallelism": 8},
    "fsdp2-tensor2-expert2": {
        "ici_fsdp_parallelism": 2,
        "ici_tensor_parallelism": 2,
        "ici_expert_parallelism": 2,
    },
    "data2-fsdp4": {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 4},
    "context2-stage2-fsdp2": {"ici_context_parallelism": 2, "ici_stage_parallelism": 2},
}
# What stands for a large model here has norms that are a larger share of it.
SIZES = {"base_num_kv_heads": 2, "sharding_tolerance": 0.5}


def meshed(rows: int = 1, **changes):
    """All eight devices, with this many rows for each."""
    return small(**{**SIZES, "num_devices": 0, "per_device_batch_size": rows, **changes})


def single(rows: int = 1, **changes):
    """One device with the rows of eight."""
    return small(**{**SIZES, "per_device_batch_size": 8 * rows, **changes})


def config_errors(**changes) -> str:
    with pytest.raises(ConfigError) as caught:
        Program(meshed(**changes), vocab_size=256)
    return str(caught.value).split("\n  - ", 1)[1]


# Sizes.


def test_an_open_axis_size_is_inferred():
    assert str(axis_sizes(meshed(), 8)) == "fsdp=8"
    assert str(axis_sizes(meshed(ici_tensor_parallelism=4), 8)) == "fsdp=2 x tensor=4"
    across = meshed(dcn_data_parallelism=-1, ici_tensor_parallelism=2)
    assert str(axis_sizes(across, 16, slices=4)) == "data=4 x fsdp=2 x tensor=2"
    assert axis_sizes(meshed(dcn_fsdp_parallelism=2), 8)["fsdp"] == 8


def test_slices_are_the_slow_part_of_an_axis():
    mesh = make_mesh(meshed(dcn_data_parallelism=2, ici_data_parallelism=2, ici_fsdp_parallelism=2))
    numbers = [[device.id for device in row] for row in mesh.devices.reshape(4, 2)]
    assert numbers == [[0, 1], [2, 3], [4, 5], [6, 7]]
    other = make_mesh(meshed(dcn_fsdp_parallelism=2, ici_data_parallelism=2, ici_fsdp_parallelism=2))
    assert [[device.id for device in row] for row in other.devices.reshape(2, 4)] == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"ici_tensor_parallelism": 3},
            "ici_tensor_parallelism=3 does not divide the 8 devices: nothing is left that -1 could be",
        ),
        (
            {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
            "ici_fsdp_parallelism=2 x ici_tensor_parallelism=2 = 4, but there are 8 devices: let one be -1, or set "
            "num_devices",
        ),
        ({"dcn_data_parallelism": 3}, "dcn_data_parallelism=3 does not divide the 8 devices of this run"),
        ({"num_devices": 9}, "num_devices=9, but there are 8 devices"),
        ({"mesh_axes": ("data", "fsdp"), "ici_tensor_parallelism": 2}, "tensor=2, but mesh_axes has no tensor"),
        (
            {"base_num_kv_heads": 1, "ici_tensor_parallelism": 2},
            "kv_heads=1 of decoder/layers/self_attention/key/kernel and 1 more does not divide by tensor=2: choose "
            "other sizes, or another rule for it in logical_axis_rules",
        ),
        (
            {"base_emb_dim": 36},
            "embed=36 of decoder/layers/mlp/wi_0/kernel and 7 more does not divide by fsdp=8",
        ),
        (
            {"base_num_decoder_layers": 3, "ici_stage_parallelism": 2},
            "layers=3 of decoder/layers/mlp/wi_0/kernel and 8 more does not divide by stage=2",
        ),
        (
            {"num_experts": 3, "ici_expert_parallelism": 2},
            "exp=3 of decoder/layers/moe_block/wi_0/kernel and 2 more does not divide by expert=2",
        ),
        (
            {"per_device_batch_size": 0.5},
            "per_device_batch_size=0.5 on 8 devices makes 4 rows, which do not divide by fsdp=8",
        ),
        (
            {"per_device_batch_size": 0.3},
            "per_device_batch_size=0.3 on 8 devices makes 2.4 rows, which is no whole number of at least 1",
        ),
        (
            {"per_device_batch_size": 0.5, "gradient_accumulation_steps": 3},
            "4 rows do not divide into gradient_accumulation_steps=3 microbatches",
        ),
        (
            {"max_target_length": 33, "ici_context_parallelism": 2, "ici_fsdp_parallelism": 4},
            "max_target_length=33 does not divide by context=2",
        ),
        (
            {"logical_axis_rules": ("embed:", "norm:"), "sharding_tolerance": 0.02},
            "a device holds 28,832 of 28,832 parameters, 700.0 % more than an even share of 3,604 over fsdp=8, and "
            "sharding_tolerance=0.02: token_embedder/embedding [256, 32] is replicated 8 times; decoder/layers/",
        ),
    ],
)
def test_sizes_that_do_not_fit_raise_with_the_numbers(changes, text):
    assert text in config_errors(**changes)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("embd:fsdp", "did you mean 'embed'? Known: activation_batch"),
        ("embed:fsd", "did you mean 'fsdp'? Known: data, stage"),
        ("embed", "'embed' is no rule: write embed:fsdp+expert, or embed: for a replicated axis"),
    ],
)
def test_rules_that_are_none(rule, text):
    with pytest.raises(ConfigError) as caught:
        small(logical_axis_rules=(rule,))
    assert text in str(caught.value)


def test_the_command_fails_before_it_compiles(tmp_path, capsys):
    sizes = {"base_output_directory": tmp_path, "num_devices": 0, "base_num_kv_heads": 2}
    assert run(words(**sizes, ici_tensor_parallelism=3)) == 2
    assert "ici_tensor_parallelism=3 does not divide the 8 devices" in capsys.readouterr().err
    assert run(words(**sizes, base_emb_dim=36)) == 2
    assert "does not divide by fsdp=8" in capsys.readouterr().err


# Shardings.


def test_parameters_are_sharded_by_their_logical_axes():
    config = meshed(**MESHES["fsdp2-tensor2-expert2"], **EXPERTS, shared_experts=1, first_num_dense_layers=1)
    program = Program(config, vocab_size=256)
    decoder = program.param_specs["decoder"]
    assert program.param_specs["token_embedder"]["embedding"] == P("tensor", ("fsdp", "expert"))
    assert decoder["layers"]["self_attention"]["query"]["kernel"] == P(None, ("fsdp", "expert"), "tensor")
    assert decoder["layers"]["self_attention"]["out"]["kernel"] == P(None, "tensor", ("fsdp", "expert"))
    assert decoder["layers"]["moe_block"]["wi_0"]["kernel"] == P(None, "expert", "fsdp", "tensor")
    assert decoder["layers"]["moe_block"]["wo"]["kernel"] == P(None, "expert", "tensor", "fsdp")
    assert decoder["dense_layers"]["mlp"]["wo"]["kernel"] == P(None, "tensor", ("fsdp", "expert"))
    assert batch_spec(config, program.mesh) == P(("fsdp", "expert"))
    cut = [spec for spec in jax.tree.leaves(program.param_specs, is_leaf=lambda x: isinstance(x, P)) if spec == P()]
    assert not cut


def test_every_parameter_of_every_model_has_names():
    model = Program(small(**EXPERTS, shared_experts=1, logits_via_embedding=False), vocab_size=256).model
    model = model.replace(qkv_bias=True, qk_norm=True)
    from octavo.models import abstract_params

    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params(model)):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert any(logical_axes(name, leaf.ndim)), name


def test_a_rule_replaces_the_default_of_its_name():
    config = meshed(logical_axis_rules=("embed:", "mlp:fsdp", "heads:fsdp", "kv_heads:fsdp"), base_num_query_heads=8,
                    base_num_kv_heads=8, head_dim=4, sharding_tolerance=2.0)  # fmt: skip
    specs = param_specs(Program(config, vocab_size=256).model, make_mesh(config), axis_rules(config))
    assert specs["decoder"]["layers"]["mlp"]["wo"]["kernel"] == P(None, "fsdp")
    assert specs["token_embedder"]["embedding"] == P()


def test_the_state_is_sharded_as_its_parameters():
    config = meshed(opt_type="muon", quantization="fp8_gpu", weight_sparsity_n=2, weight_sparsity_m=4)
    state = abstract_train_state(config, vocab_size=256)
    kernel = ["decoder", "layers", "mlp", "wo", "kernel"]
    wanted = functools.reduce(dict.__getitem__, kernel, state.params).sharding.spec
    assert wanted == P(None, None, "fsdp")
    assert state.masks["/".join(kernel)].sharding.spec == wanted
    found = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state)
        if "['wo']" in jax.tree_util.keystr(path)
    }
    assert found
    assert {leaf.sharding.spec for leaf in found.values() if leaf.shape} == {wanted}
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(state.quant)} == {P()}


def test_a_step_is_lowered_without_arrays():
    program = Program(meshed(quantization="int8", use_qwix_quantization=True), vocab_size=256)
    text = program.lower("train").as_text()
    assert '"fsdp"=8' in text
    assert shard_balance(program.model, program.mesh, axis_rules(program.config)).excess == 0


# The same step.


def losses(config, steps: int) -> list[float]:
    trainer = Trainer(config)
    return [float(trainer.step()["learning/loss"]) for _ in range(steps)]


@pytest.mark.slow
def test_two_steps_in_float_are_those_of_one_device():
    changes = {"base_num_decoder_layers": 1}
    one = losses(single(**changes), 2)
    np.testing.assert_allclose(losses(meshed(**MESHES["fsdp2-tensor2-expert2"], **changes), 2), one, rtol=1e-6)


RECIPES = {
    "float": {},
    "int8": {"quantization": "int8", "use_qwix_quantization": True},
    "int8-stochastic": {"quantization": "int8"},
    "fp8_full": {"quantization": "fp8_full", "use_qwix_quantization": True},
    "fp8-fixed": {
        "quantization": "fp8_full",
        "use_qwix_quantization": True,
        "weight_quantization_calibration_method": "fixed,-224,224",
        "act_quantization_calibration_method": "fixed,-224,224",
    },
    "deepseek": {"quantization": "deepseek_fp8"},
    "delayed": {"quantization": "fp8_gpu"},
}
# Tiles of 128 by 128 need matrices of that size.
TILES = {"base_emb_dim": 128, "base_mlp_dim": 128, "base_moe_mlp_dim": 128}
# Every recipe, and every mesh of several axes with both kinds of layers; other tests have one axis.
CASES = [
    ("deepseek", "data2-fsdp4", "experts"),
    ("int8-stochastic", "fsdp2-tensor2-expert2", "dense"),
    ("fp8-fixed", "fsdp2-tensor2-expert2", "experts"),
    ("float", "context2-stage2-fsdp2", "dense"),
    ("int8", "context2-stage2-fsdp2", "experts"),
    ("delayed", "data2-fsdp4", "dense"),
    ("fp8_full", "data2-fsdp4", "dense"),
]


def trainer_of(recipe: str, mesh: str | None, kind: str) -> Trainer:
    changes = {**RECIPES[recipe], **(EXPERTS if kind == "experts" else {}), "steps": 20}
    changes |= TILES if recipe == "deepseek" else {}
    changes |= {"sharding_tolerance": 2.0} if mesh and "stage" in mesh else {}
    return Trainer(meshed(2, **MESHES[mesh], **changes) if mesh else single(2, **changes))


def twenty(trainer: Trainer) -> np.ndarray:
    return np.asarray([float(trainer.step()["learning/loss"]) for _ in range(20)])


@functools.cache
def one_device(recipe: str, kind: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Twenty losses, and those with weights that are off by one in the last place, at random (not in float)."""
    trainer = trainer_of(recipe, None, kind)
    # A step gives its arrays away.
    start, rng = jax.tree.map(jnp.copy, trainer.state), np.random.default_rng(0)
    losses = twenty(trainer)
    if recipe == "float":
        return losses, None

    def off(x):
        return jax.device_put(np.nextafter(x, np.where(rng.random(x.shape) < 0.5, np.float32(9), np.float32(-9))))

    trainer.resume(type(start)(**{**vars(start), "params": jax.tree.map(off, start.params)}))
    return losses, twenty(trainer)


def case_of(recipe: str, mesh: str, kind: str):
    # Unoptimized, the steps of these larger matrices take longer than their optimized compilation.
    marks = [pytest.mark.codegen] if recipe == "deepseek" else []
    return pytest.param(recipe, mesh, kind, id=f"{recipe}-{mesh}-{kind}", marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "mesh", "kind"), [case_of(*case) for case in CASES])
def test_twenty_steps_are_those_of_one_device(recipe, mesh, kind):
    """To the order in which devices add: in float to 1e-5 of the loss.

    Rounding to a few bits has no such limit. A value next to the middle between two codes goes to the other one, and
    its token's product is off by a part in 127, or in 16. What one device does when its weights are off in their last
    place is the measure of that: a mesh may be as far off, and a little more because twenty steps are a small sample.
    """
    (one, near), many = one_device(recipe, kind), twenty(trainer_of(recipe, mesh, kind))
    assert one[-1] < one[0] - 0.2
    if recipe == "float":
        np.testing.assert_allclose(many, one, rtol=1e-5)
        return
    assert abs(many[0] - one[0]) < 2e-3
    np.testing.assert_allclose(many, one, rtol=5e-3)
    drift = np.abs(near - one).mean()
    assert np.abs(many - one).mean() < 4 * drift + 1e-4


EXPLICIT = {
    "data2-fsdp2-tensor2": {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
    "fsdp8": MESHES["fsdp8"],
    "fsdp2-tensor2-expert2": MESHES["fsdp2-tensor2-expert2"],
    "stage2-fsdp4": {"ici_stage_parallelism": 2, "sharding_tolerance": 2.0},
}


def explicit_losses(mode: str, steps: int, **changes) -> list[float]:
    trainer = Trainer(meshed(2, shard_mode=mode, **changes))
    kind = jax.sharding.AxisType.Explicit if mode == "explicit" else jax.sharding.AxisType.Auto
    assert {kind} == set(trainer.mesh.axis_types)
    return [float(trainer.step()["learning/loss"]) for _ in range(steps)]


@pytest.mark.codegen
@pytest.mark.parametrize(
    ("recipe", "mesh", "changes"),
    [
        ("float", "stage2-fsdp4", {"logits_via_embedding": False}),
        ("int8", "data2-fsdp2-tensor2", {}),
        ("int8", "fsdp8", {"gradient_accumulation_steps": 2}),
        ("int8", "data2-fsdp2-tensor2", {"use_batch_split_schedule": True, "remat_policy": "full"}),
        ("fp8_full", "data2-fsdp2-tensor2", {"scan_layers": False}),
        ("delayed", "data2-fsdp2-tensor2", {}),
        ("int8", "fsdp2-tensor2-expert2", EXPERTS),
    ],
)
def test_explicit_shardings_train_as_automatic_ones(recipe, mesh, changes):
    """The first loss of an integer recipe is the same to the last bit: its products are, and so is what is between.

    But with experts or microbatches: what they give is summed in an order that is the compiler's.
    """
    changes = {**RECIPES[recipe], **EXPLICIT[mesh], **changes}
    auto, explicit = (explicit_losses(mode, 3, **changes) for mode in ("auto", "explicit"))
    if recipe == "int8":
        in_parts = changes.get("num_experts") or changes.get("gradient_accumulation_steps")
        assert explicit[0] == pytest.approx(auto[0], rel=2e-7 if in_parts else 0, abs=0)
    np.testing.assert_allclose(explicit, auto, rtol=1e-6 if recipe == "float" else 1e-3)


def test_an_explicit_step_has_a_type():
    """Without running it: the state comes out of a step as it went in, and every product of it is planned."""
    program = Program(
        meshed(2, shard_mode="explicit", **EXPLICIT["data2-fsdp2-tensor2"], **RECIPES["int8"]), vocab_size=256
    )
    state = abstract_train_state(program.config, program.mesh, vocab_size=256)
    batch = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=program.batch_sharding)
        for name, x in program.abstract_batch.items()
    }
    out, _ = jax.eval_shape(functools.partial(program.train_step.train, step=0), state, batch)
    specs = jax.tree.map(lambda x: x.sharding.spec, (state.params, out.params))
    assert specs[0] == specs[1]
    auto = Program(program.config.replace(shard_mode="auto"), vocab_size=256)
    assert [row.rule for row in program.plan().rows] == [row.rule for row in auto.plan().rows]


def logits(trainer: Trainer) -> np.ndarray:
    """Of a batch, in the precision of the trainer."""
    batch = trainer.batch(0)
    low = octavo.quantized(functools.partial(apply, trainer.model), trainer.rules, weights="params")

    def forward(params, inputs, positions, segments):
        with jax.sharding.use_abstract_mesh(trainer.mesh.abstract_mesh):
            return low(params, inputs, positions, segments)[0]

    names = ("inputs", "inputs_position", "inputs_segmentation")
    return np.asarray(jax.jit(forward)(trainer.state.params, *(batch[name] for name in names)))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp8", "data2-fsdp4"])
def test_logits_of_integer_matmuls_are_bit_exact(mesh):
    """With four rows for each device the float parts between the products are computed alike, too."""
    one, many = Trainer(single(4, **RECIPES["int8"])), Trainer(meshed(4, **MESHES[mesh], **RECIPES["int8"]))
    # Drawn by programs of other shapes, the parameters may differ in their last bit.
    same = jax.device_put(jax.device_get(one.state.params), many.state_shardings.params)
    many.resume(type(many.state)(**{**vars(many.state), "params": same}))
    np.testing.assert_array_equal(logits(many), logits(one))


MATMULS = {
    "decoder/layers_0/mlp/wi_0/kernel": (64, 96),
    "decoder/layers_0/mlp/wo/kernel": (64, 96),
    "decoder/layers_0/moe_block/wi_0/kernel": (4, 64, 96),
    "decoder/layers_0/moe_block/wo/kernel": (4, 64, 96),
}


@functools.cache
def integer_matmuls():
    """All of them in one quantized function, its arguments, and what it gives on one device."""
    keys = jax.random.split(jax.random.key(0), 1 + len(MATMULS))
    rows, sizes = jax.random.normal(keys[0], (64, 64)), jnp.asarray([20, 0, 31, 13])
    params = {path: jax.random.normal(key, MATMULS[path]) for path, key in zip(MATMULS, keys[1:], strict=True)}

    def matmuls(params, rows):
        return [rows @ w if w.ndim == 2 else jax.lax.ragged_dot(rows, w, sizes) for w in params.values()]

    low = octavo.quantized(matmuls, octavo.recipe("int8", exclude=None), weights="params")
    return low, params, rows, jax.jit(low)(params, rows)


@pytest.mark.parametrize("mesh", MESHES)
def test_integer_matmuls_are_bit_exact(mesh):
    """Sums of integers and largest magnitudes do not depend on which device adds and compares what."""
    (low, params, rows, expected), config = integer_matmuls(), meshed(**MESHES[mesh])
    devices, rules = make_mesh(config), axis_rules(config)
    specs = {path: partition_spec(logical_axes(path, w.ndim), devices, rules) for path, w in params.items()}
    assert all(any(spec) for spec in specs.values())
    places = {path: NamedSharding(devices, spec) for path, spec in specs.items()}
    found = jax.jit(low, in_shardings=(places, NamedSharding(devices, batch_spec(config, devices))))(params, rows)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


# From one mesh to another.


@pytest.mark.slow
def test_a_run_resumes_on_another_mesh(tmp_path):
    """One device, then eight, then two by two by two, then one: every array as it was, each time where it belongs."""
    changes = {**RECIPES["delayed"], "opt_type": "adamw", **EXPERTS}
    configs = [
        single(2, **changes),
        meshed(2, **changes),
        meshed(2, **MESHES["fsdp2-tensor2-expert2"], **changes),
        single(2, **changes),
    ]
    expected = losses(configs[0], 4)
    found, before = [], None
    with CheckpointManager(tmp_path) as checkpoints:
        for number, config in enumerate(configs):
            trainer = Trainer(config)
            if number:
                restored = checkpoints.restore(trainer.state)
                for a, b in zip(jax.tree.leaves(restored.state), jax.tree.leaves(before), strict=True):
                    np.testing.assert_array_equal(a, b)
                if not trainer.is_single_device:
                    same = jax.tree.map(lambda x, s: x.sharding == s, restored.state, trainer.state_shardings)
                    assert all(jax.tree.leaves(same))
                trainer.resume(restored.state)
            found.append(float(trainer.step()["learning/loss"]))
            before = jax.tree.map(np.asarray, trainer.state)
            checkpoints.save(number + 1, trainer.state)
    np.testing.assert_allclose(found, expected, rtol=5e-3)


@pytest.mark.slow
def test_masks_evaluation_and_telemetry_run_on_a_mesh():
    """Masks, microbatches, evaluation, telemetry and quantized parameters."""
    config = meshed(
        2,
        **MESHES["fsdp2-tensor2-expert2"],
        **RECIPES["int8"],
        weight_sparsity_n=2,
        weight_sparsity_m=4,
        weight_sparsity_start_step=1,
        gradient_accumulation_steps=2,
        quantization_metrics_interval=1,
    )
    trainer = Trainer(config)
    for _ in range(2):
        trainer.step()
    mask = trainer.state.masks["decoder/layers/mlp/wo/kernel"]
    assert mask.sharding.spec == P(None, "tensor", ("fsdp", "expert"))
    assert (np.asarray(mask).reshape(2, 16, 4, 32).sum(axis=2) == 2).all()
    assert 4 < trainer.evaluate() < 7
    assert 25 < Telemetry(trainer).measure(1)["weight"]["sqnr_db"] < 60
    low = trainer.quantized_params()["decoder"]["layers"]["mlp"]["wo"]["kernel"]
    assert low.qvalue.sharding.spec == P(None, "tensor", ("fsdp", "expert"))
    assert low.scale.sharding.spec[-1] == ("fsdp", "expert")
    assert low.scale.shape[-1] == 32
