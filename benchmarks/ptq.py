"""GPTQ of one weight: the error and time of ours and of Qwix on the same Hessian; with --model, perplexity and KL.

python benchmarks/ptq.py [--inputs 512] [--outputs 512]
python benchmarks/ptq.py --model .cache/data/stories15m
python benchmarks/ptq.py --model .cache/data/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --data book.txt --text other.txt
    [--tokens 8192] [--llama PYTHON] [--keep DIR]

Without --data and --text, the model tells texts itself: 24 for the calibration (--told) and 16 for the evaluation.
Recipes that begin with gguf: are GGUF files with an importance matrix of the same text, such as gguf:q4_k_m; those that
begin with llama: are quantized by llama.cpp itself with the same matrix. PYTHON is an interpreter that has cyllama and
numpy. A recipe of several formats ends with its budget, such as mixed:gptq@4.5; +300 distills for 300 steps; rotated:
before a recipe rotates the model first, and hadamard: rotates the inputs of matmuls in blocks of 32 while it runs.
With --rotate all of them, and the float model, are rotated: the weights of SmolLM2 are on a grid of four bits, which a
rotation undoes. --keep keeps the texts, the statistics and the rows: the same command resumes.
"""

import argparse
import json
import math
import subprocess
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import octavo
from octavo.pretrained.memory import peak_memory
from octavo.pretrained.model import to_float
from octavo.ptq import Scales, gptq

RECIPES = (
    *("int4", "int4:signed", "int4:mse", "int4:search", "int4:gptq", "int4:minmax", "int4:minmax:gptq", "int4:awq"),
    *("int4_double:minmax:search", "int4_double:minmax:gptq", "int4_double:minmax:gptaq", "nf4", "nf4:gptq"),
    *(
        "nf4_double:gptq",
        "nvfp4",
        "nvfp4:search",
        "nvfp4:gptq",
        "mxfp4:gptq",
        "hadamard:mxfp4:gptq",
        "int2:minmax:gptq",
        "int2:minmax:autoround",
    ),
    *("int3", "int3:gptq", "int3:autoround", "int3_double:minmax:gptq", "int3_double:minmax:autoround"),
    *("int5_double:minmax:gptq", *(f"mixed:gptq@{bits}" for bits in (4, 4.5, 5, 5.5, 6))),
    *("gguf:int4", "gguf:q4_k_m", "gguf:int8", "llama:q4_0", "llama:q4_k_m", "llama:q8_0"),
)
FILE_TYPES = {"q4_0": 2, "q8_0": 7, "q4_k_s": 14, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18}

# Runs in the other interpreter. cyllama has no setter of the importance matrix, so its pointer is written into the C
# structure: after four integers, which are searched for, and six booleans.
LLAMA = """
import ctypes, sys
import numpy as np
import cyllama.llama.llama_cpp as llama
source, out, kind, matrix = sys.argv[1:]
class Entry(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("size", ctypes.c_size_t)]
params = llama.LlamaModelQuantizeParams()
params.nthread, params.ftype = 2, int(kind)
params.output_tensor_type = params.token_embedding_type = 0
found = {name.encode(): np.ascontiguousarray(x, np.float32) for name, x in np.load(matrix).items()}
entries = (Entry * (len(found) + 1))(*(Entry(name, x.ctypes.data, x.size) for name, x in found.items()))
words = (ctypes.c_int32 * 24).from_address(id(params))
at = next(i for i in range(4, 20) if words[i : i + 4] == [2, int(kind), 0, 0])
ctypes.c_void_p.from_address(id(params) + 4 * at + 24).value = ctypes.addressof(entries)
llama.model_quantize(source, out, params)
"""


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


def tell(source, count: int) -> list[str]:
    """Texts of up to 256 tokens that a model tells."""
    from octavo.serve import Engine, SamplingParams

    sampling = [SamplingParams(temperature=1.0, max_tokens=256, seed=i) for i in range(count)]
    told = [[] for _ in range(count)]
    for event in Engine(source, slots=16, max_length=258).generate([[source.tokenizer.bos_id]] * count, sampling):
        told[event.request_id].append(event.token)
    return [source.tokenizer.decode(tokens) for tokens in told]


