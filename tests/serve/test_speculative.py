"""Speculative decoding: the answers are those of plain decoding, whatever the draft proposes."""

import functools
import itertools

import jax
import pytest

import octavo
from octavo import kernels
from octavo.pretrained import PretrainedModel
from octavo.serve import Constraint, Engine, KVConfig, Request, SamplingParams
from octavo.serve.engine_source import Source
from octavo.serve.speculative import draft_of
from tests.serve.common import DENSE, MOE, Bytes, greedy, params_of, quantized_params

needs_kernels = pytest.mark.skipif(not kernels.available(), reason=kernels.status())
ONE = DENSE.replace(num_layers=1, vocab_size=257)
OTHER = ONE.replace(emb_dim=8, num_query_heads=2, num_kv_heads=1, mlp_dim=8)
SIZES = {"slots": 2, "max_length": 40, "chunk": 8, "eos_ids": ()}
GREEDY = SamplingParams(temperature=0, max_tokens=9)
SAMPLED = SamplingParams(
    temperature=1.4, top_p=0.95, seed=5, max_tokens=9, repetition_penalty=1.2, frequency_penalty=0.1, logprobs=2
)
PROMPTS = [[1, 2, 3], list(range(20)), [7] * 9, [5]]


@functools.cache
def engine_of(draft=None, weights=None, config=ONE, kv=None, **sizes):
    """An engine of float weights, which run on XLA, or of codes, which kernels decode."""
    params = params_of(config) if weights is None else quantized_params(config, weights, tile=8)
    if draft == "itself":
        draft = PretrainedModel.from_params(config, params)
    elif draft == "another":
        draft = PretrainedModel.from_params(OTHER, params_of(OTHER))
    kv = None if kv is None else KVConfig.of(kv)
    return Engine(config, params, draft=draft, kv=kv, tokenizer=Bytes(), **(SIZES | sizes))


def made(engine, params=GREEDY, prompts=PROMPTS):
    """The events of each prompt."""
    engine._prefilled = [()] * engine.slots
    engine.proposed = engine.accepted = 0
    events = list(engine.generate(prompts, params))
    return [[e for e in events if e.request_id == i] for i in range(len(prompts))]


def tokens(events):
    return [[e.token for e in request] for request in events]


@needs_kernels
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_with_kernels_all_events_are_those_of_plain_decoding(params):
    plain, engine = engine_of(None, "int8"), engine_of("int2", "int8")
    assert engine.programs.decoding == kernels.status()
    assert made(engine, params) == made(plain, params)
    assert 0 < engine.accepted < engine.proposed
    assert engine.programs.traces == {"prefill": 1, "speculate": 1}


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize(("weights", "slots"), [("int4", 1), ("int4", 3), ("int8", 1)])
def test_with_kernels_in_other_formats_and_sizes(weights, slots):
    for params in (GREEDY, SAMPLED):
        wanted = made(engine_of(None, weights, DENSE, slots=slots), params.replace(max_tokens=20), [[1, 2, 3]] * 3)
        got = made(engine_of("int3", weights, DENSE, slots=slots), params.replace(max_tokens=20), [[1, 2, 3]] * 3)
        assert got == wanted


# Matrices that kernels multiply one by one, since they do not decode layers of these models.
WIDE = ONE.replace(emb_dim=192, num_kv_heads=4, head_dim=48, mlp_dim=176)


@needs_kernels
@pytest.mark.parametrize(
    ("weights", "kv", "config"),
    [
        ("int8", "int4", WIDE),
        pytest.param("int8", None, WIDE.replace(sliding_window=5), marks=pytest.mark.slow),
    ],
)
def test_with_kernels_of_matmuls_and_other_caches(weights, kv, config):
    plain, engine = (engine_of(draft, weights, config, kv) for draft in (None, "int2"))
    assert engine.programs.decoding.startswith("XLA")
    for params in (GREEDY, SAMPLED):
        assert made(engine, params) == made(plain, params)
        assert 0 < engine.accepted < engine.proposed


