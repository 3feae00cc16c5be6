"""Subword tokenizers of the `tokenizers` package: trained on the data, or read from a file."""

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo._optional import import_optional
from octavo.data.cache import cached
from octavo.data.tokenizer import Texts, Tokenizer, register_tokenizer

DEFAULT_VOCABULARY = 4096
_END = "<|endoftext|>"
_MIN_VOCABULARY = 257  # all bytes and the end of a document
_TRAIN_ON = 16_000_000  # characters: more of them hardly change the merges
_CHUNK = 1 << 16
_ENDS = ("</s>", _END, "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")
_BEGINNINGS = ("<s>", "<|begin_of_text|>", "<bos>", "[CLS]")


class SubwordTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` package.

    Args:
      json_or_inner: The text of a tokenizer.json, or a `tokenizers.Tokenizer`, whose truncation and padding are
        switched off.
      name: What `tokenizer_type` calls it.
      bos_id, eos_ids, add_bos, template, special: As of `Tokenizer`.
    """

    def __init__(
        self,
        json_or_inner: Any,
        *,
        name: str = "huggingface",
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        add_bos: bool = False,
        template: str | None = None,
        special: Mapping[str, str] | None = None,
    ):
        self.name, self.template, self.special = name, template, dict(special or {})
        self.bos_id, self.eos_ids, self.add_bos = bos_id, tuple(eos_ids), add_bos
        as_text = isinstance(json_or_inner, str)
        self._inner = _package(name).Tokenizer.from_str(json_or_inner) if as_text else json_or_inner
        self._inner.no_truncation()
        self._inner.no_padding()
        self._text: str = json_or_inner if as_text else self._inner.to_str()
        self.vocab_size = 1 + max(self._inner.get_vocab(with_added_tokens=True).values())

    def tokenize(self, text: str) -> np.ndarray:
        # 100 MB at once would need gigabytes for offsets.
        parts = self._inner.encode_batch_fast(list(split_chunks(text)), add_special_tokens=False)
        return np.concatenate([np.empty(0, np.uint32), *(np.array(part.ids, np.uint32) for part in parts)])

    def _encode(self, text: str) -> list[int]:
        return self._inner.encode(text, add_special_tokens=False).ids

    def _decode(self, ids: list[int]) -> str:
        return self._inner.decode(ids, skip_special_tokens=False)

    def token_bytes(self) -> list[bytes | None]:
        settings = json.loads(self._text)
        decoder = settings.get("decoder") or {}
        kinds = {one.get("type") for one in decoder.get("decoders", [decoder])}
        if "ByteLevel" not in kinds and not kinds & {"Metaspace", "ByteFallback"}:
            return super().token_bytes()
        convert = _byte_level if "ByteLevel" in kinds else _metaspace
        pieces: list[bytes | None] = [None] * self.vocab_size
        for text, token in self._inner.get_vocab(with_added_tokens=False).items():
            pieces[token] = convert(text)
        # Added tokens are written as they are, and special ones are no text.
        for added in settings.get("added_tokens", ()):
            pieces[added["id"]] = None if added.get("special") else added["content"].encode()
        for token in (self.bos_id, *self.eos_ids):
            if token is not None and token < len(pieces):
                pieces[token] = None
        return pieces

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.eos_id} {self.start_id} {self._text}".encode()).hexdigest()

    def files(self) -> dict[str, bytes]:
        names = ("bos_id", "eos_ids", "add_bos", "template", "special")
        settings = json.dumps({name: getattr(self, name) for name in names}, indent=2)
        return {"tokenizer.json": self._text.encode(), "octavo_tokenizer.json": settings.encode()}


@functools.cache
def _bytes_of_characters() -> dict[str, int]:
    """The byte that each character of a byte-level BPE stands for: printable ones for themselves, others in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level(text: str) -> bytes | None:
    known = _bytes_of_characters()
    return bytes(known[char] for char in text) if all(char in known for char in text) else None


def _metaspace(text: str) -> bytes:
    """A piece of SentencePiece: a byte as <0x0A>, or text with lower blocks for spaces."""
    if found := re.fullmatch("<0x([0-9A-F]{2})>", text):
        return bytes.fromhex(found[1])
    return text.replace("\u2581", " ").encode()


def split_chunks(text: str, size: int = _CHUNK) -> Iterator[str]:
    """Split a text into chunks of at most a size, after line ends where possible.

    >>> list(split_chunks("one\\ntwo\\nthree", 5))
    ['one\\n', 'two\\n', 'three']
    """
    start = 0
    while start < len(text):
        end = start + size
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """The tokenizer.json of a byte-level BPE trained on texts, deterministically."""
    package = _package("bpe")
    inner = package.Tokenizer(package.models.BPE())
    inner.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END],
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator((chunk for text in texts for chunk in split_chunks(text)), trainer)
    return inner.to_str()


def make_bpe(config: Any, texts: Texts) -> Tokenizer:
    """A byte-level BPE of `vocab_size` ids, trained on the start of the training text and cached for later runs."""
    size = getattr(config, "vocab_size", 0) or DEFAULT_VOCABULARY
    if size < _MIN_VOCABULARY:
        raise ValueError(f"tokenizer_type=bpe needs a vocab_size of at least {_MIN_VOCABULARY}, got {size}")
    sample = list(_start(texts()))
    digest = hashlib.sha256(f"bpe 1 {_package('bpe').__version__} {size}".encode())
    for text in sample:
        digest.update(b"%d:" % len(text) + text.encode("utf-8", errors="replace"))
    path = cached(f"bpe-{digest.hexdigest()[:32]}.json", lambda file: file.write(train_bpe(sample, size).encode()))
    text = path.read_text(encoding="utf-8") if path else train_bpe(sample, size)
    return SubwordTokenizer(text, name="bpe", bos_id=0, eos_ids=(0,), add_bos=True)


def make_huggingface(config: Any, texts: Texts) -> Tokenizer:
    """The tokenizer of a local tokenizer.json, or of a folder with one."""
    del texts
    given = getattr(config, "tokenizer_path", "")
    path = Path(given)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not given or not file.is_file():
        raise FileNotFoundError(
            f"tokenizer_type=huggingface reads a local tokenizer.json or a folder with one; "
            f"tokenizer_path={given!r} is neither"
        )
    text = file.read_text(encoding="utf-8")
    known = _package("huggingface").Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
    settings = file.with_name("tokenizer_config.json")
    named = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    eos = _special(named.get("eos_token"), _ENDS, known)
    if eos is None:
        raise ValueError(
            f"{file}: no token ends a document; tokenizer_config.json next to it should name its eos_token "
            f"(looked for {', '.join(_ENDS)})"
        )
    bos = _special(named.get("bos_token"), _BEGINNINGS, known)
    return SubwordTokenizer(text, bos_id=eos if bos is None else bos, eos_ids=(eos,), add_bos=True)


def _special(named: Any, usual: Sequence[str], known: dict[str, int]) -> int | None:
    named = named.get("content") if isinstance(named, dict) else named
    return next((known[token] for token in ([named] if named else usual) if token in known), None)


def _start(texts: Iterable[str]) -> Iterator[str]:
    left = _TRAIN_ON
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def _package(needed_by: str) -> Any:
    return import_optional("tokenizers", f"tokenizer_type={needed_by}", "'octavo[models]'")


register_tokenizer("bpe", make_bpe)
register_tokenizer("huggingface", make_huggingface)
