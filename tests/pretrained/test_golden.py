"""Our forward pass on real weights is that of an independent implementation: see golden/make.py."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.models import apply
from tests.pretrained.real import real

GOLDEN = Path(__file__).parent / "golden"
pytestmark = pytest.mark.standard_promotion


@functools.cache
def logits(name):
    source, golden = real(name), np.load(GOLDEN / f"{name}.npz")
    return np.asarray(jax.jit(source.function())(source.params(), jnp.asarray(golden["tokens"])[None])[0][0])


@pytest.mark.parametrize("name", ["stories15m", pytest.param("smollm2", marks=pytest.mark.slow)])
def test_logits_are_those_of_transformers(name):
    golden = np.load(GOLDEN / f"{name}.npz")
    ours = logits(name)
    assert ours.shape == (len(golden["tokens"]), real(name).config.vocab_size)
    here = ours[golden["positions"]]
    for kind in ("top", "random"):
        found = np.take_along_axis(here, golden[f"{kind}_ids"], axis=1)
        np.testing.assert_allclose(found, golden[f"{kind}_logits"], rtol=0, atol=1e-3)
    np.testing.assert_allclose(jax.nn.logsumexp(jnp.asarray(ours), axis=-1), golden["logsumexp"], rtol=0, atol=1e-3)
    np.testing.assert_array_equal(here.argmax(axis=1), golden["top_ids"][:, 0])


@pytest.mark.parametrize("name", ["stories15m", "smollm2"])
def test_a_text_has_the_ids_of_the_original_tokenizer(name):
    golden = np.load(GOLDEN / f"{name}.npz")
    wanted = golden["tokens"].tolist()
    assert real(name).tokenizer.encode(str(golden["text"]))[: len(wanted)] == wanted


def test_a_conversation_is_written_as_the_models_template_has_it():
    golden, tokenizer = np.load(GOLDEN / "smollm2.npz"), real("smollm2").tokenizer
    messages = json.loads(str(golden["messages"]))
    assert tokenizer.chat_text(messages) == str(golden["chat"])
    assert tokenizer.chat(messages) == golden["chat_tokens"].tolist()


def test_float_parameters_are_the_models_own():
    source = real("stories15m")
    tokens = jnp.asarray([[1, 403, 2501]])
    plain = jax.jit(functools.partial(apply, source.config))(source.params(), tokens)[0]
    np.testing.assert_array_equal(plain, jax.jit(source.function())(source.params(), tokens)[0])