XLA = {
    "float": {},
    "int8 weights": {"weights": "int8", "config": ONE.replace(activation="gelu")},
    "experts": {"config": MOE.replace(num_layers=1, vocab_size=257)},
    "window": {"config": ONE.replace(sliding_window=5)},
}


@pytest.mark.parametrize(
    "case", [name if name == "float" else pytest.param(name, marks=pytest.mark.slow) for name in XLA]
)
def test_on_xla_the_draft_has_no_influence_on_a_bit(case):
    engines = [engine_of(draft, **XLA[case]) for draft in (None, "int4", "another")]
    for params in (GREEDY, SAMPLED):
        plain, good, bad = (made(engine, params) for engine in engines)
        assert good == bad
        assert engines[2].accepted * engines[1].proposed < engines[1].accepted * engines[2].proposed
        assert tokens(plain) == tokens(good)
        for a, b in zip(itertools.chain(*plain), itertools.chain(*good), strict=True):
            assert abs(a.logprob - b.logprob) < 1e-5


def test_a_draft_that_is_the_model_is_always_accepted():
    engine = engine_of("itself")
    for params in (GREEDY, SAMPLED):
        answers = tokens(made(engine, params))
        assert engine.accepted == engine.proposed > 0
        if params is GREEDY:
            assert answers == [greedy(ONE, params_of(ONE), prompt, 9) for prompt in PROMPTS]
    # A token of prefill, then rounds of five: of nine tokens that is 1, 5 and 3.
    engine.add(Request("a", (1, 2, 3), GREEDY))
    counts = []
    while engine.busy:
        counts.append(len(engine.step()))
    assert counts == [1, 5, 3]


def test_a_full_cache_ends_the_text():
    for engine in (engine_of("itself"), *([engine_of("int2", "int8")] if kernels.available() else [])):
        events = made(engine, GREEDY.replace(max_tokens=90), [[1] * 30, [2] * 39])
        assert [len(e) for e in events] == [10, 1]
        assert all(e[-1].finish == "length" for e in events)
        # Proposals beyond the end have not overwritten the prompt.
        engine.reused = 0
        assert tokens([list(engine.generate([[1] * 30], GREEDY))]) == tokens([events[0][:9]])
        assert engine.reused == 24


def test_ends_within_accepted_tokens():
    engine = engine_of("itself")
    wanted = greedy(ONE, params_of(ONE), PROMPTS[0], 9)
    end = next(i for i in range(2, 9) if wanted[i] not in wanted[:i])
    engine.eos_ids = frozenset([wanted[end]])
    try:
        (events,) = made(engine, GREEDY, PROMPTS[:1])
    finally:
        engine.eos_ids = frozenset()
    assert (tokens([events])[0], events[-1].finish) == (wanted[: end + 1], "stop")
    sampled = SAMPLED.replace(max_tokens=20, temperature=3, top_p=1)
    text = "".join(e.text for e in made(engine, sampled, [[97]])[0])
    stop = sampled.replace(stop=(text[2:4],))
    (events,), (plain,) = (made(each, stop, [[97]]) for each in (engine, engine_of()))
    assert [(e.token, e.text, e.finish) for e in events] == [(e.token, e.text, e.finish) for e in plain]
    assert (events[-1].finish, "".join(e.text for e in events)) == ("stop", text[: text.index(text[2:4])])


def test_cancelled_between_rounds():
    engine = engine_of("itself")
    wanted = greedy(ONE, params_of(ONE), PROMPTS[2], 9)
    for name, prompt in (("a", PROMPTS[0]), ("b", PROMPTS[2]), ("c", PROMPTS[3])):
        engine.add(Request(name, tuple(prompt), GREEDY))
    events = []
    while engine.busy:
        if len(events) > 3:
            engine.cancel("a")
        events += engine.step()
    assert [e.token for e in events if e.request_id == "b"] == wanted
    assert {e.request_id: e.finish for e in events if e.finish} == {"a": "cancelled", "b": "length", "c": "length"}


