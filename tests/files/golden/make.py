"""Makes the files beside it, by the implementations that Octavo has to agree with.

Each has the tensors of one weight, `expected` with its values as the other implementation computes them, and the
`quantization_config` in its metadata. Needs, in an environment of its own (Python 3.11):

    pip install torch==2.13.0 numpy safetensors pydantic loguru transformers==5.22.2
    pip install --no-deps compressed-tensors==0.20.0 autoawq==0.2.9 auto-gptq==0.7.1
    pip install --no-deps --target OLD compressed-tensors==0.10.2
    python make.py, and then PYTHONPATH=OLD python make.py act_order
"""

import importlib.util
import json
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent


def save(name, config, tensors, expected):
    tensors = {key: value.detach().contiguous() for key, value in tensors.items()}
    metadata = {"quantization_config": json.dumps(config)}
    save_file(tensors | {"expected": expected.detach().contiguous()}, HERE / f"{name}.safetensors", metadata)


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def compressed(name, fmt, args, weight, *, dtype=torch.float32, **extra):
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    rows, columns = weight.shape
    strategy = str(args.strategy)
    if strategy == "block":
        a, b = args.block_structure
        grid = torch.full((-(-rows // a), -(-columns // b)), 0.0)
        for i in range(grid.shape[0]):
            for j in range(grid.shape[1]):
                grid[i, j] = weight[i * a : i * a + a, j * b : j * b + b].abs().max()
        low, high = -grid, grid
    else:
        size = {"tensor": rows * columns, "channel": columns}.get(strategy, args.group_size)
        parts = weight.reshape(-1, size)
        shape = (1,) if strategy == "tensor" else (rows, -1)
        low, high = parts.amin(-1).reshape(shape), parts.amax(-1).reshape(shape)
    scale, zero = calculate_qparams(low, high, args, **extra)
    state = {"weight": weight, "weight_scale": scale.to(dtype), "weight_zero_point": zero}
    if "global_scale" in extra:
        state["weight_global_scale"] = extra["global_scale"]
    compressor = BaseCompressor.get_value_from_registry(fmt)
    packed = compressor.compress(state, scheme)
    expected = compressor.decompress(packed, scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}},
        "ignore": ["lm_head"],
    }
    save(name, config, {f"layer.{key}": value for key, value in packed.items()}, expected)


def int_args(bits, size=None, *, symmetric=True):
    strategy = "group" if size else "channel"
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": size}


def all_compressed():
    compressed("pack_int4", "pack-quantized", int_args(4, 32), random(24, 64))
    compressed("pack_int4_bf16", "pack-quantized", int_args(4, 32), random(24, 64), dtype=torch.bfloat16)
    compressed("pack_int4_zeros", "pack-quantized", int_args(4, 16, symmetric=False), random(20, 64) + 1)
    compressed("pack_int4_ragged", "pack-quantized", int_args(4), random(12, 37))
    compressed("pack_int3", "pack-quantized", int_args(3, 32), random(8, 64))
    compressed("pack_int8", "pack-quantized", int_args(8), random(12, 40))
    compressed("pack_int8_zeros", "pack-quantized", int_args(8, 20, symmetric=False), random(10, 40) - 1)
    compressed("int8", "int-quantized", int_args(8), random(12, 40))
    compressed("int8_zeros", "int-quantized", int_args(8, symmetric=False), random(12, 40) + 2)
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    compressed("fp8_tensor", "float-quantized", eight | {"strategy": "tensor"}, random(12, 40))
    compressed("fp8_channel", "float-quantized", eight | {"strategy": "channel"}, random(12, 40))
    block = eight | {"strategy": "block", "block_structure": [16, 16]}
    compressed("fp8_block", "float-quantized", block, random(40, 56))
    mx = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    compressed("mxfp8", "mxfp8-quantized", eight | mx, random(8, 64))
    four = {"num_bits": 4, "type": "float", "symmetric": True}
    compressed("mxfp4_packed", "mxfp4-pack-quantized", four | mx, random(8, 64))
    weight = random(8, 64)
    nv = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
    whole = (448 * 6 / weight.abs().max()).reshape(1)
    compressed("nvfp4", "nvfp4-pack-quantized", four | nv, weight, global_scale=whole)


def act_order():
    """Groups out of order, which compressed-tensors 0.10 still had."""
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize

    args = QuantizationArgs(num_bits=4, group_size=16, strategy="group", symmetric=True, actorder="group")
    weight = random(8, 64)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    g_idx = (torch.arange(64) // 16)[order].to(torch.int32)
    scale = torch.stack([weight[:, g_idx == g].abs().amax(1) / 7.5 for g in range(4)], 1)
    codes = quantize(weight, scale, None, args, dtype=torch.int8, g_idx=g_idx)
    expected = dequantize(codes, scale, None, args, g_idx=g_idx)
    weights = int_args(4, 16) | {"actorder": "group"}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    parts = {"packed": pack_to_int32(codes, 4), "scale": scale, "shape": torch.tensor([8, 64]), "g_idx": g_idx}
    save("pack_int4_order", config, {f"layer.weight_{key}": value for key, value in parts.items()}, expected)


def module(package, *path, stubs=()):
    """One file of a package whose other files need a GPU."""
    root = Path(importlib.util.find_spec(package).submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location(f"{package}_{path[-1]}", root.joinpath(*path).with_suffix(".py"))
    found = importlib.util.module_from_spec(spec)
    sys.modules.update(stubs)
    spec.loader.exec_module(found)
    return found


def gptq(name, bits, *, size=32, symmetric=True, order=False, shape=(64, 96)):
    kind = module("auto_gptq", "nn_modules", "qlinear", "qlinear_cuda").QuantLinear
    out, inputs = shape
    linear = torch.nn.Linear(inputs, out, bias=False)
    linear.weight.data = random(out, inputs)
    layer = kind(bits, size, inputs, out, False, weight_dtype=torch.float32)
    g_idx = torch.arange(inputs, dtype=torch.int32) // (inputs if size == -1 else size)
    if order:
        g_idx = g_idx[torch.randperm(inputs, generator=torch.Generator().manual_seed(2))]
    top = 2**bits - 1
    groups = [linear.weight.data[:, g_idx == g] for g in range(int(g_idx.max()) + 1)]
    if symmetric:
        scales = torch.stack([g.abs().amax(1) * 2 / top for g in groups], 1)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        scales = torch.stack([(g.amax(1) - g.amin(1)) / top for g in groups], 1)
        zeros = torch.stack([-g.amin(1) for g in groups], 1).div(scales).round().clamp(1, top)
    linear.weight.data = torch.cat([_clamped(linear.weight.data, scales, zeros, g_idx, top)], 1)
    layer.pack(linear, scales, zeros, g_idx)
    expected = layer(torch.eye(inputs)).T
    keys = ("qweight", "qzeros", "scales", "g_idx")
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric, "desc_act": order}
    save(name, config, {f"layer.{key}": getattr(layer, key) for key in keys}, expected)


def _clamped(weight, scales, zeros, g_idx, top):
    """The weight with nothing beyond the range of its codes, which packing does not check."""
    scale, zero = scales[:, g_idx.long()], zeros[:, g_idx.long()]
    return ((weight / scale).round() + zero).clamp(0, top).sub(zero) * scale


def awq(name, size):
    packing = module("awq", "utils", "packing_utils")
    stubs = {
        "awq": types.ModuleType("awq"),
        "awq.utils": types.ModuleType("awq.utils"),
        "awq.utils.module": types.SimpleNamespace(try_import=lambda _: (None, "")),
        "awq.utils.utils": types.SimpleNamespace(get_best_device=lambda: "cpu"),
        "awq.utils.packing_utils": packing,
    }
    gemm = module("awq", "modules", "linear", "gemm", stubs=stubs)
    weight = random(32, 64) + 0.3
    parts = weight.reshape(32, -1, size)
    scales = ((parts.amax(-1) - parts.amin(-1)) / 15).half().float()
    zeros = (-parts.amin(-1) / scales).round().clamp(0, 15)
    codes = (parts / scales[..., None]).round().add(zeros[..., None]).clamp(0, 15)
    linear = torch.nn.Linear(64, 32, bias=False)
    linear.weight.data = ((codes - zeros[..., None]) * scales[..., None]).reshape(32, 64)
    layer = gemm.WQLinear_GEMM.from_linear(linear, 4, size, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    expected = packing.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, size).T
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    save(name, config, {f"layer.{key}": getattr(layer, key) for key in ("qweight", "qzeros", "scales")}, expected)


def deepseek():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    weight = (random(128, 256) * 100).to(torch.float8_e4m3fn)
    scale = random(1, 2).abs() / 100
    expected = Fp8Dequantize(None)._dequantize_one(weight, scale)
    save("deepseek", config, {"layer.weight": weight, "layer.weight_scale_inv": scale}, expected)
    # transformers wants whole blocks; DeepSeek's own kernel masks what is outside.
    config["weight_block_size"] = [16, 32]
    weight = (random(40, 70) * 100).to(torch.float8_e4m3fn)
    scale = random(3, 3).abs() / 100
    grid = scale.repeat_interleave(16, 0)[:40].repeat_interleave(32, 1)[:, :70]
    tensors = {"layer.weight": weight, "layer.weight_scale_inv": scale}
    save("deepseek_ragged", config, tensors, weight.float() * grid)


def gpt_oss():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 140, (2, 6, 3), dtype=torch.uint8, generator=generator)
    expected = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    tensors = {"mlp.experts.down_proj_blocks": blocks, "mlp.experts.down_proj_scales": scales}
    save("mxfp4", {"quant_method": "mxfp4"}, tensors, expected)


def main():
    all_compressed()
    gptq("gptq_int4", 4)
    gptq("gptq_int4_zeros", 4, symmetric=False)
    gptq("gptq_int4_order", 4, symmetric=False, order=True)
    gptq("gptq_int2", 2)
    gptq("gptq_int3", 3, symmetric=False)
    gptq("gptq_int8", 8, size=-1, shape=(32, 64))
    awq("awq", 32)
    deepseek()
    gpt_oss()


if __name__ == "__main__":
    act_order() if sys.argv[1:] == ["act_order"] else main()
