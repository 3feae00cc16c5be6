"""Quantized layouts agree bit for bit with the implementations that define them, and come back as they were."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo import QArray
from octavo.files import FileError, SafeTensors
from octavo.files.layouts import Scheme, get_layout, layout_of
from octavo.files.safetensors import write
from tests.files.common import GOLDEN, Tensors, dequantized, golden

NAMES = sorted(path.stem for path in GOLDEN.glob("*.safetensors"))
# What each weight is read as: its format, and whether it has a zero point. None: as values.
FORMATS = {
    "awq": ("uint4", True),
    "deepseek": ("float8_e4m3fn", False),
    "deepseek_ragged": ("float8_e4m3fn", False),
    "fp8_block": ("float8_e4m3fn", False),
    "fp8_channel": ("float8_e4m3fn", False),
    "fp8_tensor": ("float8_e4m3fn", False),
    "gptq_int2": ("int2", False),
    "gptq_int3": ("uint4", True),
    "gptq_int4": ("int4", False),
    "gptq_int4_order": None,
    "gptq_int4_zeros": ("uint4", True),
    "gptq_int8": ("int8", False),
    "int8": ("int8", False),
    "int8_zeros": ("int8", True),
    "mxfp4": ("mxfp4", False),
    "mxfp4_packed": ("mxfp4", False),
    "mxfp8": ("mxfp8", False),
    "nvfp4": ("nvfp4", False),
    "pack_int3": ("int3", False),
    "pack_int4": ("int4", False),
    "pack_int4_bf16": ("int4", False),
    "pack_int4_order": None,
    "pack_int4_ragged": ("int4", False),
    "pack_int4_zeros": ("uint4", True),
    "pack_int8": ("int8", False),
    "pack_int8_zeros": ("uint8", True),
}
# Written as they were read, to the byte.
SAME = [
    *("awq", "fp8_block", "fp8_channel", "fp8_tensor", "gptq_int2", "gptq_int4", "gptq_int8", "mxfp4_packed", "nvfp4"),
    *(
        "pack_int3",
        "pack_int4",
        "pack_int4_bf16",
        "pack_int4_ragged",
        "pack_int4_zeros",
        "pack_int8",
        "pack_int8_zeros",
    ),
]


def weight(layout, file):
    (name,) = (name for name in layout.names(file.names()) if name != "expected")
    return name, layout.read(file, name)


def values(x, dtype=None):
    return np.asarray(dequantized(x, dtype=dtype)) if isinstance(x, QArray) else x


def test_all_files_are_tested():
    assert sorted(FORMATS) == NAMES


@pytest.mark.parametrize("case", NAMES)
def test_values_are_those_of_the_reference_to_the_bit(case):
    file, config = golden(case)
    layout = layout_of(config)
    name, x = weight(layout, file)
    expected = file.read("expected")
    assert np.array_equal(values(x, expected.dtype), expected)
    info = layout.info(file, name)
    assert (info.shape, info.dtype, info.quantized) == (x.shape, x.dtype, True)
    assert info.nbytes == file.nbytes - file.info("expected").nbytes
    if FORMATS[case] is None:
        assert isinstance(x, np.ndarray)
    else:
        assert (x.qtype.name, x.zero_point is not None) == FORMATS[case]
        # Below eight bits codes stay packed, along the inputs, and so they do in the orientation of the model.
        assert (x.packed is not None) == (x.qtype.bits < 8)
        if x.packed:
            assert x.packed[0] == -1


@pytest.mark.parametrize("case", SAME)
def test_what_is_read_is_written_to_the_byte(case):
    file, config = golden(case)
    layout = layout_of(config)
    name, x = weight(layout, file)
    written = layout.write(name, x)
    assert written.keys() == {key for key in file.names() if key != "expected"}
    for key, array in written.items():
        there = file.read(key)
        assert (array.dtype, array.shape) == (there.dtype, there.shape)
        if key.endswith("global_scale"):
            # It is read as its reciprocal.
            np.testing.assert_array_max_ulp(array, there, 1)
        else:
            assert array.tobytes() == there.tobytes()


def test_turned_to_inputs_first_codes_stay_packed_along_the_inputs():
    file, config = golden("pack_int4")
    _, x = weight(layout_of(config), file)
    assert x.T.packed == (-2, 64)
    assert np.array_equal(values(x.T), values(x).T)


@pytest.mark.parametrize("case", [case for case, fmt in FORMATS.items() if fmt is not None])
@pytest.mark.parametrize("method", ["compressed-tensors", "gptq", "awq"])
def test_whatever_is_written_reads_back(case, method, tmp_path):
    file, config = golden(case)
    name, x = weight(layout_of(config), file)
    kind = get_layout(method)
    scheme = Scheme.of(x)
    try:
        written = kind.write(name, x)
    except FileError:
        return
    config = json.loads(json.dumps(kind.config_for({name: scheme, "lm_head.weight": None})))
    write(tmp_path, written | {"lm_head.weight": np.zeros((2, 2), np.float32)})
    layout = layout_of(config)
    with SafeTensors(tmp_path) as back:
        assert set(layout.names(back.names())) == {name, "lm_head.weight"}
        assert layout.ignores("lm_head")
        assert not layout.info(back, "lm_head.weight").quantized
        again = layout.read(back, name)
        assert np.array_equal(values(again), values(x))
        assert isinstance(layout.read(back, "lm_head.weight"), np.ndarray)


@pytest.mark.parametrize(
    ("fmt", "how", "methods"),
    [
        ("int4", {"channelwise_axes": (0,), "tiled_axes": {1: 32}}, {"compressed-tensors", "gptq", "awq"}),
        ("int8", {"channelwise_axes": (0,)}, {"compressed-tensors", "gptq"}),
        ("int2", {"channelwise_axes": (0,), "tiled_axes": {1: 64}}, {"compressed-tensors", "gptq"}),
        ("int3", {"channelwise_axes": (0,), "tiled_axes": {1: 32}}, {"compressed-tensors", "gptq"}),
        ("int4", {}, {"compressed-tensors", "gptq", "awq"}),
        ("float8_e4m3fn", {}, {"compressed-tensors"}),
        ("float8_e4m3fn", {"channelwise_axes": (0,)}, {"compressed-tensors"}),
        ("float8_e4m3fn", {"tiled_axes": {0: 24, 1: 50}}, {"compressed-tensors"}),
        ("nvfp4", {"channelwise_axes": (0,), "tiled_axes": {1: 16}}, {"compressed-tensors"}),
        ("mxfp4", {"channelwise_axes": (0,), "tiled_axes": {1: 32}}, {"compressed-tensors"}),
        ("nf4", {"channelwise_axes": (0,), "tiled_axes": {1: 32}}, set()),
        ("mxint8", {"channelwise_axes": (0,), "tiled_axes": {1: 32}}, set()),
        ("int16", {"channelwise_axes": (0,)}, set()),
    ],
)
def test_what_octavo_quantizes_is_written(fmt, how, methods):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32))
    # As the model has it, too: inputs first, packed along them.
    q, packed = jax.jit(lambda x: ((q := octavo.quantize(x, fmt, **how)), q.T.pack(axis=-2).T))(x)
    wanted = dequantized(q, dtype=np.dtype(np.float32))
    done = set()
    for method in ("compressed-tensors", "gptq", "awq"):
        kind = get_layout(method)
        for weight in (q, packed):
            try:
                tensors = kind.write("up.weight", weight)
            except FileError:
                continue
            layout = layout_of(kind.config_for({"up.weight": Scheme.of(weight)}))
            back = layout.read(Tensors(tensors), "up.weight")
            assert np.array_equal(dequantized(back, dtype=np.dtype(np.float32)), wanted)
            done.add(method)
    assert done == methods


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_zero_points_of_both_versions_of_gptq(version):
    # The first keeps zero - 1, modulo 16.
    file, config = golden("gptq_int4_zeros")
    tensors = {name: file.read(name) for name in file.names()}
    layout = layout_of(config | {"checkpoint_format": version})
    tensors["layer.qzeros"] = np.full_like(tensors["layer.qzeros"], 0x76543FFF)
    zeros = np.asarray(layout.read(Tensors(tensors), "layer.weight").zero_point).astype(int)
    stored = [15, 15, 15, 3, 4, 5, 6, 7]
    assert zeros[:8, 0].tolist() == [(n + 1) % 16 if version == "gptq" else n for n in stored]


def test_asymmetric_weights_are_written_as_gptq_v2():
    file, config = golden("gptq_int4_zeros")
    name, x = weight(layout_of(config), file)
    kind = get_layout("gptq")
    config = kind.config_for({name: Scheme.of(x)})
    assert (config["checkpoint_format"], config["sym"], config["bits"], config["group_size"]) == (
        "gptq_v2",
        False,
        4,
        32,
    )
    back = layout_of(config).read(Tensors(kind.write(name, x)), name)
    assert np.array_equal(back.zero_point, x.zero_point)
    assert np.array_equal(back.qvalue, x.qvalue)


def test_awq_order():
    # Fields from the lowest: outputs 0, 2, 4, 6, 1, 3, 5, 7.
    tensors = {
        "x.qweight": np.asarray([[0x75316420]], np.int32),
        "x.qzeros": np.asarray([[0]], np.int32),
        "x.scales": np.ones((1, 8), np.float16),
    }
    layout = layout_of({"quant_method": "awq", "bits": 4, "group_size": 1, "version": "GEMM"})
    assert layout.read(Tensors(tensors), "x.weight").dequantize().tolist() == [[n] for n in range(8)]
    (config,) = [{"quant_method": "awq", "w_bit": 4, "q_group_size": 1}]
    assert layout_of(config) == layout


def test_mixed_schemes_have_groups_of_their_own():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32))
    weights = {
        "a.weight": octavo.quantize(x, "int4", channelwise_axes=(0,), tiled_axes={1: 32}),
        "b.weight": octavo.quantize(x, "int8", channelwise_axes=(0,)),
        "c.weight": octavo.quantize(x, "float8_e4m3fn", channelwise_axes=(0,)),
        "d.weight": octavo.quantize(x + 1, "int4", channelwise_axes=(0,), tiled_axes={1: 32}),
    }
    kind = get_layout("compressed-tensors")
    schemes = {name: Scheme.of(q) for name, q in weights.items()}
    config = json.loads(json.dumps(kind.config_for(schemes | {"lm_head.weight": None})))
    assert config["format"] == "mixed-precision"
    assert [group["targets"] for group in config["config_groups"].values()] == [["a", "d"], ["b"], ["c"]]
    assert config["ignore"] == ["lm_head"]
    tensors = {key: x for name, q in weights.items() for key, x in kind.write(name, q).items()}
    layout = layout_of(config)
    assert layout.names(tensors) == list(weights)
    for name, q in weights.items():
        assert np.array_equal(layout.read(Tensors(tensors), name).dequantize(), q.dequantize())
    with pytest.raises(
        FileError, match=r"gptq has one scheme for all weights but 'd\.weight' .* write compressed-tensors"
    ):
        get_layout("gptq").config_for(schemes)


def test_groups_by_pattern_and_class():
    four = {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True}
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": four},
            "group_1": {"targets": [r"re:.*\.down_proj$"], "weights": four | {"num_bits": 8}},
            "group_2": {"targets": ["Attention"], "weights": None},
        },
    }
    layout = layout_of(config)
    assert layout.group("layers.0.mlp.up_proj.weight").bits == 4
    assert layout.group("layers.0.mlp.down_proj.weight").bits == 8


def test_names_are_those_of_the_float_model():
    layout = layout_of(golden("pack_int4")[1])
    tensors = ["a.weight_packed", "a.weight_scale", "a.weight_shape", "a.bias", "b.weight", "b.weight_scale"]
    tensors += ["a.input_scale", "attn.k_scale", "norm.weight", "lonely.weight_scale"]
    assert layout.names(tensors) == ["a.weight", "a.bias", "b.weight", "norm.weight", "lonely.weight_scale"]
    tensors = ["experts.down_proj_blocks", "experts.down_proj_scales", "experts.down_proj_bias", "router.weight"]
    names = layout_of({"quant_method": "mxfp4"}).names(tensors)
    assert names == ["experts.down_proj", "experts.down_proj_bias", "router.weight"]


def test_what_stays_in_float_is_read_as_it_is():
    file, config = golden("deepseek")
    plain = np.ones((3, 2), np.float32)
    tensors = Tensors({name: file.read(name) for name in file.names()} | {"norm.weight": plain})
    layout = layout_of(config)
    assert np.array_equal(layout.read(tensors, "norm.weight"), plain)
    assert layout.info(tensors, "norm.weight").shape == (3, 2)
    # Codes without scales are values only where the configuration says so.
    del tensors.tensors["layer.weight_scale_inv"]
    with pytest.raises(FileError, match=r"'layer.weight' is float8_e4m3fn but has no scales; is a shard missing\?"):
        layout.read(tensors, "layer.weight")
    layout = dataclasses.replace(layout, ignore=("layer",))
    assert layout.read(tensors, "layer.weight").dtype == file.info("layer.weight").dtype


def test_layouts_that_are_only_read():
    q = octavo.quantize(jnp.ones((2, 32)), "mxfp4", channelwise_axes=(0,), tiled_axes={1: 32})
    for method in ("fp8", "mxfp4"):
        kind = get_layout(method)
        message = f"the layout '{method}' is only read; write awq or compressed-tensors or gptq"
        with pytest.raises(FileError, match=message):
            kind.write("x", q)
        with pytest.raises(FileError, match=message):
            kind.config_for({})
