"""The engine: what a request gets does not depend on the others, and nothing is compiled or copied twice."""

import argparse
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.cli.options import kv_config
from octavo.models import fuse
from octavo.pretrained import PretrainedModel
from octavo.serve import Constraint, Engine, KVConfig, Request, SamplingParams, Vocabulary
from tests.serve.common import DENSE, MOE, Bytes, dequantized, greedy, params_of, quantized_params, run

ONE = DENSE.replace(num_layers=1, vocab_size=257)
FLOAT = KVConfig()
GREEDY = SamplingParams(temperature=0, max_tokens=5)
PROMPTS = [[1, 2, 3], list(range(20)), [7] * 9, [5]]


@functools.cache
def engine_of(config=ONE, kv=FLOAT):
    """One engine for nearly all tests: its programs are compiled once. No token is an end of text unless set."""
    return Engine(config, params_of(config), slots=2, max_length=40, chunk=8, kv=kv, tokenizer=Bytes(), eos_ids=())


def answers(events):
    found = {}
    for event in events:
        found.setdefault(event.request_id, []).append(event.token)
    return found


@pytest.mark.parametrize(
    "config", [ONE, *(pytest.param(c, marks=pytest.mark.slow) for c in (DENSE, MOE))], ids=["one layer", "dense", "moe"]
)
def test_greedy_is_the_plain_loop(config):
    got = answers(engine_of(config).generate(PROMPTS, GREEDY))
    assert got == {i: greedy(config, params_of(config), prompt, 5) for i, prompt in enumerate(PROMPTS)}


def test_compiled_once():
    engine = engine_of()
    for params in (
        GREEDY,
        SamplingParams(seed=1, top_k=3, max_tokens=2),
        SamplingParams(seed=2, min_p=0.5, logprobs=3),
    ):
        list(engine.generate(PROMPTS, params))
    assert engine.programs.traces == {"prefill": 1, "decode": 1}


def test_the_cache_is_updated_in_place():
    programs = engine_of().programs
    text = programs.lowered().compile().as_text()
    header = text.partition("\n")[0]
    assert len(re.findall(r"(?:may|must)-alias", header)) == len(programs._state)
    length = engine_of().programs._state_of(programs._state).cache.max_length
    entry = text[text.index("ENTRY") :]
    assert not [line for line in entry.splitlines() if " copy(" in line and f",{length}" in line]

    def places():
        # Small arrays of one shape may take each other's place.
        return [x.unsafe_buffer_pointer() for x in programs._state if x.ndim == 4]

    before = places()
    assert len(before) == 2
    programs.decode(np.zeros(2, bool))
    assert places() == before


@pytest.mark.slow
def test_a_request_is_the_same_in_any_company():
    engine = engine_of()
    params = SamplingParams(seed=11, temperature=1.5, max_tokens=8)
    alone = answers(engine.generate([PROMPTS[0]], params))[0]
    assert len(set(alone)) > 2
    crowd = [SamplingParams(seed=s, max_tokens=12, top_p=0.8, repetition_penalty=1.3) for s in range(3)]
    for place in range(2):
        prompts, each = PROMPTS[1:], list(crowd)
        prompts.insert(place, PROMPTS[0])
        each.insert(place, params)
        assert answers(engine.generate(prompts, each))[place] == alone


def test_requests_come_and_go():
    engine = engine_of()
    engine._prefilled = [()] * 2
    want = {i: greedy(ONE, params_of(ONE), prompt, 5) for i, prompt in enumerate(PROMPTS)}
    assert (engine.busy, engine.active) == (False, 0)
    engine.add(Request("a", tuple(PROMPTS[1]), GREEDY))
    events = engine.step()
    assert events == []  # a prompt of three chunks
    engine.add(Request("b", tuple(PROMPTS[0]), GREEDY))
    engine.add(Request("c", tuple(PROMPTS[2]), GREEDY))
    assert (engine.busy, engine.active, engine.waiting) == (True, 2, 1)
    with pytest.raises(ValueError, match="there is a request 'b' already"):
        engine.add(Request("b", (1,), GREEDY))
    with pytest.raises(RuntimeError, match="generate needs the engine to itself"):
        next(engine.generate([[1]], GREEDY))
    while engine.busy:
        events += engine.step()
    assert answers(events) == {"a": want[1], "b": want[0], "c": want[2]}
    assert [e.request_id for e in events if e.finish == "length"] == ["a", "b", "c"]


