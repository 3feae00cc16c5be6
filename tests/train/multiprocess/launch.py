"""The processes of a run on this machine, each with one device, which find each other over loopback."""

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.train.common import words

STEP = re.compile(r"completed step: (\d+),.* loss: ([\d.]+)")


@dataclasses.dataclass
class Processes:
    """Running processes, the first of which writes the log."""

    all: list[subprocess.Popen]
    logs: list[Path]

    def text(self, number: int = 0) -> str:
        return self.logs[number].read_text(errors="replace")

    def wait_for(self, pattern: str, timeout: float = 240) -> re.Match:
        """Until the log has a line; a process that ends before is an error."""
        deadline = time.monotonic() + timeout
        while (found := re.search(pattern, self.text())) is None:
            ended = [p.returncode for p in self.all if p.poll() is not None]
            if ended or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"no {pattern!r}; statuses {ended}\n{self.everything()}")
            time.sleep(0.1)
        return found

    def statuses(self, timeout: float = 240) -> list[int]:
        """Wait for the end of all."""
        deadline = time.monotonic() + timeout
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.all]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s\n{self.everything()}") from None
        finally:
            self.kill()

    def everything(self) -> str:
        return "\n".join(f"== process {i}\n{self.text(i)[-3000:]}" for i in range(len(self.all)))

    def kill(self) -> None:
        for process in self.all:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


def launch(count: int, directory: Path, **changes) -> Processes:
    """Start `octavo train` as so many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = {
        "base_output_directory": directory,
        "num_devices": 0,
        "base_num_kv_heads": 2,
        "base_num_decoder_layers": 2,
        "sharding_tolerance": 0.5,
        "coordinator_address": address,
        "num_processes": count,
        "jax_distributed_heartbeat_timeout_seconds": 30,
        **changes,
    }
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("OCTAVO_", "M_"))},
        "XLA_FLAGS": "--xla_backend_optimization_level=1 --xla_cpu_parallel_codegen_split_count=1",
    }
    processes, logs = [], []
    for number in range(count):
        log = directory / f"log-{time.monotonic_ns()}-{number}.txt"
        with log.open("w") as file:
            command = [sys.executable, "-m", "octavo.train", *words(**settings, process_id=number)]
            processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
        logs.append(log)
    return Processes(processes, logs)
