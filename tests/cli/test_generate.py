"""`octavo generate`, with a small model in place of one from disk."""

import json
import re

import pytest

from octavo.cli import main
from tests.serve.common import DENSE, Bytes, params_of

CONFIG = DENSE.replace(num_layers=1, vocab_size=257)


class Source:
    config, tokenizer, rules = CONFIG, Bytes(), ()

    def params(self):
        return params_of(CONFIG)

    def describe(self):
        return "a small model"


@pytest.fixture(autouse=True)
def _model(monkeypatch):
    """`open_model` finds a model by the name "small" and no other."""
    import octavo.pretrained

    def open_model(path):
        if path != "small":
            raise FileNotFoundError(f"there is no model at {path}")
        return Source()

    monkeypatch.setattr(octavo.pretrained, "open_model", open_model)


def test_text(capsys):
    words = ["generate", "small", "--prompt", "ab", "--max-tokens", "6", "--seed", "3", "--kv", "int8"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert out.startswith("ab")
    assert out.endswith("\n")
    assert "6 tokens from 2 of prompt in" in err
    assert "a small model" in err
    assert "in int8/int8" in err
    assert "MiB" in err


def test_a_draft(capsys):
    words = ["generate", "small", "--prompt", "ab", "--max-tokens", "6", "--temperature", "0"]
    assert main([*words, "--draft", "int8", "--draft-tokens", "2"]) == 0
    assert re.search(r"\n  draft int8: \d of \d proposed tokens accepted \(\d+%\)\n", capsys.readouterr().err)


@pytest.mark.slow
def test_json_and_a_batch(capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    words = ["generate", "small", "--prompt", "ab", "--prompt-file", str(file), "--max-tokens", "4"]
    words += ["--seed", "3", "--json", "--slots", "2"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert main(words) == 0
    assert capsys.readouterr().out == out
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["prompt"] for line in lines] == ["ab", "one", "two"]
    assert all(len(line["tokens"]) <= 4 and line["finish"] in ("stop", "length") for line in lines)
    assert main([*words[:-3], "--chat"]) == 0
    out = capsys.readouterr().out
    # In their order, whichever was done first.
    assert out.index("ab") < out.index("one") < out.index("two")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["small"], "there is no prompt: give --prompt TEXT"),
        (["large", "--prompt", "x"], "there is no model at large"),
        (["small", "--prompt", "x", "--top-p", "2"], "top_p is above 0 and at most 1"),
        (["small", "--prompt", "x", "--kv", "int9"], "unknown keys 'int9'"),
        (["small", "--prompt", "x", "--kv-values", "int8"], "--kv-values needs --kv"),
        (["small", "--prompt", "x" * 30, "--max-length", "20"], "there is no room for an answer"),
        (["small", "--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (["small", "--prompt", "x", "--draft-tokens", "3"], "--draft-tokens needs --draft, a number format"),
        (["small", "--prompt", "x", "--draft", "int4", "--draft-tokens", "0"], "draft_tokens is at least 1"),
        (["small", "--prompt", "x", "--draft", "int9"], "the draft 'int9' is neither a model nor a number format"),
        (["small", "--prompt", "x", "--draft", "no/model"], "there is no model at no/model"),
        (["small", "--prompt", "x", "--draft", "int4", "--kv", "int4", "--kv-axis", "kivi"], "a draft needs a cache"),
    ],
)
def test_errors(words, text, capsys):
    assert main(["generate", *words]) == 2
    assert text in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert "--kv-axis" in capsys.readouterr().out
