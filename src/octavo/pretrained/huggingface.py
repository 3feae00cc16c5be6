"""Models in Hugging Face directories: config.json, safetensors in float or in a quantized layout, a tokenizer."""

import dataclasses
import functools
import json
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from octavo.files.layouts import Layout, Scheme, get_layout, layout_of
from octavo.files.safetensors import SafeTensors, write
from octavo.models import abstract_params
from octavo.pretrained.architectures import ARCHITECTURES
from octavo.pretrained.export import Export, Exporter, converting, register_exporter
from octavo.pretrained.fields import check_layers, check_placed
from octavo.pretrained.huggingface_config import describe, model_config
from octavo.pretrained.model import ModelFormat, PretrainedModel, register_format, to_float
from octavo.pretrained.names import Place, TensorNames, assemble
from octavo.pretrained.text_part import text_model, unread_keys
from octavo.pretrained.tokenizer import read_tokenizer
from octavo.qarray import QArray

_SHARD_BYTES = 5 * 10**9
_BFLOAT16 = ("nvfp4", "mxfp4")
"""Formats whose weights other programs dequantize to bfloat16, so that all other tensors must have that dtype."""
_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Tensors of some files that are constants."""


def matches(path: Path) -> bool:
    """Whether a path is a directory with config.json and safetensors."""
    return path.is_dir() and (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def read(directory: Path) -> PretrainedModel:
    """Open the model of a directory."""
    described = _read_json(directory / "config.json")
    file = SafeTensors(directory)
    layout = layout_of(described["quantization_config"]) if described.get("quantization_config") else None
    names = file.names() if layout is None else layout.names(file.names())
    described, renamed = text_model(described, names)
    if len(renamed) < len(names):
        left = sorted(set(names) - set(renamed.values()))
        warnings.warn(
            f"{directory}: the tensors of images and sounds, {left[0]!r} and {len(left) - 1} more, are left out: only "
            "the text model is opened",
            stacklevel=3,
        )
    names = list(renamed)
    predictors = _predictors(described, names)
    if predictors:
        names = [name for name in names if name not in predictors]
        warnings.warn(
            f"{directory}: the tensors of multi-token prediction, {predictors[0]!r} and {len(predictors) - 1} more, "
            "are left out: the logits of the next token do not depend on them",
            stacklevel=3,
        )
    config = model_config(described, directory, names)
    tensors = ARCHITECTURES[described["model_type"]].huggingface_names
    prefix = _left_out_prefix(tensors, names)
    check_layers(directory, "num_hidden_layers", config.num_layers, names, tensors.layer.removeprefix(prefix))
    places = tensors.places(abstract_params(config), config)
    places = {path: dataclasses.replace(place, name=place.name.removeprefix(prefix)) for path, place in places.items()}
    placed = [name for place in places.values() for name in place.names]
    unread = (*_BUFFERS, *unread_keys(config, tensors))
    check_placed(directory, names, [*placed, *(["lm_head.weight"] if config.tied_logits else [])], unread)
    places = {path: _renamed(place, renamed) for path, place in places.items()}
    leaves = {
        path: place.leaf(functools.partial(_info, file, layout, place), functools.partial(_load, file, layout, place))
        for path, place in places.items()
    }
    name = described.get("_name_or_path")
    origin = {
        "kind": "Hugging Face",
        "path": directory.name,
        "name": name if isinstance(name, str) and name else directory.resolve().name,
        "architecture": described.get("model_type"),
        "max_length": config.learned_positions or described.get("max_position_embeddings"),
    }
    return PretrainedModel(config, leaves, read_tokenizer(directory), origin=origin)


def _renamed(place: Place, renamed: Mapping[str, str]) -> Place:
    """The place with its name in the file; those of experts are templates."""
    first = place.names[0]
    own = renamed.get(first, first)
    # The last parts of both names are the same.
    count = next((n for n in range(len(first), -1, -1) if own.endswith(first[len(first) - n :])), 0)
    return dataclasses.replace(place, name=own[: len(own) - count] + place.name[len(first) - count :])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("quantization_config") or {}, dict):
        raise ValueError(f"{path} and its quantization_config are objects of JSON")
    return found


def _predictors(described: dict[str, Any], names: Collection[str]) -> list[str]:
    """The tensors of the layers of multi-token prediction, which config.json counts apart from the others."""
    first, count = (described.get(key) for key in ("num_hidden_layers", "num_nextn_predict_layers"))
    if type(first) is not int or type(count) is not int:
        return []
    layers = tuple(f"model.layers.{first + i}." for i in range(min(count, 100)))
    return sorted(name for name in names if name.startswith(layers))


def _left_out_prefix(tensors: TensorNames, names: Collection[str]) -> str:
    """The prefix that files saved without a head leave out, such as those of GPT-2."""
    name = tensors.modules["token_embedder"]
    prefix, _, last = name.rpartition(".")
    return f"{prefix}." if f"{name}.weight" not in names and f"{last}.weight" in names else ""


def _info(file: SafeTensors, layout: Layout | None, place: Place, name: str) -> tuple[tuple[int, ...], str, str]:
    info = file.info(name) if layout is None else layout.info(file, name)
    quantized = layout is not None and getattr(info, "quantized", False)
    shape = info.shape
    if quantized and not place.transposed:  # codes are [out, in] always
        shape = (*shape[:-2], shape[-1], shape[-2])
    return shape, str(info.dtype), layout.method if layout is not None and quantized else str(info.dtype)


def _load(file: SafeTensors, layout: Layout | None, place: Place, name: str) -> Any:
    if layout is None:
        return file.read(name)
    value = layout.read(file, name)
    return (
        value.swapaxes(-1, -2)
        if getattr(layout.info(file, name), "quantized", False) and not place.transposed
        else value
    )


def write_huggingface(
    source: PretrainedModel, params: Mapping[str, Any], out: Path, *, method: str | None = None
) -> None:
    """Write a directory with config.json, safetensors and the tokenizer.

    Args:
      source: The model.
      params: Its parameters by path, floats and QArrays.
      out: The directory.
      method: The `quant_method` of the layout for QArrays; without one they are dequantized.
    """
    layout = None if method is None else get_layout(method)
    config = source.config
    described = describe_model(source, "float32")
    places = ARCHITECTURES[described["model_type"]].huggingface_names.places(abstract_params(config), config)
    tensors: dict[str, np.ndarray] = {}
    # The matmul of tied logits is a module of its own in transformers, which reads the embedding table.
    schemes: dict[str, Scheme | None] = {"lm_head": None} if config.tied_logits else {}
    shared: dict[str, list[tuple[Place, np.ndarray]]] = {}
    for path, place in places.items():
        value = params[path]
        if isinstance(value, QArray) and layout is not None and place.transposed:
            if place.part is not None or place.experts:
                raise ValueError(f"{path} shares tensors with others in such files, and cannot be written as {method}")
            q = value._map(jnp.asarray).unpack().T
            tensors |= layout.write(place.name, q)
            schemes[place.name.removesuffix(".weight")] = Scheme.of(q)
            continue
        if place.transposed:
            schemes |= {name.removesuffix(".weight"): None for name in place.names}
        for name, one in zip(place.names, place.stored(to_float(value)), strict=True):
            shared.setdefault(name, []).append((place, one))
    floats = {name: assemble(parts) for name, parts in shared.items()}
    if any(scheme is not None and scheme.qtype.name in _BFLOAT16 for scheme in schemes.values()):
        floats = {name: x.astype(jnp.bfloat16) for name, x in floats.items()}
    tensors |= floats
    out.mkdir(parents=True, exist_ok=True)
    write(out, tensors, {"format": "pt"}, max_shard_bytes=_SHARD_BYTES)
    described["torch_dtype"] = str(tensors[places["decoder/decoder_norm/scale"].name].dtype)
    if layout is not None:
        described["quantization_config"] = layout.config_for(schemes)
    (out / "config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
    if source.tokenizer is not None:
        source.tokenizer.save(out)
        named = {**source.tokenizer.special, "add_bos_token": source.tokenizer.add_bos}
        if source.tokenizer.template:
            named["chat_template"] = source.tokenizer.template
        (out / "tokenizer_config.json").write_text(json.dumps(named, indent=2), encoding="utf-8")


def describe_model(source: PretrainedModel, dtype: str) -> dict[str, Any]:
    """The config.json of a model."""
    described = describe(source.config, int(source.origin.get("max_length") or 2048), dtype)
    if source.tokenizer is not None:
        ends = list(source.tokenizer.eos_ids)
        described |= {"bos_token_id": source.tokenizer.bos_id, "eos_token_id": ends[0] if len(ends) == 1 else ends}
    return described


register_format(
    ModelFormat("huggingface", "a Hugging Face directory (config.json and safetensors)", matches=matches, read=read)
)


def _exporter(method: str | None, scale_dtype: str | None) -> Exporter:
    def write_params(source: PretrainedModel, done: Export, out: Path) -> None:
        write_huggingface(source, done.params, out, method=method)

    # Quantized embeddings and logits are unknown to these layouts.
    return converting(write_params, head="float", scale_dtype=scale_dtype)


register_exporter("safetensors", _exporter(None, None))
for _method in ("compressed-tensors", "gptq", "awq"):
    register_exporter(_method, _exporter(_method, "float16"))
