"""GPTQ of one weight: the error and time of ours and of Qwix on the same Hessian; with --model, perplexity and KL.

python benchmarks/ptq.py [--inputs 512] [--outputs 512]
python benchmarks/ptq.py --model .cache/data/stories15m --data calibration.txt --text heldout.txt
"""

import argparse
import math
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import octavo
from octavo.ptq import Scales, gptq

RECIPES = (
    *("int4", "int4:signed", "int4:mse", "int4:search", "int4:gptq", "int4:minmax", "int4:minmax:gptq"),
    *("nf4", "nf4:gptq", "nvfp4", "nvfp4:search", "nvfp4:gptq", "int3", "int3:gptq", "int3,int4,int8:gptq"),
)


def timed(fn, repeats: int = 3):
    """The result and the best time, with the time of the first call, which compiles."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        out = jax.block_until_ready(fn())
        times.append(time.perf_counter() - start)
    return out, min(times[1:]), times[0]


def layer(inputs: int, outputs: int) -> None:
    """One matrix in int4, groups of 128: ours against Qwix's gptq_core, both with the scales of absmax."""
    from qwix._src.core.qarray import HowToQuantize
    from qwix.contrib import gptq_core

    rng = np.random.default_rng(0)
    w = rng.standard_t(5, size=(inputs, outputs)).astype(np.float32)
    x = (rng.normal(size=(4 * inputs, inputs // 2)) @ rng.normal(size=(inputs // 2, inputs))).astype(np.float32)
    x += rng.normal(size=x.shape).astype(np.float32)
    h = jnp.asarray(x.T @ x / len(x))
    how = HowToQuantize(qtype=jnp.int4, channelwise_axes=[0], tiled_axes={1: 128}, calibration_method="absmax")

    def theirs():
        q, _ = gptq_core.quantize_weight(jnp.asarray(w.T), h, how)
        return q.qvalue.astype(jnp.float32).T * jnp.repeat(q.scale, 128, axis=1).T

    scale = np.repeat(np.abs(w).reshape(-1, 128, outputs).max(axis=1) / 7.5, 128, axis=0)
    scales, fmt = Scales(jnp.asarray(scale)[None]), octavo.get_format("int4")

    def ours():
        return gptq(jnp.asarray(w)[None], h[None], scales, fmt)[0]

    print(f"{inputs} x {outputs}, int4 in groups of 128; jax {jax.__version__}")
    print(f"{'':8} {'error':>10} {'seconds':>9} {'first call':>11}")
    found = {}
    for name, fn, repeats in (("qwix", theirs, 1), ("octavo", ours, 3)):
        out, best, first = timed(fn, repeats)
        off = out - w
        error = float(jnp.sum((h @ off) * off) / jnp.sum((h @ w) * w))
        found[name] = error, best
        print(f"{name:8} {error:10.6f} {best:9.3f} {first:11.3f}")
    print(f"error {found['octavo'][0] / found['qwix'][0]:.3f} x, {found['qwix'][1] / found['octavo'][1]:.1f} x faster")


def model(path: str, data: str, text: str, recipes: list[str], head: str, bits: float) -> None:
    """Perplexity and KL of a model in several recipes, against float."""
    from octavo.pretrained import CalibrationData, PretrainedModel, convert_model, open_model, weight_rules
    from octavo.pretrained.budgeted import budget_rules
    from octavo.pretrained.calibrated import calibrated_codes, split_method
    from octavo.serve.evaluate import evaluate

    source = open_model(path)
    ids = source.tokenizer.encode(Path(text).read_text(encoding="utf-8"))
    calibration = CalibrationData(Path(data).read_text(encoding="utf-8"))
    print(f"{source.describe()}; {len(ids)} tokens")
    print(f"{'recipe':20} {'bits':>6} {'perplexity %':>16} {'KL':>18} {'same top %':>11} {'seconds':>8}")
    for recipe in recipes:
        start = time.perf_counter()
        plain, method = split_method(recipe)
        options = {"scale_dtype": "bfloat16"}
        if "," in plain:
            rules = budget_rules(source, plain.split(","), calibration, bits=bits, head=head, **options)
        else:
            rules = weight_rules(plain, source.config, head=head)
        codes = calibrated_codes(source, rules, calibration, method=method, **options) if method else None
        params, _ = convert_model(source, rules, codes=codes, **options)
        seconds = time.perf_counter() - start
        low = PretrainedModel.from_params(source.config, params, tokenizer=source.tokenizer, origin=source.origin)
        found = evaluate(low, ids, against=source, layers=False)
        change = f"{math.expm1(found.log_ratio.mean):+.2%} ± {found.log_ratio.error:.2%}"
        kl = f"{found.kl.mean:.4f} ± {found.kl.error:.4f}"
        stored = [q for q in params.values() if hasattr(q, "qtype")]
        size = 8 * sum(q.nbytes for q in stored) / sum(q.size for q in stored)
        print(f"{recipe:20} {size:6.2f} {change:>16} {kl:>18} {found.same_top.mean:11.2%} {seconds:8.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=512)
    parser.add_argument("--outputs", type=int, default=512)
    parser.add_argument("--model")
    parser.add_argument("--data", help="the calibration text")
    parser.add_argument("--text", help="the text of the evaluation")
    parser.add_argument("--recipes", default=" ".join(RECIPES))
    parser.add_argument("--bits", type=float, default=4.5, help="the budget of recipes with several formats")
    parser.add_argument("--head", default="float", help="the format of the embedding table and the logits")
    args = parser.parse_args()
    if args.model:
        model(args.model, args.data, args.text, args.recipes.split(), args.head, args.bits)
    else:
        layer(args.inputs, args.outputs)


if __name__ == "__main__":
    main()
