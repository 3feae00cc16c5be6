"""Models in GGUF files: float or quantized tensors, and the tokenizer in the metadata."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from octavo.data import SubwordTokenizer
from octavo.files.gguf import Gguf, Tensor, tokenizer_metadata, tokenizer_of, write_gguf
from octavo.models import ModelConfig
from octavo.numerics import nearest_names
from octavo.pretrained.convert import Summary
from octavo.pretrained.export import Export, Request, register_exporter
from octavo.pretrained.memory import peak_memory
from octavo.pretrained.model import Leaf, PretrainedModel
from octavo.pretrained.names import gguf_names, is_transposed
from octavo.pretrained.registry import ModelFormat, register_format
from octavo.qarray import QArray

ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}
"""Whether RoPE rotates neighbouring rows of queries and keys (interleaved), as llama.cpp does for Llama."""

_SKIPPED = ("rope_freqs.weight",)

TYPES = {"int8": "Q8_0", "int4": "Q4_0", "float16": "F16", "float32": "F32", "q8_0": "Q8_0", "q4_0": "Q4_0"}
TYPES |= {"f16": "F16", "f32": "F32", "bfloat16": "BF16", "bf16": "BF16"}
"""The tensor types that are written, by the names of recipes."""

_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}


def matches(path: Path) -> bool:
    """Whether a path is a GGUF file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def read(path: Path) -> PretrainedModel:
    """Open the model of a GGUF file."""
    file = Gguf(path)
    config = model_config(file)
    interleaved = ARCHITECTURES[file.metadata["general.architecture"]]
    names = gguf_names(config)
    beyond = sorted(set(file.names()) - set(names.values()) - set(_SKIPPED))
    if beyond:
        raise ValueError(f"{path} has the tensor {beyond[0]!r}, which Octavo's decoder does not: it is unsupported")
    leaves = {}
    for place, name in names.items():
        heads = _rotary_heads(place, config) if interleaved else 0
        info = file.info(name)
        shape = tuple(info.shape)
        load = functools.partial(_load, file, name, is_transposed(place), heads)
        leaves[place] = Leaf(shape[::-1] if is_transposed(place) else shape, "float32", load, info.kind)
    origin = {
        "kind": "GGUF",
        "path": path.name,
        "name": file.metadata.get("general.name") or path.stem,
        "architecture": file.metadata["general.architecture"],
        "max_length": _field(file, "context_length", None),
    }
    return PretrainedModel(config, leaves, _tokenizer(file), origin=origin)


