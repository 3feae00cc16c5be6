"""Layers on TPUs, by the estimates of TPU's own compiler: bf16, octavo and Qwix; no TPU is needed.

    python benchmarks/accelerators.py [--quick] [--json FILE] [--targets v6e,v5e] [--layers mlp] [--kinds bf16,int8]

Forward and backward of one layer on one chip: 8192 tokens, bfloat16 activations, float32 weights, the gradient of the
mean square of the output with respect to weights and input. A `linear` layer is 4096 x 4096 on 4096 tokens; `mlp` is
the gated MLP of Llama-8B (4096, 14336); `layer-8b` and `layer-1b` are a transformer layer with its sizes and with
(2048, 8192); `attention` is that of `layer-8b`; `moe` is that of DeepSeek-V2-Lite, 64 experts of width
1408 for tokens of width 2048, six for each token, and two that all tokens have. "of it linear" are the instructions
whose result belongs to a linear layer: matmuls, quantization, and what is fused with them.

Kinds: `int8` has dynamic ranges per token and channel, `int8-static` fixed ranges per tensor, `int8-delayed` the ranges
of earlier steps per tensor, from an initial one; `int8-attention` is `int8` with the matmuls of attention as in
SageBwd; `fp8` is E4M3 with E5M2 gradients. `qwix-` is Qwix with the same rule.
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
from jax.experimental.pallas.ops.tpu import splash_attention
from timing import Results, arguments, progress

import octavo
from octavo.calibration import AmaxHistory
from octavo.hlo import ProgramCost, compile_for, devices, get_accelerator, read_cost
from octavo.models.moe import permute, weighted_sum

TOKENS, HEAD = (4, 2048), 128
SPLASH = splash_attention.BlockSizes(
    block_q=512,
    block_kv=512,
    block_q_dkv=512,
    block_kv_dkv=512,
    block_kv_dkv_compute=512,
    block_q_dq=512,
    block_kv_dq=512,
)
# The matmuls over blocks of scores in each kernel of attention: in int8, in bfloat16.
FLASH = {
    "splash_mha_fwd": (0, 2),
    "splash_mha_dq": (0, 3),
    "splash_mha_dkv": (0, 4),
    "int8_flash_forward": (2, 0),
    "int8_flash_backward": (4, 1),
}
LINEAR = r"/(dense|q|k|v|o|gate|up|down)/"


def dense(width: int, name: str) -> nn.Dense:
    return nn.Dense(width, use_bias=False, dtype=jnp.bfloat16, name=name)


class Linear(nn.Module):
    """One linear layer."""

    width: int

    @nn.compact
    def __call__(self, x):
        return dense(self.width, "dense")(x)


class GatedMlp(nn.Module):
    """A gated MLP: (silu(x gate) * x up) down."""

    hidden: int

    @nn.compact
    def __call__(self, x):
        gated = nn.silu(dense(self.hidden, "gate")(x)) * dense(self.hidden, "up")(x)
        return dense(x.shape[-1], "down")(gated)


def causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention without a kernel."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def splash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention by JAX's own flash kernel for TPUs, in bfloat16."""
    mask = splash_attention.MultiHeadMask([splash_attention.CausalMask((q.shape[1],) * 2)] * q.shape[2])
    kernel = splash_attention.make_splash_mha(mask, block_sizes=SPLASH, head_shards=1, q_seq_shards=1)
    q, k, v = (x.swapaxes(1, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
    return jax.vmap(kernel)(q, k, v).swapaxes(1, 2)


class Layer(nn.Module):
    """A transformer layer with RMSNorm, causal attention and a gated MLP."""

    hidden: int
    attend: Callable[..., jax.Array] = causal

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        y = nn.RMSNorm(dtype=jnp.bfloat16, name="norm1")(x)
        q, k, v = (dense(width, name)(y).reshape(*x.shape[:-1], width // HEAD, HEAD) for name in "qkv")
        x = x + dense(width, "o")(self.attend(q, k, v).reshape(x.shape))
        y = nn.RMSNorm(dtype=jnp.bfloat16, name="norm2")(x)
        gated = nn.silu(dense(self.hidden, "gate")(y)) * dense(self.hidden, "up")(y)
        return x + dense(width, "down")(gated)


class Scores(nn.Module):
    """Causal attention of queries, keys and values alone."""

    attend: Callable[..., jax.Array] = causal

    def __call__(self, x):
        q, k, v = (y.reshape(*y.shape[:-1], -1, HEAD) for y in jnp.split(x, 3, axis=-1))
        return self.attend(q, k, v).reshape(*x.shape[:-1], -1)


class Attention(nn.Module):
    """Causal attention with its four linear layers."""

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        q, k, v = (dense(width, name)(x).reshape(*x.shape[:-1], width // HEAD, HEAD) for name in "qkv")
        return dense(width, "o")(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


class Experts(nn.Module):
    """One matmul of all experts with the tokens of each."""

    experts: int
    width: int

    @nn.compact
    def __call__(self, rows, sizes):
        shape = (self.experts, rows.shape[-1], self.width)
        kernel = self.param("kernel", nn.initializers.lecun_normal(batch_axis=0), shape)
        return jax.lax.ragged_dot(rows, kernel.astype(rows.dtype), sizes)


class Moe(nn.Module):
    """Gated MLPs as experts, some of them for all tokens."""

    hidden: int
    experts: int
    chosen: int
    shared: int

    @nn.compact
    def __call__(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        router = self.param("router", nn.initializers.lecun_normal(), (x.shape[-1], self.experts))
        scores = jax.nn.softmax(jnp.einsum("td,de->te", tokens.astype(jnp.float32), router))
        weights, experts = jax.lax.top_k(scores, self.chosen)
        order = jnp.argsort(experts.reshape(-1))
        back, sizes = jnp.argsort(order), jnp.bincount(experts.reshape(-1), length=self.experts)
        rows = permute(jnp.repeat(tokens, self.chosen, axis=0), order, back)
        wide = lambda name: Experts(self.experts, self.hidden, name=name)(rows, sizes)  # noqa: E731
        out = Experts(self.experts, x.shape[-1], name="down")(nn.silu(wide("gate")) * wide("up"), sizes)
        out = weighted_sum(permute(out, back, order).reshape(-1, self.chosen, x.shape[-1]), weights)
        return out.reshape(x.shape) + GatedMlp(self.shared * self.hidden, name="shared")(x)


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (Linear(4096), (2, 2048, 4096)),
    "mlp": (GatedMlp(14336), (*TOKENS, 4096)),
    "scores": (Scores(), (*TOKENS, 3 * 4096)),
    "flash-scores": (Scores(splash), (*TOKENS, 3 * 4096)),
    "attention": (Attention(), (*TOKENS, 4096)),
    "moe": (Moe(1408, experts=64, chosen=6, shared=2), (*TOKENS, 2048)),
    "layer-1b": (Layer(8192), (*TOKENS, 2048)),
    "layer-8b": (Layer(14336), (*TOKENS, 4096)),
    "flash-8b": (Layer(14336, splash), (*TOKENS, 4096)),
}


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
            compare(results, target, layer, words(options.kinds, kinds_of[target]), options.ops)


def compare(results: Results, target: str, layer: str, kinds: tuple[str, ...], ops: int) -> None:
    """One table: every kind of a layer on a target."""
    costs: dict[str, ProgramCost] = {}
    for kind in kinds:
        progress(f"{target} {layer} {kind}")
        costs[kind] = measure(layer, kind, target)
        if ops:
            print(f"\n{target} {layer} {kind}", *format_ops(costs[kind], ops), sep="\n", flush=True)
    base, columns = costs.get("bf16"), ["", "cycles", "bf16 / it", "of it linear", "bf16 / it", "GB", "of bf16"]
    columns += ["temporary MiB", "of bf16", "unknown"]
    results.add(f"{layer} on {target}", columns, [row(name, cost, base) for name, cost in costs.items()])


def row(kind: str, cost: ProgramCost, base: ProgramCost | None) -> list[str]:
    """The figures of a kind, each with its ratio to bf16's."""
    figures = lambda c: (c.cycles, c.cycles_at(LINEAR), c.bytes_accessed, c.temp_bytes)  # noqa: E731
    mine, others = figures(cost), figures(base) if base else (0,) * 4
    shown = (f"{mine[0]:,}", f"{mine[1]:,}", f"{mine[2] / 1e9:.2f}", f"{mine[3] / 2**20:.0f}")
    cells = [kind]
    for n, (text, own, other) in enumerate(zip(shown, mine, others, strict=True)):
        ratio = (other, own) if n < 2 else (own, other)
        cells += [text, f"{ratio[0] / ratio[1]:.2f}" if base and ratio[1] else ""]
    return [*cells, str(len(cost.unknown)) if cost.unknown else ""]


def format_ops(cost: ProgramCost, most: int) -> list[str]:
    return ["  ".join(cells) for cells in cost.table(most)]


if __name__ == "__main__":
    sys.exit(main())
