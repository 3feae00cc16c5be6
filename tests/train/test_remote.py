"""Runs, checkpoints, models and reports in object stores, here in fsspec's `memory://`."""

import json
import sys

import fsspec
import numpy as np
import pytest

from octavo import _remote
from octavo.checkpoint import CheckpointManager, load
from octavo.cli import main
from octavo.pretrained import open_model
from octavo.train import train
from octavo.train.__main__ import main as train_main
from octavo.train.config import Config, ConfigError
from tests.train.common import small, words

URL = "memory://bucket/runs"


@pytest.fixture(autouse=True)
def store(monkeypatch):
    """An empty store, and no local copies; `store()` forgets the copies, as on another machine."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    for scheme, package in (("s3", "s3fs"), ("gs", "gcsfs")):  # missing here, whether they are installed or not
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, scheme, raising=False)

    def forget():
        _remote._mirror.cache_clear()
        _remote._root.cache_clear()
        return fs

    forget()
    yield forget
    fs.store.clear()
    forget()


def files(fs):
    return {name.removeprefix("/bucket/runs/") for name in fs.find("/bucket/runs")}


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("gs://bucket/runs", r"the package for gs:// is missing: .*gcsfs"),
        ("s3://bucket/runs", r"the package for s3:// is missing: .*s3fs"),
        ("gcloud://bucket", r"fsspec knows no gcloud://"),
    ],
)
@pytest.mark.parametrize(
    "key", ["base_output_directory", "save_quantized_params_path", "load_parameters_path", "metrics_file"]
)
def test_a_scheme_whose_package_is_missing_raises_before_anything_runs(key, url, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=text):
        Config(**{key: url, "quantization": "int8"})
    assert not list(tmp_path.iterdir())


def test_models_and_outputs_too(capsys, tmp_path):
    with pytest.raises(ValueError, match="the package for s3:// is missing"):
        open_model("s3://bucket/model")
    for command in (["quantize", "nowhere", "int8", "s3://bucket/out"], ["report", "s3://bucket/run"]):
        assert main(command) == 2
        assert "the package for s3:// is missing" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="there is no"):
        open_model("memory://bucket/nothing")


def test_errors_of_a_client_name_the_url(store, monkeypatch, capsys, tmp_path):
    class NoCredentialsError(Exception):
        """As botocore's, which is no OSError."""

    def find(self, path, **options):
        raise NoCredentialsError("Unable to locate credentials")

    monkeypatch.setattr(type(store()), "find", find)
    monkeypatch.chdir(tmp_path)
    text = f"{URL}/a: the object store raises NoCredentialsError: Unable to locate credentials; check the credentials"
    with pytest.raises(OSError, match=text):
        _remote.pull(f"{URL}/a")
    assert main(["report", f"{URL}/a"]) == 2
    assert text in capsys.readouterr().err
    assert train_main(words(base_output_directory=URL)) == 1
    assert "Unable to locate credentials; check" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_changes_is_uploaded_and_manifests_last(store, monkeypatch):
    fs, order = store(), []
    put = type(fs).put_file
    monkeypatch.setattr(type(fs), "put_file", lambda self, a, b, **k: order.append(b) or put(self, a, b, **k))
    root = _remote.local(f"{URL}/a")
    for name in ("1/manifest.json", "1/array", "2.saving/array", "config.yml", ".lock"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    _remote.push(f"{URL}/a")
    assert files(fs) == {"a/1/manifest.json", "a/1/array", "a/config.yml"}
    assert order[-1] == "/bucket/runs/a/1/manifest.json"
    _remote.push(f"{URL}/a")
    assert len(order) == 3
    (root / "config.yml").write_text("changed")
    (root / "1/array").unlink()
    _remote.push(f"{URL}/a/")
    assert files(fs) == {"a/1/manifest.json", "a/config.yml"}
    store()
    again = _remote.pull(f"{URL}/a")
    assert again != root
    assert (again / "config.yml").read_text() == "changed"
    fs.rm_file("/bucket/runs/a/config.yml")
    assert not (_remote.pull(f"{URL}/a") / "config.yml").exists()


def test_a_checkpoint_in_a_store(store):
    url, state = f"{URL}/b/checkpoints", {"w": np.arange(6.0).reshape(2, 3)}
    with CheckpointManager(_remote.pull(url), asynchronous=False, max_to_keep=1) as manager:
        for step in (1, 2):
            manager.save(step, state)
    _remote.push(url)
    fs = store()
    assert {name.split("/")[2] for name in files(fs)} == {"2"}
    np.testing.assert_array_equal(load(_remote.pull(url)).state["w"], state["w"])


@pytest.mark.standard_promotion
def test_a_run_is_in_a_store_and_nowhere_else(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(small(steps=1, base_output_directory=URL), log=lambda text: None)
    fs = store()
    assert {"test/config.yml", "test/metrics.jsonl", "test/checkpoints/1/manifest.json"} <= files(fs)
    assert open_model(f"{URL}/test").origin["step"] == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_a_run_resumes_from_a_store_and_its_model_opens(store, capsys):
    changes = {"base_output_directory": URL, "checkpoint_period": 2, "quantization": "int8"}
    changes |= {"quantize_kvcache": True, "kv_quant_dtype": "int4", "dataset_type": "python"}
    assert train_main(words(steps=2, save_quantized_params_path=f"{URL}/low", **changes)) == 0
    assert f"report: {URL}/test/report.html" in capsys.readouterr().out
    fs = store()
    assert {"test/config.yml", "test/metrics.jsonl", "test/report.html", "test/plan.json"} <= files(fs)
    said = []
    assert train(small(steps=4, **changes), log=said.append).step == 4
    assert "resuming at step 2 of 4" in said
    store()
    assert open_model(f"{URL}/test").origin["step"] == 4
    assert open_model(f"{URL}/low").origin["step"] == 2
    assert main(["report", f"{URL}/test"]) == 0
    assert main(["generate", f"{URL}/test", "--prompt", "a", "--max-tokens", "2"]) == 0
    assert "in int4/int4" in capsys.readouterr().err
    assert json.loads(fs.cat_file("/bucket/runs/test/metrics.jsonl").splitlines()[-1])["step"] == 3


@pytest.mark.parametrize("key", ["base_output_directory", "save_quantized_params_path"])
def test_several_processes_raise_before_anything_runs(store, key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("octavo.train.distributed.is_multiprocess", lambda: True)
    config = small(**{"base_output_directory": str(tmp_path), "quantization": "int8", key: "memory://bucket/runs"})
    with pytest.raises(ValueError, match=rf"{key}=memory://bucket/runs: several processes .*mount the bucket"):
        train(config, log=lambda text: None)
    assert not files(store())
    assert not list(tmp_path.iterdir())