def from_gguf(path: Path, source):
    """A model from a GGUF file, read as a whole, and the bits per weight of its layers."""
    from octavo.files.gguf import Gguf
    from octavo.pretrained import open_model

    with Gguf(path) as file:
        infos = [file.info(name) for name in file.names() if name.startswith("blk.")]
    infos = [info for info in infos if len(info.shape) == 2]
    bits = 8 * sum(info.nbytes for info in infos) / sum(math.prod(info.shape) for info in infos)
    low = open_model(path)
    leaves = {path: np.asarray(to_float(leaf.load(), "float32")) for path, leaf in low.leaves.items()}
    return type(low).from_params(low.config, leaves, tokenizer=source.tokenizer, origin=source.origin), bits


def as_gguf(source, kind: str, calibration, head: str):
    """A model in a GGUF file that Octavo writes."""
    from octavo.pretrained import Request, export_model

    data = calibration if "_k" in kind else None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "m.gguf"
        export_model("gguf", source, out, Request(kind, head="float32" if head == "float" else head, data=data))
        return from_gguf(out, source)


def by_llama(source, kind: str, calibration, python: str):
    """A model in a GGUF file that llama.cpp writes; its head stays in float."""
    from octavo.files.gguf import read_imatrix
    from octavo.pretrained import Request, export_model, gguf

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("float.gguf", "low.gguf", "matrix.npz", "matrix.gguf", "own.gguf")]
        gguf.write_model(source, "float32", paths[0], head="float32")
        export_model("gguf", source, paths[4], Request("q4_k", data=calibration, imatrix=paths[3]))
        np.savez(paths[2], **read_imatrix(paths[3]))
        words = [*map(str, paths[:2]), str(FILE_TYPES[kind]), str(paths[2])]
        subprocess.run([python, "-c", LLAMA, *words], check=True, capture_output=True)
        return from_gguf(paths[1], source)


def as_recipe(source, recipe: str, calibration, head: str, budgets: dict, keep: Path | None):
    """A model converted by a recipe, and the bits per quantized weight."""
    from octavo.pretrained import PretrainedModel, convert_model, hadamard, rotated, weight_rules
    from octavo.pretrained.budgeted import budget_formats, budget_options, budget_rules
    from octavo.pretrained.calibrated import calibrated_codes, distilled, split_method

    if recipe.startswith("rotated:"):
        source, recipe, keep = rotated(source), recipe.removeprefix("rotated:"), None
    if recipe.startswith("hadamard:"):
        source, recipe, keep = hadamard(source, inputs=32), recipe.removeprefix("hadamard:"), None
    recipe, _, steps = recipe.partition("+")
    recipe, _, bits = recipe.partition("@")
    plain, method = split_method(recipe)
    options = {"scale_dtype": "bfloat16"}
    kept = {**options, "checkpoint": None if method in ("gptaq", "awq") else keep}
    if bits:
        found = budgets.get(plain) or budget_options(source, budget_formats(plain), calibration, **kept)
        rules, _ = budget_rules(source, budgets.setdefault(plain, found), bits=float(bits), head=head, **options)
    else:
        rules = weight_rules(plain, source.config, head=head)
    codes = calibrated_codes(source, rules, calibration, method=method, **kept) if method else None
    params, _ = convert_model(source, rules, codes=codes, **options)
    if steps:
        params = distilled(source, params, rules, calibration, steps=int(steps))
    stored = [q for q in params.values() if hasattr(q, "qtype")]
    size = 8 * sum(q.nbytes for q in stored) / sum(q.size for q in stored)
    return PretrainedModel.from_params(source.config, params, tokenizer=source.tokenizer, origin=source.origin), size


