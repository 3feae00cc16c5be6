"""Prefill with activations in int8."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo import kernels
from octavo.models import apply, fuse
from octavo.serve import Engine, SamplingParams
from tests.serve.common import DENSE, params_of, quantized_params

# Its matrices are large enough for the kernel, which leaves small ones to XLA.
CONFIG = DENSE.replace(num_layers=1, emb_dim=128, head_dim=32, mlp_dim=256)
PROMPTS = [list(range(20)), [7, 1] * 9, list(range(30, 1, -2)), [11, 3, 5]]
INT8 = {"weight_qtype": "int8", "act_qtype": "int8", "tile_size": 32}
RULE = octavo.QtRule(module_path="decoder/layers.*", scope="weights", **INT8)

needs_kernels = pytest.mark.skipif(not kernels.available(), reason=kernels.status())


@functools.cache
def params_in(name):
    """Codes for the matrices. Codes of embeddings would often be halfway between two codes of activations."""
    params = dict(quantized_params(CONFIG, name, 32))
    return params | {"token_embedder": params_of(CONFIG)["token_embedder"]}


@functools.cache
def engine_of(name, prefill):
    return Engine(CONFIG, params_in(name), max_length=40, chunk=32, prefill=prefill)


def logprobs(engine):
    """The log probability of the most probable token after each prompt."""
    engine._prefilled = [()]
    events = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1))
    return np.asarray([event.logprob for event in events])


def reference(params, rules):
    """The same by the model's own code, on XLA."""
    with kernels.disabled():
        config, joined = fuse(CONFIG, params)
        model = octavo.served(functools.partial(apply, config), rules)
        logits = [model(joined, jnp.asarray([prompt]))[0][0, -1] for prompt in PROMPTS]
    return np.asarray([float(jax.nn.log_softmax(x).max()) for x in logits])


@needs_kernels
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_activations_are_in_int8(name):
    params, auto = params_in(name), engine_of(name, "auto")
    assert auto.programs.prefill_qtype == "int8"
    arguments = auto.programs._leaves, auto.programs._state, np.zeros((1, 32), np.int32), np.zeros(3, np.int32)
    masks = np.stack([auto.programs._all[0]] * 2)
    lowered = auto.programs._prefill.jitted.lower(*arguments, settings(), masks, None).as_text()
    assert lowered.count("@octavo_tiled_matmul") == 3  # the output projection is small
    got, floats = logprobs(auto), logprobs(engine_of(name, "float"))
    np.testing.assert_allclose(floats, reference(params, []), rtol=0, atol=1e-5)
    # Activations next to a tie are rounded to the other side: one changes a log probability by up to 0.01. That the
    # kernel computes the same product is tested in tests/ops/test_native.py.
    np.testing.assert_allclose(got, reference(params, [RULE]), rtol=0, atol=0.03)
    assert np.all(np.abs(got - floats) > 1e-5)


def settings():
    from octavo.serve.sampling import Settings

    return Settings.of([SamplingParams(temperature=0)])


@needs_kernels
def test_log_probabilities_of_a_prompt_are_those_of_floats():
    found = []
    for prefill in ("float", "int8"):
        engine = engine_of("int8", prefill)
        engine._prefilled = [()]
        events = list(engine.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=True)))
        found.append([score for score, _ in events[0].prompt])
    assert found[0] == found[1]


@needs_kernels
def test_what_is_not_possible():
    params = params_in("int8")
    for given, options, reason in (
        (params_of(CONFIG), {}, "no matrix of a layer is stored in int8 or int4"),
        (params, {"rules": [RULE]}, "the rules say how activations are quantized"),
    ):
        assert Engine(CONFIG, given, max_length=40, prefill="auto", **options).programs.prefill_qtype == "float"
        with pytest.raises(ValueError, match=f"prefill='int8' is not possible: {reason}"):
            Engine(CONFIG, given, max_length=40, prefill="int8", **options)
    with pytest.raises(ValueError, match="prefill='int4' is not one of 'float', 'int8', 'auto'"):
        Engine(CONFIG, params, max_length=40, prefill="int4")
    with kernels.disabled(), pytest.raises(ValueError, match="CPU kernels are switched off"):
        Engine(CONFIG, params, max_length=40, prefill="int8")
