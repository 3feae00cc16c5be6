"""model.bin and tokenizer.bin of llama2.c."""

import itertools
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.files import FileError
from octavo.files.llama2c import Llama2c, Llama2cConfig, Llama2cTokenizer

SIZES = {"dim": 8, "hidden_dim": 12, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 5, "seq_len": 3}


def shapes(layers=2, kv=4, dim=8, hidden=12):
    one = {
        "attention_norm": (dim,), "attention.wq": (dim, dim), "attention.wk": (kv, dim), "attention.wv": (kv, dim),
        "attention.wo": (dim, dim), "ffn_norm": (dim,), "feed_forward.w1": (hidden, dim),
        "feed_forward.w2": (dim, hidden), "feed_forward.w3": (hidden, dim),
    }  # fmt: skip
    return {part: (layers, *shape) for part, shape in one.items()}


def model(version=0, *, shared=True, **changes):
    """The bytes of a model and its tensors, written by the order of llama2.c's export.py."""
    sizes, rng = SIZES | changes, np.random.default_rng(0)
    layers = {part: rng.normal(size=shape).astype("<f4") for part, shape in shapes().items()}
    single = {"tok_embeddings": (5, 8), "norm": (8,), "freqs_cos": (3, 2), "freqs_sin": (3, 2), "output": (5, 8)}
    single = {name: rng.normal(size=shape).astype("<f4") for name, shape in single.items()}
    attention = ["attention.wq", "attention.wk", "attention.wv", "attention.wo"]
    mlp = ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3"]
    if version == 0:
        vocab = sizes["vocab_size"] * (1 if shared else -1)
        head = struct.pack("<7i", *(sizes | {"vocab_size": vocab}).values())
        order = ["tok_embeddings", "attention_norm", *attention, "ffn_norm", *mlp, "norm", "freqs_cos", "freqs_sin"]
    else:
        head = struct.pack("<Ii7iB", 0x616B3432, version, *sizes.values(), shared).ljust(256, b"\0")
        order = ["attention_norm", "ffn_norm", "norm", "tok_embeddings", *attention, *mlp]
    order += [] if shared else ["output"]
    arrays = layers | single
    tensors = {f"layers.{i}.{part}.weight": stack[i] for part, stack in layers.items() for i in range(2)}
    tensors |= {f"{name}.weight": single[name] for name in ("tok_embeddings", "norm")}
    tensors |= {} if shared else {"output.weight": single["output"]}
    return head + b"".join(arrays[name].tobytes() for name in order), tensors


@pytest.fixture
def opened(tmp_path):
    def make(data):
        (tmp_path / "model.bin").write_bytes(data)
        return Llama2c(tmp_path / "model.bin")

    return make


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("shared", [True, False])
def test_every_tensor_is_read_from_its_place(version, shared, opened):
    data, tensors = model(version, shared=shared)
    with opened(data) as file:
        assert file.config == Llama2cConfig(**SIZES, shared=shared, version=version)
        assert file.config.head_dim == 4
        assert set(file.names()) == set(tensors)
        assert file.names()[0] == "tok_embeddings.weight"
        for name, array in tensors.items():
            assert file.info(name).shape == array.shape
            assert np.array_equal(file.read(name), array)
        with pytest.raises(FileError, match=r"has no tensor 'norm'; did you mean 'norm.weight'"):
            file.read("norm")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"is truncated: the header needs bytes 0 to 28 of 0"),
        (model(n_layers=0)[0], r"is no model.bin of llama2.c: n_layers is 0"),
        (model(dim=-8)[0], r"dim is -8"),
        (model(n_heads=3)[0], r"dim 8 is not 3 heads of an even size"),
        (model(n_heads=8)[0], r"dim 8 is not 8 heads of an even size"),
        (model(n_heads=2, n_kv_heads=4)[0], r"n_heads 2 is no multiple of n_kv_heads 4"),
        (model(n_layers=2**31 - 1)[0], r"is no whole model.bin of llama2.c: Llama2cConfig\(.*\) needs \d+ bytes"),
        (model(vocab_size=6)[0], r"is no whole model.bin"),
        (model()[0][:-1], r"is no whole model.bin"),
        (model()[0] + b"\0", r"is no whole model.bin"),
        (model(2)[0], r"is of version 2; known are 0 and 1, in float32: export it with --version 1"),
        (struct.pack("<Ii", 0x616B3432, 1).ljust(30, b"\0"), r"is truncated"),
    ],
)
def test_what_is_wrong_is_said(data, message, opened):
    with pytest.raises(FileError, match=message):
        opened(data)


