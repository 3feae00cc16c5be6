"""Tokenizers: the interface, its registry, and UTF-8 bytes as ids."""

import abc
import hashlib
import json
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo._names import unknown_name
from octavo._optional import import_optional
from octavo.data.packing import Ids

type Texts = Callable[[], Iterable[str]]
"""Opens the documents of the training text, for tokenizers that are trained on it."""

type Message = Mapping[str, Any]
"""A message of a conversation: `role` and `content`."""


class Tokenizer(abc.ABC):
    """Text to token ids and back, for training data and for the prompts of a model.

    Attributes:
      name: What `tokenizer_type` calls it.
      vocab_size: Ids are below this.
      bos_id: The id that begins a text, if there is one.
      eos_ids: The ids that end a text. The first separates documents in training data.
      add_bos: Whether the model expects `bos_id` before a prompt.
      template: The model's chat template (Jinja), if it has one.
      special: What the template calls special tokens, such as `bos_token`.
    """

    name: str
    vocab_size: int
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False
    template: str | None = None
    special: Mapping[str, str] = types.MappingProxyType({})

    @abc.abstractmethod
    def tokenize(self, text: str) -> np.ndarray:
        """The ids of a document, without `bos_id` and `eos_ids`."""

    @abc.abstractmethod
    def _decode(self, ids: list[int]) -> str: ...

    @property
    @abc.abstractmethod
    def digest(self) -> str:
        """A hash that differs between tokenizers that encode differently."""

    @property
    def eos_id(self) -> int:
        """The id that ends a document in training data."""
        return self.eos_ids[0]

    @property
    def start_id(self) -> int:
        """The id that a model reads before a document: `bos_id`, or `eos_id` without one."""
        return self.eos_id if self.bos_id is None else self.bos_id

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, after `bos_id` where the model expects it."""
        ids = self._encode(text)
        return [self.bos_id, *ids] if self.add_bos and self.bos_id is not None else ids

    def _encode(self, text: str) -> list[int]:
        return self.tokenize(text).tolist()

    def decode(self, ids: Ids) -> str:
        """The text of ids, without `bos_id` and `eos_ids`."""
        silent = {self.bos_id, *self.eos_ids}
        return self._decode([int(i) for i in np.asarray(ids, np.int64).reshape(-1) if int(i) not in silent])

    def token_bytes(self) -> list[bytes | None]:
        """The bytes that each id adds to a text; None for ids that are no text, such as `eos_ids`."""
        raise ValueError(f"tokenizer {self.name!r} does not tell the bytes of its tokens, which constraints need")

    def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """The ids of a conversation, up to where the model answers."""
        return self._encode(self.chat_text(messages, tools))

    def chat_text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """A conversation as the model's template writes it, with the tools that the model may call."""
        if self.template is None:
            raise ValueError("this model has no chat template: it continues text, so give it a prompt instead")
        if tools and not re.search(r"\btools\b", self.template):
            raise ValueError(
                "this model's chat template knows no tools: leave tools out, or describe them in a message"
            )
        return render_chat(self.template, messages, self.special, tools=tools)

    def files(self) -> dict[str, bytes]:
        """The files from which `octavo.pretrained` reads it again, by name; empty if it has none."""
        return {}

    def save(self, directory: Path) -> None:
        """Write `files` into a directory."""
        for name, content in self.files().items():
            (directory / name).write_bytes(content)


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8 text, with 256 ids: byte 255 never occurs in UTF-8, and separates documents.

    >>> ByteTokenizer().tokenize("né").tolist(), ByteTokenizer().decode([255, 110, 195, 169, 255])
    ([110, 195, 169], 'né')
    """

    name = "byte"
    vocab_size = 256
    bos_id = 255
    eos_ids = (255,)
    add_bos = True

    def tokenize(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8)

    def _decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 255).decode("utf-8", errors="replace")

    def token_bytes(self) -> list[bytes | None]:
        return [*(bytes((i,)) for i in range(255)), None]

    @property
    def digest(self) -> str:
        return hashlib.sha256(b"octavo byte 255").hexdigest()

    def files(self) -> dict[str, bytes]:
        return {"octavo_tokenizer.json": b'{"bytes": true}'}


def render_chat(
    template: str,
    messages: Sequence[Message],
    special: Mapping[str, str],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The text that a chat template makes of messages; with `add_generation_prompt`, up to where the model answers.

    Templates come with a model: they run in Jinja's sandbox, which can format text and nothing else.
    """
    jinja2 = import_optional("jinja2", "a chat template", "'octavo[serve]'")
    sandbox = import_optional("jinja2.sandbox", "a chat template", "'octavo[serve]'")

    def raise_exception(text: str) -> None:
        raise jinja2.TemplateError(text)

    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = lambda x, **kwargs: json.dumps(x, ensure_ascii=False, **kwargs)
    try:
        compiled = environment.from_string(template)
        # Without tools, templates test for none or for an undefined name.
        extra = {"tools": list(tools)} if tools else {}
        return compiled.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **extra, **special)
    except (jinja2.TemplateError, TypeError) as error:  # such as text joined with a number
        raise ValueError(f"the model's chat template cannot write these messages: {error}") from error


type TokenizerMaker = Callable[[Any, Texts], Tokenizer]

_makers: dict[str, TokenizerMaker] = {}


def register_tokenizer(name: str, maker: TokenizerMaker, *, replace: bool = False) -> None:
    """Register a tokenizer by name; `maker` takes the configuration and a function that opens the training text."""
    if name in _makers and not replace:
        raise ValueError(f"a tokenizer named {name!r} exists; choose another name or pass replace=True")
    _makers[name] = maker


def tokenizers() -> tuple[str, ...]:
    """The names of all tokenizers, sorted."""
    return tuple(sorted(_makers))


def make_tokenizer(config: Any, texts: Texts) -> Tokenizer:
    """Make the tokenizer of a training configuration, by its `tokenizer_type`."""
    name = getattr(config, "tokenizer_type", "byte")
    if name not in _makers:
        raise ValueError(f"unknown tokenizer_type {name!r}: {unknown_name(name, _makers)}")
    return _makers[name](config, texts)


register_tokenizer("byte", lambda config, texts: ByteTokenizer())
