"""What conversion costs real models, on text that they know: their perplexity, and their distance to float."""

import functools
import math
import pydoc_data.topics

import pytest

from octavo.pretrained import PretrainedModel, convert_model, weight_rules
from octavo.serve import Engine, KVConfig, SamplingParams
from octavo.serve.evaluate import evaluate
from tests.pretrained.real import real

pytestmark = pytest.mark.standard_promotion

STARTS = ["Once upon a time", "One day, a", "Lily and", "There was a", "In a small house", "Tom had a"]


@functools.cache
def text_of(name):
    """Stories that the story model tells, and the English of Python's own help."""
    source = real(name)
    if name == "smollm2":
        topics = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
        return tuple(source.tokenizer.encode(topics)[:2000])
    engine = Engine(source, slots=6, max_length=256)
    prompts = [source.tokenizer.encode(start) for start in STARTS]
    told = [list(prompt) for prompt in prompts]
    sampling = [SamplingParams(temperature=1.0, max_tokens=230, seed=i) for i in range(len(prompts))]
    for event in engine.generate(prompts, sampling):
        told[event.request_id].append(event.token)
    return tuple(token for story in told for token in story[1:])


@functools.cache
def converted(name, asked):
    source = real(name)
    params, summary = convert_model(source, weight_rules(asked, source.config), scale_dtype="bfloat16")
    low = PretrainedModel.from_params(source.config, params, tokenizer=source.tokenizer, origin=source.origin)
    return low, summary


# KL to float and bits per weight: a third above what was measured. Stories on the model's own samples (the head of a
# 15M model is 60 % of it, and int8 in all of these), SmolLM2 on Python's help, whose weights lie on another 4-bit grid.
COSTS = {
    ("stories15m", "int8"): (0.0016, 8.1),
    ("stories15m", "int8:g32"): (0.0014, 8.3),
    ("stories15m", "fp8"): (0.015, 8.1),
    ("stories15m", "nf4"): (0.14, 6.7),
    ("stories15m", "int4"): (0.24, 6.7),
    ("smollm2", "int8"): (0.0066, 8.1),
    ("smollm2", "int8:g32"): (0.0038, 8.5),
    ("smollm2", "int4"): (0.55, 5.3),
}


def needing_data(cases):
    """Cases whose first value is the name of a model."""
    return [pytest.param(*case, marks=pytest.mark.data(case[0])) for case in cases]


@pytest.mark.parametrize(("name", "asked"), needing_data(COSTS))
def test_the_distance_to_float(name, asked):
    low, summary = converted(name, asked)
    found = evaluate(low, text_of(name), against=real(name), layers=False)
    kl, bits = COSTS[name, asked]
    assert kl / 10 < found.kl.mean < kl
    assert summary.bits_per_weight < bits
    change, error = math.expm1(found.log_ratio.mean), found.log_ratio.error
    if asked.startswith("int8"):
        assert found.same_top.mean > 0.93
        if name == "stories15m":
            assert abs(change) < 0.001 + 2 * error


@pytest.mark.parametrize(
    ("name", "axis", "kl"),
    needing_data([("stories15m", "dkv", 1e-3), ("stories15m", "kivi", 1e-3), ("smollm2", "dkv", 1.4e-3)]),
)
def test_a_cache_in_int8_costs_nothing_that_can_be_seen(name, axis, kl):
    source, kv = real(name), KVConfig.of("int8", axis=axis)
    found = evaluate(source, text_of(name), against=source, kv=kv, layers=False)
    assert abs(math.expm1(found.log_ratio.mean)) < 0.001 + 2 * found.log_ratio.error
    assert 0 < found.kl.mean < kl
    assert found.same_top.mean > 0.97
