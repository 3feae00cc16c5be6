"""The tokenizer in the metadata of a GGUF file, built with the `tokenizers` library, and the inverse."""

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from octavo._names import unknown_name
from octavo._optional import import_optional
from octavo.files.errors import FileError
from octavo.files.gguf.pre_tokenizers import PRE_TOKENIZERS
from octavo.files.gguf.reader import Gguf

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER, _BYTE = 1, 2, 3, 4, 6
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_SPACE = "\u2581"
_LONGEST = 512

# Files seldom list all end-of-turn tokens; llama.cpp recognizes these by their text.
_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|return|>",
    "<EOT>",
)


class GgufTokenizer(NamedTuple):
    """A tokenizer, and its settings in the file: those of `octavo.data.SubwordTokenizer`.

    `tokenizer.encode(text)` adds bos and eos as the file has it; `encode(text, add_special_tokens=False)` does not.
    Control tokens in the text count as such; `tokenizer.encode_special_tokens = True` makes them ordinary text.
    """

    tokenizer: "Tokenizer"
    bos_id: int | None
    eos_ids: tuple[int, ...]
    """All the ids that end an answer."""
    add_bos: bool
    template: str | None
    """The chat template."""
    special: dict[str, str]
    """The texts of `bos_token` and `eos_token`."""


def tokenizer_of(file: Gguf | Mapping[str, Any]) -> GgufTokenizer:
    """The tokenizer of a GGUF file, or of its metadata: byte-level BPE ("gpt2") or SentencePiece's BPE ("llama")."""
    vocabulary = _Vocabulary(file.metadata if isinstance(file, Gguf) else file)
    import_optional("tokenizers", "the tokenizer of a file", "'octavo[models]'")
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    if vocabulary.model not in builders:
        raise FileError(f"tokenizer.ggml.model {vocabulary.model!r} is not known; known: {', '.join(builders)}")
    tokenizer, add_bos = builders[vocabulary.model](vocabulary)
    return _finish(vocabulary, tokenizer, add_bos)


