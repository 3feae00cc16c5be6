"""What an engine takes a model from: one that was opened, or a config and parameters."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from octavo.models import ModelConfig
from octavo.pretrained import PretrainedModel
from octavo.serve.cache import FLOAT, KVConfig


@dataclasses.dataclass(frozen=True)
class Source:
    """A model to run: its config, a function that loads its parameters, and what it was trained with."""

    config: ModelConfig
    load: Callable[[], Any]
    rules: Any = ()
    tokenizer: Any = None
    ranges: Any = None
    """The ranges that training remembers."""
    kv: KVConfig = FLOAT
    """The cache that it was trained for."""
    model: PretrainedModel | None = None

    @classmethod
    def of(cls, source: Any, params: Any = None, rules: Any = None, tokenizer: Any = None) -> "Source":
        """The model of `Engine`'s arguments."""
        if isinstance(source, ModelConfig):
            if params is None:
                raise TypeError(
                    "Engine(config, params) takes the parameters too; Engine(source) a model that was opened"
                )
            return cls(source, lambda: params, () if rules is None else rules, tokenizer)
        if params is not None:
            raise TypeError(f"parameters come with a ModelConfig, or within a source; got a {type(source).__name__}")
        if not hasattr(source, "config") or not hasattr(source, "params"):
            raise TypeError(
                f"Engine takes a ModelConfig and parameters, or what octavo.pretrained.open_model gives, got a "
                f"{type(source).__name__}"
            )
        rules = getattr(source, "rules", ()) if rules is None else rules
        # Rules quantize floats; without any, codes are multiplied as they are.
        plain = rules or not hasattr(source, "leaves")
        return cls(
            source.config,
            source.params if plain else functools.partial(source.params, codes=True),
            rules,
            tokenizer or getattr(source, "tokenizer", None),
            getattr(source, "state", None),
            _kv_of(source),
            source if isinstance(source, PretrainedModel) else None,
        )


def _kv_of(source: Any) -> KVConfig:
    found = getattr(source, "origin", {}).get("kv_cache")
    return FLOAT if found is None else KVConfig.of(found["format"], axis=found["axis"])
