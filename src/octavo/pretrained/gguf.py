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
from octavo.pretrained.architectures import ARCHITECTURES, architecture_of
from octavo.pretrained.calibrated import importances
from octavo.pretrained.convert import ConversionSums, Summary, convert_model
from octavo.pretrained.export import Export, Request, register_exporter
from octavo.pretrained.fields import check_placed
from octavo.pretrained.gguf_config import ROPE_TABLES, model_config
from octavo.pretrained.gguf_config import metadata as model_metadata
from octavo.pretrained.gguf_latent import GgufTensors
from octavo.pretrained.kernel_layout import packed_for_kernels
from octavo.pretrained.model import Leaf, ModelFormat, PretrainedModel, register_format, to_float
from octavo.pretrained.names import EMBEDDING, LOGITS, Place, assemble, interleaved_rotary
from octavo.pretrained.text_part import unread_keys
from octavo.pretrained.weight_rules import TRAINED, weight_rules
from octavo.qarray import QArray

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
    name, config = model_config(file)
    places = _places(name, config)
    placed, tensors = [place.name for place in places.values()], GgufTensors(file)
    unread = unread_keys(config, ARCHITECTURES[name].gguf_tensors)
    check_placed(path, file.names(), [*placed, *ROPE_TABLES, *tensors.parts], unread)
    load_codes = functools.partial(_load_codes, tensors)
    leaves = {param: place.leaf(tensors.info, tensors.load, load_codes) for param, place in places.items()}
    origin = {
        "kind": "GGUF",
        "path": path.name,
        "name": file.metadata.get("general.name") or path.stem,
        "architecture": file.metadata["general.architecture"],
        "max_length": config.learned_positions or file.metadata.get(f"{ARCHITECTURES[name].gguf}.context_length"),
    }
    return PretrainedModel(config, leaves, _tokenizer(file), origin=origin)


def _places(name: str, config: ModelConfig) -> dict[str, Place]:
    architecture = ARCHITECTURES[name]
    interleaved = architecture.interleaved
    return architecture.gguf_tensors.places(abstract_params(config), config, interleaved=interleaved)


def _load_codes(file: GgufTensors, name: str) -> np.ndarray | QArray:
    """A tensor as kernels multiply it: codes of four bits are packed, those of five and six are bytes."""
    found = file.load(name, exact=False)
    return packed_for_kernels(found) if isinstance(found, QArray) else found


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

    Codes that Q8_0 and Q4_0 can hold (symmetric, in groups of a multiple of 32 inputs) are written as they are, with
    their scales as float16.

    Args:
      source: The model.
      recipe: The type of matrices, one of `TYPES`; or "trained", for that of the codes that the model holds.
      out: The file.
      head: The type of the embedding table and the logits; by default Q8_0 where matrices are Q4_0, Q6_K where they are
        K-quants, else theirs.
      log: Called with a line for each tensor.
      importance: The mean square of the inputs of tensors by their names in the file, for K-quants.
    """
    body = _type_of_codes(source) if recipe == TRAINED else _tensor_type(recipe)
    top = _tensor_type(head) if head else "Q8_0" if body == "Q4_0" else "Q6_K" if "_K" in body else body
    places = _places(architecture_of(source.config), source.config)
    names = {path: place.name for path, place in places.items()}
    if importance is not None:
        _check_importance(importance, names, source)
    metadata, tables = _metadata(source, body)
    sums = ConversionSums(len(names), max(map(len, names.values())))
    tensors: dict[str, Any] = {}
    parts: dict[str, list[str]] = {}
    for path, name in names.items():
        parts.setdefault(name, []).append(path)
    for name, paths in parts.items():
        is_head = paths[0] in (EMBEDDING, LOGITS)
        kind = top if is_head else _with_more_bits(body, paths[0], source.config.num_layers)
        kind = "F32" if any(word in name for word in ("_gate_inp", "position_embd")) else kind
        if recipe == TRAINED and not is_head:
            kind = _held_type(source.leaves[paths[0]]) or "F32"
        tensor = _tensor([(places[path], source.leaves[path]) for path in paths], kind)
        tensor = tensors[name] = dataclasses.replace(tensor, importance=(importance or {}).get(name))
        leaves = [source.leaves[path] for path in paths]
        lines = [sums.add(name, x, tensor.kind, tensor.type.nbytes(math.prod(x.shape))) for x in leaves]
        if log is not None:
            load = functools.partial(_logged, tensor.values, "\n".join(lines), log)
            tensors[name] = dataclasses.replace(tensor, values=load)
    write_gguf(out, metadata, {**tables, **tensors})
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
    inputs = {n: source.leaves[p].shape[-2 if p.endswith("/kernel") else -1] for p, n in names.items()}
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


def _tensor(parts: list[tuple[Place, Leaf]], kind: str) -> Tensor:
    """Parameters as a tensor whose matrices have a type."""
    shape = _stored_shape(parts)
    if len(shape) == 1 or parts[0][0].name.endswith(".bias"):
        kind = "F32"
    elif kind in _SHORT_ROWS and shape[-1] % 256:
        kind = _SHORT_ROWS[kind]
    if kind.startswith("Q") and shape[-1] % 32:
        kind = "F16"  # row size is not a multiple of 32

    def load() -> np.ndarray | QArray:
        if kind in _HELD.values() and (codes := _held_codes(parts, kind)) is not None:
            return codes
        values = [(place, place.stored(to_float(leaf.load(), "float32"))[0]) for place, leaf in parts]
        return np.ascontiguousarray(assemble(values), np.float32)

    return Tensor(load, kind, shape)


_HELD = {"int4": "Q4_0", "int8": "Q8_0"}
"""The types that hold codes of QArrays as they are."""


def _held_type(leaf: Leaf) -> str | None:
    """The type that holds the codes of a parameter; None if it is in float."""
    value = leaf.load()
    return _HELD.get(value.qtype.name, value.qtype.name) if isinstance(value, QArray) else None


def _type_of_codes(source: PretrainedModel) -> str:
    """The type of the codes of a model's layers; raises if there is none for some of them."""
    kinds = {path: _held_type(x) for path, x in source.leaves.items() if path not in (EMBEDDING, LOGITS)}
    for path, kind in kinds.items():
        if kind is None:
            continue
        place = _places(architecture_of(source.config), source.config)[path]
        if kind not in _HELD.values() or _held_codes([(place, source.leaves[path])], kind) is None:
            raise ValueError(
                f"the trained codes of {path!r} cannot be written to a GGUF file, which holds symmetric int4 and int8 "
                "in groups of a multiple of 32 inputs: write --format compressed-tensors or octavo, or name a type, "
                "such as q4_0, by which the weights are quantized again"
            )
    return "Q4_0" if "Q4_0" in kinds.values() else "Q8_0"


