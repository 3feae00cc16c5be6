"""Text encoders in directories of Hugging Face and sentence-transformers: reading, quantizing, embedding texts."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo._names import unknown_name
from octavo._optional import import_optional
from octavo._typing import Array
from octavo.frameworks import convert, served
from octavo.models.encoder import EncoderConfig, encoder_apply
from octavo.models.module_params import Params
from octavo.models.pooling import POOLINGS, normalize
from octavo.numerics import FormatLike
from octavo.pretrained.encoder_architectures import ENCODERS
from octavo.pretrained.encoder_files import read_encoder
from octavo.pretrained.sentence_files import SentenceSettings, read_sentence_settings
from octavo.pretrained.tokenizer import read_json
from octavo.pretrained.weight_rules import weight_rules
from octavo.qarray import is_qarray, quantize
from octavo.rules import QuantizationRule, as_rules

_BATCH_LENGTH = 512
"""Longer texts are fewer in a batch, which then has no more tokens than one of texts of this length."""


@dataclasses.dataclass(frozen=True)
class Encoder:
    """A text encoder: see `open_encoder`.

    Args:
      config: The architecture.
      params: Its parameters, floats or QArrays.
      tokenizer: A `tokenizers.Tokenizer` without truncation or padding of its own.
      pooling: How token states are pooled to the embedding of a text: a name in `octavo.models.pooling.POOLINGS`.
      max_length: Longer texts are truncated to so many tokens.
      rules: The rules that its matmuls run with.
      normalized: Whether embeddings are scaled to length one.
      prompts: Texts that may be put before those that are embedded, by name.
      default_prompt: The name of the prompt that is used if none is named.
    """

    config: EncoderConfig
    params: Params = dataclasses.field(repr=False)
    tokenizer: Any = dataclasses.field(default=None, repr=False)
    pooling: str = "mean"
    max_length: int = 256
    rules: tuple[QuantizationRule, ...] = ()
    normalized: bool = True
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default_prompt: str | None = None

    def __post_init__(self):
        if self.pooling not in POOLINGS:
            raise ValueError(f"unknown pooling {self.pooling!r}: {unknown_name(self.pooling, tuple(POOLINGS))}")
        if not 1 <= self.max_length <= self.config.max_length:
            raise ValueError(f"max_length is 1 to {self.config.max_length}, the model's own; got {self.max_length}")

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.params, is_leaf=is_qarray))

    def embed(self, texts: Sequence[str], batch_size: int = 32, *, prompt_name: str | None = None) -> np.ndarray:
        """Embeddings of texts, `[texts, emb_dim]` in float32, with the prompt of this name before each.

        The embedding of a text does not depend on the other texts, except that padding may change last bits and with
        quantized activations some of their codes.
        """
        if isinstance(texts, str):
            raise TypeError("embed takes a list of texts; for a single one write embed([text])")
        if batch_size < 1:
            raise ValueError(f"batch_size is at least 1, got {batch_size}")
        if self.tokenizer is None:
            raise ValueError("this encoder has no tokenizer: give ids to embed_tokens instead")
        prompt = self.prompt(prompt_name)
        ids = [encoding.ids for encoding in self.tokenizer.encode_batch([prompt + text for text in texts])]
        result = np.zeros((len(ids), self.config.emb_dim), np.float32)
        for some in _batches([len(row) for row in ids], batch_size):
            tokens, mask = self._padded([ids[i] for i in some], batch_size)
            result[some] = np.asarray(self.embed_tokens(tokens, mask))[: len(some)]
        return result

    def prompt(self, name: str | None = None) -> str:
        """The text of a prompt; by default that of `default_prompt`, or none."""
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            raise ValueError(f"unknown prompt {name!r}: {unknown_name(name, tuple(self.prompts))}")
        return self.prompts[name]

    def embed_tokens(self, tokens: Any, mask: Any) -> Array:
        """Embeddings of texts given as ids `[texts, length]`; `mask` is false for padding."""
        return _embed(
            self.config,
            self.rules,
            self.pooling,
            self.normalized,
            self.params,
            jnp.asarray(tokens),
            jnp.asarray(mask),
        )

    def quantize(
        self,
        recipe: str | QuantizationRule | Sequence[QuantizationRule],
        *,
        activations: FormatLike | None = None,
        words: FormatLike | None = "int8",
    ) -> "Encoder":
        """This encoder in low precision.

        Args:
          recipe: A number format for the weights of all layers ("int8", "int4", "int4:g64" in groups of 64, "fp8",
            "nf4", ...), `recipe:NAME`, a file of rules, or rules.
          activations: The format of the inputs of matmuls, quantized dynamically; by default they stay in float.
          words: The format of the word embeddings, with one scale per word, or None to keep them.

        >>> from octavo.models.encoder import encoder_params
        >>> config = EncoderConfig(vocab_size=50, emb_dim=64, num_layers=2, num_heads=2, mlp_dim=128)
        >>> encoder = Encoder(config, encoder_params(config, jax.random.key(0)))
        >>> low = encoder.quantize("int8:g32", activations="int8")
        >>> low.params["encoder"]["layers_0"]["mlp"]["wi_0"]["kernel"].scale.shape
        (2, 128)
        """
        if any(map(is_qarray, jax.tree.leaves(self.params, is_leaf=is_qarray))):
            raise ValueError("this encoder is quantized already: quantize the float one it was made from")
        rules = _rules(recipe, activations)
        ids = jax.ShapeDtypeStruct((1, 8), jnp.int32)
        model = functools.partial(encoder_apply, self.config)
        params = convert(model, self.params, ids, jax.ShapeDtypeStruct((1, 8), bool), rules=rules)
        params = jax.tree.map(lambda x: x.pack(axis=-2) if is_qarray(x) else x, params, is_leaf=is_qarray)
        if words is not None:
            table = quantize(params["embeddings"]["word"]["embedding"], words, channelwise_axes=(0,))
            params["embeddings"]["word"]["embedding"] = table.pack()
        return dataclasses.replace(self, params=params, rules=rules)

    def _padded(self, rows: list[list[int]], batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids padded to one array. Sizes are powers of two, since each shape is compiled."""
        length = min(_power_of_two(max(map(len, rows)), 16), self.config.max_length)
        count = min(_power_of_two(len(rows), 1), batch_size)
        tokens, mask = np.zeros((count, length), np.int32), np.zeros((count, length), bool)
        for i, row in enumerate(rows):
            tokens[i, : len(row)], mask[i, : len(row)] = row, True
        return tokens, mask