def texts_of(source, args) -> list[str]:
    """The texts of the calibration and of the evaluation."""
    if args.data and args.text:
        return [Path(name).read_text(encoding="utf-8") for name in (args.data, args.text)]
    paths = [args.keep / name for name in ("calibration.txt", "evaluation.txt")] if args.keep else []
    if paths and all(path.exists() for path in paths):
        return [path.read_text(encoding="utf-8") for path in paths]
    told = tell(source, args.told + 16)
    texts = ["\n\n".join(part) for part in (told[: args.told], told[args.told :])]
    for path, text in zip(paths, texts, strict=bool(paths)):
        path.write_text(text, encoding="utf-8")
    return texts


def model(args) -> None:
    """Perplexity and KL of a model in several recipes, against float."""
    from octavo.pretrained import CalibrationData, open_model, rotated
    from octavo.serve.evaluate import evaluate

    source = open_model(args.model)
    if args.rotate:
        source = rotated(source)
        leaves = {path: leaf.load() for path, leaf in source.leaves.items()}
        source = type(source).from_params(source.config, leaves, tokenizer=source.tokenizer, origin=source.origin)
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
    texts = texts_of(source, args)
    ids = source.tokenizer.encode(texts[1])[: args.tokens]
    calibration = CalibrationData(texts[0], tokens=args.data_tokens)
    rows = args.keep / "rows.json" if args.keep else None
    done = json.loads(rows.read_text()) if rows and rows.exists() else {}
    print(f"{source.describe()}; {len(ids)} tokens")
    print(f"{'recipe':32} {'bits':>6} {'perplexity %':>16} {'KL':>18} {'same top %':>11} {'CPU s':>8} {'s':>6}")
    budgets = {}
    for recipe in args.recipes.split():
        if recipe.startswith("llama:") and args.llama is None:
            continue
        if recipe not in done:
            start, wall = time.process_time(), time.perf_counter()
            if recipe.startswith("gguf:"):
                low, size = as_gguf(source, recipe.removeprefix("gguf:"), calibration, args.head)
            elif recipe.startswith("llama:"):
                low, size = by_llama(source, recipe.removeprefix("llama:"), calibration, args.llama)
            else:
                low, size = as_recipe(source, recipe, calibration, args.head, budgets, args.keep)
            seconds, wall = time.process_time() - start, time.perf_counter() - wall
            found = evaluate(low, ids, against=source, layers=False)
            change = f"{math.expm1(found.log_ratio.mean):+.2%} ± {found.log_ratio.error:.2%}"
            kl = f"{found.kl.mean:.4f} ± {found.kl.error:.4f}"
            top = f"{found.same_top.mean:11.2%} {seconds:8.1f} {wall:6.1f}"
            done[recipe] = f"{recipe:32} {size:6.2f} {change:>16} {kl:>18} {top}"
            if rows:
                rows.write_text(json.dumps(done))
        print(done[recipe], flush=True)
    print(f"peak memory of this process: {peak_memory() >> 20} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=512)
    parser.add_argument("--outputs", type=int, default=512)
    parser.add_argument("--model")
    parser.add_argument("--data", help="the calibration text")
    parser.add_argument("--text", help="the text of the evaluation")
    parser.add_argument("--told", type=int, default=24, help="texts for the calibration that the model tells")
    parser.add_argument("--recipes", default=" ".join(RECIPES))
    parser.add_argument("--llama", metavar="PYTHON", help="an interpreter that has cyllama and numpy")
    parser.add_argument("--head", default="float", help="the format of the embedding table and the logits")
    parser.add_argument("--data-tokens", type=int, help="tokens of the calibration text; all of it by default")
    parser.add_argument("--tokens", type=int, help="tokens of the evaluation text; all of it by default")
    parser.add_argument("--rotate", action="store_true", help="rotate the float model first")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep texts, statistics and rows in DIR, and resume")
    args = parser.parse_args()
    if args.model:
        model(args)
    else:
        layer(args.inputs, args.outputs)


if __name__ == "__main__":
    main()
