"""One linear layer: forward, gradients and all three matmuls in int8 against float32, Qwix and AQT; one-row products.

    python benchmarks/matmul.py [--quick]

Everything is dynamic: quantizing the operands and the gradient is part of what is timed. A ratio above 1 means that
the first is faster.
"""

import argparse
import functools
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from timing import header, side_by_side

import octavo

PLAIN = (((1,), (0,)), ((), ()))
SHAPES = [(2048, 512, 512), (2048, 512, 2048), (2048, 2048, 512), (2048, 1024, 4096)]
ROWS = [(512, 512), (512, 2048), (2048, 512), (1024, 4096)]


def contenders() -> dict:
    """The same matmul, four ways."""
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


def parts(f) -> dict:
    """Forward alone, each gradient alone, and the three together."""
    return {
        "forward": lambda x, w, g: f(x, w),
        "dlhs": lambda x, w, g: jax.vjp(lambda x: f(x, w), x)[1](g),
        "drhs": lambda x, w, g: jax.vjp(lambda w: f(x, w), w)[1](g),
        "all": lambda x, w, g: (lambda out, vjp: (out, vjp(g)))(*jax.vjp(f, x, w)),
    }


def training(repeats: int) -> None:
    print(
        f"{'tokens x in x out':>18} {'part':>8} {'f32 ms':>8} {'octavo':>8} "
        f"{'f32/oct':>8} {'qwix/oct':>9} {'aqt/oct':>8} spread"
    )
    fns = contenders()
    for m, k, n in SHAPES:
        rng = np.random.default_rng(0)
        x, w, g = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((m, k), (k, n), (m, n)))
        for part in ("forward", "dlhs", "drhs", "all"):
            calls = {name: (jax.jit(parts(f)[part]), (x, w, g)) for name, f in fns.items()}
            t = side_by_side(calls, repeats=repeats)
            ours = t["octavo"].seconds
            print(
                f"{f'{m} x {k} x {n}':>18} {part:>8} {1e3 * t['f32'].seconds:8.1f} {1e3 * ours:8.1f} "
                f"{t['f32'].seconds / ours:8.2f} {t['qwix'].seconds / ours:9.2f} {t['aqt'].seconds / ours:8.2f} "
                f"{100 * t['octavo'].spread:5.0f}%",
                flush=True,
            )


def decoding(repeats: int) -> None:
    """One row times int8 weights, a chain of layers in one program; weights as [in, out] and as [out, in]."""
    print(
        f"\none row x int8 weights, float activation\n"
        f"{'in x out':>18} {'f32 us':>8} {'[in,out]':>9} {'[out,in]':>9} (f32/octavo)"
    )
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
        t = side_by_side(calls, repeats=3 * repeats)
        f32 = t["f32"].seconds
        print(
            f"{f'{k} x {n}':>18} {1e6 * f32 / layers:8.0f} {f32 / t['in'].seconds:9.2f} {f32 / t['out'].seconds:9.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    repeats = 7 if parser.parse_args().quick else 21
    warnings.simplefilter("ignore", DeprecationWarning)  # aqtp 0.9 converts arrays to dtypes implicitly
    print(header("qwix", "aqtp"), f"best of {repeats} interleaved rounds", sep="\n")
    training(repeats)
    decoding(repeats)


if __name__ == "__main__":
    sys.exit(main())