def model_config(file: Gguf) -> ModelConfig:
    """The model that the metadata of a file describes."""
    kind = file.metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: architecture {kind!r} is not supported: {nearest_names(str(kind), tuple(ARCHITECTURES))}"
        )
    names = set(file.names())
    if "rope_freqs.weight" in names:
        raise ValueError(f"{file.path} scales RoPE by a table (rope_freqs), which is not supported")
    heads, size = _field(file, "attention.head_count"), _field(file, "embedding_length")
    dim = _field(file, "attention.key_length", size // heads)
    if _field(file, "rope.dimension_count", dim) != dim:
        raise ValueError(f"{file.path} applies RoPE to a part of each head only, which is not supported")
    return ModelConfig(
        vocab_size=file.info("token_embd.weight").shape[0],
        emb_dim=size,
        num_layers=_field(file, "block_count"),
        num_query_heads=heads,
        num_kv_heads=_field(file, "attention.head_count_kv", heads),
        head_dim=dim,
        mlp_dim=_field(file, "feed_forward_length"),
        norm_eps=_decimal(_field(file, "attention.layer_norm_rms_epsilon")),
        rope_theta=_decimal(_field(file, "rope.freq_base", 10_000.0)),
        tied_logits="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        scan_layers=False,
    )


def _field(file: Gguf, key: str, *default: Any) -> Any:
    name = f"{file.metadata['general.architecture']}.{key}"
    if name not in file.metadata and not default:
        raise ValueError(f"{file.path} has no {name}, which a decoder needs")
    return file.metadata.get(name, *default)


def _decimal(value: float) -> float:
    """A float32 as the shortest decimal that rounds to it, such as 1e-5.

    >>> _decimal(9.999999747378752e-06)
    1e-05
    """
    return float(str(np.float32(value)))


def _rotary_heads(path: str, config: ModelConfig) -> int:
    """Heads of a query or key projection, 0 for other parameters."""
    return config.num_query_heads if "/query/" in path else config.num_kv_heads if "/key/" in path else 0


def _load(file: Gguf, name: str, transposed: bool, heads: int) -> np.ndarray | QArray:
    kept = file.read_quantized(name)
    value: Any = file.read(name) if kept is None else kept
    if heads:
        value = value[half_rotary(value.shape[0], heads)]
    return value.T if transposed else value


def half_rotary(rows: int, heads: int) -> np.ndarray:
    """Row indices from the order of interleaved RoPE, (0, 1), (2, 3), to that of halves, which Hugging Face uses.

    >>> half_rotary(8, 2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def interleaved_rotary(rows: int, heads: int) -> np.ndarray:
    """The inverse of `half_rotary`.

    >>> half_rotary(8, 2)[interleaved_rotary(8, 2)].tolist()
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
    return SubwordTokenizer(
        found.tokenizer,
        bos_id=found.bos_id,
        eos_ids=found.eos_ids,
        add_bos=found.add_bos,
        template=found.chat_template,
        special=special,
    )


def write_model(
    source: PretrainedModel, recipe: str, out: Path, *, head: str = "", log: Callable[[str], None] | None = None
) -> Summary:
    """Write a model to a GGUF file, quantized by ggml's own formulas.

    Args:
      source: The model.
      recipe: The type of matrices, one of `TYPES`.
      out: The file.
      head: The type of the embedding table and the logits; Q8_0 by default where matrices are Q4_0, else theirs.
      log: Called with a line for each tensor.
    """
    start = time.perf_counter()
    body = _tensor_type(recipe)
    top = _tensor_type(head) if head else "Q8_0" if body == "Q4_0" else body
    names = gguf_names(source.config)
    metadata = _metadata(source, body)
    interleaved = ARCHITECTURES[metadata["general.architecture"]]
    tensors: dict[str, Tensor] = {}
    kinds: dict[str, int] = {}
    before = after = 0
    for number, (path, name) in enumerate(names.items(), 1):
        leaf = source.leaves[path]
        heads = _rotary_heads(path, source.config) if interleaved else 0
        tensor = tensors[name] = _tensor(leaf, path, body, top, heads)
        values = math.prod(leaf.shape)
        size = tensor.type.nbytes(values)
        before, after = before + leaf.nbytes, after + size
        kinds[tensor.kind] = kinds.get(tensor.kind, 0) + values
        if log is not None:
            line = f"[{number:>{len(str(len(names)))}}/{len(names)}] {name:<28} {leaf.stored:>9} -> {tensor.kind:<5}"
            line += f" {leaf.nbytes / 2**20:9.2f} MiB -> {size / 2**20:8.2f} MiB"
            tensors[name] = dataclasses.replace(tensor, values=functools.partial(_logged, tensor.values, line, log))
    write_gguf(out, metadata, tensors)
    return Summary(before, after, source.size, kinds, {}, time.perf_counter() - start, peak_memory())


def _logged(load: Callable[[], Any], line: str, log: Callable[[str], None]) -> Any:
    log(line)
    return load()


def _tensor_type(recipe: str) -> str:
    if recipe not in TYPES:
        raise ValueError(
            f"{recipe!r} is not a type that is written to GGUF files: {nearest_names(recipe, tuple(TYPES))}"
        )
    return TYPES[recipe]


def _tensor(leaf: Leaf, path: str, body: str, top: str, heads: int) -> Tensor:
    transposed = is_transposed(path)
    is_head = path == "token_embedder/embedding" or "logits_dense" in path
    kind = "F32" if len(leaf.shape) == 1 else top if is_head else body
    shape = tuple(leaf.shape[::-1] if transposed else leaf.shape)
    if kind.startswith("Q") and shape[-1] % 32:
        kind = "F16"  # row size is not a multiple of 32
    return Tensor(functools.partial(_float_rows, leaf, transposed, heads), kind, shape)


def _float_rows(leaf: Leaf, transposed: bool, heads: int) -> np.ndarray:
    value: Any = leaf.load()
    if isinstance(value, QArray):
        value = value._map(jnp.asarray).dequantize(jnp.float32)
    value = np.asarray(value)
    value = value.T if transposed else value
    if heads:
        value = value[interleaved_rotary(value.shape[0], heads)]
    return np.ascontiguousarray(value, np.float32)


def _metadata(source: PretrainedModel, body: str) -> dict[str, Any]:
    config = source.config
    architecture = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    if config.rope_scaling is not None:
        raise ValueError("scaled RoPE (rope_scaling) is not written to GGUF files: write safetensors instead")
    if config.activation != "silu":
        raise ValueError(
            f"llama.cpp runs such models with silu only, not {config.activation}: write safetensors instead"
        )
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
        **_tokenizer_metadata(source),
    }


def _tokenizer_metadata(source: PretrainedModel) -> dict[str, Any]:
    tokenizer = source.tokenizer
    if tokenizer is None or "tokenizer.json" not in tokenizer.files():
        return {}
    found = tokenizer_metadata(tokenizer.files()["tokenizer.json"], source.config.vocab_size)
    key = "tokenizer.ggml."
    if tokenizer.bos_id is not None:
        found[f"{key}bos_token_id"] = tokenizer.bos_id
    if tokenizer.eos_ids:
        # GGUF has a single EOS id, and some models also stop at BOS.
        found[f"{key}eos_token_id"] = next((i for i in tokenizer.eos_ids if i != tokenizer.bos_id), tokenizer.eos_id)
    found[f"{key}add_bos_token"] = bool(tokenizer.add_bos)
    if tokenizer.template:
        found["tokenizer.chat_template"] = tokenizer.template
    return found


def _export(source: PretrainedModel, out: Path, request: Request) -> Export:
    summary = write_model(source, request.recipe, out, head=request.head, log=request.log)
    # Blocks are encoded while the file is written, so stored parameters are read back from it.
    written = read(out)
    return Export(summary, lambda path: written.leaves[path].load())


register_format(ModelFormat("gguf", "a GGUF file", matches=matches, read=read))
register_exporter("gguf", _export)
