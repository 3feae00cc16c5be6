"""Many clients at once, good and bad, on a real engine: right answers, and nothing is left of them."""

import asyncio
import gc
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.data import ByteTokenizer
from octavo.models import ModelConfig, abstract_params
from octavo.serve import Engine, SamplingParams
from octavo.serve.http import Limits, running
from octavo.serve.http.worker import Job
from tests.arrays import random_params
from tests.serve.http.client import call, metric, opened, post, until
from tests.serve.http.client import stream as streamed

CLIENTS, ROUNDS, LENGTH = 64, 4, 96
PROMPTS = ("a", "Once upon a time", "été 水", "x" * 50, "The quick brown fox jumps", "0123456789 " * 3)
GREEDY = {"temperature": 0, "max_tokens": 24, "logprobs": 0}
SAMPLED = {"temperature": 1, "top_p": 0.9, "max_tokens": 20, "logprobs": 0}


@pytest.fixture(scope="module")
def engine():
    tokenizer = ByteTokenizer()
    sizes = {"emb_dim": 32, "num_layers": 2, "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mlp_dim": 64}
    config = ModelConfig(vocab_size=tokenizer.vocab_size, scan_layers=False, **sizes)
    params = random_params(abstract_params(config))
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


def seen(choices):
    return [(choice["text"], choice["logprobs"]["tokens"], choice["finish_reason"]) for choice in choices]


def answered(url, *, stream, **body):
    """The choices of an answer, put together if it was a stream."""
    if not stream:
        status, found = post(url, **body)
        assert status == 200
        return seen(found["choices"])
    events, done = streamed(url, **body)
    assert done
    whole = {}
    for (choice,) in (event["choices"] for event in events):
        text, tokens, _ = whole.get(choice["index"], ("", [], None))
        ((more, new, finish),) = seen([choice])
        whole[choice["index"]] = (text + more, tokens + new, finish)
    return [whole[i] for i in sorted(whole)]


BAD = [
    (b'{"prompt": ', 400, "the body is no JSON"),
    ({"prompt": "a", "tempature": 1}, 400, "unknown field 'tempature'"),
    ({"prompt": "y" * LENGTH}, 400, f"with max_length={LENGTH} there is no room for an answer"),
    ({"prompt": "a", "model": "other"}, 404, "there is no model 'other'"),
    ({"prompt": "z" * 9000}, 413, "the body is longer than 8000 bytes"),
    ({"prompt": "a", "n": 99}, 400, "n is at most 4, got 99"),
]


def client(url, number, expected):
    """One of several kinds of clients; those that stay get what is expected."""
    prompt, kind = PROMPTS[number % len(PROMPTS)], number % 8
    if kind in (0, 1, 2, 3):
        assert answered(url, prompt=prompt, **GREEDY, stream=kind > 1) == [expected[prompt, None]]
    elif kind == 4:
        found = answered(url, prompt=prompt, **SAMPLED, n=3, seed=3, stream=number % 16 == 4)
        assert found == [expected[prompt, seed] for seed in (3, 4, 5)]
    elif kind == 5:
        pair = [prompt, PROMPTS[(number + 1) % len(PROMPTS)]]
        assert answered(url, prompt=pair, **GREEDY, stream=False) == [expected[p, None] for p in pair]
    elif kind == 6:
        streaming = number % 16 == 6
        with opened(url, prompt=prompt, max_tokens=40, n=2, stream=streaming) as sock:
            sock.recv(1000) if streaming else time.sleep(0.05)
    else:
        body, status, text = BAD[(number // 8) % len(BAD)]
        found = call(url, "/v1/completions", body)
        assert found[0] == status
        assert text in found[2]["error"]["message"]


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
    with running(engine, name="small", limits=Limits(queue=160, body=8000, choices=4)) as url:
        for number in range(ROUNDS):
            with ThreadPoolExecutor(CLIENTS) as pool:
                list(pool.map(lambda i: client(url, i, expected), range(number, number + CLIENTS)))
            until(lambda: metric(url, "octavo_active_slots") + metric(url, "octavo_queue_depth") == 0, seconds=60)
            left.append(unfinished())
            memory.append(resident())
        # Who left before the server had read anything is not counted.
        left_early = metric(url, "octavo_disconnects_total")
        assert ROUNDS * CLIENTS / 16 < left_early <= ROUNDS * CLIENTS / 8
        assert not engine.busy
        assert engine.active == 0
        assert all(count == 1 for count in engine.programs.traces.values()), "each program was compiled once"
    # The first round starts the threads that tokenize, and warms allocators up.
    assert left[1:] == [left[1]] * (ROUNDS - 1)
    assert left[1][1] == 0, "jobs that are kept"
    assert max(memory[1:]) - memory[1] < 30 * 2**20, [f"{m / 2**20:.1f} MiB" for m in memory]
