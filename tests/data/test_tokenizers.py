"""Bytes, a BPE trained on the text, and tokenizers from files."""

import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.data import make_dataset, make_tokenizer
from octavo.data.subwords import SubwordTokenizer, split_chunks, train_bpe
from octavo.data.tokenizer import ByteTokenizer

TEXT = "".join(f"def function_{i}(argument):\n    return argument + {i}\n\n" for i in range(300)) + "naïve: 日本\n"


@given(st.text())
def test_bytes_round_trip_and_never_hold_the_separator(text):
    ids = ByteTokenizer().tokenize(text)
    valid = text.encode("utf-8", errors="replace").decode()
    assert ByteTokenizer().decode(ids) == valid
    assert not (ids == ByteTokenizer.eos_ids[0]).any()


@given(st.text(alphabet="ab\n", max_size=60), st.integers(1, 20))
def test_chunks_are_the_text(text, size):
    parts = list(split_chunks(text, size))
    assert "".join(parts) == text
    assert all(0 < len(part) <= size for part in parts)


@pytest.fixture
def book(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    return str(tmp_path / "book.txt")


def test_a_bpe_is_trained_cached_and_shared_by_both_splits(config, book, cache, monkeypatch):
    pytest.importorskip("tokenizers")
    wanted = config(dataset_path=book, tokenizer_type="bpe", vocab_size=300)
    train = make_dataset(wanted)
    assert len(list(cache.glob("bpe-*.json"))) == 1
    monkeypatch.setattr("octavo.data.subwords.train_bpe", lambda *_: pytest.fail("trained again"))
    rest = make_dataset(wanted, "eval")
    assert train.vocab_size == rest.vocab_size == 300
    assert train.describe()["bytes_per_token"] > 2
    assert rest.describe()["tokenizer"] == "bpe"
    tokens = np.concatenate(
        [b["targets"][b["targets_segmentation"] > 0] for b in map(rest.batch, range(rest.num_batches))]
    )
    assert TEXT.endswith(rest.decode(tokens))
    assert len(rest.decode(tokens)) > 500


def test_training_is_deterministic():
    pytest.importorskip("tokenizers")
    assert train_bpe([TEXT, TEXT[::-1]], 400) == train_bpe([TEXT, TEXT[::-1]], 400)


def test_a_bpe_encodes_every_byte(config):
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match="tokenizer_type=bpe needs a vocab_size of at least 257, got 200"):
        make_tokenizer(config(tokenizer_type="bpe", vocab_size=200), lambda: [TEXT])
    tokenizer = make_tokenizer(config(tokenizer_type="bpe", vocab_size=260), lambda: ["plain"])
    unseen = "\0 \x7f unseen: 日本, 🎲\r\n\ttabs"
    assert tokenizer.decode(tokenizer.tokenize(unseen)) == unseen
    assert tokenizer.tokenize("").size == 0


