"""Tokenizers as metadata of GGUF files: the inverse of `tokenizer_of`."""

import json
import re
from typing import Any

import numpy as np

from octavo.files.gguf.pre_tokenizers import PRE_TOKENIZERS

_NORMAL, _UNKNOWN, _CONTROL, _USER, _BYTE = 1, 2, 3, 4, 6
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


def tokenizer_metadata(tokenizer_json: bytes, vocab_size: int) -> dict[str, Any]:
    """The metadata of a BPE tokenizer, byte-level ("gpt2") or SentencePiece's ("llama"), from its tokenizer.json.

    Ids up to `vocab_size` that it does not use get names of their own.
    """
    described = json.loads(tokenizer_json)
    model = described["model"]
    if model.get("type") != "BPE":
        raise ValueError(f"BPE tokenizers are written to GGUF files, not {model.get('type')}")
    added = described.get("added_tokens", [])
    texts = [f"[PAD{i}]" for i in range(vocab_size)]
    for text, i in {**model["vocab"], **{token["content"]: token["id"] for token in added}}.items():
        texts[i] = text
    types = np.full(vocab_size, _NORMAL, np.int32)
    for token in added:
        types[token["id"]] = _CONTROL if token.get("special") else _USER
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    common = {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": types}
    if model.get("byte_fallback"):
        return {"tokenizer.ggml.model": "llama", **common, **_sentence_piece(model, texts, types, merges)}
    pre = _pre(described.get("pre_tokenizer") or {})
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, **common, "tokenizer.ggml.merges": merges}


def _sentence_piece(model: dict[str, Any], texts: list[str], types: np.ndarray, merges: list[str]) -> dict[str, Any]:
    """Scores in place of merges: minus the rank of the first merge that makes a piece."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    scores = np.asarray([-float(ranks.get(text, len(merges))) for text in texts], np.float32)
    types[[i for i, text in enumerate(texts) if _BYTE_TOKEN.fullmatch(text)]] = _BYTE
    found: dict[str, Any] = {"tokenizer.ggml.scores": scores}
    if (unknown := model.get("unk_token")) is not None:
        found["tokenizer.ggml.unknown_token_id"] = model["vocab"][unknown]
        types[model["vocab"][unknown]] = _UNKNOWN
    return found


def _pre(described: dict[str, Any]) -> str:
    """llama.cpp's name for a pre-tokenizer: the one with the same regular expressions."""
    steps = described.get("pretokenizers", [described])
    patterns = []
    for step in steps:
        if step.get("type") == "Split":
            pattern = step.get("pattern", {})
            patterns.append(pattern.get("Regex", pattern.get("String")))
        elif step.get("type") == "Digits" and step.get("individual_digits"):
            patterns.append(r"\p{N}")
        elif step.get("type") == "ByteLevel" and step.get("use_regex", True):
            patterns.append(PRE_TOKENIZERS["gpt-2"].patterns[0])
    for name, split in PRE_TOKENIZERS.items():
        if split.patterns == tuple(patterns):
            return name
    raise ValueError(
        f"llama.cpp has no pre-tokenizer with the patterns {patterns}: this tokenizer cannot be written to GGUF"
    )
