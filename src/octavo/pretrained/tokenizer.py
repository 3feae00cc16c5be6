"""What text has to do with a pretrained model: ids, where a text ends, and how a conversation is written down."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo._optional import import_optional

type Message = Mapping[str, Any]

_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<eos>")
_BEGINNINGS = ("<s>", "<|begin_of_text|>", "<bos>")


@dataclasses.dataclass(frozen=True)
class TextTokenizer:
    """Text to ids and back. `encode` begins with `bos_id` where the model was trained so; `eos_ids` end a text."""

    encode_plain: Callable[[str], Sequence[int]]
    decode_ids: Callable[[Sequence[int]], str]
    vocab_size: int
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False
    template: str | None = None
    special: Mapping[str, str] = dataclasses.field(default_factory=dict)
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    """The files that make it again, by name."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, after the id that begins one where the model wants it."""
        ids = [int(i) for i in self.encode_plain(text)]
        return [self.bos_id, *ids] if self.add_bos and self.bos_id is not None else ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; those that begin or end it say nothing."""
        return self.decode_ids([int(i) for i in ids if int(i) != self.bos_id and int(i) not in self.eos_ids])

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation, up to where the model answers."""
        return [int(i) for i in self.encode_plain(self.chat_text(messages))]

    def chat_text(self, messages: Sequence[Message]) -> str:
        """A conversation as the model's template writes it."""
        if self.template is None:
            raise ValueError("this model has no chat template: it continues text, so give it a prompt instead")
        jinja = import_optional("jinja2.sandbox", "a chat template", "'octavo[serve]'")
        # A template comes with the model: it may format text, and nothing else.
        environment = jinja.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = lambda x, **kwargs: json.dumps(x, ensure_ascii=False, **kwargs)
        try:
            template = environment.from_string(self.template)
            return template.render(messages=list(messages), add_generation_prompt=True, **self.special)
        except import_optional("jinja2", "a chat template", "'octavo[serve]'").TemplateError as error:
            raise ValueError(f"the model's chat template cannot write these messages: {error}") from error

    def save(self, directory: Path) -> None:
        """Write the files that make it again."""
        for name, content in self.files.items():
            (directory / name).write_bytes(content)


def _refuse(text: str) -> None:
    raise import_optional("jinja2", "a chat template", "'octavo[serve]'").TemplateError(text)


def from_tokenizers(
    inner: Any,
    *,
    bos: int | None = None,
    eos: Sequence[int] = (),
    add_bos: bool = False,
    template: str | None = None,
    special: Mapping[str, str] | None = None,
) -> TextTokenizer:
    """Of a `tokenizers.Tokenizer`."""
    inner.no_truncation()
    inner.no_padding()
    settings: dict[str, Any] = {"bos_id": bos, "eos_ids": list(eos), "add_bos": add_bos, "template": template}
    settings["special"] = dict(special or {})
    return TextTokenizer(
        encode_plain=lambda text: inner.encode(text, add_special_tokens=False).ids,
        decode_ids=lambda ids: inner.decode(list(ids), skip_special_tokens=False),
        vocab_size=1 + max(inner.get_vocab(with_added_tokens=True).values()),
        bos_id=bos,
        eos_ids=tuple(eos),
        add_bos=add_bos,
        template=template,
        special=dict(special or {}),
        files={
            "tokenizer.json": inner.to_str().encode(),
            "octavo_tokenizer.json": json.dumps(settings, indent=2).encode(),
        },
    )


def of_bytes() -> TextTokenizer:
    """The bytes of UTF-8 text, as the trainer's default tokenizer has them."""
    from octavo.data.tokenizer import Bytes

    inner = Bytes()
    return TextTokenizer(
        encode_plain=lambda text: inner.encode(text).tolist(),
        decode_ids=inner.decode,
        vocab_size=inner.vocab_size,
        bos_id=inner.bos,
        eos_ids=(inner.eos,),
        add_bos=True,
        files={"octavo_tokenizer.json": b'{"bytes": true}'},
    )


def read_tokenizer(directory: Path) -> TextTokenizer | None:
    """The tokenizer of a directory: ours, or that of a tokenizer.json with its settings; None if it has none."""
    own = directory / "octavo_tokenizer.json"
    settings = json.loads(own.read_text(encoding="utf-8")) if own.is_file() else None
    if settings and settings.get("bytes"):
        return of_bytes()
    if settings and settings.get("llama2c"):
        from octavo.pretrained.llama2c import read_pieces

        return read_pieces(directory / "tokenizer.bin")
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    inner = import_optional("tokenizers", "a tokenizer.json", "'octavo[models]'").Tokenizer.from_file(str(file))
    if settings is not None:
        return from_tokenizers(
            inner,
            bos=settings["bos_id"],
            eos=settings["eos_ids"],
            add_bos=settings["add_bos"],
            template=settings["template"],
            special=settings["special"],
        )
    return _huggingface(directory, inner)


def _huggingface(directory: Path, inner: Any) -> TextTokenizer:
    """By the settings that lie beside a tokenizer.json of Hugging Face."""
    named = _json(directory / "tokenizer_config.json")
    generation = _json(directory / "generation_config.json")
    model = _json(directory / "config.json")
    known = inner.get_vocab(with_added_tokens=True)
    special = {f"{kind}_token": token for kind in ("bos", "eos") if (token := _content(named.get(f"{kind}_token")))}
    bos = known.get(special.get("bos_token", next((t for t in _BEGINNINGS if t in known), "")))
    eos = {known[special["eos_token"]]} if special.get("eos_token") in known else set()
    for settings in (generation, model):
        value = settings.get("eos_token_id")
        eos |= set(value if isinstance(value, list) else [] if value is None else [value])
    if not eos:
        eos = {known[t] for t in _ENDS if t in known}
    add_bos = named.get("add_bos_token")
    if add_bos is None:  # as its post-processor does
        add_bos = bos is not None and inner.encode("a", add_special_tokens=True).ids[:1] == [bos]
    template = named.get("chat_template")
    if isinstance(template, list):
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    if template is None and (directory / "chat_template.jinja").is_file():
        template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    return from_tokenizers(
        inner, bos=bos, eos=sorted(int(i) for i in eos), add_bos=bool(add_bos), template=template, special=special
    )


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no object: it is not what its name says")
    return found
