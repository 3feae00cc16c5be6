"""Tokenizers out of the metadata of GGUF files: small vocabularies, how text is cut, and what is wrong."""

import functools

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from octavo.files import FileError
from octavo.files.gguf import Gguf, tokenizer_of, write_gguf
from octavo.files.gguf.pre_tokenizers import PRE_TOKENIZERS

BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def byte_level(pre="smollm", merges=("h e", "l l", "he ll", "Ġ he", "1 2"), **more):
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>", *BYTES]
    tokens += [merge.replace(" ", "") for merge in merges]
    types = np.ones(len(tokens), np.int32)
    types[:3], types[3] = 3, 4
    metadata = {
        "model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": list(merges),
        "bos_token_id": 1, "eos_token_id": 2, **more,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def sentence_piece(**more):
    pieces = ["\u2581", "a", "b", "c", "ab", "bc", "abc", "\u2581a", "\u2581abc", "\u2581\u2581", "<x>"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    types = np.array([2, 3, 3, *[6] * 256, *[1] * 10, 4], np.int32)
    scores = [0.0] * 259 + [-1e9, -90, -91, -92, -1, -2, -3, -4, -5, -1e9, 0]
    metadata = {
        "model": "llama", "tokens": tokens, "token_type": types, "scores": np.float32(scores), "bos_token_id": 1,
        "eos_token_id": 2, "unknown_token_id": 0, **more,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def pieces(metadata, text, **options):
    return tokenizer_of(metadata).tokenizer.encode(text, **options).tokens


def round_trip(made, text):
    return made.tokenizer.decode(made.tokenizer.encode(text).ids)


def test_byte_level_bpe():
    made = tokenizer_of(byte_level() | {"tokenizer.chat_template": "{{ messages }}"})
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert made[1:] == (1, (2, 0), False, "{{ messages }}", special)
    assert made.tokenizer.encode("hello hell").tokens == ["hell", "o", "Ġ", "hell"]
    assert made.tokenizer.encode("<|im_start|>he<tool>").tokens == ["<|im_start|>", "he", "<tool>"]
    assert round_trip(made, "<|im_start|>héllo 🎉 12<tool>") == "héllo 🎉 12<tool>"
    made.tokenizer.encode_special_tokens = True
    assert made.tokenizer.encode("<|im_end|>").tokens[0] == "<"


@functools.cache
def llama_bpe():
    return tokenizer_of(byte_level("llama-bpe", add_bos_token=False))


@given(st.text(max_size=40))
def test_any_text_comes_back(text):
    made = llama_bpe()
    if not any(token in text for token in ("<|", "<tool>")):
        assert round_trip(made, text) == text


def test_bos_and_eos_are_added_as_the_file_says():
    assert pieces(byte_level(add_bos_token=True), "he") == ["<|im_start|>", "he"]
    assert pieces(byte_level(add_bos_token=True, add_eos_token=True), "he") == ["<|im_start|>", "he", "<|im_end|>"]
    assert pieces(byte_level(add_bos_token=True), "he", add_special_tokens=False) == ["he"]
    assert pieces(byte_level("llama-bpe"), "he") == ["<|im_start|>", "he"]
    assert pieces(byte_level("llama-bpe", add_bos_token=False), "he") == ["he"]
    assert pieces(byte_level("llama-bpe", bos_token_id=None), "he") == ["he"]


TEXT = "It's 12345 naïve ab\u0301c  x\n\n  y!! HTMLParser's DON'T"
CUT = {  # with a bar at every cut
    "gpt-2": "It|'s| 12345| naïve| ab|\u0301|c| | x|\n\n | y|!!| HTMLParser|'s| DON|'|T",
    "smollm": "It|'s| |1|2|3|4|5| naïve| ab|\u0301|c| | x|\n\n | y|!!| HTMLParser|'s| DON|'|T",
    "llama-bpe": "It|'s| |123|45| naïve| ab|\u0301c| | x|\n\n| | y|!!| HTMLParser|'s| DON|'T",
    "qwen2": "It|'s| |1|2|3|4|5| naïve| ab|\u0301c| | x|\n\n| | y|!!| HTMLParser|'s| DON|'T",
    "qwen35": "It|'s| |1|2|3|4|5| naïve| ab\u0301c| | x|\n\n| | y|!!| HTMLParser|'s| DON|'T",
    "gpt-4o": "It's| |123|45| naïve| ab\u0301c| | x|\n\n| | y|!!| HTMLParser's| DON'T",
    "default": "It|'|s| |123|45| naïve",
}


@pytest.mark.parametrize("pre", CUT)
def test_text_is_cut_as_the_name_says(pre):
    cut = tokenizer_of(byte_level(pre)).tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    words = [TEXT[start:end] for _, (start, end) in cut]
    assert "|".join(words).startswith(CUT[pre])


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_name_cuts_without_losing_text(pre):
    cut = tokenizer_of(byte_level(pre)).tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert "".join(TEXT[start:end] for _, (start, end) in cut) == TEXT


def test_whole_words_of_the_vocabulary_need_no_merges():
    metadata = byte_level("llama-bpe", add_bos_token=False)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "xyz"]
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], np.int32(1))
    assert pieces(metadata, "xyz") == ["xyz"]
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert pieces(metadata, "xyz") == ["x", "y", "z"]


