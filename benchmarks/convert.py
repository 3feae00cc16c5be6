"""Memory and time of converting a model of a billion parameters, float to low precision.

    python benchmarks/convert.py [--recipe int4] [--layers 16] [--quick] [--json FILE]

Writes a random Llama of 1.2 billion parameters in Hugging Face's layout (bfloat16, 2.5 GB, in a temporary directory),
converts it with `octavo quantize` in a process of its own, and compares its peak memory with a budget: that of a
process after converting a tiny model, plus the result, plus 1.2 times the largest parameter.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from timing import Results, arguments

from octavo._tree import flatten_paths
from octavo.files.safetensors import Info, Lazy, write
from octavo.models import ModelConfig, abstract_params
from octavo.pretrained.huggingface import describe_model
from octavo.pretrained.model import PretrainedModel
from octavo.pretrained.names import HUGGINGFACE, is_transposed

SIZES = {"emb_dim": 2048, "num_query_heads": 32, "num_kv_heads": 8, "head_dim": 64, "mlp_dim": 8192}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def write_random(config: ModelConfig, folder: Path) -> int:
    """Write a model tensor by tensor; returns the bytes of the largest."""
    shapes = {path: leaf.shape for path, leaf in flatten_paths(abstract_params(config)).items()}
    rng = np.random.default_rng(0)
    tensors = {}
    for path, name in HUGGINGFACE.param_names(abstract_params(config)).items():
        shape = shapes[path][::-1] if is_transposed(path) else shapes[path]

        def make(shape: tuple[int, ...] = tuple(shape)) -> np.ndarray:
            return (rng.standard_normal(shape, np.float32) * 0.02).astype(BFLOAT16)

        tensors[name] = Lazy(Info.make(BFLOAT16, tuple(shape)), make)
    write(folder, tensors, {"format": "pt"}, max_shard_bytes=10**9)
    source = object.__new__(PretrainedModel)
    source.__dict__.update(config=config, leaves={}, tokenizer=None, rules=(), origin={})
    (folder / "config.json").write_text(json.dumps(describe_model(source, "bfloat16")))
    return max(lazy.info.nbytes for lazy in tensors.values())


def run(words: list[str]) -> tuple[str, int]:
    """The output of a command, and the peak memory of its process."""
    # The resource usage of a child includes this process's memory; the child's own peak at its end does not.
    program = "import sys; from octavo.cli import main; from octavo.pretrained.memory import peak_memory\n"
    program += "status = main(sys.argv[1:]); print(peak_memory()); sys.exit(status)"
    child = subprocess.run([sys.executable, "-c", program, *words], stdout=subprocess.PIPE, text=True)
    if child.returncode:
        sys.exit(f"octavo {' '.join(words)} failed")
    text, _, peak = child.stdout.rstrip().rpartition("\n")
    return text, int(peak)


def main() -> None:
    parser = arguments(__doc__, quick="two layers and a small vocabulary")
    parser.add_argument("--recipe", default="int4")
    parser.add_argument("--layers", type=int, default=16)
    args = parser.parse_args()
    layers, vocab = (2, 16_384) if args.quick else (args.layers, 128_256)
    config = ModelConfig(vocab_size=vocab, num_layers=layers, scan_layers=False, **SIZES)
    results = Results(method=f"recipe {args.recipe}, {layers} layers", file=args.json)
    with tempfile.TemporaryDirectory() as folder:
        small = ModelConfig(vocab_size=32, num_layers=1, scan_layers=False, **dict.fromkeys(SIZES, 64))
        write_random(small.replace(num_query_heads=1, num_kv_heads=1), Path(folder, "small"))
        _, base = run(["quantize", f"{folder}/small", args.recipe, f"{folder}/nothing", "--quiet"])
        largest = write_random(config, Path(folder, "float"))
        begin = time.perf_counter()
        text, peak = run(["quantize", f"{folder}/float", args.recipe, f"{folder}/low", "--quiet"])
        seconds = time.perf_counter() - begin
        output = sum(file.stat().st_size for file in Path(folder, "low").rglob("*") if file.is_file())
    print(text)
    budget = base + output + 1.2 * largest
    sizes = {
        "the process itself": base,
        "the result on disk": output,
        "the largest parameter": largest,
        "peak memory": peak,
        "budget": budget,
    }
    results.add(
        "Memory of `octavo quantize`, a model from bfloat16 to low precision",
        ["", "MiB"],
        [[what, f"{size / 2**20:.0f}"] for what, size in sizes.items()],
        f"{peak / budget:.2f} of the budget, {seconds:.0f} seconds including the start of the process.",
    )


if __name__ == "__main__":
    main()
