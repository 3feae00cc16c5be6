"""BERT encoders in Hugging Face directories, such as all-MiniLM-L6-v2: reading, quantizing, embedding texts."""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo._names import unknown_name
from octavo._optional import import_optional
from octavo._tree import unflatten_paths
from octavo._typing import Array
from octavo.files.safetensors import SafeTensors
from octavo.frameworks import convert, served
from octavo.models.bert import POOLINGS, BertConfig, Params, abstract_bert_params, bert_apply, normalize
from octavo.numerics import FormatLike
from octavo.pretrained.names import BERT, is_transposed
from octavo.pretrained.tokenizer import read_json
from octavo.pretrained.weight_rules import weight_rules
from octavo.qarray import is_qarray, quantize
from octavo.rules import QuantizationRule, as_rules

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
_WORDS = "embeddings.word_embeddings.weight"
_LAYER = re.compile(r"encoder\.layer\.(\d+)\..*")


@dataclasses.dataclass(frozen=True)
class Encoder:
    """A text encoder: see `open_encoder`.

    Args:
      config: The architecture.
      params: Its parameters, floats or QArrays.
      tokenizer: A `tokenizers.Tokenizer` without truncation or padding of its own.
      pooling: How token states are pooled to the embedding of a text, which has norm one.
      max_length: Longer texts are truncated to so many tokens.
      rules: The rules that its matmuls run with.
    """

    config: BertConfig
    params: Params = dataclasses.field(repr=False)
    tokenizer: Any = dataclasses.field(default=None, repr=False)
    pooling: str = "mean"
    max_length: int = 256
    rules: tuple[QuantizationRule, ...] = ()

    def __post_init__(self):
        if self.pooling not in POOLINGS:
            raise ValueError(f"unknown pooling {self.pooling!r}: {unknown_name(self.pooling, tuple(POOLINGS))}")
        if not 1 <= self.max_length <= self.config.max_length:
            raise ValueError(f"max_length is 1 to {self.config.max_length}, the model's own; got {self.max_length}")

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.params, is_leaf=is_qarray))

    def embed(self, texts: Sequence[str], batch_size: int = 32) -> np.ndarray:
        """Embeddings of texts, `[texts, emb_dim]` in float32.

        The embedding of a text does not depend on the other texts, except that padding may change last bits and with
        quantized activations some of their codes.
        """
        if isinstance(texts, str):
            raise TypeError("embed takes a list of texts; for a single one write embed([text])")
        if batch_size < 1:
            raise ValueError(f"batch_size is at least 1, got {batch_size}")
        if self.tokenizer is None:
            raise ValueError("this encoder has no tokenizer: give ids to embed_tokens instead")
        ids = [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]
        result = np.zeros((len(ids), self.config.emb_dim), np.float32)
        # Batches of similar lengths need little padding.
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        for start in range(0, len(order), batch_size):
            some = order[start : start + batch_size]
            tokens, mask = self._padded([ids[i] for i in some], batch_size)
            result[some] = np.asarray(self.embed_tokens(tokens, mask))[: len(some)]
        return result

    def embed_tokens(self, tokens: Any, mask: Any) -> Array:
        """Embeddings of texts given as ids `[texts, length]`; `mask` is false for padding."""
        return _embed(self.config, self.rules, self.pooling, self.params, jnp.asarray(tokens), jnp.asarray(mask))

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

        >>> from octavo.models.bert import bert_params
        >>> config = BertConfig(vocab_size=50, emb_dim=64, num_layers=2, num_heads=2, mlp_dim=128)
        >>> encoder = Encoder(config, bert_params(config, jax.random.key(0)))
        >>> low = encoder.quantize("int8:g32", activations="int8")
        >>> low.params["encoder"]["layers_0"]["mlp"]["wi"]["kernel"].scale.shape
        (2, 128)
        """
        if any(map(is_qarray, jax.tree.leaves(self.params, is_leaf=is_qarray))):
            raise ValueError("this encoder is quantized already: quantize the float one it was made from")
        rules = _rules(recipe, activations)
        ids = jax.ShapeDtypeStruct((1, 8), jnp.int32)
        model = functools.partial(bert_apply, self.config)
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


def open_encoder(path: str | Path, *, max_length: int | None = None, num_heads: int | None = None) -> Encoder:
    """Open the encoder of a directory with model.safetensors, tokenizer.json and config.json.

    Args:
      path: The directory.
      max_length: Where texts are truncated, in tokens; by default that of sentence_bert_config.json, or the model's.
      num_heads: Needed without a config.json; other sizes are those of the tensors.

    >>> open_encoder("nowhere")
    Traceback (most recent call last):
    FileNotFoundError: there is no directory nowhere: give that of an encoder, with model.safetensors and tokenizer.json
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        raise FileNotFoundError(
            f"there is no directory {path}: give that of an encoder, with model.safetensors and tokenizer.json"
        )
    described = read_json(path / "config.json")
    with SafeTensors(path) as file:
        prefix = _prefix(file, path)
        config = _config(file, prefix, described, num_heads, path)
        params = _read_params(file, prefix, config)
    limit = max_length or read_json(path / "sentence_bert_config.json").get("max_seq_length") or config.max_length
    limit = limit if max_length else min(limit, config.max_length)
    tokenizer = _tokenizer(path / "tokenizer.json", limit, config)
    return Encoder(config, params, tokenizer, _pooling(path), limit)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _embed(
    config: BertConfig, rules: tuple[QuantizationRule, ...], pooling: str, params: Params, tokens: Array, mask: Array
) -> Array:
    states = served(functools.partial(bert_apply, config), rules, state={})(params, tokens, mask)
    return normalize(POOLINGS[pooling](states, mask))


