"""`octavo embed`: JSON lines, NumPy files, low precision, and errors."""

import io
import json

import numpy as np
import pytest

from octavo.cli import main
from octavo.pretrained import open_encoder
from tests.pretrained.encoder import write_encoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("encoder")
    write_encoder(path)
    return path


def test_a_line_of_json_for_each_text(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("c d\n\ne\n"))
    assert main(["embed", str(folder), "--text", "a b", "--text-file", "-"]) == 0
    out, err = capsys.readouterr()
    found = [json.loads(line) for line in out.splitlines()]
    assert [row["text"] for row in found] == ["a b", "c d", "e"]
    wanted = open_encoder(folder).embed(["a b", "c d", "e"])
    np.testing.assert_array_equal(np.float32([row["embedding"] for row in found]), wanted)
    assert err.startswith("octavo embed: 3 texts, 64 dimensions, ")


def test_low_precision_into_a_file(folder, capsys, tmp_path):
    words = ["embed", str(folder), "--text", "a b", "--text", "e", "--out", str(tmp_path / "vectors.npy")]
    assert main([*words, "--weights", "int8", "--activations", "int8", "--batch-size", "1"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    float_bytes = open_encoder(folder).nbytes
    assert float(err.rpartition(": ")[2].split()[0]) < 0.5 * float_bytes / 2**20
    found, exact = np.load(tmp_path / "vectors.npy"), open_encoder(folder).embed(["a b", "e"])
    assert not np.array_equal(found, exact)
    assert (np.sum(found * exact, axis=1) > 0.98).all()


def test_a_prompt_is_put_before_texts(tmp_path, capsys):
    write_encoder(tmp_path)
    (tmp_path / "config_sentence_transformers.json").write_text('{"prompts": {"query": "a b "}}')
    assert main(["embed", str(tmp_path), "--text", "c", "--prompt-name", "query"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == "c"
    np.testing.assert_array_equal(np.float32([found["embedding"]]), open_encoder(tmp_path).embed(["a b c"]))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "there is no text: give --text TEXT, or --text-file FILE with one on each line"),
        (["--text", "a", "--activations", "int8"], "--activations needs --weights"),
        (["--text", "a", "--weights", "int9"], "int9"),
        (["--text", "a", "--batch-size", "0"], "batch_size is at least 1, got 0"),
        (["--text", "a", "--max-length", "999"], "max_length is 1 to 16, the model's own; got 999"),
        (["--text", "a", "--prompt-name", "query"], "unknown prompt 'query'"),
        (["--text-file", "nowhere.txt"], "nowhere.txt"),
        (["--text", "a", "--out", "nowhere/vectors.npy"], "nowhere"),
    ],
)
def test_errors(folder, words, text, capsys):
    assert main(["embed", str(folder), *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("octavo embed: ")
    assert text in err


def test_a_model_that_is_no_encoder(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert main(["embed", str(tmp_path), "--text", "a"]) == 2
    error = capsys.readouterr().err
    assert "octavo embed: " in error
    assert (
        "model_type 'llama' is not a supported encoder: Known: bert, distilbert, modernbert, mpnet, roberta, xlm-r"
        in error
    )
    assert main(["embed", str(tmp_path / "nowhere"), "--text", "a"]) == 2
    assert "there is no directory" in capsys.readouterr().err
