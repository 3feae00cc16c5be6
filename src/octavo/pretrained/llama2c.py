"""The models of llama2.c: a model.bin in float32, with its tokenizer.bin beside it."""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from octavo.files.errors import FileError
from octavo.files.llama2c import Llama2c, Llama2cTokenizer
from octavo.models import ModelConfig
from octavo.pretrained.gguf import halves_of_pairs
from octavo.pretrained.names import is_matrix, llama_names
from octavo.pretrained.registry import Kind, register_kind
from octavo.pretrained.source import Leaf, Source
from octavo.pretrained.tokenizer import TextTokenizer


def fits(path: Path) -> bool:
    """Whether a path is a model.bin, or a directory with one and its tokenizer."""
    file = _file(path)
    if file is None:
        return False
    try:
        Llama2c(file).close()
    except FileError:
        return False
    return True


def _file(path: Path) -> Path | None:
    if path.is_file():
        return path if path.suffix == ".bin" else None
    found = path / "model.bin"
    return found if found.is_file() and (path / "tokenizer.bin").is_file() else None


def read(path: Path) -> Source:
    """Open the model."""
    found = _file(path)
    assert found is not None
    file = Llama2c(found)
    header = file.config
    config = ModelConfig(
        vocab_size=header.vocab_size,
        emb_dim=header.dim,
        num_layers=header.n_layers,
        num_query_heads=header.n_heads,
        num_kv_heads=header.n_kv_heads,
        head_dim=header.head_dim,
        mlp_dim=header.hidden_dim,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        tied_logits=header.shared,
        scan_layers=False,
    )
    leaves = {place: _leaf(file, name, place, config) for place, name in llama_names(config).items()}
    pieces = found.with_name("tokenizer.bin")
    tokenizer = read_pieces(pieces) if pieces.is_file() else None
    name = path.name if path.is_dir() else path.stem
    origin = {"kind": "llama2.c", "path": path.name, "name": name, "architecture": "llama"}
    return Source(config, leaves, tokenizer, origin={**origin, "max_length": header.seq_len})


def _leaf(file: Llama2c, name: str, place: str, config: ModelConfig) -> Leaf:
    shape, turned = file.info(name).shape, is_matrix(place)
    heads = config.num_query_heads if "/query/" in place else config.num_kv_heads if "/key/" in place else 0
    load = functools.partial(_load, file, name, turned, heads)
    return Leaf(shape[::-1] if turned else shape, "float32", load, "float32")


def _load(file: Llama2c, name: str, turned: bool, heads: int) -> np.ndarray:
    value: Any = file.read(name)
    if heads:
        value = value[halves_of_pairs(value.shape[0], heads)]
    return value.T if turned else value


def read_pieces(path: Path) -> TextTokenizer:
    """The tokenizer of a tokenizer.bin."""
    inner = Llama2cTokenizer.read(path)
    return TextTokenizer(
        encode_plain=lambda text: inner.encode(text, bos=False),
        decode_ids=inner.decode,
        vocab_size=inner.vocab_size,
        bos_id=inner.bos_id,
        # A story ends where the next one begins.
        eos_ids=(inner.bos_id, inner.eos_id),
        add_bos=True,
        files={"tokenizer.bin": path.read_bytes(), "octavo_tokenizer.json": b'{"llama2c": true}'},
    )


register_kind(Kind("llama2c", "a model.bin of llama2.c", fits=fits, read=read))
