"""Many clients at once, good and bad, on a real engine: right answers, and nothing is left of them."""

import asyncio
import gc
import itertools
import json
import threading
from pathlib import Path
from urllib.parse import urlsplit

import jax
import pytest

from octavo.data import ByteTokenizer
from octavo.models import ModelConfig, init_params
from octavo.serve import Engine, SamplingParams
from octavo.serve.http import Limits, running
from octavo.serve.http.worker import Job
from tests.serve.http.client import metric, until

CLIENTS, ROUNDS, LENGTH = 64, 4, 96
PROMPTS = ("a", "Once upon a time", "été 水", "x" * 50, "The quick brown fox jumps", "0123456789 " * 3)
GREEDY = {"temperature": 0, "max_tokens": 24, "logprobs": 0}
SAMPLED = {"temperature": 1, "top_p": 0.9, "max_tokens": 20, "logprobs": 0}


@pytest.fixture(scope="module")
def engine():
    tokenizer = ByteTokenizer()
    sizes = {"emb_dim": 32, "num_layers": 2, "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mlp_dim": 64}
    config = ModelConfig(vocab_size=tokenizer.vocab_size, scan_layers=False, **sizes)
    params = init_params(config, jax.random.key(0))
    return Engine(config, params, slots=8, max_length=LENGTH, chunk=16, tokenizer=tokenizer)


def alone(engine, prompt, fields, seed=0):
    """What the engine makes of a prompt when it has nothing else to do: text, tokens and how it ends."""
    known = {name: fields[name] for name in ("max_tokens", "top_p") if name in fields}
    params = SamplingParams(temperature=float(fields["temperature"]), seed=seed, **known)
    events = list(engine.generate([engine.tokenizer.encode(prompt)], params))
    tokens = [engine.tokenizer.decode([event.token]) for event in events]
    return "".join(event.text for event in events), tokens, events[-1].finish


@pytest.fixture(scope="module")
def expected(engine):
    greedy = {(prompt, None): alone(engine, prompt, GREEDY) for prompt in PROMPTS}
    sampled = {(p, seed): alone(engine, p, SAMPLED, seed) for p, seed in itertools.product(PROMPTS, (3, 4, 5))}
    return {**greedy, **sampled}


async def send(url, body, path="/v1/completions"):
    """A connection with a request on it, status line and headers not yet read."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json"
    writer.write(f"{head}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    return reader, writer


async def answered(url, body):
    """The status and the choices of an answer, put together if it was a stream."""
    reader, writer = await send(url, body)
    content = await reader.read()
    writer.close()
    await writer.wait_closed()
    head, _, data = content.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    if b"transfer-encoding: chunked" in head.lower():
        data = unchunked(data)
        assert data.endswith(b"data: [DONE]\n\n")
        return status, joined([json.loads(line[6:]) for line in data.decode().split("\n\n")[:-2]])
    found = json.loads(data)
    return status, found["error"] if "error" in found else [seen(choice) for choice in found["choices"]]


def unchunked(data):
    found = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        found += data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]
    return found


def seen(choice):
    return choice["text"], choice["logprobs"]["tokens"], choice["finish_reason"]


def joined(events):
    texts, tokens, ends = {}, {}, {}
    for (choice,) in (event["choices"] for event in events):
        i = choice["index"]
        texts[i] = texts.get(i, "") + choice["text"]
        tokens.setdefault(i, []).extend(choice["logprobs"]["tokens"])
        ends[i] = choice["finish_reason"]
    return [(texts[i], tokens[i], ends[i]) for i in sorted(texts)]


BAD = [
    (b'{"prompt": ', 400, "the body is no JSON"),
    ({"prompt": "a", "tempature": 1}, 400, "unknown field 'tempature'"),
    ({"prompt": "y" * LENGTH}, 400, f"with max_length={LENGTH} there is no room for an answer"),
    ({"prompt": "a", "model": "other"}, 404, "there is no model 'other'"),
    ({"prompt": "z" * 9000}, 413, "the body is longer than 8000 bytes"),
    ({"prompt": "a", "n": 99}, 400, "n is at most 4, got 99"),
]


async def client(url, number, expected):
    """One of several kinds of clients; those that stay get what is expected."""
    prompt, kind = PROMPTS[number % len(PROMPTS)], number % 8
    if kind in (0, 1, 2, 3):
        status, choices = await answered(url, {"prompt": prompt, **GREEDY, "stream": kind > 1})
        assert (status, choices) == (200, [expected[prompt, None]])
    elif kind == 4:
        body = {"prompt": prompt, **SAMPLED, "n": 3, "seed": 3, "stream": number % 16 == 4}
        assert await answered(url, body) == (200, [expected[prompt, seed] for seed in (3, 4, 5)])
    elif kind == 5:
        pair = [prompt, PROMPTS[(number + 1) % len(PROMPTS)]]
        status, choices = await answered(url, {"prompt": pair, **GREEDY})
        assert (status, choices) == (200, [expected[p, None] for p in pair])
    elif kind == 6:
        streaming = number % 16 == 6
        reader, writer = await send(url, {"prompt": prompt, "max_tokens": 40, "n": 2, "stream": streaming})
        if streaming:
            await reader.readuntil(b"data: ")
        else:
            await asyncio.sleep(0.05)
        writer.transport.abort()
    else:
        body, status, text = BAD[(number // 8) % len(BAD)]
        found = await answered(url, body)
        assert found[0] == status
        assert text in found[1]["message"]


def resident():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def unfinished():
    gc.collect()
    tasks = sum(isinstance(x, asyncio.Task) and not x.done() for x in gc.get_objects())
    # asyncio's own pool starts its few threads one by one, whenever none of them is idle.
    threads = [thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_")]
    return tasks, sum(isinstance(x, Job) for x in gc.get_objects()), len(threads)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_many_clients(engine, expected):
    memory, left = [], []

    async def all_at_once(url, first):
        await asyncio.gather(*(client(url, first + i, expected) for i in range(CLIENTS)))

    with running(engine, name="small", limits=Limits(queue=160, body=8000, choices=4)) as url:
        for number in range(ROUNDS):
            asyncio.run(all_at_once(url, number))
            until(lambda: metric(url, "octavo_active_slots") + metric(url, "octavo_queue_depth") == 0, seconds=60)
            left.append(unfinished())
            memory.append(resident())
        # Who left before the server had read anything is not counted.
        left_early = metric(url, "octavo_disconnects_total")
        assert ROUNDS * CLIENTS / 16 < left_early <= ROUNDS * CLIENTS / 8
        assert not engine.busy
        assert engine.free_slots == 8
        assert all(count == 1 for count in engine.traces.values()), "each program was compiled once"
    # The first round starts the threads that tokenize, and warms allocators up.
    assert left[1:] == [left[1]] * (ROUNDS - 1)
    assert left[1][1] == 0, "jobs that are kept"
    assert max(memory[1:]) - memory[1] < 30 * 2**20, [f"{m / 2**20:.1f} MiB" for m in memory]