@given(st.binary(max_size=400), st.booleans())
def test_random_bytes_are_refused(tmp_path_factory, data, magic):
    path = tmp_path_factory.getbasetemp() / "random.bin"
    path.write_bytes(struct.pack("<Ii", 0x616B3432, 1) + data if magic else data)
    for read in (Llama2c, Llama2cTokenizer.read):
        with pytest.raises(FileError):
            read(path)


# A vocabulary as SentencePiece has it: a merge that was learned earlier scores higher.
WORDS = [(" ", -1e9), ("a", -90.0), ("b", -91.0), ("c", -92.0), ("é", -93.0), ("ab", -1.0), ("bc", -2.0), ("abc", -3.0)]
WORDS += [(" a", -4.0), (" abc", -5.0), ("  ", -1e9)]
PLACE = {piece: 259 + i for i, (piece, _) in enumerate(WORDS)}


def tokenizer_file(path, pieces, longest=27):
    first = [("<unk>", 0), ("\n<s>\n", 0), ("\n</s>\n", 0), *((chr(b), 0) for b in range(256))]
    data = struct.pack("<I", longest)
    for piece, score in [*first, *pieces]:
        data += struct.pack("<fi", score, len(piece.encode())) + piece.encode()
    path.write_bytes(data)
    return path


def test_pieces_win_over_the_bytes_that_look_like_them(tmp_path):
    tokenizer = Llama2cTokenizer.read(tokenizer_file(tmp_path / "t.bin", WORDS))
    assert tokenizer.vocab_size == 259 + len(WORDS)
    assert tokenizer.encode("c", bos=False) == [PLACE[" "], PLACE["c"]]
    assert tokenizer.encode("abc") == [1, PLACE[" abc"]]
    assert tokenizer.encode("b a", eos=True) == [1, PLACE[" "], PLACE["b"], PLACE[" a"], 2]
    assert tokenizer.encode("") == [1]
    # U+00FF is spelled by the file at the place of byte 255, which it is not.
    assert tokenizer.encode("\xff", bos=False) == [PLACE[" "], 3 + 0xC3, 3 + 0xBF]
    assert tokenizer.encode("é!\n", bos=False) == [PLACE[" "], PLACE["é"], 3 + ord("!"), 3 + 10]


@given(st.text(alphabet="abc éz\n🎉", max_size=30))
def test_merges_are_those_of_the_plain_algorithm(text):
    tokenizer = Llama2cTokenizer(WORDS)
    scores = dict(WORDS)
    pieces = [c if c in scores else c.encode() for c in " " + text] if text else []
    pieces = [p for piece in pieces for p in ([piece] if isinstance(piece, str) else piece)]
    while True:
        pairs = [
            (scores[a + b], -i)
            for i, (a, b) in enumerate(itertools.pairwise(pieces))
            if isinstance(a, str) and isinstance(b, str) and a + b in scores
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    wanted = [PLACE[p] if isinstance(p, str) else 3 + p for p in pieces]
    assert tokenizer.encode(text, bos=False) == wanted
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_decoding_leaves_out_what_is_no_text():
    tokenizer = Llama2cTokenizer(WORDS)
    assert tokenizer.decode([1, PLACE[" a"], PLACE[" a"], 2]) == "a a"
    assert tokenizer.decode([3 + 0xC3]) == "\ufffd"
    assert tokenizer.decode_bytes([3 + 0xC3, 3 + 0xA9]) == "é".encode()
    assert tokenizer.decode([1, PLACE[" "], PLACE["c"], 1, PLACE[" a"]]) == "ca"
    with pytest.raises(ValueError, match="id 999 is not among the 270 of the tokenizer"):
        tokenizer.decode([999])


def test_wrong_tokenizers_are_refused(tmp_path):
    path = tmp_path / "t.bin"
    data = tokenizer_file(path, WORDS).read_bytes()
    for wrong, message in [
        (data[:2], "is no tokenizer.bin: it has 2 bytes"),
        (data[:-3], r"piece 269 has 2 bytes|is truncated in piece|which cannot be"),
        (data[:400], r"is truncated in piece|which cannot be"),
        (data + b"\0\0", "is truncated in piece 270"),
        (data + struct.pack("<fi", 0, -1), "piece 270 has -1 bytes and score 0.0, which cannot be"),
        (data + struct.pack("<fi", 0, 1 << 30), "piece 270 has 1073741824 bytes"),
        (data + struct.pack("<fi", float("nan"), 1) + b"x", "score nan"),
        (struct.pack("<I", 5) + struct.pack("<fi", 0, 1) + b"x", "has 1 pieces; the bytes alone are 259"),
    ]:
        path.write_bytes(wrong)
        with pytest.raises(FileError, match=message):
            Llama2cTokenizer.read(path)
