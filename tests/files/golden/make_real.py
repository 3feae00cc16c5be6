"""Makes real.json: what `gguf` and llama.cpp say about the files that `make data` fetches.

    pip install gguf==0.19.0 llama-cpp-python==0.3.36
    python tests/files/golden/make_real.py SmolLM2-135M-Instruct.Q4_1.gguf ggml-vocab-llama-spm.gguf

The second file is the vocabulary of Llama 2, which stories15M shares; it is in llama.cpp's own tests.
"""

import ctypes
import hashlib
import json
import sys
from pathlib import Path

import gguf
import numpy as np
from llama_cpp import llama_cpp as lib

TENSORS = ["token_embd.weight", "blk.0.attn_q.weight", "blk.17.ffn_down.weight", "blk.29.attn_norm.weight"]
TEXTS = [
    "Hello, world!",
    " leading and  double   spaces ",
    "",
    " ",
    "\n",
    "a\n\nb\r\n\tc",
    "The year 1984, 3.14159 and 1,000,000.",
    "12345678901234567890",
    "def f(x):\n    return x**2  # comment\n",
    "if (a != b) { c[i] += 0x1F; }",
    "naïve café über Straße",
    "e\u0301 combining",
    "Привет, мир",
    "你好\uff0c世界。",
    "こんにちは",
    "مرحبا بالعالم",
    "🎉👩‍👩‍👧‍👦🇩🇪",
    "it's I'M they'LL don't",
    "<html><body class='x'>&amp;</body></html>",
    "https://example.org/a?b=c&d=%20#e",
    "ALLCAPS CamelCase snake_case kebab-case",
    "\u00a0\u2003non-breaking",
    "a" * 50,
    "....,,,,!!!!????",
    "Once upon a time, there was a little girl named Lily.",
]
SPECIAL = ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<|endoftext|>x"]


def hashes(path: str) -> dict[str, str]:
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    values = {name: gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type) for name in TENSORS}
    return {name: hashlib.sha256(np.ascontiguousarray(v, "<f4").tobytes()).hexdigest() for name, v in values.items()}


def tokens(path: str, texts: list[str]) -> dict[str, list[int]]:
    params = lib.llama_model_default_params()
    params.vocab_only = True
    vocab = lib.llama_model_get_vocab(lib.llama_model_load_from_file(path.encode(), params))
    made = {}
    for text in texts:
        data, ids = text.encode(), (lib.llama_token * 1000)()
        count = lib.llama_tokenize(vocab, data, len(data), ids, len(ids), ctypes.c_bool(True), ctypes.c_bool(True))
        made[text] = list(ids[:count])
    return made


def lines(part: dict[str, object]) -> str:
    return ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in part.items())


if __name__ == "__main__":
    lib.llama_backend_init()
    smollm2, llama = sys.argv[1:]
    made = {
        "smollm2 float32": hashes(smollm2),
        "smollm2 tokens": tokens(smollm2, TEXTS + SPECIAL),
        "llama tokens": tokens(llama, TEXTS),
    }
    parts = (f'"{key}": {{\n{lines(part)}\n}}' for key, part in made.items())
    Path(__file__).with_name("real.json").write_text("{\n" + ",\n".join(parts) + "\n}\n")
