"""Tokens per second of a real model at batch size 1, decoded and prefilled: float32, int8 and int4 weights, llama.cpp.

    python benchmarks/decode.py [--quick] [--json FILE] [--model FILE] [--tokens 128] [--rounds 5] [--threads 2]
        [--llama PYTHON]

The model is SmolLM2-135M (`make data ARGS=smollm2`), whose published weights are 4-bit; they are dequantized to float32
first, so the speed is that of any float32 model. All engines are in memory at once, rounds are interleaved, and the
fastest counts. PYTHON is an interpreter that has llama-cpp-python; its F32, Q8_0, Q4_0 and Q4_K files are written from
the same weights (rows that are no multiple of 256 have Q5_0 in the last), and its rounds are interleaved with ours, on
as many threads. `--window N` times every N tokens by themselves, and the fastest counts: on a machine that others use.
"""

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from peers import MissingError, Peer
from timing import Results, Timing, arguments, side_by_side

from octavo import QArray, kernels
from octavo.pretrained import gguf, open_model
from octavo.pretrained.convert import convert_model, peak_memory
from octavo.pretrained.model import Leaf, PretrainedModel
from octavo.pretrained.weight_rules import weight_rules
from octavo.serve import Engine, SamplingParams

MODEL = Path(__file__).parents[1] / ".cache/data/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "The lighthouse at the end of the harbour was built in 1874, after a winter in which"
WEIGHTS = {
    "octavo float32": None,
    "octavo int8": "int8",
    "octavo int4 g32": "int4",
    "octavo int4_double:minmax": "int4_double:minmax",
}
FILES = {"llama.cpp F32": "float32", "llama.cpp Q8_0": "int8", "llama.cpp Q4_0": "int4", "llama.cpp Q4_K": "q4_k"}
RIVALS = dict(zip(WEIGHTS, FILES, strict=True))

PROMPT_TOKENS = 512

# Runs in the other interpreter: a line with a file's number for each round, answered by seconds per token. After the
# number, "prompt" asks for those of a prompt.
LLAMA = """
import json, sys, time, llama_cpp
from llama_cpp import Llama
files, tokens, window, threads, prompt = json.loads(sys.argv[1])
models = [Llama(f, n_ctx=1024, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False) for f in files]
print(f"llama-cpp-python {llama_cpp.__version__}", flush=True)
for line in sys.stdin:
    number, *what = line.split()
    model = models[int(number)]
    model.reset()
    if what:
        ids = (model.tokenize(prompt.encode()) * 512)[:512]
        begin = time.perf_counter()
        model.eval(ids)
        print((time.perf_counter() - begin) / len(ids), flush=True)
        continue
    model.eval(model.tokenize(prompt.encode()))
    times = [time.perf_counter()]
    for _ in range(tokens // window):
        for _ in range(window):
            model.eval([model.sample(temp=0.0)])
        times.append(time.perf_counter())
    print(min(b - a for a, b in zip(times, times[1:])) / window, flush=True)
"""


def with_weights(source: PretrainedModel, qtype: str | None) -> PretrainedModel:
    """The model with its weights in a quantized type, or in float32."""
    if qtype is None:
        params = {path: leaf.load() for path, leaf in source.leaves.items()}
        params = {path: np.asarray(x.dequantize()) if isinstance(x, QArray) else x for path, x in params.items()}
    else:
        params, _ = convert_model(source, weight_rules(qtype, source.config), scale_dtype="bfloat16")
    leaves = {path: Leaf(x.shape, "float32", lambda x=x: x) for path, x in params.items()}
    return PretrainedModel(source.config, leaves, source.tokenizer, origin=source.origin)


def decode(engine: Engine, ids: list[int], tokens: int, window: int = 0) -> float:
    """Seconds per token, without the prompt: of all tokens, or of the fastest `window` of them."""
    window = window or tokens
    events = engine.generate([ids], SamplingParams(temperature=0.0, max_tokens=tokens + 1))
    next(events)
    times = [time.perf_counter()]
    for number, _ in enumerate(events, 1):
        if number % window == 0:
            times.append(time.perf_counter())
    assert len(times) == 1 + tokens // window, f"the text ended after some of {tokens} tokens"
    return min(b - a for a, b in itertools.pairwise(times)) / window


def prefill(engine: Engine, ids: list[int], rounds: Iterator[int]) -> float:
    """Seconds per token of a prompt, no prefix of which is in the cache."""
    prompt = [next(rounds) % 1000 + 10, *ids * PROMPT_TOKENS][:PROMPT_TOKENS]
    begin = time.perf_counter()
    list(engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1)))
    return (time.perf_counter() - begin) / len(prompt)