def open_encoder(
    path: str | Path, *, max_length: int | None = None, num_heads: int | None = None, normalized: bool | None = None
) -> Encoder:
    """Open the encoder of a directory with model.safetensors, tokenizer.json and config.json.

    Pooling, normalization and prompts are those of the files of sentence-transformers; without them the mean,
    normalized.

    Args:
      path: The directory.
      max_length: Where texts are truncated, in tokens; by default that of sentence_bert_config.json, of
        tokenizer_config.json, or the model's.
      num_heads: Needed without a config.json; other sizes are those of the tensors.
      normalized: Whether embeddings are scaled to length one; by default as modules.json says.

    >>> open_encoder("nowhere")
    Traceback (most recent call last):
    FileNotFoundError: there is no directory nowhere: give that of an encoder, with model.safetensors and tokenizer.json
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        raise FileNotFoundError(
            f"there is no directory {path}: give that of an encoder, with model.safetensors and tokenizer.json"
        )
    settings = read_sentence_settings(path)
    config, params = read_encoder(settings.folder, num_heads)
    limit = max_length or min(settings.max_length or config.max_length, config.max_length)
    return Encoder(
        config,
        params,
        _tokenizer(settings, limit, config),
        settings.pooling,
        limit,
        normalized=settings.normalized if normalized is None else normalized,
        prompts=settings.prompts,
        default_prompt=settings.default_prompt,
    )


def is_encoder(path: str | Path) -> bool:
    """Whether a path is the directory of an encoder, of an architecture that `open_encoder` opens."""
    path = Path(path).expanduser()
    if not path.is_dir():
        return False
    folder = path if (path / "config.json").is_file() else path / "0_Transformer"
    return read_json(folder / "config.json").get("model_type") in ENCODERS


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _embed(
    config: EncoderConfig,
    rules: tuple[QuantizationRule, ...],
    pooling: str,
    normalized: bool,
    params: Params,
    tokens: Array,
    mask: Array,
) -> Array:
    states = served(functools.partial(encoder_apply, config), rules, state={})(params, tokens, mask)
    pooled = POOLINGS[pooling](states, mask)
    return normalize(pooled) if normalized else pooled


def _batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices of texts in batches: of similar lengths, which need little padding, and fewer of long texts."""
    order, batches = sorted(range(len(lengths)), key=lambda i: -lengths[i]), []
    while order:
        count = max(1, min(batch_size, batch_size * _BATCH_LENGTH // _power_of_two(lengths[order[0]], 1)))
        batches.append(order[:count])
        order = order[count:]
    return batches


def _power_of_two(n: int, least: int) -> int:
    return max(least, 1 << max(n - 1, 0).bit_length())


def _rules(recipe: Any, activations: FormatLike | None) -> tuple[QuantizationRule, ...]:
    if isinstance(recipe, str):
        recipe = weight_rules(recipe, head="float")
    rules = as_rules(recipe)
    if activations is None:
        return rules
    return tuple(r if r.leaves_alone else r.replace(act_qtype=activations) for r in rules)


def _tokenizer(settings: SentenceSettings, limit: int, config: EncoderConfig) -> Any:
    path = settings.folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}, which tokenizes texts")
    tokenizers = import_optional("tokenizers", "an encoder's text", "'octavo[models]'")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise ValueError(f"{path} has {tokenizer.get_vocab_size()} tokens, but the model {config.vocab_size}")
    if settings.lowercase:
        others = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Lowercase(), *others])
    tokenizer.no_padding()
    tokenizer.enable_truncation(limit)
    return tokenizer
