"""Looking ahead: topologies, the roofline, the weights that a step sends, and whole looks."""

import dataclasses
import functools

import pytest

from octavo.hlo.collectives import Collective, Traffic, partitioned_hlo, read_traffic
from octavo.hlo.text import Shape
from octavo.hlo.work import Work
from octavo.train.ahead import AheadError, Look, look, look_ahead, multiplied, sides
from octavo.train.chips import Topology, chip, chips, topology
from octavo.train.config import Config, ConfigError
from octavo.train.roofline import Roofline, estimate, flops_by_type, memory_bytes
from octavo.train.setup import Setup

pytestmark = pytest.mark.standard_promotion  # Optax promotes

TINY = {
    "base_emb_dim": 64,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "base_mlp_dim": 128,
    "base_num_decoder_layers": 2,
    "vocab_size": 64,
    "max_target_length": 16,
    "per_device_batch_size": 1,
    "dataset_type": "synthetic",
}

# Topologies.


@pytest.mark.parametrize(
    ("text", "platform", "name", "devices"),
    [
        ("tpu:v5e-256", "tpu", "v5e", 256),
        ("TPU:v5p-8", "tpu", "v5p", 8),
        ("tpu:7x-4", "tpu", "7x", 4),
        ("cuda:8", "cuda", "h100", 8),
        ("cuda:b200-64", "cuda", "b200", 64),
        ("cpu:8", "cpu", "host", 8),
    ],
)
def test_topology(text, platform, name, devices):
    found = topology(text)
    assert (found.chip.platform, found.chip.name, found.devices) == (platform, name, devices)
    assert topology(str(found)) == found


@pytest.mark.parametrize(
    ("text", "nearest"),
    [("tpu:v5f-256", "tpu:v5"), ("cuda:h1000-8", "cuda:h100-N"), ("cpu:", "cpu:N"), ("tpu:h100-8", ""), ("cuda:0", "")],
)
def test_unknown_topologies_list_what_there_is(text, nearest):
    with pytest.raises(ConfigError) as error:
        topology(text)
    message = str(error.value)
    assert f"topology={text}: no topology is called so; there are {nearest}" in message
    assert all(name in message for name in ("tpu:v5e-N", "tpu:7x-N", "cuda:N", "cuda:a100-N", "cpu:N"))
    assert "where N is how many devices" in message


def test_a_topology_has_devices():
    with pytest.raises(ValueError, match="a topology has 1 device or more, got 0"):
        Topology(chip("v5e"), 0)


def test_every_accelerator_has_all_of_its_rates():
    for found in chips().values():
        rates = (found.bf16, found.memory, found.bandwidth, found.link, found.int8 or found.fp8)
        assert all(rates) or found.platform == "cpu", found


def test_types_without_units_of_their_own_run_in_bfloat16():
    assert chip("v5e").peak(8) == chip("v5e").peak(16) == 197e12
    assert chip("v5e").peak(8, is_float=False) == 393e12
    assert chip("h100").peak(8) == chip("h100").peak(8, is_float=False) == 1979e12
    assert chip("h100").peak(32) == 494e12


def test_groups_larger_than_a_node_use_the_network():
    assert chip("h100").sends(8) == 450e9
    assert chip("h100").sends(16) == 50e9
    assert chip("v5e").sends(256) == 200e9


# The roofline.

_WORK = (
    Work("dot", Shape("s8", (1000, 1000)), Shape("s8", (1000, 1000)), Shape("s32", (1000, 1000)), 2 * 10**9, count=3),
    Work("dot", Shape("bf16", (1000, 500)), Shape("bf16", (500, 1000)), Shape("f32", (1000, 1000)), 10**9),
)
_TRAFFIC = Traffic((Collective("all-gather", "s8", (1000, 1000), 8, count=3), Collective("all-reduce", "f32", (8,), 8)))


