"""The files of sentence-transformers next to an encoder: pooling, normalization, prompts, and lengths of texts."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.models.pooling import POOLINGS
from octavo.pretrained.fields import Fields
from octavo.pretrained.huggingface_config import warn_unknown
from octavo.pretrained.tokenizer import read_json

_MODULES = ["Transformer", "Pooling", "Normalize"]
_POOLING_KEYS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
}
"""The flags of pooling that older files have."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("query_length", "document_length", "query_expansion"), (None,)),
    "transformer_task": ("feature-extraction",),
    "modality_config": ({"text": {"method": "forward", "method_output_name": "last_hidden_state"}},),
    "module_input_name": ("sentence_embedding",),
    "model_type": ("SentenceTransformer",),
    "processing_kwargs": ({},),
}
"""Keys of computations that are not supported, with the values that turn them off."""
_INERT = ("__version__", "similarity_fn_name", "unpad_inputs", "word_embedding_dimension", "embedding_dimension")


@dataclasses.dataclass(frozen=True)
class SentenceSettings:
    """How the texts and states of an encoder become embeddings.

    Args:
      folder: The directory of the encoder itself.
      pooling: A name in `POOLINGS`.
      normalized: Whether embeddings are scaled to length one.
      max_length: Longer texts are truncated to so many tokens; None for the model's limit.
      lowercase: Whether texts are lowercased.
      prompts: Texts that may be put before others, by name.
      default_prompt: The name of the prompt that is used if none is named.
    """

    folder: Path
    pooling: str
    normalized: bool
    max_length: int | None
    lowercase: bool
    prompts: Mapping[str, str]
    default_prompt: str | None


def read_sentence_settings(path: Path) -> SentenceSettings:
    """The settings of a directory; one without modules.json has the mean of states, normalized."""
    folder, pooling, normalized = path, path / "1_Pooling", True
    if (path / "modules.json").is_file():
        modules = _modules(path / "modules.json")
        folder, pooling, normalized = path / modules["Transformer"], path / modules["Pooling"], "Normalize" in modules
        if normalized:
            _check(_read(path / modules["Normalize"] / "config.json"), module_output_name="sentence_embedding")
    config = pooling / "config.json"
    whole = _read(path / "config_sentence_transformers.json")
    prompts = {name: text for name, text in whole.get("prompts", {}).items() if text is not None}
    default = whole.get("default_prompt_name", None)
    _check(whole)
    texts = _read(next(iter(sorted(folder.glob("sentence_*_config.json"))), folder / "sentence_bert_config.json"))
    length = texts.int("max_seq_length", None) or read_json(folder / "tokenizer_config.json").get("model_max_length")
    lowercase = texts.flag("do_lower_case")
    _check(texts, module_output_name="token_embeddings")
    name = _pooling(_read(config if config.is_file() else path / "pooling.json"), prompts)
    return SentenceSettings(folder, name, normalized, length, lowercase, prompts, default)


def _read(path: Path) -> Fields:
    return Fields(read_json(path), path)


def _check(fields: Fields, **neutral: str) -> None:
    """Raise for values that are not supported, and warn of unknown keys."""
    fields.check_neutral({**_NEUTRAL, **{key: (value,) for key, value in neutral.items()}})
    warn_unknown(fields, *_INERT)


def _modules(path: Path) -> dict[str, str]:
    """The folder of each module by its type."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        modules = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in found]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a list of modules with a type and a path: {error!r}") from None
    kinds = [kind for kind, _ in modules]
    if kinds != _MODULES[: max(len(kinds), 2)]:
        others = [kind for kind in kinds if kind not in _MODULES] or kinds
        raise ValueError(f"{path} has the modules {', '.join(others)}: only {', '.join(_MODULES)} are supported")
    return dict(modules)


def _pooling(fields: Fields, prompts: Mapping[str, str]) -> str:
    """The pooling that is configured, the mean by default."""
    named = fields.get("pooling_mode", None)
    modes = [named] if isinstance(named, str) else list(named or ())
    flags = {key: fields.flag(key) for key in fields.values if key.startswith("pooling_mode_")}
    modes = modes or [_POOLING_KEYS.get(key, key) for key, is_on in flags.items() if is_on] or ["mean"]
    if len(modes) > 1 or modes[0] not in POOLINGS:
        raise ValueError(
            f"{fields.path} asks for {', '.join(map(str, modes))}; Octavo has one of {', '.join(POOLINGS)}"
        )
    if not fields.flag("include_prompt", True) and any(prompts.values()):
        raise ValueError(f"{fields.path}: include_prompt=False is not supported with prompts: they are pooled too")
    _check(fields)
    return modes[0]
