"""Models written as GGUF files, in llama.cpp's own blocks, straight from what the model holds."""

import functools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from octavo.files.gguf import Tensor, write_gguf
from octavo.numerics import nearest_names
from octavo.pretrained.convert import Summary
from octavo.pretrained.gguf import pairs_of_halves
from octavo.pretrained.memory import peak_memory
from octavo.pretrained.names import gguf_names, is_matrix
from octavo.pretrained.source import Leaf, Source
from octavo.qarray import QArray

KINDS = {"int8": "Q8_0", "int4": "Q4_0", "float16": "F16", "float32": "F32", "q8_0": "Q8_0", "q4_0": "Q4_0"}
KINDS |= {"f16": "F16", "f32": "F32", "bfloat16": "BF16", "bf16": "BF16"}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}
_BYTES = {"F32": 4.0, "F16": 2.0, "BF16": 2.0, "Q8_0": 34 / 32, "Q4_0": 18 / 32}
_NORMAL, _CONTROL, _USER, _BYTE = 1, 3, 4, 6


def write_as_gguf(
    source: Source, asked: str, out: Path, *, head: str = "", say: Callable[[str], None] | None = None
) -> Summary:
    """Write a model to a GGUF file: matrices as `asked`, the embedding and the logits as `head`, vectors in F32."""
    began = time.perf_counter()
    config = source.config
    body, top = _kind(asked), _kind(head) if head else ""
    if not top:
        top = "Q8_0" if body == "Q4_0" else body
    names = gguf_names(config)
    architecture = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    tensors: dict[str, Tensor] = {}
    before = after = 0
    kinds: dict[str, int] = {}
    for number, (path, name) in enumerate(names.items(), 1):
        leaf = source.leaves[path]
        is_top = path == "token_embedder/embedding" or "logits_dense" in path
        kind = "F32" if len(leaf.shape) == 1 else top if is_top else body
        shape = tuple(leaf.shape[::-1] if is_matrix(path) else leaf.shape)
        if _BYTES[kind] != int(_BYTES[kind]) and shape[-1] % 32:
            kind = "F16"  # a row that no blocks of 32 fill
        heads = 0
        if architecture == "llama" and "/self_attention/" in path:
            heads = config.num_query_heads if "/query/" in path else config.num_kv_heads if "/key/" in path else 0
        size = int(math.prod(shape) * _BYTES[kind])
        before, after = before + leaf.nbytes, after + size
        kinds[kind] = kinds.get(kind, 0) + math.prod(shape)
        load = functools.partial(_load, leaf, is_matrix(path), heads)
        if say is not None:
            line = f"[{number:>{len(str(len(names)))}}/{len(names)}] {name:<28} {leaf.stored:>9} -> {kind:<5}"
            line += f" {leaf.nbytes / 2**20:9.2f} MiB -> {size / 2**20:8.2f} MiB"
            load = functools.partial(_said, load, line, say)
        tensors[name] = Tensor(load, kind, shape)
    write_gguf(out, {**_metadata(source, architecture, body), **_tokens(source)}, tensors)
    return Summary(before, after, source.size, kinds, {}, time.perf_counter() - began, peak_memory())


def _kind(asked: str) -> str:
    if asked not in KINDS:
        raise ValueError(f"{asked!r} is no type that is written to GGUF files: {nearest_names(asked, tuple(KINDS))}")
    return KINDS[asked]


def _said(load: Callable[[], Any], line: str, say: Callable[[str], None]) -> Any:
    say(line)
    return load()


def _load(leaf: Leaf, turned: bool, heads: int) -> np.ndarray:
    value: Any = leaf.load()
    if isinstance(value, QArray):
        value = np.asarray(value._map(jnp.asarray).dequantize(jnp.float32))
    value = np.asarray(value)
    value = value.T if turned else value
    if heads:
        value = value[pairs_of_halves(value.shape[0], heads)]
    return np.ascontiguousarray(value, np.float32)


