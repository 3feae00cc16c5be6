"""`octavo serve` as a command."""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest

from octavo._tree import flatten_paths
from octavo.cli import main
from octavo.cli.serve import _api_keys
from octavo.data import ByteTokenizer
from octavo.models import ModelConfig, abstract_params
from octavo.pretrained import Leaf, PretrainedModel
from octavo.pretrained.native import write_model
from octavo.serve.http import bind
from tests.arrays import random_params
from tests.serve.http.client import call, post


def test_keys_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "other")
    (tmp_path / "keys").write_text("# of the team\none\n\n two \n")
    options = argparse.Namespace(api_key=None, api_key_file=str(tmp_path / "keys"))
    assert _api_keys(options) == ["one", "two"]
    assert _api_keys(argparse.Namespace(api_key="a", api_key_file=None)) == ["a"]
    assert _api_keys(argparse.Namespace(api_key=None, api_key_file=None)) == ["other"]


def test_wrong_options_are_errors_before_anything_is_loaded(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    keys = tmp_path / "keys"
    keys.write_text("# nothing\n")
    for words, text in (
        (["--port", "70000"], "--port is from 0 to 65535, got 70000"),
        (["--queue", "-1"], "queue is at least 0, got -1"),
        (["--grace", "-1"], "grace is at least 0, got -1"),
        (["--api-key", ""], "a key of --api-key, --api-key-file or OCTAVO_API_KEY is printable ASCII, and not empty"),
        (["--api-key-file", str(tmp_path / "none")], "No such file"),
        (["--api-key-file", str(keys)], "keys has no key"),
    ):
        assert main(["serve", "nothing", *words]) == 2
        assert text in capsys.readouterr().err


def test_a_port_in_use_is_an_error(capsys):
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        assert main(["serve", "nothing", "--port", str(port)]) == 2
    assert f"octavo serve: cannot listen on port {port} of '127.0.0.1'" in capsys.readouterr().err


def test_a_missing_model_is_an_error(capsys, tmp_path):
    assert main(["serve", str(tmp_path / "nothing"), "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("octavo serve: ")
    assert "nothing" in error


@pytest.mark.parametrize("kind", ["bert", "mpnet", "modernbert"])
def test_an_encoder_is_known_by_its_config(kind, capsys, tmp_path):
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    assert main(["serve", str(tmp_path), "--port", "0", "--kv", "int8"]) == 2
    assert "is an encoder: --adapter, --kv and --draft are for models that generate text" in capsys.readouterr().err
    assert main(["serve", str(tmp_path), "--port", "0"]) == 2
    assert "safetensors" in capsys.readouterr().err


def test_a_missing_package_is_named():
    # In a process of its own: what was imported stays imported.
    code = """
import sys
import octavo.serve
from octavo.cli import main
try:
    main(["serve", "--help"])
except SystemExit:
    pass
packages = {"pydantic", "prometheus_client", "starlette", "uvicorn"}
assert not packages & set(sys.modules), "imported though no server runs"
for name in ("starlette", "pydantic"):
    sys.modules[name] = None
    assert main(["serve", "nothing"]) == 2
    for module in [m for m in sys.modules if m == name or m.startswith("octavo.serve.http")]:
        del sys.modules[module]
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr.splitlines() == [
        f"octavo serve: an HTTP server needs the package {name!r}; install it with: pip install 'octavo[serve]'"
        for name in ("starlette", "pydantic")
    ]


@pytest.fixture
def model(tmp_path):
    tokenizer = ByteTokenizer()
    sizes = {"emb_dim": 16, "num_layers": 1, "num_query_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_dim": 32}
    config = ModelConfig(vocab_size=tokenizer.vocab_size, scan_layers=False, **sizes)
    params = flatten_paths(random_params(abstract_params(config)))
    leaves = {path: Leaf(x.shape, str(x.dtype), lambda x=x: x) for path, x in params.items()}
    write_model(PretrainedModel(config, leaves, tokenizer), params, tmp_path / "tiny", facts={})
    return tmp_path / "tiny"


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_the_command_serves_until_it_is_stopped(model):
    words = ["serve", str(model), "--port", "0", "--slots", "2", "--max-length", "64", "--kv", "int8"]
    environment = {**os.environ, "OCTAVO_API_KEY": "secret"}
    command = [sys.executable, "-m", "octavo", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        try:
            line = process.stdout.readline()
            found = re.fullmatch(r"octavo serve: tiny at (http://127\.0\.0\.1:\d+); try: (curl .*)\n", line)
            assert found, line
            url = found[1]
            assert "secret" not in line
            # The command that is printed works as it is.
            shown = shlex.split(found[2].replace('"Authorization: Bearer $OCTAVO_API_KEY"', "KEY"))
            assert shown[1] == f"{url}/v1/completions"
            key = {"Authorization": "Bearer secret"}
            status, _, answer = call(url, "/v1/completions", shown[-1].encode(), headers=key)
            assert status == 200
            assert answer["model"] == "tiny"
            assert answer["usage"]["completion_tokens"] <= 32
            assert post(url, prompt="a")[0] == 401
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
        assert process.stdout.read() == ""
