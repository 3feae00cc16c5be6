"""GGUF files: the tensors of llama.cpp, float or kept in its blocks, with the tokenizer that lies among them."""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from octavo.files.gguf import Gguf, tokenizer_of
from octavo.models import ModelConfig
from octavo.numerics import nearest_names
from octavo.pretrained.names import gguf_names, is_matrix
from octavo.pretrained.registry import Kind, register_kind
from octavo.pretrained.source import Leaf, Source
from octavo.pretrained.tokenizer import from_tokenizers
from octavo.qarray import QArray

ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}
"""Whether the rows of queries and keys lie in pairs, as llama.cpp's rotary positions want them for Llama."""

_SKIPPED = ("rope_freqs.weight",)


def fits(path: Path) -> bool:
    """Whether a path is a GGUF file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def read(path: Path) -> Source:
    """Open the model of a GGUF file."""
    file = Gguf(path)
    config = model_config(file)
    paired = ARCHITECTURES[file.metadata["general.architecture"]]
    names = gguf_names(config)
    beyond = sorted(set(file.names()) - set(names.values()) - set(_SKIPPED))
    if beyond:
        raise ValueError(f"{path} has the tensor {beyond[0]!r}, for which a decoder of its kind has no place")
    leaves = {}
    for place, name in names.items():
        heads = _heads(place, config) if paired else 0
        info = file.info(name)
        shape = tuple(info.shape)
        load = functools.partial(_load, file, name, is_matrix(place), heads)
        leaves[place] = Leaf(shape[::-1] if is_matrix(place) else shape, "float32", load, info.kind)
    origin = {
        "kind": "GGUF",
        "path": path.name,
        "name": file.metadata.get("general.name") or path.stem,
        "architecture": file.metadata["general.architecture"],
        "max_length": _of(file, "context_length", None),
    }
    return Source(config, leaves, _tokenizer(file), origin=origin)


def model_config(file: Gguf) -> ModelConfig:
    """The model that the metadata of a file describes."""
    kind = file.metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: architecture {kind!r} is none that Octavo knows: "
            f"{nearest_names(str(kind), tuple(ARCHITECTURES))}"
        )
    names = set(file.names())
    if "rope_freqs.weight" in names:
        raise ValueError(f"{file.path} scales its rotary positions by a table, which is not supported")
    heads, size = _of(file, "attention.head_count"), _of(file, "embedding_length")
    dim = _of(file, "attention.key_length", size // heads)
    if _of(file, "rope.dimension_count", dim) != dim:
        raise ValueError(f"{file.path} turns only a part of each head by its position, which is not supported")
    return ModelConfig(
        vocab_size=file.info("token_embd.weight").shape[0],
        emb_dim=size,
        num_layers=_of(file, "block_count"),
        num_query_heads=heads,
        num_kv_heads=_of(file, "attention.head_count_kv", heads),
        head_dim=dim,
        mlp_dim=_of(file, "feed_forward_length"),
        norm_eps=_decimal(_of(file, "attention.layer_norm_rms_epsilon")),
        rope_theta=_decimal(_of(file, "rope.freq_base", 10_000.0)),
        tied_logits="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        scan_layers=False,
    )


def _of(file: Gguf, key: str, *default: Any) -> Any:
    name = f"{file.metadata['general.architecture']}.{key}"
    if name not in file.metadata and not default:
        raise ValueError(f"{file.path} has no {name}: it describes no decoder")
    return file.metadata.get(name, *default)


def _decimal(value: float) -> float:
    """A float32 as the shortest number that rounds to it: what was meant, such as 1e-5.

    >>> _decimal(9.999999747378752e-06)
    1e-05
    """
    return float(str(np.float32(value)))


def _heads(path: str, config: ModelConfig) -> int:
    if "/query/" in path:
        return config.num_query_heads
    return config.num_kv_heads if "/key/" in path else 0


def _load(file: Gguf, name: str, turned: bool, heads: int) -> np.ndarray | QArray:
    kept = file.read_quantized(name)
    value: Any = file.read(name) if kept is None else kept
    if heads:
        value = value[halves_of_pairs(value.shape[0], heads)]
    return value.T if turned else value


def halves_of_pairs(rows: int, heads: int) -> np.ndarray:
    """Which rows, in the order of pairs, make the order of halves: the first of every pair, then the second.

    >>> halves_of_pairs(8, 2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def pairs_of_halves(rows: int, heads: int) -> np.ndarray:
    """The way back from `halves_of_pairs`.

    >>> halves_of_pairs(8, 2)[pairs_of_halves(8, 2)].tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _tokenizer(file: Gguf) -> Any:
    if "tokenizer.ggml.model" not in file.metadata:
        return None
    found = tokenizer_of(file)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    special = {}
    if found.bos_id is not None:
        special["bos_token"] = tokens[found.bos_id]
    if found.eos_id is not None:
        special["eos_token"] = tokens[found.eos_id]
    return from_tokenizers(
        found.tokenizer,
        bos=found.bos_id,
        eos=found.eos_ids,
        add_bos=found.add_bos,
        template=found.chat_template,
        special=special,
    )


register_kind(Kind("gguf", "a GGUF file", fits=fits, read=read))
