"""Two processes save and restore sharded arrays together, and raise the errors of either."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

SAVER = pathlib.Path(__file__).with_name("saver.py")


@pytest.mark.multiprocess
def test_two_processes(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    commands = [[sys.executable, str(SAVER), "distributed", str(tmp_path), str(i), str(port)] for i in range(2)]
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    processes = [subprocess.Popen(c, stdout=subprocess.PIPE, text=True, env=environment) for c in commands]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    for output, origin in zip(outputs, ("", "process 0: "), strict=True):
        assert f"{origin}{tmp_path}/3 exists already; pass force=True to replace it" in output
        assert f"{origin}{tmp_path} has no checkpoint of step 9; the steps 2, 3 are there" in output