def test_constrained_requests_decode_one_token_beside_others():
    engine, plain = engine_of("itself"), engine_of()
    found = []
    for each in (engine, plain):
        each.eos_ids = frozenset([256])
        constraint = Constraint.of_schema({"enum": ["yes", "no"]}, each.vocabulary)
        each.add(Request("c", (1, 2), SAMPLED.replace(max_tokens=12), constraint))
        each.add(Request("f", (1, 2, 3), GREEDY))
        events = []
        while each.busy:
            events += each.step()
        found.append([[e.token for e in events if e.request_id == name] for name in "cf"])
        each.eos_ids = frozenset()
    assert found[0] == found[1]
    assert bytes(i for i in found[0][0] if i < 256).decode().strip() in ('"yes"', '"no"')


def test_new_parameters_are_those_of_the_draft_too():
    engine, plain = engine_of("int2", "int8"), engine_of(None, "int8")
    codes, floats = quantized_params(ONE, "int8", tile=8), jax.tree.map(lambda x: -x, params_of(ONE))
    before = made(plain)
    made(engine)
    accepted = engine.accepted
    for params in (floats, codes):
        plain.update(params)
        wanted = made(plain)
        stale = made(engine)
        assert (wanted == before) == (params is codes)
        engine.update(params)
        assert tokens(made(engine)) == tokens(wanted) != tokens(stale)
    assert engine.accepted == accepted > 0
    assert engine.programs.traces["update"] == 2  # of floats and of codes


@needs_kernels
def test_stored_programs(tmp_path):
    make = lambda: Engine(ONE, quantized_params(ONE, tile=8), draft="int4", cache_dir=tmp_path, **SIZES)  # noqa: E731
    first = make()
    assert not first.programs.is_stored
    first.warm_up()
    assert first.programs.is_stored
    second = make()
    second.warm_up()
    wanted = [[(e.token, e.logprob) for e in events] for events in made(engine_of(None, "int8"))]
    for engine in (first, second):
        assert [[(e.token, e.logprob) for e in events] for events in made(engine)] == wanted
    assert not second.programs.traces
    assert not second.programs.draft.traces


def test_stacked_layers_and_other_formats_as_drafts():
    config = DENSE.replace(scan_layers=True)
    for name in ("int4:g8", "nf4:g8"):
        params = draft_of(name, Source.of(config, params_of(config))).load()
        kernel = params["decoder"]["layers_1"]["mlp"]["wo"]["kernel"]
        assert isinstance(kernel, octavo.QArray)
        assert kernel.qtype.name == name[:-3]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"draft": "int9"}, "the draft 'int9' is neither a model nor a number format: 'int9' is not"),
        ({"draft": "recipe:int8"}, "the draft 'recipe:int8' quantizes activations: name a number format for weights"),
        ({"draft": "trained"}, "neither a model nor a number format: the model was trained in float"),
        ({"draft": "vocabulary"}, "the draft has a vocabulary of 31 tokens, and the model has 257"),
        ({"draft": "int4", "draft_tokens": 0}, "draft_tokens is at least 1"),
        ({"draft": "int4", "kv": KVConfig.of("int4", axis="kivi")}, "use axis='dkv' or 'heads_and_dkv', or no draft"),
        ({"draft": "int4", "rules": "int8"}, "the rules quantize activations, which rounds a difference in the last"),
        ({"draft": "int4", "kv": KVConfig.of("int8")}, r"the cache is in low precision.*: use float32 .KVConfig"),
        ({"draft": "int4", "dtype": "bfloat16"}, "activations are in bfloat16"),
    ],
)
def test_errors_come_before_work(options, text):
    options = dict(options)
    if options["draft"] == "vocabulary":
        small = DENSE.replace(num_layers=1)
        options = {"draft": PretrainedModel.from_params(small, params_of(small))}
    change = {"dtype": options.pop("dtype")} if "dtype" in options else {}
    if "rules" in options:
        options = options | {"rules": octavo.recipe(options["rules"])}
    with pytest.raises(ValueError, match=text):
        Engine(ONE.replace(**change), params_of(ONE), **(SIZES | options))


def test_a_draft_that_is_no_model():
    with pytest.raises(TypeError, match="got a int"):
        Engine(ONE, params_of(ONE), draft=4, **SIZES)