class LlamaCpp:
    """llama.cpp in another interpreter, with files of the same weights."""

    def __init__(self, python: str, source: PretrainedModel, folder: Path, tokens: tuple[int, int], threads: int):
        files = {name: folder / f"{qtype}.gguf" for name, qtype in FILES.items()}
        for name, file in files.items():
            gguf.write_model(source, FILES[name], file)
        self.sizes = {name: file.stat().st_size for name, file in files.items()}
        words = json.dumps([[str(file) for file in files.values()], *tokens, threads, PROMPT])
        self.peer = Peer(python, ["-c", LLAMA, words], missing="llama-cpp-python, or it cannot load the files")

    def calls(self, what: str = "") -> dict[str, Callable[[], float]]:
        """A call per file that returns seconds per token, decoded or, for "prompt", of a prompt."""
        return {name: lambda i=i: float(self.peer.ask(f"{i} {what}")) for i, name in enumerate(FILES)}


def main() -> None:
    parser = arguments(__doc__, quick="fewer tokens (16) and rounds (2)", peers=("llama",))
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--window", type=int)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    tokens, rounds = args.tokens or (16 if args.quick else 128), args.rounds or (2 if args.quick else 5)
    window = args.window or tokens
    what = f"{tokens} tokens" if window == tokens else f"the fastest {window} of {tokens} tokens"
    method = f"{kernels.status()}; {what}, best of {rounds} interleaved rounds"
    results = Results(method=method, file=args.json)
    if not Path(args.model).exists():
        results.skip("everything", f"there is no {Path(args.model).name}: make data ARGS=smollm2")
        return
    source = open_model(args.model)
    ids = source.tokenizer.encode(PROMPT)
    engines = {
        name: Engine(with_weights(source, qtype), slots=1, max_length=1024, kv="auto", prefill="auto", eos_ids=())
        for name, qtype in WEIGHTS.items()
    }
    sizes = {name: engine.programs.params_nbytes for name, engine in engines.items()}
    for engine in engines.values():
        decode(engine, ids, 4)
    calls = {name: lambda engine=engine: decode(engine, ids, tokens, window) for name, engine in engines.items()}
    count = itertools.count()
    prompts = {name: lambda engine=engine: prefill(engine, ids, count) for name, engine in engines.items()}
    llama = None
    with tempfile.TemporaryDirectory() as folder:
        try:
            if args.llama is None:
                raise MissingError("no interpreter was given: --llama PYTHON")
            llama = LlamaCpp(args.llama, source, Path(folder), (tokens, window), args.threads)
            results.add_versions(llama.peer.ready)
            calls, sizes = calls | llama.calls(), sizes | llama.sizes
            prompts |= llama.calls("prompt")
        except MissingError as error:
            results.skip("llama.cpp", str(error))
        times, of_prompts = side_by_side(calls, repeats=rounds), side_by_side(prompts, repeats=rounds)
        if llama is not None:
            llama.peer.close()
    for title, found in (("decoded", times), (f"of a prompt of {PROMPT_TOKENS}", of_prompts)):
        add_table(results, title, found, sizes)


def add_table(results: Results, title: str, times: dict[str, Timing], sizes: dict[str, int]) -> None:
    """Add the tokens per second of all engines."""
    base = times["octavo float32"].seconds
    rows = []
    for name, timing in times.items():
        rival = times.get(RIVALS.get(name, ""))
        cells = [f"{1 / timing.seconds:.1f}", f"{base / timing.seconds:.2f}"]
        cells += [f"{rival.seconds / timing.seconds:.2f}" if rival else "", f"{sizes[name] / 2**20:.0f}"]
        bandwidth = f"{sizes[name] / timing.seconds / 1e9:.1f}" if title == "decoded" else ""
        rows.append([name, *cells, bandwidth, f"{timing.spread:.0%}"])
    results.add(
        f"Tokens of SmolLM2-135M {title}, batch size 1",
        ["", "tokens/s", "float32 / it", "llama.cpp / it", "MiB", "GB/s", "spread"],
        rows,
        "Ratios of times: float32 is octavo's, llama.cpp's has as many bits. MiB are those of the weights; peak "
        f"memory of this process, all models in it: {peak_memory() >> 20} MiB.",
        ratios=["float32 / it", "llama.cpp / it"],
    )


if __name__ == "__main__":
    sys.exit(main())
