"""Configurations and tensors that do not fit together are FileErrors that say what does not."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import QArray
from octavo.files import FileError
from octavo.files.layouts import get_layout, layout_of
from octavo.files.safetensors.dtypes import DTYPES
from octavo.numerics import get_format
from tests.files.common import Tensors, golden

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
CT = {"quant_method": "compressed-tensors"}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def groups(**weights):
    return CT | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS | weights}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no quant_method; known: awq, compressed-tensors, fp8, gptq, mxfp4"),
        ({"quant_method": 3}, "no quant_method"),
        ({"quant_method": "gptqq"}, "quant_method 'gptqq' is not one Octavo reads; did you mean 'gptq'"),
        (
            {"quant_method": "bitsandbytes"},
            "quant_method 'bitsandbytes' is not one Octavo reads; .*Known: awq, compressed",
        ),
        (GPTQ | {"bits": 5}, "has bits 5; Octavo reads 2, 3, 4, 8"),
        (GPTQ | {"bits": True}, "has bits True"),
        (GPTQ | {"group_size": 0}, "has group_size 0; it is a positive number of values, or -1 for all"),
        (GPTQ | {"group_size": None}, "has group_size None"),
        (GPTQ | {"checkpoint_format": "marlin"}, "has checkpoint_format 'marlin'; Octavo reads 'gptq', 'gptq_v2'"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, "'dynamic' with bits of some modules' own"),
        (GPTQ | {"modules_to_not_convert": "x"}, "has modules_to_not_convert 'x'; it is a list of names"),
        (AWQ | {"bits": 8}, "has bits 8; Octavo reads 4"),
        (AWQ | {"version": "gemv"}, "has version 'gemv'; Octavo reads 'gemm'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size \[128\]; it is the rows and columns"),
        (CT, "compressed-tensors has no config_groups"),
        (
            CT | {"format": "marlin-24"},
            "compressed-tensors format 'marlin-24' is not read; .*Known: dense, float-quant",
        ),
        (CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "has the sparsity 'sparse-24-bitmask'"),
        (groups(num_bits=9), "has num_bits 9"),
        (groups(type="complex"), "has type 'complex'; Octavo reads 'int', 'float'"),
        (CT | {"config_groups": {"g": {"targets": [], "weights": WEIGHTS}}}, "the group 'g' without targets"),
    ],
)
def test_configurations(config, message):
    with pytest.raises(FileError, match=message):
        layout_of(config)


# A file, a change to one of its tensors, and what the error says.
CHANGES = {
    "no scales": ("gptq_int4", "layer.scales", None, "the file has no 'layer.scales', which its layout needs"),
    "no zeros": ("awq", "layer.qzeros", None, "the file has no 'layer.qzeros'"),
    "words": ("gptq_int4", "layer.qweight", np.zeros((12, 64), np.int8), r"int8 \[12, 64\], not int32 of rank 2"),
    "rank": ("awq", "layer.qweight", np.zeros(8, np.int32), r"is int32 \[8\], not int32 of rank 2; is this another"),
    "scales": (
        "gptq_int4",
        "layer.scales",
        np.zeros((3, 8), np.float32),
        r"has the shape \[3, 8\] but the codes imply",
    ),
    "zeros": ("gptq_int4", "layer.qzeros", np.zeros((3, 7), np.int32), r"\[3, 7\] but the scales imply \[3, 8\]"),
    "groups": ("awq", "layer.qweight", np.zeros((32, 4), np.int32), "32 inputs in groups of 32 do not make the 2"),
    "g_idx": ("gptq_int4", "layer.g_idx", np.full(96, 3, np.int32), "its g_idx names groups outside of 0 to 2"),
    "g_idx size": ("gptq_int4", "layer.g_idx", np.zeros(95, np.int32), r"\[95\] but the codes imply \[96\]"),
    "shape": ("pack_int4", "layer.weight_shape", np.asarray([24, 65]), r"says \[24, 65\], which is not what fits"),
    "negative": ("pack_int4", "layer.weight_shape", np.asarray([24, -64]), r"says \[24, -64\], which is not what"),
    "huge": ("pack_int4", "layer.weight_shape", np.asarray([24, 2**62]), "which is not what fits the words"),
    "shape rank": ("pack_int4", "layer.weight_shape", np.asarray([24]), r"\[1\] but matrices imply \[2\]"),
    "rows": ("pack_int4", "layer.weight_scale", np.zeros((3, 2), np.float32), r"\[3, 2\] do not fit a weight with 24"),
    "zero points": ("pack_int4_zeros", "layer.weight_zero_point", np.zeros((2, 4), np.int32), r"imply \[3, 4\]"),
    "blocks": ("deepseek", "layer.weight_scale_inv", np.ones((2, 2), np.float32), r"in blocks \[128, 128\]"),
    "block rank": (
        "deepseek",
        "layer.weight_scale_inv",
        np.ones((1, 1, 2), np.float32),
        r"scales of shape \[1, 1, 2\]",
    ),
    "mxfp4": ("mxfp4", "mlp.experts.down_proj_blocks", np.zeros((2, 6, 3, 8), np.uint8), "not .*out, groups, 16"),
    "mx scales": ("mxfp4", "mlp.experts.down_proj_scales", np.zeros((2, 6, 2), np.uint8), "but the blocks imply"),
    "nvfp4": ("nvfp4", "layer.weight_scale", np.zeros((8, 2), DTYPES["F8_E4M3"]), r"the codes imply \[8, 4\]"),
    "global": ("nvfp4", "layer.weight_global_scale", np.zeros(1, np.float32), "global_scale is 0.0; scales cannot be"),
    "no global": ("nvfp4", "layer.weight_global_scale", None, "the file has no 'layer.weight_global_scale'"),
    "int8 scale": ("int8", "layer.weight_scale", None, "is int8 but has no layer.weight_scale; is a shard missing"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_tensors(case):
    name, part, value, message = CHANGES[case]
    file, config = golden(name)
    tensors = {key: file.read(key) for key in file.names() if key != "expected"} | {part: value}
    tensors = Tensors({key: x for key, x in tensors.items() if x is not None})
    layout = layout_of(config)
    weight = "mlp.experts.down_proj" if name == "mxfp4" else "layer.weight"
    with pytest.raises(FileError, match=message):
        layout.read(tensors, weight)


KINDS = ["I32", "U8", "I8", "I64", "F16", "F32", "BF16", "F8_E4M3", "F8_E8M0", "BOOL"]


@settings(max_examples=100)
@given(data=st.data())
def test_any_tensors_give_a_weight_or_a_file_error(data):
    name = data.draw(
        st.sampled_from(["gptq_int4", "awq", "pack_int4_zeros", "fp8_block", "mxfp4", "nvfp4", "int8_zeros"])
    )
    file, config = golden(name)
    tensors = {key: file.read(key) for key in file.names() if key != "expected"}
    file.close()
    for part in data.draw(st.lists(st.sampled_from(sorted(tensors)), min_size=1, max_size=2)):
        shape = list(tensors[part].shape)
        if data.draw(st.booleans()):
            shape = data.draw(st.lists(st.integers(0, 65), max_size=3))
        elif shape:
            shape[data.draw(st.integers(0, len(shape) - 1))] = data.draw(st.integers(0, 65))
        dtype = data.draw(st.sampled_from([tensors[part].dtype, *(DTYPES[kind] for kind in KINDS)]))
        bits = np.random.default_rng(data.draw(st.integers(0, 9))).integers(0, 2, (*shape, dtype.itemsize))
        tensors[part] = bits.astype(np.uint8).view(dtype).reshape(shape)
    layout, there = layout_of(config), Tensors(tensors)
    for weight in layout.names(tensors):
        try:
            info = layout.info(there, weight)
            x = layout.read(there, weight)
        except FileError:
            continue
        assert x.shape == info.shape


def zeros(shape, fmt, tile):
    """A weight without zero points, padded to whole tiles."""
    grid = [-(-n // size) for n, size in zip(shape[-2:], tile, strict=True)]
    whole = [n * size for n, size in zip(grid, tile, strict=True)]
    padding = tuple((i - 2, whole[i] - shape[i - 2]) for i in range(2) if whole[i] != shape[i - 2])
    codes = jnp.zeros((*shape[:-2], *whole), get_format(fmt).storage)
    return QArray(codes, jnp.ones((*shape[:-2], *grid)), qtype=fmt, padding=padding)


@pytest.mark.parametrize(
    ("method", "shape", "fmt", "tile", "message"),
    [
        ("gptq", (12, 64), "int4", (1, 32), "gptq packs 4 bits into 32; leave this weight in"),
        ("gptq", (32, 64), "int4", (16, 16), "not tiles of"),
        ("gptq", (2, 32, 64), "int4", (1, 16), "this layout holds matrices"),
        ("awq", (32, 64), "int8", (1, 16), "is int8; this layout holds integers of 4 bits"),
        ("awq", (32, 64), "uint4", (1, 16), "is uint4 without a zero point"),
        ("awq", (12, 64), "int4", (1, 32), "awq packs outputs in eights; leave this weight"),
        ("compressed-tensors", (8, 40), "int4", (1, 32), "scales are per output and full group"),
        ("compressed-tensors", (8, 40), "nf4", (1, 8), "is nf4; compressed-tensors is written"),
        ("compressed-tensors", (8, 40), "nvfp4", (1, 16), "in whole tiles of 16 inputs"),
        ("compressed-tensors", (2, 8, 40), "int4", (1, 8), "compressed-tensors holds matrices"),
    ],
)
def test_weights_that_a_layout_does_not_have(method, shape, fmt, tile, message):
    with pytest.raises(FileError, match=message):
        get_layout(method).write("x.weight", zeros(shape, fmt, tile))


def test_nothing_to_configure():
    for method in ("gptq", "awq", "compressed-tensors"):
        with pytest.raises(FileError, match="none of 1 weights is quantized; write a float model without a layout"):
            get_layout(method).config_for({"x.weight": None})


def test_modules_that_are_ignored():
    config = GPTQ | {"modules_to_not_convert": ["lm_head", "mlp.gate"], "dynamic": {r"-:.*\.visual\..*": {}}}
    layout = layout_of(config)
    assert layout.ignores("lm_head")
    assert layout.ignores("model.layers.0.mlp.gate")
    assert layout.ignores("model.visual.merger")
    assert not layout.ignores("model.layers.0.mlp.gate_proj")
    with pytest.raises(FileError, match=r"has the invalid pattern 're:\('"):
        layout_of(GPTQ | {"modules_to_not_convert": ["re:("]}).ignores("x")


def test_a_weight_without_a_group():
    layout = layout_of(CT | {"config_groups": {"g": {"targets": ["re:no"], "weights": WEIGHTS}}})
    file, _ = golden("pack_int4")
    with pytest.raises(FileError, match="is quantized, but no group of the quantization_config is for it"):
        layout.read(file, "layer.weight")
    file, _ = golden("pack_int4")
    with pytest.raises(FileError, match="has several scales per output, but the configuration gives no group_size"):
        layout_of(groups(group_size=None)).read(file, "layer.weight")
    with pytest.raises(FileError, match="packed into int32 words as float4; Octavo reads int2 to int8"):
        layout_of(groups(type="float")).read(file, "layer.weight")