def test_the_oldest_prompt_is_prefilled_first():
    engine = engine_of()
    long, short = tuple(PROMPTS[1]), (1, 2)
    engine._prefilled = [(7,), ()]  # so that the first request goes to the second slot
    engine.add(Request("first", long, GREEDY))
    engine.add(Request("second", short, GREEDY))
    assert [slot.request.request_id for slot in engine._running] == ["second", "first"]
    events = []
    while engine.busy:
        events += engine.step()
    assert next(e.request_id for e in events) == "first"
    assert [e.request_id for e in events if e.finish] == ["first", "second"]


def test_several_tokens_at_once_are_those_of_single_steps():
    engine = engine_of()
    how = SamplingParams(seed=3, temperature=1.2, max_tokens=7, logprobs=2)
    one, many = [], []
    for most, events in ((1, one), (3, many), (100, many)):
        events.clear()
        for i, prompt in enumerate((PROMPTS[0], PROMPTS[3])):
            engine.add(Request(i, tuple(prompt), how if i else how.replace(max_tokens=6)))
        sizes = []
        while engine.busy:
            events += (new := engine.step(most))
            sizes.append(len(new))
        if most == 1:
            continue
        # When both are read, the first has four tokens left, and no step goes beyond the end of a request.
        assert max(sizes) == 2 * min(most, 4)
        for i in range(2):
            assert [e for e in many if e.request_id == i] == [e for e in one if e.request_id == i]


def test_a_waiting_request_is_admitted_after_one_step():
    engine = engine_of()
    for i in range(3):
        engine.add(Request(i, (1, 2), GREEDY.replace(max_tokens=20)))
    # The prompts are prefilled one after the other. While a request waits, every step decodes one token.
    assert [len(engine.step(4)) for _ in range(4)] == [1, 2, 2, 2]
    engine.cancel(0)
    assert [e.finish for e in engine.step(4)] == ["cancelled", None, None]
    assert engine.waiting == 0
    assert len(engine.step(4)) == 2 * 4
    for i in (1, 2):
        engine.cancel(i)
    engine.step()


def test_what_follows_the_end_of_a_text_is_thrown_away(monkeypatch):
    engine = engine_of()
    tokens = answers(engine.generate([PROMPTS[0]], GREEDY))[0]
    monkeypatch.setattr(engine, "eos_ids", frozenset([tokens[2]]))
    before = tokens[: tokens.index(tokens[2]) + 1]
    for _ in range(2):  # the slot is as good as new
        events = list(engine.generate([PROMPTS[0]], GREEDY))
        assert ([e.token for e in events], events[-1].finish) == (before, "stop")


def test_cancel():
    engine = engine_of()
    engine.add(Request("a", (1, 2), SamplingParams(temperature=0, max_tokens=30)))
    engine.add(Request("b", (3,), GREEDY))
    engine.add(Request("waits", (4,), GREEDY))
    engine.step()
    engine.cancel("a")
    engine.cancel("waits")
    engine.cancel("nobody")
    events = []
    while engine.busy:
        events += engine.step()
    assert {e.request_id: e.finish for e in events if e.finish} == {
        "a": "cancelled",
        "waits": "cancelled",
        "b": "length",
    }
    assert answers(events)["b"][-5:] == greedy(ONE, params_of(ONE), [3], 5)[-len(answers(events)["b"]) :]
    it = engine.generate(PROMPTS, GREEDY)
    next(it)
    it.close()
    assert not engine.busy


