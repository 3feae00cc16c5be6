"""Runs, checkpoints and models in an S3 server on loopback, moto's: `pip install s3fs 'moto[s3]' flask flask-cors`.

These are not among the test dependencies: they are thirty packages of 95 MB, and hold python-dateutil back. What a
store has to do is tested in `memory://` by default (test_remote.py).
"""

import fsspec
import numpy as np
import pytest

from octavo import _remote
from octavo.checkpoint import CheckpointManager, load
from octavo.pretrained import open_model
from octavo.train import train
from tests.train.common import small

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
WHY = "an S3 server needs s3fs, moto[s3], flask and flask-cors: pip install them"


@pytest.fixture
def bucket(monkeypatch):
    """A bucket, and a function that forgets the local copies, as on another machine."""
    pytest.importorskip("s3fs", reason=WHY)
    moto = pytest.importorskip("moto.server", reason=WHY)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "a", "secret": "b", "endpoint_url": f"http://{host}:{port}"}
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    fs = fsspec.filesystem("s3")
    fs.makedirs("bucket", exist_ok=True)  # the state of moto outlives its servers

    def forget():
        _remote._mirror.cache_clear()
        _remote._root.cache_clear()
        fs.invalidate_cache()
        return fs

    forget()
    yield forget
    forget()
    server.stop()


def test_a_checkpoint_in_s3(bucket):
    url, state = "s3://bucket/b/checkpoints", {"w": np.arange(6.0).reshape(2, 3)}
    with CheckpointManager(_remote.pull(url), asynchronous=False, max_to_keep=1) as manager:
        for step in (1, 2):
            manager.save(step, state)
    _remote.push(url)
    assert {name.split("/")[3] for name in bucket().find("bucket/b")} == {"2"}
    np.testing.assert_array_equal(load(_remote.pull(url)).state["w"], state["w"])


@pytest.mark.standard_promotion
def test_a_run_resumes_from_s3_and_its_model_opens(bucket):
    changes = {"base_output_directory": "s3://bucket/runs", "checkpoint_period": 2, "quantization": "int8"}
    train(small(steps=2, save_quantized_params_path="s3://bucket/low", **changes), log=lambda text: None)
    bucket()
    said = []
    assert train(small(steps=4, **changes), log=said.append).step == 4
    assert "resuming at step 2 of 4" in said
    bucket()
    assert open_model("s3://bucket/runs/test").origin["step"] == 4
    assert open_model("s3://bucket/low").origin["step"] == 2
