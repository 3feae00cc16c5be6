"""The three matmuls of a linear layer in int8 against float32, Qwix and AQT; matrix-vector products.

    python benchmarks/matmul.py [--quick] [--json FILE] [--torch PYTHON]

Quantization is dynamic: quantizing the operands and the gradient is part of the measured time. PYTHON is an interpreter
with torch and torchao, whose rounds are interleaved with ours.
"""

import functools
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from peers import Torch, attempt, torch_process
from timing import Results, arguments, progress, side_by_side, spreads

import octavo

PLAIN = (((1,), (0,)), ((), ()))
SHAPES = [(2048, 512, 512), (2048, 512, 2048), (2048, 2048, 512), (2048, 1024, 4096)]
RIVALS = ["f32", "qwix", "aqt", "torch float32", "torch int8"]
ROWS = [(512, 512), (512, 2048), (2048, 512), (1024, 4096)]


def contenders() -> dict:
    """The same matmul in four implementations."""
    from aqt.jax.v2 import config as aqt_config
    from qwix._src.core import dot_general_qt as qwix

    qwix_config = qwix.DotGeneralQtConfig(
        lhs_qtype="int8", rhs_qtype="int8", dlhs_grad_qtype="int8", drhs_grad_qtype="int8"
    )
    aqt = aqt_config.fully_quantized(fwd_bits=8, bwd_bits=8, use_stochastic_rounding=False)
    config = octavo.DotConfig.qt("int8")
    return {
        "f32": lambda x, w: jax.lax.dot_general(x, w, PLAIN),
        "octavo": lambda x, w: octavo.dot_general(x, w, PLAIN, config=config),
        "qwix": lambda x, w: qwix.dot_general_qt(x, w, PLAIN, qwix_config),
        "aqt": lambda x, w: aqt(x, w, PLAIN),
    }


def passes(f) -> dict:
    """The forward pass, each gradient, and all three together."""
    return {
        "forward": lambda x, w, g: f(x, w),
        "dlhs": lambda x, w, g: jax.vjp(lambda x: f(x, w), x)[1](g),
        "drhs": lambda x, w, g: jax.vjp(lambda w: f(x, w), w)[1](g),
        "all": lambda x, w, g: (lambda out, vjp: (out, vjp(g)))(*jax.vjp(f, x, w)),
    }


def training(results: Results, repeats: int, shapes: list[tuple[int, int, int]], torch: Torch | None) -> None:
    fns = contenders()
    rows = []
    for m, k, n in shapes:
        rng = np.random.default_rng(0)
        x, w, g = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((m, k), (k, n), (m, n)))
        for part in ("forward", "dlhs", "drhs", "all"):
            calls = {name: (jax.jit(passes(f)[part]), (x, w, g)) for name, f in fns.items()}
            if torch and part == "forward":
                for kind in ("float32", "int8"):
                    calls |= attempt(results, f"torch {kind}", functools.partial(torch.linear, kind, m, k, n))
            t = side_by_side(calls, repeats=repeats)
            ours = t["octavo"].seconds
            ratios = [f"{t[name].seconds / ours:.2f}" if name in t else "" for name in RIVALS]
            times = [f"{1e3 * t['f32'].seconds:.1f}", f"{1e3 * ours:.1f}"]
            rows.append([f"{m} x {k} x {n}, {part}", *times, *ratios, spreads(t)])
            progress(rows[-1][0])
    results.add(
        "The three int8 matmuls of a linear layer (tokens x in x out)",
        ["", "float32 ms", "octavo ms", *(f"{name} / octavo" for name in RIVALS), "spread"],
        rows,
        "Ratios of times: above 1 octavo is faster. `all` is forward and both gradients. torch's layers only run "
        "forward, with weights quantized beforehand; the others quantize both operands in every call.",
        ratios=[f"{name} / octavo" for name in RIVALS],
    )


def decoding(results: Results, repeats: int, torch: Torch | None) -> None:
    """A vector times int8 weights, a chain of layers in one program; weights as [in, out] and as [out, in]."""
    rows = []
    for k, n in ROWS:
        rng = np.random.default_rng(0)
        layers = max(4, 2**23 // (k * n))
        ws = [jnp.asarray(rng.normal(size=(k, n)), jnp.float32) for _ in range(layers)]
        by_out = [octavo.quantize(w, "int8", channelwise_axes=(1,)) for w in ws]
        by_in = [octavo.quantize(w.T, "int8", channelwise_axes=(0,)) for w in ws]
        x = jnp.asarray(rng.normal(size=(1, k)), jnp.float32)

        def chain(x, weights, contract):
            total = jnp.zeros((1, 1))
            for w in weights:
                total = total + octavo.dot_general(x + 1e-9 * total, w, (((1,), (contract,)), ((), ())))[:, :1]
            return total

        calls = {
            "f32": (jax.jit(functools.partial(chain, contract=0)), (x, ws)),
            "in": (jax.jit(functools.partial(chain, contract=0)), (x, by_out)),
            "out": (jax.jit(functools.partial(chain, contract=1)), (x, by_in)),
        }
        if torch:
            calls |= attempt(results, "torchao", functools.partial(torch.linear, "int8 weights", 1, k, n))
        t = side_by_side(calls, repeats=3 * repeats)
        f32 = t["f32"].seconds
        row = [f"{1e6 * f32 / layers:.0f}", f"{f32 / t['in'].seconds:.2f}", f"{f32 / t['out'].seconds:.2f}"]
        row.append(f"{1e6 * t['torchao'].seconds:.0f}" if "torchao" in t else "")
        rows.append([f"{k} x {n}", *row, spreads(t)])
        progress(rows[-1][0])
    results.add(
        "Vector times int8 weights, float activation (in x out)",
        ["", "float32 us", "float32 / octavo [in, out]", "float32 / octavo [out, in]", "torchao us", "spread"],
        rows,
        "Layers in a chain, time per layer. torchao's layer is called alone, so its time includes that of a call.",
        ratios=["float32 / octavo [in, out]", "float32 / octavo [out, in]"],
    )


def main() -> None:
    options = arguments(__doc__, peers=("torch",)).parse_args()
    repeats, shapes = (5, SHAPES[:2]) if options.quick else (21, SHAPES)
    warnings.simplefilter("ignore", DeprecationWarning)  # aqtp 0.9 converts arrays to dtypes implicitly
    results = Results("qwix", "aqtp", method=f"best of {repeats} interleaved rounds", file=options.json)
    with torch_process(results, options.torch) as torch:
        training(results, repeats, shapes, torch)
        decoding(results, repeats, torch)


if __name__ == "__main__":
    sys.exit(main())