def test_a_full_cache_ends_a_text():
    events = list(engine_of().generate([[3] * 35], SamplingParams(temperature=0, max_tokens=50)))
    assert (len(events), events[-1].finish) == (5, "length")
    assert [e.token for e in events] == greedy(ONE, params_of(ONE), [3] * 35, 5)


def test_logprobs():
    events = list(engine_of().generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=2, logprobs=3)))
    logits = run(ONE, params_of(ONE), jnp.asarray([PROMPTS[0]]))[0][0, -1]
    want = np.sort(np.asarray(jax.nn.log_softmax(logits)))[::-1]
    assert len(events[0].top) == 3
    np.testing.assert_allclose([p for _, p in events[0].top], want[:3], atol=1e-5)
    np.testing.assert_allclose(events[0].logprob, want[0], atol=1e-5)
    assert events[0].top[0][0] == events[0].token


def test_logprobs_of_prompts():
    engine = engine_of()
    prompt = PROMPTS[1]
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=2, prompt_logprobs=True)
    events = list(engine.generate([prompt, PROMPTS[3]], [params, params]))
    want = np.asarray(jax.nn.log_softmax(run(ONE, params_of(ONE), jnp.asarray([prompt]))[0][0]))
    first, one = (next(e for e in events if e.request_id == i) for i in range(2))
    assert one.prompt == ()  # its only token has no logprob
    assert len(first.prompt) == len(prompt) - 1
    np.testing.assert_allclose([p for p, _ in first.prompt], [want[i, t] for i, t in enumerate(prompt[1:])], atol=1e-5)
    for i, (_, top) in enumerate(first.prompt):
        np.testing.assert_allclose([p for _, p in top], np.sort(want[i])[::-1][:2], atol=1e-5)
    assert answers(events)[0] == greedy(ONE, params_of(ONE), prompt, 2)
    assert [e.prompt for e in events if e.request_id == 0][1:] == [()]
    assert engine.programs.traces["scored prefill"] == 1


def test_penalties():
    def adjust(logits, answer):
        logits = logits.copy()
        seen = sorted({*PROMPTS[0], *answer})
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.3, logits[seen] * 1.3)
        counts = np.bincount(answer, minlength=len(logits)) if answer else np.zeros(len(logits))
        return logits - 0.3 * counts - 0.2 * (counts > 0)

    want = greedy(ONE, params_of(ONE), PROMPTS[0], 12, adjust)
    assert want != greedy(ONE, params_of(ONE), PROMPTS[0], 12)
    given = GREEDY.replace(repetition_penalty=1.3, frequency_penalty=0.3, presence_penalty=0.2, max_tokens=12)
    # Twice: an answer is not charged for that before it in the slot. A plain one is not at all.
    for _ in range(2):
        got = answers(engine_of().generate([PROMPTS[0], PROMPTS[2]], [given, GREEDY]))
        assert got == {0: want, 1: greedy(ONE, params_of(ONE), PROMPTS[2], 5)}


def test_answers_under_a_constraint():
    """JSON of the schema at any temperature, next to a request that is as it would be alone."""
    engine = engine_of()
    schema = {"type": "array", "items": {"enum": ["a", 17, None]}, "minItems": 1, "maxItems": 2}
    constraint = Constraint.of_schema(schema, engine.vocabulary)
    texts, plain = [], greedy(ONE, params_of(ONE), PROMPTS[2], 9)
    for seed in range(6):
        params = SamplingParams(seed=seed, temperature=2.0 * (seed > 0), max_tokens=30, logprobs=1)
        engine.add(Request("json", (1, 2), params, constraint))
        engine.add(Request("plain", tuple(PROMPTS[2]), GREEDY.replace(max_tokens=9)))
        events = []
        while engine.busy:
            events += engine.step(4)
        assert answers(events)["plain"] == plain
        own = [e for e in events if e.request_id == "json"]
        texts.append("".join(e.text for e in own))
        if own[-1].finish == "stop":  # whitespace can fill it
            found = json.loads(texts[-1])
            assert 1 <= len(found) <= 2
            assert all(one in schema["items"]["enum"] for one in found)
        else:
            assert len(own) == 30
    assert len(set(texts)) > 3
    assert sum(text.endswith("]") for text in texts) >= 2
    assert engine.programs.traces["decode"] == engine.programs.traces["prefill"] == 1
    small = Vocabulary([bytes((i,)) for i in range(128)], size=128)
    with pytest.raises(ValueError, match="the constraint is for a vocabulary of 128 tokens, and the model has 257"):
        engine.add(Request("json", (1, 2), params, Constraint.json(small)))


