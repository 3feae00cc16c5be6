"""New parameters for a running engine: same codes as training, same buffers, nothing compiled again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo.models import abstract_params, apply
from octavo.models.functional import unstack_layers
from octavo.rollout import mismatch, token_logprobs
from octavo.serve import Engine, Request, SamplingParams
from octavo.serve.engine_update import Layouts, _quantize
from tests.arrays import normal, random_params
from tests.serve.common import DENSE, params_of, tokens_of

ONE = DENSE.replace(num_layers=1)
TYPES = {"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8", "act_calibration_method": "absmax,1.01"}
RULES = (octavo.QtRule(module_path="decoder/layers.*", scope="weights", **TYPES),)
GREEDY = SamplingParams(temperature=0, max_tokens=4)
TEXTS = np.asarray(tokens_of(ONE, (2, 8)))


def new_params(seed=1, config=ONE):
    return random_params(abstract_params(config), seed)


def convert(params, config=ONE):
    return octavo.convert(functools.partial(apply, config), params, TEXTS, rules=RULES)


@functools.cache
def trained():
    """The log probabilities by the program of training."""
    low = octavo.quantized(functools.partial(apply, ONE), RULES)
    return jax.jit(lambda params, tokens: token_logprobs(low(params, tokens)[0], tokens))


@functools.cache
def unified():
    """An engine with the rules and the codes of training."""
    return Engine(ONE, convert(params_of(ONE)), rules=RULES, slots=2, max_length=16, chunk=8, eos_ids=())


def sampled(engine, prompts):
    found = {}
    for event in engine.generate(prompts, GREEDY):
        found.setdefault(event.request_id, []).append(event)
    return [found[i] for i in range(len(prompts))]


def test_logprobs_are_those_of_training_bit_for_bit():
    engine = unified()
    for seed in (1, 2):
        engine.update(new_params(seed))
        found = mismatch(trained()(new_params(seed), TEXTS), np.stack(engine.logprobs(TEXTS.tolist())))
        assert (float(found.k3), float(found.max), float(found.effective_sample_size)) == (0.0, 0.0, 1.0)


@pytest.mark.slow
def test_sampled_logprobs_are_close_and_another_precision_is_not():
    engine, params = unified(), new_params(3)
    engine.update(params)
    prompts = TEXTS[:, :4].tolist()
    events = sampled(engine, prompts)
    tokens = jnp.asarray([[*prompt, *(e.token for e in own)] for prompt, own in zip(prompts, events, strict=True)])
    own = np.asarray([[e.logprob for e in row] for row in events])
    assert mismatch(trained()(params, tokens)[:, 3:], own).k3 < 1e-6
    floats = jax.jit(lambda params: token_logprobs(apply(ONE, params, tokens)[0], tokens))(params)
    assert mismatch(floats[:, 3:], own).k3 > 1e-6  # the metric sees that float weights are another policy


@pytest.mark.slow
def test_a_hundred_updates_trace_and_allocate_once():
    engine, params = unified(), new_params(4)
    list(engine.generate(TEXTS[:, :4].tolist(), GREEDY))
    engine.update(params)
    places = lambda: sorted(x.unsafe_buffer_pointer() for x in engine.programs._leaves)  # noqa: E731
    before, traces = places(), dict(engine.programs.traces)
    for _ in range(100):
        engine.update(params)
    list(engine.generate(TEXTS[:, :4].tolist(), GREEDY))
    assert places() == before
    assert engine.programs.traces == traces
    assert traces["update"] == 1


def test_parameters_that_the_caller_holds_are_not_donated():
    old = params_of(ONE)
    engine = Engine(ONE, old, slots=1, max_length=16, chunk=8, eos_ids=())
    before = engine.logprobs(TEXTS[:1].tolist())[0]
    new = new_params(5)
    engine.update(new)
    engine.update(old)  # both are still alive
    np.testing.assert_array_equal(engine.logprobs(TEXTS[:1].tolist())[0], before)
    assert not any(x.is_deleted() for x in jax.tree.leaves((old, new)))


@pytest.mark.parametrize(("name", "tile"), [("int4", 8), pytest.param("int8", 16, marks=pytest.mark.slow)])
def test_codes_without_rules_are_made_in_their_layout_and_fused(name, tile):
    """Packed codes in groups: the layout that decoding reads is rebuilt too."""

    @jax.jit
    def codes(params):
        def leaf(path, x):
            if path[-1].key != "kernel":
                return x
            q = octavo.quantize(x, name, channelwise_axes=(1,), tiled_axes={0: tile}, scale_dtype="bfloat16")
            return q.pack(0)

        return jax.tree_util.tree_map_with_path(leaf, params)

    old, new = (
        Engine(ONE, codes(new_params(seed)), slots=1, max_length=16, chunk=8, eos_ids=()).programs for seed in (1, 2)
    )
    assert old.config.fused
    old.update(new_params(2))
    for a, b in zip(old._leaves, new._leaves, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_stacked_parameters_are_unstacked():
    stacked = new_params(6, DENSE.replace(scan_layers=True))
    engine = Engine(DENSE, params_of(DENSE), slots=1, max_length=16, chunk=8, eos_ids=())
    engine.update(stacked)
    expected = jax.jit(lambda p: token_logprobs(apply(DENSE, p, TEXTS[:1])[0], TEXTS[:1]))(unstack_layers(stacked))
    np.testing.assert_allclose(engine.logprobs(TEXTS[:1].tolist())[0], expected[0], rtol=1e-5, atol=1e-5)


def test_updates_that_do_not_fit():
    engine = unified()
    with pytest.raises(ValueError, match=r"which needs 'decoder/decoder_norm/scale'"):
        engine.update({"decoder": {}, "token_embedder": new_params()["token_embedder"]})
    with pytest.raises(
        ValueError, match=r"'decoder/decoder_norm/scale' has the shape \(24,\), and the engine's \(16,\)"
    ):
        engine.update(new_params(0, ONE.replace(emb_dim=24)))
    floats = Engine(ONE, params_of(ONE), slots=1, max_length=16, chunk=8)
    with pytest.raises(ValueError, match=r"has codes, and the engine's is float32: dequantize it first"):
        floats.update(convert(params_of(ONE)))
    before = unified().logprobs(TEXTS.tolist())
    engine.add(Request("one", (1, 2), GREEDY))
    with pytest.raises(RuntimeError, match="requests are running"):
        engine.update(new_params())
    engine.cancel("one")
    engine.step()
    np.testing.assert_array_equal(unified().logprobs(TEXTS.tolist()), before)
    with pytest.raises(ValueError, match="ids are from 0 to 30"):
        engine.logprobs([[1, 2, 31]])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("int8", {"channelwise_axes": (1,), "calibration": "absmax,1.01"}),
        ("int4", {"channelwise_axes": (1,), "tiled_axes": {0: 48}, "scale_dtype": "bfloat16"}),
        ("nf4_double", {"channelwise_axes": (1,), "tiled_axes": {0: 64}}),
    ],
)
def test_two_passes_give_the_codes_of_three(name, options):
    quantizer = octavo.Quantizer(name, **options)
    x = normal(3, 128, 8).at[0, 1].set(jnp.nan).at[:, 2].set(0).at[3, 4].set(1e-30)
    expected = jax.jit(quantizer.quantize)(x)
    found = jax.jit(functools.partial(_quantize, quantizer))(x)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.astype(np.float32), other.astype(np.float32))
    assert np.isnan(found.dequantize()[:, 1]).any()


def test_floats_without_their_learned_scales():
    rules = (octavo.QuantizationRule(scope="weights", weight_qtype="int8", weight_calibration_method="lsq"),)
    layouts = Layouts(ONE, convert(params_of(ONE)), rules)
    with pytest.raises(ValueError, match=r"the scale of 'decoder/layers_0/.*' is learned \(lsq\), so floats alone"):
        layouts.matched(params_of(ONE))
