"""Our forward pass on real weights is that of an independent implementation: see golden/make.py."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.models import apply
from tests.pretrained.real import golden, real

pytestmark = pytest.mark.standard_promotion
MODELS = [pytest.param(name, marks=pytest.mark.data(name)) for name in ("stories15m", "smollm2", "gemma3")]


@functools.cache
def logits(name):
    source, tokens = real(name), jnp.asarray(golden(name)["tokens"])
    return np.asarray(jax.jit(source.function())(source.params(), tokens[None])[0][0])


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name):
    ours, theirs = logits(name), golden(name)
    assert ours.shape == (len(theirs["tokens"]), real(name).config.vocab_size)
    here = ours[theirs["positions"]]
    for kind in ("top", "random"):
        found = np.take_along_axis(here, theirs[f"{kind}_ids"], axis=1)
        np.testing.assert_allclose(found, theirs[f"{kind}_logits"], rtol=0, atol=1e-3)
    np.testing.assert_allclose(jax.nn.logsumexp(jnp.asarray(ours), axis=-1), theirs["logsumexp"], rtol=0, atol=1e-3)
    np.testing.assert_array_equal(here.argmax(axis=1), theirs["top_ids"][:, 0])


@pytest.mark.parametrize("name", MODELS)
def test_a_text_has_the_ids_of_the_original_tokenizer(name):
    wanted = golden(name)["tokens"].tolist()
    assert real(name).tokenizer.encode(str(golden(name)["text"]))[: len(wanted)] == wanted


@pytest.mark.data("smollm2")
def test_a_conversation_is_written_as_the_models_template_has_it():
    theirs, tokenizer = golden("smollm2"), real("smollm2").tokenizer
    messages = json.loads(str(theirs["messages"]))
    assert tokenizer.chat_text(messages) == str(theirs["chat"])
    assert tokenizer.chat(messages) == theirs["chat_tokens"].tolist()


@pytest.mark.data("stories15m")
def test_float_parameters_are_the_models_own():
    source = real("stories15m")
    tokens = jnp.asarray([[1, 403, 2501]])
    plain = jax.jit(functools.partial(apply, source.config))(source.params(), tokens)[0]
    np.testing.assert_array_equal(plain, jax.jit(source.function())(source.params(), tokens)[0])