def test_prefixes_are_not_prefilled_again():
    engine = engine_of()
    prompt = [*range(50, 72), 3]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2)

    def made(prompts):
        before, events = engine.reused, list(engine.generate(prompts, params))
        return [[(e.token, e.logprob, e.top) for e in events if e.request_id == i] for i in range(len(prompts))], (
            engine.reused - before
        )

    def fresh(prompt):
        engine._prefilled = [()] * 2
        (found,), reused = made([prompt])
        assert reused == 0
        return found

    other = [*prompt[:18], 9, 9, 9]
    want, want_other = fresh(prompt), fresh(other)
    assert made([prompt]) == ([want], 16)
    # Chunks of eight: of 18 common tokens two, and of a prompt that was its own prefix all but the last chunk.
    assert made([other]) == ([want_other], 16)
    assert made([prompt[:16]])[1] == 8
    assert fresh(prompt[:16]) == made([prompt[:16]])[0][0]
    # The slot with the longest prefix is taken, also when a request was cancelled while it was read.
    engine._prefilled = [(), ()]
    engine.add(Request("a", tuple(prompt), params))
    engine.step()
    engine.cancel("a")
    engine.step()
    assert made([[1], prompt])[1] == 8
    assert made([prompt])[0] == [want]


def test_text_stop_and_end(monkeypatch):
    engine = engine_of()
    params = SamplingParams(seed=5, max_tokens=30)
    events = list(engine.generate([list(b"ab")], params))
    text = "".join(e.text for e in events)
    assert text == bytes(e.token for e in events if 0 <= e.token < 256).decode(errors="replace").rstrip("\ufffd")
    piece = next(c for c in text[3:] if c.isprintable())
    stopped = list(engine.generate([list(b"ab")], params.replace(stop=(piece,))))
    assert stopped[-1].finish == "stop"
    assert "".join(e.text for e in stopped) == text[: text.index(piece)]
    token = events[4].token
    first = next(i for i, e in enumerate(events) if e.token == token)
    monkeypatch.setattr(engine, "eos_ids", frozenset([token]))
    last = list(engine.generate([list(b"ab")], params))
    assert (last[-1].finish, len(last)) == ("stop", first + 1)


def test_logits_that_are_no_numbers_end_a_request(monkeypatch):
    engine = engine_of()
    table = params_of(ONE)["token_embedder"]["embedding"]
    leaves = [x.at[4].set(jnp.nan) if x.shape == table.shape else x for x in engine.programs._leaves]
    monkeypatch.setattr(engine.programs, "_leaves", tuple(leaves))
    # The logits are tied to the table: those of every text with token 4 are NaN.
    assert [e.finish for e in engine.generate([[4]], GREEDY)] == ["error"]
    assert not engine.busy