def _power_of_two(n: int, least: int) -> int:
    return max(least, 1 << max(n - 1, 0).bit_length())


def _rules(recipe: Any, activations: FormatLike | None) -> tuple[QuantizationRule, ...]:
    if isinstance(recipe, str):
        recipe = weight_rules(recipe, head="float")
    rules = as_rules(recipe)
    if activations is None:
        return rules
    return tuple(r if r.leaves_alone else r.replace(act_qtype=activations) for r in rules)


def _prefix(file: SafeTensors, path: Path) -> str:
    """The prefix of the encoder's tensors in a larger model."""
    for name in file.names():
        if name.endswith(_WORDS):
            return name.removesuffix(_WORDS)
    raise ValueError(f"{path} has no tensor {_WORDS!r}: it is not a BERT model")


def _config(
    file: SafeTensors, prefix: str, described: Mapping[str, Any], num_heads: int | None, path: Path
) -> BertConfig:
    """The architecture, from the tensors and config.json, which must agree."""
    kind = described.get("model_type", "bert")
    if kind != "bert":
        raise ValueError(f"{path / 'config.json'}: model_type {kind!r} is not a supported encoder: bert")
    position_type = described.get("position_embedding_type", "absolute")
    if position_type != "absolute":
        raise ValueError(
            f"{path / 'config.json'}: position_embedding_type {position_type!r} is not supported: absolute is"
        )
    activation = described.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        known = unknown_name(str(activation), tuple(_ACTIVATIONS))
        raise ValueError(f"{path / 'config.json'}: unknown hidden_act {activation!r}: {known}")
    heads = num_heads or described.get("num_attention_heads")
    if not heads:
        raise ValueError(f"{path} has no config.json with the number of heads: pass num_heads=")
    layers = [int(found[1]) for name in file.names() if (found := _LAYER.fullmatch(name.removeprefix(prefix)))]

    def shape(name: str) -> tuple[int, ...]:
        return tuple(file.info(prefix + name).shape)

    vocab_size, emb_dim = shape(_WORDS)
    config = BertConfig(
        vocab_size=vocab_size,
        emb_dim=emb_dim,
        num_layers=1 + max(layers, default=-1),
        num_heads=heads,
        mlp_dim=shape("encoder.layer.0.intermediate.dense.weight")[0],
        max_length=shape("embeddings.position_embeddings.weight")[0],
        num_types=shape("embeddings.token_type_embeddings.weight")[0],
        activation=_ACTIVATIONS[activation],
        norm_eps=described.get("layer_norm_eps", 1e-12),
        weight_dtype=jnp.dtype(file.info(prefix + _WORDS).dtype).name,
    )
    fields = {"vocab_size": "vocab_size", "hidden_size": "emb_dim", "num_hidden_layers": "num_layers"}
    for key, field in {**fields, "intermediate_size": "mlp_dim"}.items():
        if described.get(key, getattr(config, field)) != getattr(config, field):
            raise ValueError(
                f"{path / 'config.json'} says {key}={described[key]}, but by its tensors it is {getattr(config, field)}"
            )
    return config


def _read_params(file: SafeTensors, prefix: str, config: BertConfig) -> Params:
    params = {path: file.read(prefix + name) for path, name in BERT.param_names(abstract_bert_params(config)).items()}
    return unflatten_paths({path: jnp.asarray(x.T if is_transposed(path) else x) for path, x in params.items()})


def _tokenizer(path: Path, limit: int, config: BertConfig) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}, which tokenizes texts")
    tokenizer = import_optional("tokenizers", "an encoder's text", "'octavo[models]'").Tokenizer.from_file(str(path))
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise ValueError(f"{path} has {tokenizer.get_vocab_size()} tokens, but the model {config.vocab_size}")
    tokenizer.no_padding()
    tokenizer.enable_truncation(limit)
    return tokenizer


def _pooling(path: Path) -> str:
    """The pooling that sentence-transformers configures, the mean by default."""
    for name in ("1_Pooling/config.json", "pooling.json"):
        asked = {
            key for key, value in read_json(path / name).items() if key.startswith("pooling_mode_") and value is True
        }
        if asked:
            known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
            if len(asked) > 1 or not asked <= set(known):
                raise ValueError(f"{path / name} asks for {', '.join(sorted(asked))}; Octavo has {', '.join(POOLINGS)}")
            return known[asked.pop()]
    return "mean"