class _Vocabulary:
    """Validated metadata."""

    def __init__(self, metadata: Mapping[str, Any]):
        self._metadata = metadata
        self.model: str = self._get("model", str)
        self.pre: str = self._get("pre", str, "default")
        self.tokens = self._tokens()
        count = len(self.tokens)
        self.ids = {text: i for i, text in enumerate(self.tokens)}
        if len(self.ids) < count:
            twice = next(text for i, text in enumerate(self.tokens) if self.ids[text] != i)
            raise FileError(f"tokenizer.ggml.tokens has {twice!r} twice")
        self.types = self._numbers("token_type", count, "iu")
        self.scores = self._numbers("scores", count, "f")

    def _get(self, name: str, kind: type, default: Any = None) -> Any:
        value = self._metadata.get(_KEY + name, default)
        if not isinstance(value, kind):
            problem = "is missing" if value is None else f"should be of type {kind.__name__}"
            raise FileError(f"metadata {_KEY}{name} {problem}")
        return value

    def _tokens(self) -> list[str]:
        tokens = self._get("tokens", list)
        if not tokens or not all(isinstance(text, str) for text in tokens):
            raise FileError("tokenizer.ggml.tokens is not a list of strings")
        return [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]

    def _numbers(self, name: str, count: int, kinds: str) -> np.ndarray | None:
        values = self._metadata.get(_KEY + name)
        if values is None:
            return None
        if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds or len(values) != count:
            raise FileError(f"{_KEY}{name} should be {count} numbers, one to a token")
        if kinds == "f" and np.isnan(values).any():
            raise FileError(f"{_KEY}{name} has a NaN")
        return values

    def kind(self, i: int) -> int:
        return _NORMAL if self.types is None else int(self.types[i])

    def of_kind(self, kind: int) -> list[int]:
        return [] if self.types is None else np.flatnonzero(self.types == kind).tolist()

    def id(self, name: str) -> int | None:
        value = self._metadata.get(f"{_KEY}{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(self.tokens):
            raise FileError(f"{_KEY}{name}_token_id is {value!r}, but ids are below {len(self.tokens)}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return self._get(name, bool, default)

    def merges(self) -> list[tuple[str, str]]:
        pairs = []
        for line in self._get("merges", list):
            # The left part may begin with a space, but is not empty.
            at = line.find(" ", 1) if isinstance(line, str) else -1
            left, right = (line[:at], line[at + 1 :]) if at > 0 else ("", "")
            if left not in self.ids or right not in self.ids or left + right not in self.ids:
                raise FileError(f"tokenizer.ggml.merges has {line!r}, whose parts are not all among the tokens")
            pairs.append((left, right))
        return pairs

    def template(self) -> str | None:
        value = self._metadata.get("tokenizer.chat_template")
        return value if isinstance(value, str) else None


def _byte_level(vocabulary: _Vocabulary) -> tuple["Tokenizer", bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    if vocabulary.pre not in PRE_TOKENIZERS:
        known = unknown_name(vocabulary.pre, list(PRE_TOKENIZERS))
        raise FileError(f"tokenizer.ggml.pre {vocabulary.pre!r} is not known: {known}")
    split = PRE_TOKENIZERS[vocabulary.pre]
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, vocabulary.merges(), ignore_merges=split.ignore_merges))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.add_bos


def _sentence_piece(vocabulary: _Vocabulary) -> tuple["Tokenizer", bool]:
    from tokenizers import Tokenizer, decoders, models, normalizers

    if vocabulary.scores is None:
        raise FileError("metadata tokenizer.ggml.scores is missing")
    unknown = vocabulary.id("unknown")
    model = models.BPE(
        vocabulary.ids,
        _merges_by_score(vocabulary),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", _SPACE)
    prefixed = vocabulary.flag("add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer, True


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, by its score: with these ranks BPE equals SentencePiece's algorithm."""
    assert vocabulary.scores is not None
    ids, found = vocabulary.ids, []
    for i, text in enumerate(vocabulary.tokens):
        if vocabulary.kind(i) in (_NORMAL, _USER):
            if len(text) > _LONGEST:  # all splits are tried
                raise FileError(f"token {i} has {len(text)} characters; at most {_LONGEST} are supported")
            for at in range(1, len(text)):
                left, right = ids.get(text[:at]), ids.get(text[at:])
                if left is not None and right is not None:
                    found.append((-float(vocabulary.scores[i]), left, right))
    found.sort()
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, left, right in found]


def _finish(vocabulary: _Vocabulary, tokenizer: "Tokenizer", add_bos: bool) -> GgufTokenizer:
    from tokenizers import AddedToken, processors

    texts = vocabulary.tokens
    control = vocabulary.of_kind(_CONTROL)
    special = [*control, *vocabulary.of_kind(_UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(texts[i], special=True, normalized=False) for i in special])
    tokenizer.add_tokens([AddedToken(texts[i], normalized=False) for i in vocabulary.of_kind(_USER)])
    bos, eos = vocabulary.id("bos"), vocabulary.id("eos")
    add_bos = vocabulary.flag("add_bos_token", add_bos) and bos is not None
    add_eos = vocabulary.flag("add_eos_token", False) and eos is not None
    if add_bos or add_eos:
        before, after = ["bos"] * add_bos, ["eos"] * add_eos
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B", *after],
            special_tokens=[
                {"id": name, "ids": [i], "tokens": [texts[i]]}
                for name, i in (("bos", bos), ("eos", eos))
                if i is not None
            ],
        )
    ends = [eos, vocabulary.id("eot"), vocabulary.id("eom")]
    ends += [i for text in _ENDS if (i := vocabulary.ids.get(text)) in control]
    eos_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
    special = {name: texts[i] for name, i in (("bos_token", bos), ("eos_token", eos)) if i is not None}
    return GgufTokenizer(tokenizer, bos, eos_ids, add_bos, vocabulary.template(), special)


def tokenizer_metadata(tokenizer_json: bytes, vocab_size: int) -> dict[str, Any]:
    """The metadata of a BPE tokenizer, from its tokenizer.json: the inverse of `tokenizer_of`.

    Ids up to `vocab_size` that it does not use get names of their own.
    """
    described = json.loads(tokenizer_json)
    model = described["model"]
    if model.get("type") != "BPE":
        raise ValueError(f"BPE tokenizers are written to GGUF files, not {model.get('type')}")
    added = described.get("added_tokens", [])
    texts = [f"[PAD{i}]" for i in range(vocab_size)]
    for text, i in {**model["vocab"], **{token["content"]: token["id"] for token in added}}.items():
        texts[i] = text
    types = np.full(vocab_size, _NORMAL, np.int32)
    for token in added:
        types[token["id"]] = _CONTROL if token.get("special") else _USER
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    common = {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": types}
    if model.get("byte_fallback"):
        return {"tokenizer.ggml.model": "llama", **common, **_piece_scores(model, texts, types, merges)}
    pre = _pre_tokenizer_name(described.get("pre_tokenizer") or {})
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, **common, "tokenizer.ggml.merges": merges}


def _piece_scores(model: dict[str, Any], texts: list[str], types: np.ndarray, merges: list[str]) -> dict[str, Any]:
    """Scores in place of merges: minus the rank of the first merge that makes a piece."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    scores = np.asarray([-float(ranks.get(text, len(merges))) for text in texts], np.float32)
    types[[i for i, text in enumerate(texts) if _BYTE_TOKEN.fullmatch(text)]] = _BYTE
    found: dict[str, Any] = {"tokenizer.ggml.scores": scores}
    if (unknown := model.get("unk_token")) is not None:
        found["tokenizer.ggml.unknown_token_id"] = model["vocab"][unknown]
        types[model["vocab"][unknown]] = _UNKNOWN
    return found


def _pre_tokenizer_name(described: dict[str, Any]) -> str:
    """llama.cpp's name for a pre-tokenizer: the one with the same regular expressions."""
    steps = described.get("pretokenizers", [described])
    patterns = []
    for step in steps:
        if step.get("type") == "Split":
            pattern = step.get("pattern", {})
            patterns.append(pattern.get("Regex", pattern.get("String")))
        elif step.get("type") == "Digits" and step.get("individual_digits"):
            patterns.append(r"\p{N}")
        elif step.get("type") == "ByteLevel" and step.get("use_regex", True):
            patterns.append(PRE_TOKENIZERS["gpt-2"].patterns[0])
    for name, split in PRE_TOKENIZERS.items():
        if split.patterns == tuple(patterns):
            return name
    raise ValueError(
        f"llama.cpp has no pre-tokenizer with the patterns {patterns}: this tokenizer cannot be written to GGUF"
    )