def _metadata(source: Source, architecture: str, body: str) -> dict[str, Any]:
    config = source.config
    if config.rope_scaling is not None:
        raise ValueError("rotary positions that are scaled have no place in the GGUF files that are written here")
    if config.activation != "silu":
        raise ValueError(f"llama.cpp has no {config.activation} in such models: only silu")
    sizes = {
        "context_length": int(source.origin.get("max_length") or 2048),
        "embedding_length": config.emb_dim,
        "block_count": config.num_layers,
        "feed_forward_length": config.mlp_dim,
        "rope.dimension_count": config.head_dim,
        "attention.head_count": config.num_query_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.freq_base": float(config.rope_theta),
        "vocab_size": config.vocab_size,
    }
    return {
        "general.architecture": architecture,
        "general.name": source.name,
        "general.file_type": _FILE_TYPES[body],
        **{f"{architecture}.{key}": value for key, value in sizes.items()},
    }


def _tokens(source: Source) -> dict[str, Any]:
    """The tokenizer as metadata, from its tokenizer.json (byte-level BPE) or its tokenizer.bin."""
    tokenizer = source.tokenizer
    if tokenizer is None:
        return {}
    found: dict[str, Any] = {}
    if "tokenizer.bin" in tokenizer.files:
        from octavo.files.llama2c import Llama2cTokenizer

        found = _pieces(Llama2cTokenizer.from_bytes(tokenizer.files["tokenizer.bin"], "tokenizer.bin"))
    elif "tokenizer.json" in tokenizer.files:
        found = _byte_level(json.loads(tokenizer.files["tokenizer.json"]), source.config.vocab_size)
    if not found:
        return {}
    key = "tokenizer.ggml."
    if tokenizer.bos_id is not None:
        found[f"{key}bos_token_id"] = int(tokenizer.bos_id)
    if tokenizer.eos_ids:
        found[f"{key}eos_token_id"] = int(
            tokenizer.eos_ids[-1] if "tokenizer.bin" in tokenizer.files else tokenizer.eos_ids[0]
        )
    found[f"{key}add_bos_token"] = bool(tokenizer.add_bos)
    if tokenizer.template:
        found["tokenizer.chat_template"] = tokenizer.template
    return found


def _pieces(tokenizer: Any) -> dict[str, Any]:
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    scores, types = [0.0] * len(texts), [2, _CONTROL, _CONTROL, *[_BYTE] * 256]
    for piece, score in tokenizer.pieces():
        texts.append(piece.decode("utf-8", "replace").replace(" ", "\u2581"))
        scores.append(score)
        types.append(_NORMAL)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": np.asarray(scores, np.float32),
        "tokenizer.ggml.token_type": np.asarray(types, np.int32),
        "tokenizer.ggml.unknown_token_id": 0,
    }


def _byte_level(described: dict[str, Any], size: int) -> dict[str, Any]:
    model = described["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise ValueError("only byte-level BPE tokenizers are written to GGUF files so far")
    ids = {**model["vocab"], **{token["content"]: token["id"] for token in described.get("added_tokens", [])}}
    texts = [f"[PAD{i}]" for i in range(size)]
    for text, i in ids.items():
        texts[i] = text
    types = np.full(size, _NORMAL, np.int32)
    for token in described.get("added_tokens", []):
        types[token["id"]] = _CONTROL if token.get("special") else _USER
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre(described.get("pre_tokenizer") or {}),
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }


def _pre(described: dict[str, Any]) -> str:
    """llama.cpp's name for how text is cut before BPE: that of the same expressions, or of GPT-2's."""
    from octavo.files.gguf.splits import SPLITS

    steps = described.get("pretokenizers", [described])
    patterns = []
    for step in steps:
        if step.get("type") == "Split":
            pattern = step.get("pattern", {})
            patterns.append(pattern.get("Regex", pattern.get("String")))
        elif step.get("type") == "Digits" and step.get("individual_digits"):
            patterns.append(r"\p{N}")
        elif step.get("type") == "ByteLevel" and step.get("use_regex", True):
            patterns.append(SPLITS["gpt-2"].patterns[0])
    for name, split in SPLITS.items():
        if split.patterns == tuple(patterns):
            return name
    raise ValueError(
        f"llama.cpp has no name for how this tokenizer cuts text ({patterns}): it cannot be written to GGUF"
    )