def _held_codes(parts: list[tuple[Place, Leaf]], kind: str) -> QArray | None:
    """The codes of a parameter in the layout of its tensor, scales as float16; None if it cannot hold them."""
    (place, leaf), *others = parts
    value = leaf.load()
    if others or place.experts or place.offset or place.part is not None or not isinstance(value, QArray):
        return None
    plain = value.zero_point is None and value.outer_scale is None and not value.padding
    if not plain or _HELD.get(value.qtype.name) != kind:
        return None
    value = value.unpack()
    value = value.swapaxes(-1, -2) if place.transposed else value
    if place.heads:
        value = value[interleaved_rotary(value.shape[0], place.heads)]
    if value.ndim < 2 or value.tile_shape[-1] % 32:
        return None
    return value._replace(scale=np.asarray(value.scale, np.float16).astype(np.float32))


def _stored_shape(parts: list[tuple[Place, Leaf]]) -> tuple[int, ...]:
    place, leaf = parts[0]
    shape = [*leaf.shape[:-2], leaf.shape[-1], leaf.shape[-2]] if place.transposed else list(leaf.shape)
    axis = -2 if place.transposed else -1
    shape[axis] = sum(leaf.shape[-1] for _, leaf in parts) if place.part is not None else shape[axis]
    return tuple(shape)


def _metadata(source: PretrainedModel, body: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The metadata of a file, and the tensors that hold some of it."""
    architecture, fields, tables = model_metadata(source.config, int(source.origin.get("max_length") or 2048))
    found = {
        "general.architecture": architecture,
        "general.name": source.name,
        "general.file_type": _FILE_TYPES[body],
        **{f"{architecture}.{key}": value for key, value in fields.items()},
        **_tokenizer_metadata(source),
    }
    return found, tables


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
    given = {"--distill": request.distill, "--bits": request.bits, "--mebibytes": request.mebibytes}
    for option in (name for name, value in given.items() if value):
        raise ValueError(f"{option} is not for --format gguf, whose blocks have scales of their own: leave it out")
    matrix = _importance(source, request)
    if request.recipe == TRAINED and not any(_held_type(leaf) for leaf in source.leaves.values()):
        params, _ = convert_model(source, weight_rules(TRAINED, trained=source.rules))
        source = PretrainedModel.from_params(
            source.config, params, tokenizer=source.tokenizer, origin=source.origin, rules=source.rules
        )
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
    names = {path: place.name for path, place in _places(architecture_of(source.config), source.config).items()}
    found, tokens = importances(source, request.data, log=request.log)
    matrix = {names[path]: one for path, one in found.items() if path in names}
    if request.imatrix is not None:
        write_imatrix(request.imatrix, matrix, tokens=tokens)
    return matrix


register_format(ModelFormat("gguf", "a GGUF file", matches=matches, read=read))
register_exporter("gguf", _export)