def test_roofline():
    held = 10**6
    moved = 3 * 6_000_000 + 6_000_000 + 3 * 1_000_000 + 32 + 2 * held
    assert memory_bytes(_WORK, _TRAFFIC, held) == moved
    assert flops_by_type(_WORK) == {"s8 x s8": 6 * 10**9, "bf16 x bf16": 10**9}
    found = estimate(_WORK, _TRAFFIC, held, chip("v5e"))
    assert found is not None
    assert found.compute == pytest.approx(6e9 / 393e12 + 1e9 / 197e12)
    assert found.memory == pytest.approx(moved / 819e9)
    assert found.network == pytest.approx((3 * 875_000 + 56) / 200e9)
    assert found.overlapped == found.memory
    assert found.bound == "memory"
    assert found.serial == found.compute + found.memory + found.network


def test_no_estimate_for_what_nothing_is_published_of():
    assert estimate(_WORK, _TRAFFIC, 0, chip("host")) is None


def test_the_bound_is_the_longest():
    assert Roofline(1.0, 2.0, 3.0).bound == "network"


# Looks.


def test_sides():
    plain = Config(**TINY)
    assert sides(plain) == {"float": plain}
    low = plain.replace(quantization="int8")
    assert sides(low) == {"float": plain, "int8": low}


@pytest.mark.parametrize("platform", ["tpu:v5e-8", pytest.param("cpu:8", marks=pytest.mark.slow)])
def test_a_look(platform):
    where = topology(platform)
    found = look("float", Config(**TINY | {"base_num_decoder_layers": 1}), where)
    assert found.mesh == "fsdp=8"
    assert found.parameters == 64 * 64 + 2 * 64 + 64 + 64 * 16 * 12 + 3 * 64 * 128
    assert found.held["params"] * 8 == found.parameters * 4
    assert found.held["opt_state"] == 2 * found.held["params"] + 8
    assert (found.rows, found.tokens) == (8, 128)
    assert found.temporaries > 0
    # Forward and both gradients of every weight's product, and of attention's two, for one row of sixteen tokens.
    weights, attention = found.parameters - 3 * 64, 2 * 2 * 16 * 16 * 64
    assert sum(found.flops.values()) >= 3 * (2 * 16 * weights + attention)
    assert sum(found.flops.values()) == pytest.approx(found.even, rel=0.01)
    assert found.low == {"forward": 0.0, "backward": 0.0}
    assert found.traffic["weights"] > 0
    # CPUs have no reduce-scatter; the others do.
    assert ("reduce-scatter" in found.traffic["by_kind"]) == (platform != "cpu:8")
    assert (found.seconds is None) == (platform == "cpu:8")
    assert {m["path"] for m in found.matmuls} >= {"decoder/layers/mlp/wo"}
    assert Look(**dataclasses.asdict(found)) == found


@pytest.mark.slow
def test_what_a_compiler_left_behind_is_enough(tmp_path):
    config, where = Config(**TINY | {"base_num_decoder_layers": 1}), topology("tpu:v5e-8")
    whole = look("float", config, where, dump=str(tmp_path))
    found = look("float", config, where, dump=str(tmp_path), crashed=True)
    assert found.notes == ["temporaries are estimated, since the compiler of this machine stopped: it crashed"]
    assert (found.traffic, found.flops, found.held) == (whole.traffic, whole.flops, whole.held)
    assert 0.4 * whole.temporaries < found.temporaries < 2.5 * whole.temporaries


def test_what_stablehlo_multiplies():
    """Ragged products are written in another form than the others."""
    lines = (
        "%1 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : "
        "(tensor<8x4xf8E4M3FN>, tensor<4x2xf8E5M2>) -> tensor<8x2xf32>",
        '%0 = "chlo.ragged_dot"(%a, %b, %c) <{ragged_dot_dimension_numbers = #chlo.ragged_dot<'
        "lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [1], rhs_group_dimensions = [0]>}> : "
        "(tensor<8x4xi8>, tensor<2x4x3xi8>, tensor<2xi32>) -> tensor<8x3xi32>",
    )
    assert multiplied("\n".join((*lines, lines[1]))) == [
        {"op": "dot_general", "lhs": "f8E4M3FN", "rhs": "f8E5M2", "out": "f32", "count": 1},
        {"op": "ragged_dot", "lhs": "i8", "rhs": "i8", "out": "i32", "count": 2},
    ]


def test_too_few_devices():
    with pytest.raises(AheadError, match="16 host devices are needed to stand for others, and there are 8"):
        look("float", Config(**TINY), topology("cpu:16"))


