"""Models in GGUF files: float or quantized tensors, and the tokenizer in the metadata."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from octavo._names import unknown_name
from octavo.data import SubwordTokenizer
from octavo.files.gguf import Gguf, Tensor, read_imatrix, tokenizer_metadata, tokenizer_of, write_gguf, write_imatrix
from octavo.models import ModelConfig, abstract_params
from octavo.pretrained.calibrated import importances
from octavo.pretrained.convert import ConversionSums, Summary
from octavo.pretrained.export import Export, Request, register_exporter
from octavo.pretrained.model import Leaf, ModelFormat, PretrainedModel, register_format, to_float
from octavo.pretrained.names import ARCHITECTURES, EMBEDDING, GGUF, LOGITS, architecture_of, is_transposed
from octavo.qarray import QArray

_ARCHITECTURES = tuple(name for name, architecture in ARCHITECTURES.items() if architecture.in_gguf)

TYPES = {"int8": "Q8_0", "int4": "Q4_0", "float16": "F16", "float32": "F32", "q8_0": "Q8_0", "q4_0": "Q4_0"}
TYPES |= {"f16": "F16", "f32": "F32", "bfloat16": "BF16", "bf16": "BF16"}
TYPES |= {"q4_k": "Q4_K", "q4_k_m": "Q4_K_M", "q5_k": "Q5_K", "q5_k_m": "Q5_K_M", "q6_k": "Q6_K"}
"""The tensor types that are written, by the names of recipes."""

_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}
_FILE_TYPES |= {"Q4_K": 14, "Q4_K_M": 15, "Q5_K": 16, "Q5_K_M": 17, "Q6_K": 18}
_MIXED = {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K"}
_SHORT_ROWS = {"Q4_K": "Q5_0", "Q5_K": "Q8_0", "Q6_K": "Q8_0"}
"""The types of rows that are no multiple of 256."""


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
    architecture = file.metadata["general.architecture"]
    names = GGUF.param_names(abstract_params(config))
    unknown = sorted(set(file.names()) - set(names.values()))
    if unknown:
        raise ValueError(f"{path} has the tensor {unknown[0]!r}, which Octavo's decoder does not: it is unsupported")
    leaves = {}
    for param, name in names.items():
        load = functools.partial(_load, file, name, _interleaved_heads(param, config, architecture))
        leaf = Leaf(file.info(name).shape, "float32", load, file.info(name).kind)
        leaves[param] = leaf.T if is_transposed(param) else leaf
    origin = {
        "kind": "GGUF",
        "path": path.name,
        "name": file.metadata.get("general.name") or path.stem,
        "architecture": architecture,
        "max_length": _field(file, "context_length", None),
    }
    return PretrainedModel(config, leaves, _tokenizer(file), origin=origin)


def model_config(file: Gguf) -> ModelConfig:
    """The model that the metadata of a file describes."""
    kind = file.metadata.get("general.architecture")
    if kind not in _ARCHITECTURES:
        raise ValueError(
            f"{file.path}: architecture {kind!r} is not supported: {unknown_name(str(kind), _ARCHITECTURES)}"
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


def _interleaved_heads(path: str, config: ModelConfig, architecture: str) -> int:
    """Heads of a query or key projection with rows in the order of interleaved RoPE, 0 for other parameters."""
    if not ARCHITECTURES[architecture].interleaved:
        return 0
    return config.num_query_heads if "/query/" in path else config.num_kv_heads if "/key/" in path else 0


def _load(file: Gguf, name: str, heads: int) -> np.ndarray | QArray:
    quantized = file.read_quantized(name)
    value: Any = file.read(name) if quantized is None else quantized
    return value[half_rotary(value.shape[0], heads)] if heads else value


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
    settings = tokenizer_of(file)._asdict()
    return SubwordTokenizer(settings.pop("tokenizer"), **settings)


def write_model(
    source: PretrainedModel,
    recipe: str,
    out: Path,
    *,
    head: str = "",
    log: Callable[[str], None] | None = None,
    importance: Mapping[str, np.ndarray] | None = None,
) -> Summary:
    """Write a model to a GGUF file, quantized by ggml's own formulas; K-quants with searched scales.

    Args:
      source: The model.
      recipe: The type of matrices, one of `TYPES`.
      out: The file.
      head: The type of the embedding table and the logits; by default Q8_0 where matrices are Q4_0, Q6_K where they are
        K-quants, else theirs.
      log: Called with a line for each tensor.
      importance: The mean square of the inputs of tensors by their names in the file, for K-quants.
    """
    body = _tensor_type(recipe)
    top = _tensor_type(head) if head else "Q8_0" if body == "Q4_0" else "Q6_K" if "_K" in body else body
    names = GGUF.param_names(abstract_params(source.config))
    if importance is not None:
        _check_importance(importance, names, source)
    metadata = _metadata(source, body)
    sums = ConversionSums(len(names), max(map(len, names.values())))
    tensors: dict[str, Tensor] = {}
    for path, name in names.items():
        leaf = source.leaves[path]
        is_head = path in (EMBEDDING, LOGITS)
        heads = _interleaved_heads(path, source.config, metadata["general.architecture"])
        kind = top if is_head else _with_more_bits(body, path, source.config.num_layers)
        tensor = _tensor(leaf.T if is_transposed(path) else leaf, kind, heads)
        tensor = tensors[name] = dataclasses.replace(tensor, importance=(importance or {}).get(name))
        line = sums.add(name, leaf, tensor.kind, tensor.type.nbytes(math.prod(leaf.shape)))
        if log is not None:
            tensors[name] = dataclasses.replace(tensor, values=functools.partial(_logged, tensor.values, line, log))
    write_gguf(out, metadata, tensors)
    return sums.summary()


def _with_more_bits(kind: str, path: str, layers: int) -> str:
    """The type of a matrix: of values and the last matrix of MLPs, mixtures have Q6_K in half of the layers."""
    if kind not in _MIXED:
        return kind
    match = re.search(r"layers_(\d+)/(self_attention/value|mlp/wo)/", path)
    if match is None:
        return _MIXED[kind]
    layer, eighth = int(match[1]), layers // 8
    more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    return "Q6_K" if more else _MIXED[kind]


def _check_importance(importance: Mapping[str, np.ndarray], names: Mapping[str, str], source: PretrainedModel) -> None:
    inputs = {name: source.leaves[path].shape[0 if is_transposed(path) else -1] for path, name in names.items()}
    if not importance.keys() & inputs.keys():
        raise ValueError(
            f"the importance matrix is of another model: it has {next(iter(importance))!r}, which this one does not"
        )
    for name in importance.keys() & inputs.keys():
        if importance[name].shape[-1] != inputs[name]:
            raise ValueError(
                f"the importance matrix has {importance[name].shape[-1]} inputs of {name!r}, the model {inputs[name]}"
            )


def _logged(load: Callable[[], Any], line: str, log: Callable[[str], None]) -> Any:
    log(line)
    return load()


def _tensor_type(recipe: str) -> str:
    if recipe not in TYPES:
        raise ValueError(
            f"{recipe!r} is not a type that is written to GGUF files: {unknown_name(recipe, tuple(TYPES))}"
        )
    return TYPES[recipe]


def _tensor(leaf: Leaf, kind: str, heads: int) -> Tensor:
    """A parameter as a tensor whose matrices have a type."""
    if len(leaf.shape) == 1:
        kind = "F32"
    elif kind in _SHORT_ROWS and leaf.shape[-1] % 256:
        kind = _SHORT_ROWS[kind]
    if kind.startswith("Q") and leaf.shape[-1] % 32:
        kind = "F16"  # row size is not a multiple of 32

    def load() -> np.ndarray:
        value = to_float(leaf.load(), "float32")
        value = value[interleaved_rotary(value.shape[0], heads)] if heads else value
        return np.ascontiguousarray(value, np.float32)

    return Tensor(load, kind, leaf.shape)


def _metadata(source: PretrainedModel, body: str) -> dict[str, Any]:
    config = source.config
    architecture = architecture_of(config)
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
    matrix = _importance(source, request)
    summary = write_model(source, request.recipe, out, head=request.head, log=request.log, importance=matrix)
    # Blocks are encoded while the file is written, so stored parameters are read back from it.
    written = read(out)
    return Export(summary, lambda path: written.leaves[path].load())


def _importance(source: PretrainedModel, request: Request) -> dict[str, np.ndarray] | None:
    """The importance matrix: from calibration data, and then written to the file of the request; or read from it."""
    if request.data is None and request.imatrix is None:
        return None
    if "_K" not in TYPES.get(request.recipe, ""):
        raise ValueError(f"importances are for K-quants such as q4_k, not for {request.recipe}")
    if request.data is None:
        assert request.imatrix is not None
        return read_imatrix(request.imatrix)
    names = GGUF.param_names(abstract_params(source.config))
    found = importances(source, request.data, log=request.log)
    matrix = {names[path]: one for path, one in found.items() if path in names}
    if request.imatrix is not None:
        write_imatrix(request.imatrix, matrix, tokens=request.data.tokens)
    return matrix


register_format(ModelFormat("gguf", "a GGUF file", matches=matches, read=read))
register_exporter("gguf", _export)
