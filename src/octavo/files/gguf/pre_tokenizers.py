"""Pre-tokenizers by their `tokenizer.ggml.pre` names: regular expressions that split text before BPE, in order.

Each expression splits the pieces that the ones before it left. The names are llama.cpp's; the expressions are those of
the models' tokenizer.json files.
"""

import dataclasses

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"

_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _words(digits: str, letters: str = r"\p{L}") -> str:
    other = rf"[^\s{letters}\p{{N}}]"
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?{other}+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(digits: str, contractions: str) -> str:
    """Words that end where a capital follows a small letter."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    head = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{head}{upper}*{lower}+{contractions}|{head}{upper}+{lower}*{contractions}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """Expressions in order, `ignore_merges` of BPE, and whether BOS is added by default."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_DIGITS_APART = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_words(r"\p{N}"),))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "mpt": PreTokenizer((_GPT2,)),
    "olmo": PreTokenizer((_GPT2,)),
    "phi-2": PreTokenizer((_GPT2,)),
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "command-r": _DIGITS_APART,
    "codeshell": _DIGITS_APART,
    "exaone": _DIGITS_APART,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "dbrx": dataclasses.replace(_LLAMA3, ignore_merges=False, add_bos=False),
    "smaug-bpe": dataclasses.replace(_LLAMA3, ignore_merges=False, add_bos=False),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "qwen35": PreTokenizer((_words(r"\p{N}", r"\p{L}\p{M}"),)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[一-龥\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)),
    "tekken": PreTokenizer((_cased(r"\p{N}", ""),), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer((_cased(r"\p{N}{1,3}", _CONTRACTIONS + "?"),)),
}