# Weights over the wire.

STEPS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int8 of bfloat16": {"quantization": "int8", "dtype": "bfloat16"},
    "fp8_full": {"quantization": "fp8_full", "use_qwix_quantization": True},
    "deepseek_fp8": {"quantization": "deepseek_fp8", "use_qwix_quantization": True},
    "published": {
        "quantization": "fp8_full",
        "use_qwix_quantization": True,
        "weight_quantization_calibration_method": "fixed,-224,224",
        "act_quantization_calibration_method": "fixed,-224,224",
    },
}


@functools.cache
def _traffic(name, platform):
    """What a device sends in a step: between CPUs, as the compiled program has it."""
    config = Config(**TINY | {"base_emb_dim": 128, "base_mlp_dim": 512} | STEPS[name])
    setup = Setup(config)
    traced = setup.program("train", 0).trace(setup.state, setup.batch)
    lowered = traced.lower(lowering_platforms=(platform,))
    text = lowered.compile().as_text() if platform == "cpu" else partitioned_hlo(lowered)
    return read_traffic(text)


def _weights(name, platform):
    return _traffic(name, platform).weights()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bfloat16", "int8 of bfloat16"])
def test_nothing_is_sent_wider_than_it_is_multiplied(name):
    """Logits are summed in float32, of a table in bfloat16."""
    sent = [c for c in _traffic(name, "tpu").collectives if c.is_weight]
    assert [c for c in sent if c.dtype == "bf16" and c.shape == (64, 128)]
    assert not [c for c in sent if c.dtype == "f32" and len(c.shape) > 1 and min(c.shape) > 1]
    assert _weights("int8 of bfloat16", "tpu") <= 0.55 * _weights("bfloat16", "tpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "fp8_full", "deepseek_fp8", "published"])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_weights_are_sent_in_eight_bits(name, platform):
    assert 0 < _weights(name, platform) <= 0.3 * _weights("float32", platform)
    # CPUs send bfloat16 as float32.
    assert _weights(name, platform) <= 0.55 * _weights("bfloat16", "tpu")


@pytest.mark.slow
def test_both_sides_in_processes_of_their_own():
    config = Config(**TINY | {"quantization": "int8"})
    plain, low = look_ahead(config, topology("tpu:v5e-16"))
    assert (plain.name, low.name) == ("float", "int8")
    assert plain.mesh == low.mesh == "fsdp=16"
    assert low.traffic["weights"] < 0.5 * plain.traffic["weights"]
    assert low.flops["s8 x s8"] > 0


@pytest.mark.slow
def test_what_does_not_fit_the_devices_is_refused_as_in_training():
    with pytest.raises(ConfigError, match="ici_fsdp_parallelism=3, but there are 16 devices"):
        list(look_ahead(Config(**TINY | {"ici_fsdp_parallelism": 3}), topology("cpu:16")))


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["", "int8", "deepseek_fp8"])
def test_experts_are_shared_out_evenly(quantization):
    """No device multiplies what another one does, and tokens are sent to the devices of their experts alone."""
    more = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "base_emb_dim": 128,
        "base_mlp_dim": 128,
        "base_moe_mlp_dim": 128,
        "ici_expert_parallelism": 4,
        "sharding_tolerance": 0.5,
        "max_target_length": 32,
        "quantization": quantization,
        "use_qwix_quantization": True,
    }
    found = look("step", Config(**{**TINY, **more}), topology("tpu:v5e-8"))
    assert sum(found.flops.values()) == pytest.approx(found.even, rel=0.02)
    kernels = {(row["op"], row["lhs"]) for row in found.lowered if row["op"].startswith("octavo_")}
    kind = {"": "f32", "int8": "i8", "deepseek_fp8": "f8E4M3FN"}[quantization]
    assert kernels == {("octavo_gmm", kind), ("octavo_tgmm", kind)}
    # A token, its gradient and what the experts make of both, each sent to the three other devices of the four.
    tokens = 8 * 32 * 128 * 4
    most = max(c["total"] for c in found.largest if c["group_size"] == 4)
    assert most < 8 * tokens
