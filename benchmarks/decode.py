"""Tokens per second of a real model, one text at a time: float32, int8 and int4 weights, beside llama.cpp.

    python benchmarks/decode.py [--model FILE] [--tokens 64] [--rounds 5] [--threads 2] [--llama PYTHON] [--quick]

The model is SmolLM2-135M (`make data ARGS=smollm2`), whose matrices lie on a 4-bit grid; as float32 they are what is
multiplied here, so speed is that of any float32 model. All engines are in memory at once and take turns; the best round
counts. PYTHON is an interpreter that has llama-cpp-python; its F32, Q8_0 and Q4_0 files are written from the same
weights, and its rounds are between ours, on as many threads.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from timing import header

from octavo import QArray, kernels
from octavo.pretrained import open_model
from octavo.pretrained.convert import convert_model, peak_memory
from octavo.pretrained.source import Leaf, Source
from octavo.pretrained.to_gguf import write_as_gguf
from octavo.pretrained.weights import weight_rules
from octavo.serve import Engine, SamplingParams

MODEL = Path(__file__).parents[1] / ".cache/data/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "The lighthouse at the end of the harbour was built in 1874, after a winter in which"
WEIGHTS = {"float32": None, "int8": "int8", "int4 g32": "int4"}
FILES = {"llama.cpp F32": "float32", "llama.cpp Q8_0": "int8", "llama.cpp Q4_0": "int4"}

# Runs in the other interpreter: a line with a file's number for each round, answered by seconds for a token.
LLAMA = """
import json, sys, time
from llama_cpp import Llama
files, tokens, threads, prompt = json.loads(sys.argv[1])
models = [Llama(f, n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False) for f in files]
print("ready", flush=True)
for line in sys.stdin:
    model = models[int(line)]
    model.reset()
    model.eval(model.tokenize(prompt.encode()))
    begin = time.perf_counter()
    for _ in range(tokens):
        model.eval([model.sample(temp=0.0)])
    print((time.perf_counter() - begin) / tokens, flush=True)
"""


def low(source: Source, asked: str | None) -> Source:
    """The model with its weights in a format, or in float32."""
    if asked is None:
        params = {path: leaf.load() for path, leaf in source.leaves.items()}
        params = {path: np.asarray(x.dequantize()) if isinstance(x, QArray) else x for path, x in params.items()}
    else:
        params, _ = convert_model(source, weight_rules(asked, source.config), scale_dtype="bfloat16")
    leaves = {path: Leaf(x.shape, "float32", lambda x=x: x) for path, x in params.items()}
    return Source(source.config, leaves, source.tokenizer, origin=source.origin)


def decode(engine: Engine, ids: list[int], tokens: int) -> float:
    """Seconds for a token, the prompt not counted."""
    events = engine.generate([ids], SamplingParams(temperature=0.0, max_tokens=tokens + 1))
    next(events)
    begin = time.perf_counter()
    count = sum(1 for _ in events)
    assert count == tokens, f"the text ended after {count} tokens"
    return (time.perf_counter() - begin) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama", metavar="PYTHON", help="an interpreter with llama-cpp-python")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.rounds = 16, 2
    if not Path(args.model).exists():
        print(f"there is no {args.model}: make data ARGS=smollm2")
        return
    print(f"{header()}\n{kernels.status()}\n")
    source = open_model(args.model)
    ids = source.tokenizer.encode(PROMPT)
    engines = {name: Engine(low(source, asked), slots=1, max_length=512, eos_ids=()) for name, asked in WEIGHTS.items()}
    sizes = {name: engine.params_nbytes for name, engine in engines.items()}
    for engine in engines.values():
        decode(engine, ids, 4)
    found: dict[str, list[float]] = {name: [] for name in engines}
    with tempfile.TemporaryDirectory() as folder:
        llama = None
        if args.llama:
            files = [str(Path(folder, f"{asked}.gguf")) for asked in FILES.values()]
            for asked, file in zip(FILES.values(), files, strict=True):
                write_as_gguf(source, asked, Path(file))
            sizes |= {name: Path(file).stat().st_size for name, file in zip(FILES, files, strict=True)}
            found |= {name: [] for name in FILES}
            words = json.dumps([files, args.tokens, args.threads, PROMPT])
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            llama = subprocess.Popen([args.llama, "-c", LLAMA, words], text=True, **pipes)
            if llama.stdout.readline().strip() != "ready":
                sys.exit(f"{args.llama} cannot load the models: has it llama-cpp-python?")
        for _ in range(args.rounds):
            for name, engine in engines.items():
                found[name].append(decode(engine, ids, args.tokens))
            for number, name in enumerate(FILES if llama else ()):
                print(number, file=llama.stdin, flush=True)
                found[name].append(float(llama.stdout.readline()))
        if llama:
            llama.stdin.close()
            llama.wait()
    base = min(found["float32"])
    print(f"{'':<16}{'tokens/s':>10}{'x float32':>11}{'spread':>9}{'MiB':>8}{'GB/s':>8}")
    for name, times in found.items():
        best, spread = min(times), statistics.median(times) / min(times) - 1
        rate = sizes[name] / best / 1e9
        print(f"{name:<16}{1 / best:>10.1f}{base / best:>11.2f}{spread:>9.0%}{sizes[name] / 2**20:>8.0f}{rate:>8.1f}")
    print(f"peak memory of this process, all three models in it: {peak_memory() / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