def test_sentence_piece():
    made = tokenizer_of(sentence_piece())
    assert made[1:] == (1, (2,), True, None, {"bos_token": "<s>", "eos_token": "</s>"})
    assert made.tokenizer.encode("abc bc").tokens == ["<s>", "\u2581abc", "\u2581", "bc"]
    assert made.tokenizer.encode("é<x>a", add_special_tokens=False).tokens == [
        "\u2581", "<0xC3>", "<0xA9>", "<x>", "\u2581a",
    ]  # fmt: skip
    assert round_trip(made, "abc é\n a") == "abc é\n a"
    plain = tokenizer_of(sentence_piece(add_space_prefix=False, add_bos_token=False))
    assert plain.tokenizer.encode("abc").tokens == ["abc"]
    assert round_trip(plain, " abc") == " abc"


@functools.cache
def llama_pieces():
    return tokenizer_of(sentence_piece())


def greedy(scores, text):
    """SentencePiece's ids: of all neighbours that make a piece, those with the best score are merged first."""
    pieces = [part for c in (" " + text if text else "") for part in ([c] if c in scores else c.encode())]

    def score(i):
        joined = isinstance(pieces[i], str) and isinstance(pieces[i + 1], str) and pieces[i] + pieces[i + 1]
        return scores.get(joined, -np.inf)

    while len(pieces) > 1 and score(best := max(range(len(pieces) - 1), key=score)) > -np.inf:
        pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]
    return [1, *(259 + list(scores).index(p) if isinstance(p, str) else 3 + p for p in pieces)]


@given(st.text(alphabet="abc é\n", max_size=30))
def test_sentence_piece_is_the_greedy_algorithm(text):
    metadata = sentence_piece()
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    pairs = zip([t.replace("\u2581", " ") for t in tokens[259:269]], scores[259:269].tolist(), strict=True)
    assert llama_pieces().tokenizer.encode(text).ids == greedy(dict(pairs), text)


def test_it_is_read_from_a_file(tmp_path):
    for metadata in (byte_level(), sentence_piece()):
        write_gguf(tmp_path / "m.gguf", metadata, {})
        with Gguf(tmp_path / "m.gguf") as file:
            assert tokenizer_of(file).tokenizer.encode("abc").tokens == pieces(metadata, "abc")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, r"metadata tokenizer\.ggml\.model is missing"),
        (byte_level(model="rwkv"), r"tokenizer\.ggml\.model 'rwkv' is not known; known: gpt2, llama"),
        (byte_level(pre="smollm3"), r"tokenizer\.ggml\.pre 'smollm3' is not known: did you mean 'smollm'"),
        (byte_level(tokens=None), r"metadata tokenizer\.ggml\.tokens is missing"),
        (byte_level(tokens=[]), r"tokenizer\.ggml\.tokens is not a list of strings"),
        (byte_level(tokens=["a", "a"], token_type=None), r"tokenizer\.ggml\.tokens has 'a' twice"),
        (
            byte_level() | {"tokenizer.ggml.merges": ["h e", "q"]},
            r"tokenizer\.ggml\.merges has 'q', whose parts are not all among the tokens",
        ),
        (byte_level(token_type=np.zeros(3, np.int32)), r"token_type should be \d+ numbers, one to a token"),
        (byte_level(eos_token_id=10**6), r"eos_token_id is 1000000, but ids are below \d+"),
        (byte_level(add_bos_token="yes"), r"metadata tokenizer\.ggml\.add_bos_token should be of type bool"),
        (byte_level() | {"tokenizer.ggml.merges": 7}, r"metadata tokenizer\.ggml\.merges should be of type list"),
        (sentence_piece(scores=None), r"metadata tokenizer\.ggml\.scores is missing"),
        (sentence_piece(scores=np.full(270, np.nan, np.float32)), r"tokenizer\.ggml\.scores has a NaN"),
        (
            sentence_piece(tokens=["x" * 1000], token_type=None, scores=np.float32([0])),
            r"token 0 has 1000 characters; at most 512 are supported",
        ),
        (sentence_piece(scores=np.arange(270)), r"scores should be 270 numbers, one to a token"),
    ],
)
def test_what_is_wrong_is_said(metadata, message):
    with pytest.raises(FileError, match=message):
        tokenizer_of(metadata)
