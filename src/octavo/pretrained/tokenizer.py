"""The tokenizer in the directory of a model."""

import json
from pathlib import Path
from typing import Any

from octavo._optional import import_optional
from octavo.data import ByteTokenizer, SubwordTokenizer, Tokenizer

_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<eos>")
_BEGINNINGS = ("<s>", "<|begin_of_text|>", "<bos>")


def read_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer of a directory, or None if it has none.

    Settings are read from octavo_tokenizer.json, or from Hugging Face's other files in the directory.
    """
    own = directory / "octavo_tokenizer.json"
    settings = json.loads(own.read_text(encoding="utf-8")) if own.is_file() else None
    if settings and settings.get("bytes"):
        return ByteTokenizer()
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    inner = import_optional("tokenizers", "a tokenizer.json", "'octavo[models]'").Tokenizer.from_file(str(file))
    if settings is not None:
        return SubwordTokenizer(inner, **settings)
    return _with_huggingface_settings(directory, inner)


def _with_huggingface_settings(directory: Path, inner: Any) -> SubwordTokenizer:
    named = read_json(directory / "tokenizer_config.json")
    generation = read_json(directory / "generation_config.json")
    model = read_json(directory / "config.json")
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
    eos_ids = sorted(int(i) for i in eos)
    return SubwordTokenizer(
        inner, bos_id=bos, eos_ids=eos_ids, add_bos=bool(add_bos), template=template, special=special
    )


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object but a {type(found).__name__}")
    return found
