"""Layers on TPUs, by the estimates of TPU's own compiler: bf16, octavo and Qwix; no TPU is needed.

    python benchmarks/accelerators.py [--quick] [--json FILE] [--targets v6e,v5e] [--layers mlp] [--kinds bf16,int8]

Forward and backward of one layer on one chip: 8192 tokens, bfloat16 activations, float32 weights, the gradient of the
mean square of the output with respect to weights and input. A `linear` layer is 4096 x 4096 on 4096 tokens; `mlp` is
the gated MLP of Llama-8B (4096, 14336); `layer-8b` and `layer-1b` are a transformer layer with its sizes and with
(2048, 8192); `attention` is that of `layer-8b`, and `scores` the same without its linear layers; `flash-8b` and
`flash-scores` have JAX's own flash kernel for TPUs, in bfloat16; `moe` is that of DeepSeek-V2-Lite, 64 experts of width
1408 for tokens of width 2048, six for each token, and two that all tokens have. They are in `tpu_layers.py`. Pallas
kernels are counted by `kernel_cycles`. "of it linear" are the instructions whose result belongs to a linear layer:
matmuls, quantization, and what is fused with them.

Kinds: `int8` has dynamic ranges per token and channel, `int8-static` fixed ranges per tensor, `int8-delayed` the ranges
of earlier steps per tensor, from an initial one; with `-attention` after the kind the matmuls of attention are in int8
as in SageBwd, by octavo's flash kernel; `fp8` is E4M3 with E5M2 gradients. `qwix-` is Qwix with the same rule.
Gradients of clipped values pass in `int8-static` and `int8-delayed`; `int8-static` does not look for non-finite values.
"""

import math
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import qwix
from jax.experimental.pallas import tpu as pltpu
from timing import Results, arguments, progress
from tpu_layers import LAYERS

import octavo
from octavo.calibration import AmaxHistory
from octavo.hlo import ProgramCost, compile_for, devices, get_accelerator, read_cost

# The matmuls over blocks of scores in each kernel of attention: in int8, in bfloat16.
FLASH = {
    "splash_mha_fwd": (0, 2),
    "splash_mha_dq": (0, 3),
    "splash_mha_dkv": (0, 4),
    "int8_flash_forward": (2, 0),
    "int8_flash_backward": (4, 1),
}
LINEAR = r"/(dense|q|k|v|o|gate|up|down)/"


def rule(forward: str, backward: str, **fields: Any) -> dict[str, Any]:
    """The fields of a QtRule, for octavo and for Qwix."""
    types = {"weight_qtype": forward, "act_qtype": forward, "bwd_qtype": backward}
    return {"module_path": ".*", "op_names": ("dot_general", "ragged_dot"), **types, **fields}


def delayed(forward: str, backward: str) -> dict[str, Any]:
    tracked = lambda qtype, initial: octavo.Operand(  # noqa: E731
        qtype, per_tensor=True, tracker=AmaxHistory(length=16, initial=initial)
    )
    gradient = octavo.Matmul(tracked(backward, 0.001))
    matmuls = {"fwd": octavo.Matmul(tracked(forward, 8.0), tracked(forward, 0.1)), "dlhs": gradient, "drhs": gradient}
    return rule(forward, backward, **matmuls, additional_qt_config={"disable_gradient_clipping": True})


STRAIGHT = {"check_finite": False, "additional_qt_config": {"disable_gradient_clipping": True}}
FIXED = {
    "weight_calibration_method": "fixed,-0.1,0.1",
    "act_calibration_method": "fixed,-8,8",
    "bwd_calibration_method": "fixed,-0.001,0.001",
    "disable_channelwise_axes": True,
}
FP8 = ("float8_e4m3fn", "float8_e5m2")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("", {}),
    "int8": ("octavo", rule("int8", "int8")),
    "int8-static": ("octavo", rule("int8", "int8", **FIXED, **STRAIGHT)),
    "int8-delayed": ("octavo", delayed("int8", "int8")),
    "qwix-int8": ("qwix", rule("int8", "int8")),
    "qwix-int8-static": ("qwix", rule("int8", "int8", **FIXED)),
    "fp8": ("octavo", rule(*FP8)),
    "fp8-static": ("octavo", rule(*FP8, **FIXED, **STRAIGHT)),
    "fp8-delayed": ("octavo", delayed(*FP8)),
    "qwix-fp8": ("qwix", rule(*FP8)),
}


# Attention's matmuls in int8 as in SageBwd, ahead of the other rule.
SAGE = {"scope": "activations", "act_qtype": "int8", "bwd_qtype": "int8", "attention": True}


def quantized(model: nn.Module, kind: str) -> nn.Module:
    kind, attention = kind.removesuffix("-attention"), kind.endswith("-attention")
    library, fields = KINDS[kind]
    if library == "octavo":
        return octavo.quantize_model(model, [octavo.QtRule(**f) for f in ([SAGE] if attention else []) + [fields]])
    if library == "qwix":
        # Qwix takes dtypes, not their names.
        types = {name: jnp.dtype(value) for name, value in fields.items() if name.endswith("_qtype")}
        return qwix.quantize_model(model, qwix.QtProvider([qwix.QtRule(**fields | types)]))
    return model