def test_only_the_start_of_a_long_text_is_used(config, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.setattr("octavo.data.subwords._TRAIN_ON", 1000)
    wanted = config(tokenizer_type="bpe", vocab_size=280)
    short = make_tokenizer(wanted, lambda: [TEXT[:600], TEXT[600:1000], "never read"])
    long = make_tokenizer(wanted, lambda: [TEXT[:600], TEXT[600:], "something else"])
    assert short.digest == long.digest


def save(folder, specials, **settings):
    from tokenizers import Tokenizer

    inner = Tokenizer.from_str(train_bpe([TEXT], 300))
    inner.add_special_tokens(specials)
    inner.enable_truncation(8)
    inner.save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_a_local_tokenizer_is_read_with_its_special_tokens(config, tmp_path):
    pytest.importorskip("tokenizers")
    save(tmp_path, ["<s>", "<stop>"], eos_token={"content": "<stop>"}, bos_token="<s>")
    tokenizer = make_tokenizer(config(tokenizer_type="huggingface", tokenizer_path=str(tmp_path)), tuple)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (300, 301, 302)
    assert tokenizer.decode(tokenizer.tokenize(TEXT)) == TEXT
    assert tokenizer.decode([300, *tokenizer.tokenize("text"), 301]) == "text"


def test_bos_is_an_input_and_eos_a_target(config, tmp_path, book):
    pytest.importorskip("tokenizers")
    save(tmp_path, ["<s>", "</s>"])
    path = str(tmp_path / "tokenizer.json")
    wanted = config(dataset_path=book, tokenizer_type="huggingface", tokenizer_path=path, packing=False)
    data = make_dataset(wanted, "eval")
    assert data.batch(0)["inputs"][0, 0] == 300
    assert not (data.batch(0)["inputs"] == 301).any()


def test_default_names_of_special_tokens(config, tmp_path):
    pytest.importorskip("tokenizers")
    save(tmp_path, ["</s>"])
    tokenizer = make_tokenizer(config(tokenizer_type="huggingface", tokenizer_path=str(tmp_path)), tuple)
    assert tokenizer.eos_id == tokenizer.bos_id == 300


def test_a_tokenizer_without_eos_raises(config, tmp_path):
    pytest.importorskip("tokenizers")
    save(tmp_path, ["<s>"], eos_token="<none>")
    with pytest.raises(ValueError, match=r"no token ends a document; tokenizer_config.json next to it should name"):
        make_tokenizer(config(tokenizer_type="huggingface", tokenizer_path=str(tmp_path)), tuple)


@pytest.mark.parametrize("path", ["", "gone", "."])
def test_a_missing_tokenizer_raises(config, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"a folder with one; tokenizer_path='{path}' is neither"):
        make_tokenizer(config(tokenizer_type="huggingface", tokenizer_path=path), tuple)


def test_a_missing_package_names_the_extra(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r"tokenizer_type=bpe needs .*pip install 'octavo\[models\]'"):
        make_tokenizer(config(tokenizer_type="bpe"), lambda: [TEXT])


def test_bytes_of_tokens():
    """Together they are the text, also where a character has several tokens; special tokens are no text."""
    package = pytest.importorskip("tokenizers")
    byte_level = SubwordTokenizer(train_bpe([TEXT] * 2, 400), eos_ids=(0,))
    words = [f"<0x{i:02X}>" for i in range(256)]
    vocab = {piece: i for i, piece in enumerate(["<s>", "</s>", *words, "▁", "d", "e", "f", "▁d", "ef", "▁def"])}
    merges = [("▁", "d"), ("e", "f"), ("▁d", "ef")]
    inner = package.Tokenizer(package.models.BPE(vocab, merges, byte_fallback=True))
    inner.normalizer = package.normalizers.Replace(" ", "▁")
    replace = package.decoders.Replace("▁", " ")
    inner.decoder = package.decoders.Sequence([replace, package.decoders.ByteFallback(), package.decoders.Fuse()])
    inner.add_special_tokens(["<s>", "</s>", "<|x|>"])
    inner.add_tokens(["<call>"])
    pieces_of_sentences = SubwordTokenizer(inner.to_str(), bos_id=0, eos_ids=(1,))
    for tokenizer in (ByteTokenizer(), byte_level, pieces_of_sentences):
        pieces = tokenizer.token_bytes()
        text = " def <call> naïve: 日本\n"
        assert b"".join(pieces[i] for i in tokenizer.tokenize(text)).decode() == text
        assert len(pieces) == tokenizer.vocab_size
        assert all(pieces[i] is None for i in tokenizer.eos_ids)
    assert pieces[inner.token_to_id("<|x|>")] is None
    assert pieces[inner.token_to_id("▁def")] == b" def"
    inner.decoder = package.decoders.WordPiece()
    with pytest.raises(ValueError, match="does not tell the bytes of its tokens"):
        SubwordTokenizer(inner.to_str()).token_bytes()