@pytest.mark.slow
@pytest.mark.parametrize("kv", [KVConfig.of("int8"), KVConfig.of("int8", axis="kivi", group=4, window=4)])
def test_caches_in_low_precision(kv):
    got = answers(engine_of(kv=kv).generate(PROMPTS, GREEDY))
    want = {i: greedy(ONE, params_of(ONE), prompt, 5) for i, prompt in enumerate(PROMPTS)}
    same = sum(a == b for i in want for a, b in zip(got[i], want[i], strict=True))
    assert same >= 16  # of 20: a near tie may fall the other way
    assert engine_of(kv=kv).programs.cache_bytes_per_token < engine_of().programs.cache_bytes_per_token


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tile"), [("int8", None), ("int4", 8)])
def test_weights_in_low_precision_and_fused(name, tile):
    params = quantized_params(ONE, name, tile)
    _, joined = fuse(ONE, params)
    parts = [params["decoder"]["layers_0"]["self_attention"][n]["kernel"] for n in ("query", "key", "value")]
    whole = joined["decoder"]["layers_0"]["self_attention"]["query_key_value"]["kernel"]
    np.testing.assert_array_equal(whole.dequantize(), jnp.concatenate([p.dequantize() for p in parts], axis=1))
    floats = dequantized(params)
    engine = Engine(ONE, params, slots=1, max_length=40, chunk=8)
    assert engine.programs.params_nbytes < 0.5 * sum(x.nbytes for x in jax.tree.leaves(floats))
    assert answers(engine.generate(PROMPTS[:2], GREEDY)) == {
        i: greedy(ONE, floats, prompt, 5) for i, prompt in enumerate(PROMPTS[:2])
    }
    assert "wi_0" in params["decoder"]["layers_0"]["mlp"]  # the caller's own are left alone


def test_what_does_not_go_together_is_not_fused():
    def check():
        params = quantized_params.__wrapped__(ONE)
        params["decoder"]["layers_0"]["mlp"]["wi_0"] = params_of(ONE)["decoder"]["layers_0"]["mlp"]["wi_0"]
        assert fuse(ONE, params) is None
        with pytest.raises(ValueError, match="fuse takes unscanned layers"):
            fuse(ONE.replace(scan_layers=True), params)

    jax.eval_shape(check)


@pytest.mark.slow
def test_parameters_of_scanned_layers():
    config = DENSE.replace(scan_layers=True)
    engine = Engine(config, params_of(config), max_length=40, chunk=8)
    assert answers(engine.generate(PROMPTS[:1], GREEDY))[0] == greedy(DENSE, params_of(DENSE), PROMPTS[0], 5)


def test_errors(monkeypatch):
    engine = engine_of()
    for prompt, text in (
        ((), "the prompt is empty"),
        ((1,) * 40, "the prompt has 40 tokens, and with max_length=40 there is no room for an answer"),
        ((257,), "a token id outside of the vocabulary: ids are from 0 to 256"),
        ((-1,), "a token id outside of the vocabulary"),
    ):
        with pytest.raises(ValueError, match=text):
            engine.add(Request(0, prompt, GREEDY))
        with pytest.raises(ValueError, match=text):
            list(engine.generate([[1], prompt], GREEDY))
    assert not engine.busy
    monkeypatch.setattr(engine, "tokenizer", None)
    with pytest.raises(ValueError, match="stop texts need a tokenizer"):
        engine.add(Request(0, (1,), SamplingParams(stop=("x",))))
    with pytest.raises(ValueError, match="2 prompts, but sampling parameters for 1"):
        list(engine.generate([[1], [2]], [GREEDY]))
    with pytest.raises(ValueError, match="slots is at least 1, got 0"):
        Engine(ONE, params_of(ONE), slots=0)
    with pytest.raises(TypeError, match=r"Engine\(config, params\) takes the parameters too"):
        Engine(ONE)
    with pytest.raises(TypeError, match="parameters come with a ModelConfig"):
        Engine(object(), params_of(ONE))
    with pytest.raises(TypeError, match=r"what octavo\.pretrained\.open_model gives, got a object"):
        Engine(object())


def test_the_cache_of_a_run_is_that_of_its_configuration():
    """`quantize_kvcache` of a training run, unless another cache is asked for."""
    source = PretrainedModel.from_params(
        ONE, params_of(ONE), origin={"kv_cache": {"format": "int4", "axis": "heads_and_dkv"}}
    )
    assert Engine(source, max_length=8, chunk=4).kv == KVConfig.of("int4", axis="heads_and_dkv")
    assert Engine(source, max_length=8, chunk=4, kv=KVConfig()).kv == KVConfig()
    options = argparse.Namespace(kv=None, kv_values=None, kv_axis="dkv", kv_latent=False)
    assert kv_config(options) is None
    options.kv = "float"
    assert kv_config(options) == KVConfig()