def program(layer: str, kind: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The gradient of a layer with respect to its variables and its input, and the shapes of both."""
    model, shape = LAYERS[layer]
    model = quantized(model, kind)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(variables, x):
        return jnp.mean(jnp.square(model.apply(variables, x).astype(jnp.float32)))

    return jax.grad(loss, argnums=(0, 1)), (variables, x)


def measure(layer: str, kind: str, target: str) -> ProgramCost:
    fn, shapes = program(layer, kind)
    return read_cost(compile_for(get_accelerator(target), fn, *shapes))


def kernel_cycles(cost: ProgramCost, target: str, layer: str) -> int:
    """The cycles of the kernels of attention: the larger of the time for their bytes and of that for their matmuls.

    Every operand and result is counted once, at the bandwidth of HBM, and matmuls at the chip's peak for their type. A
    kernel computes the blocks of 512 x 512 scores that are not masked altogether.
    """
    accelerator = get_accelerator(target)
    mesh = jax.sharding.Mesh(np.asarray(devices(accelerator)[:1]), ("device",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        chip = pltpu.get_tpu_info()
    length, block = LAYERS[layer][1][1], 512
    blocks, seconds = length // block, 0.0
    for kernel in cost.kernels:
        queries = next(array.size for array in kernel.arrays if array.dtype == "bf16")
        flops = queries // length * blocks * (blocks + 1) * block**2  # of one matmul
        int8, bf16 = next(counts for name, counts in FLASH.items() if name in kernel.name)
        compute = int8 * flops / (chip.int8_ops_per_second or math.inf) + bf16 * flops / chip.bf16_ops_per_second
        seconds += kernel.count * max(compute, kernel.bytes / chip.mem_bw_bytes_per_second)
    return round(seconds * accelerator.clock * 1e9)


ONLY = {"scores": ("bf16", "int8-attention"), "flash-scores": ("bf16",)}
"""The kinds of layers without linear layers."""
QUICK = {"v6e": ("bf16", "int8", "int8-static", "qwix-int8")}
KINDS_OF = {
    "v6e": ("bf16", "int8", "int8-static", "int8-delayed", "qwix-int8"),
    "v5e": ("bf16", "int8", "int8-static", "int8-delayed", "qwix-int8"),
    "tpu7x": ("bf16", "fp8", "fp8-static", "fp8-delayed", "qwix-fp8"),
}


def main() -> None:
    parser = arguments(__doc__, quick="the linear layer and the MLP on v6e")
    for name, known in (("targets", KINDS_OF), ("layers", LAYERS), ("kinds", KINDS)):
        parser.add_argument(f"--{name}", help=f"some of {','.join(known)}")
    parser.add_argument("--ops", type=int, default=0, help="also print this many of the most expensive instructions")
    options = parser.parse_args()
    words = lambda given, default: tuple(given.split(",")) if given else tuple(default)  # noqa: E731
    kinds_of = QUICK if options.quick else KINDS_OF
    results = Results("qwix", "flax", "libtpu", method="estimates of TPU's compiler", file=options.json)
    for target in words(options.targets, kinds_of):
        for layer in words(options.layers, ("linear", "mlp") if options.quick else LAYERS):
            compare(results, target, layer, words(options.kinds, ONLY.get(layer, kinds_of[target])), options.ops)


def compare(results: Results, target: str, layer: str, kinds: tuple[str, ...], ops: int) -> None:
    """One table: every kind of a layer on a target."""
    costs: dict[str, ProgramCost] = {}
    for kind in kinds:
        progress(f"{target} {layer} {kind}")
        costs[kind] = measure(layer, kind, target)
        if ops:
            print(f"\n{target} {layer} {kind}", *format_ops(costs[kind], ops), sep="\n", flush=True)
    base, columns = costs.get("bf16"), ["", "cycles", "bf16 / it", "of it linear", "bf16 / it", "GB", "of bf16"]
    columns += ["temporary MiB", "of bf16", "unknown", "kernels"]
    kernels = {name: kernel_cycles(cost, target, layer) for name, cost in costs.items()}
    rows = [row(name, cost, base, kernels[name], kernels.get("bf16", 0)) for name, cost in costs.items()]
    results.add(f"{layer} on {target}", columns, rows)


def row(kind: str, cost: ProgramCost, base: ProgramCost | None, kernels: int, base_kernels: int) -> list[str]:
    """The figures of a kind, each with its ratio to bf16's; cycles with those of kernels."""
    figures = lambda c, k: (c.cycles + k, c.cycles_at(LINEAR), c.bytes_accessed, c.temp_bytes)  # noqa: E731
    mine, others = figures(cost, kernels), figures(base, base_kernels) if base else (0,) * 4
    shown = (f"{mine[0]:,}", f"{mine[1]:,}", f"{mine[2] / 1e9:.2f}", f"{mine[3] / 2**20:.0f}")
    cells = [kind]
    for n, (text, own, other) in enumerate(zip(shown, mine, others, strict=True)):
        ratio = (other, own) if n < 2 else (own, other)
        cells += [text, f"{ratio[0] / ratio[1]:.2f}" if base and ratio[1] else ""]
    return [*cells, str(len(cost.unknown)) if cost.unknown else "", f"{kernels:,}" if kernels else ""]


def format_ops(cost: ProgramCost, most: int) -> list[str]:
    return ["  ".join(cells) for cells in cost.table(most)]


if __name__ == "__main__":
    sys.exit(main())
