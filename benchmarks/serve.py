"""Servers with many clients: start-up, memory and tokens per second of `octavo serve`, beside llama.cpp's.

    python benchmarks/serve.py [--quick] [--json FILE] [--model FILE] [--tokens 64] [--llama PYTHON]

Each server is started twice, and the second start counts: from the command to the first token of an answer. Then 1, 8
and 32 clients ask for three texts each, one after the other, with prompts of their own of some 60 tokens. Servers run
one after the other, in processes of their own, with int8 and int4 weights made from the same model: SmolLM2-135M
(`make data ARGS=smollm2`), dequantized to float32 first. Memory is resident, after the requests, also as a maximum.

PYTHON is an interpreter with llama-cpp-python[server], whose server answers one request at a time.
"""

import concurrent.futures
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from decode import MODEL, PROMPT, with_weights
from peers import MissingError
from timing import Results, arguments

from octavo.pretrained import gguf, open_model

FORMATS = {"int8": "Q8_0", "int4": "Q4_0"}
CLIENTS, EACH = (1, 8, 32), 3
SLOTS, CONTEXT = 8, 512


@dataclass(frozen=True)
class Measured:
    """What a server needs, and the tokens per second of all clients together, by their number."""

    start: float
    resident: int
    peak: int
    speed: dict[int, float]


def command(name: str, file: Path, port: int, python: str | None) -> list[str]:
    """The command that starts a server."""
    if name == "octavo":
        options = ["--slots", str(SLOTS), "--max-length", str(CONTEXT), "--queue", "64"]
        return [sys.executable, "-m", "octavo", "serve", str(file), "--port", str(port), "--name", "model", *options]
    options = ["--n_ctx", str(CONTEXT), "--n_threads", "2", "--n_threads_batch", "2", "--model_alias", "model"]
    return [str(python), "-m", "llama_cpp.server", "--model", str(file), "--port", str(port), *options]


@contextlib.contextmanager
def running(words: list[str], port: int) -> Iterator[tuple[subprocess.Popen, float]]:
    """A server, and the seconds from its start to a first token."""
    begin = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            if process.poll() is not None:
                raise MissingError(f"{Path(words[0]).name} {' '.join(words[1:3])} does not start")
            with contextlib.suppress(OSError):
                ask(port, 0, 1)
                break
            time.sleep(0.02)
        yield process, time.perf_counter() - begin
    finally:
        process.terminate()
        process.wait()


def ask(port: int, number: int, tokens: int) -> int:
    """The number of tokens of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    prompt = f"{number}. {PROMPT} " * 3
    body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0.8, "seed": number}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer["usage"]["completion_tokens"]


def speed(port: int, clients: int, tokens: int) -> float:
    """Tokens per second of all clients together."""
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        begin = time.perf_counter()
        client = lambda i: [ask(port, 1000 * clients + EACH * i + j, tokens) for j in range(EACH)]  # noqa: E731
        made = sum(sum(counts) for counts in pool.map(client, range(clients)))
        return made / (time.perf_counter() - begin)


def memory(process: subprocess.Popen, field: str) -> int:
    """A field of the status of a process, in bytes: VmRSS or VmHWM."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(name: str, file: Path, tokens: int, clients: tuple[int, ...], python: str | None) -> Measured:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    words = command(name, file, port, python)
    with running(words, port):
        pass
    with running(words, port) as (process, start):
        speeds = {count: speed(port, count, tokens) for count in clients}
        return Measured(start, memory(process, "VmRSS"), memory(process, "VmHWM"), speeds)


def main() -> None:
    parser = arguments(__doc__, quick="fewer tokens (16), 1 and 8 clients", peers=("llama",))
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--tokens", type=int)
    args = parser.parse_args()
    tokens, clients = args.tokens or (16 if args.quick else 64), CLIENTS[:2] if args.quick else CLIENTS
    results = Results(method=f"{tokens} tokens an answer, {SLOTS} slots of {CONTEXT} tokens", file=args.json)
    if not Path(args.model).exists():
        results.skip("everything", f"there is no {Path(args.model).name}: make data ARGS=smollm2")
        return
    if args.llama is None:
        results.skip("llama.cpp", "no interpreter was given: --llama PYTHON")
    source, found = open_model(args.model), {}
    with tempfile.TemporaryDirectory() as folder:
        for qtype, theirs in FORMATS.items():
            file = Path(folder) / f"{qtype}.gguf"
            gguf.write_model(with_weights(source, None), qtype, file)
            found[f"octavo {qtype}"] = measure("octavo", file, tokens, clients, None)
            if args.llama is not None:
                try:
                    found[f"llama.cpp {theirs}"] = measure("llama.cpp", file, tokens, clients, args.llama)
                except MissingError as error:
                    results.skip("llama.cpp", str(error))
    columns = ["", "start s", "resident MiB", "peak MiB", *(f"{n} client{'s' * (n > 1)} tokens/s" for n in clients)]
    rows = [
        [name, f"{m.start:.1f}", f"{m.resident >> 20}", f"{m.peak >> 20}", *(f"{m.speed[n]:.0f}" for n in clients)]
        for name, m in found.items()
    ]
    results.add("Servers of SmolLM2-135M", columns, rows)


if __name__ == "__main__":
    main()
