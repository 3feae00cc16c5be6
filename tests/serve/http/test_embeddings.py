"""/v1/embeddings, of an encoder whose vectors are known."""

import base64
import types

import numpy as np
import pytest

from octavo.serve.http import Limits, running
from tests.serve.http.client import call, metric, post


class Lengths:
    """An encoder whose vectors are the lengths of texts, and their first letters."""

    max_length = 16

    def __init__(self):
        encode = lambda texts: [types.SimpleNamespace(ids=list(text.encode())) for text in texts]  # noqa: E731
        self.tokenizer = types.SimpleNamespace(encode_batch=encode)

    def embed(self, texts):
        return np.asarray([[len(text), ord(text[0]) / 7] for text in texts], np.float32)


@pytest.fixture(scope="module")
def url():
    with running(Lengths(), name="lengths", limits=Limits(inputs=3)) as found:
        yield found


def test_embeddings(url):
    status, found = post(url, "/v1/embeddings", model="lengths", input=["ab", "xyz"], user="me")
    assert status == 200
    vectors = Lengths().embed(["ab", "xyz"])
    assert found == {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": x.tolist()} for i, x in enumerate(vectors)],
        "model": "lengths",
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }
    _, one = post(url, "/v1/embeddings", input="ab", encoding_format="base64")
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(one["data"][0]["embedding"]), "<f4"), vectors[0])
    assert metric(url, "octavo_prompt_tokens_total") == 7
    assert call(url, "/v1/models")[2]["data"][0]["max_model_len"] == 16
    assert call(url, "/health")[0] == 200


@pytest.mark.parametrize(
    ("fields", "status", "param", "text"),
    [
        ({}, 400, "input", "input is missing"),
        ({"input": 3}, 400, "input", "a string or a list of strings, got a number"),
        ({"input": [1, 2]}, 400, "input", "input is a string, got a number"),
        ({"input": []}, 400, "input", "input is empty"),
        ({"input": ["a", ""]}, 400, "input", "has an empty string"),
        ({"input": ["a"] * 4}, 400, "input", "input is at most 3 strings, got 4"),
        ({"input": "a", "dimensions": 3}, 400, "dimensions", "dimensions is not supported"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format", "takes 'float' or 'base64'"),
        ({"input": "a", "inputs": "a"}, 400, "inputs", "did you mean 'input'"),
        ({"input": "a", "model": "other"}, 404, "model", "there is no model 'other' here"),
    ],
)
def test_what_is_wrong_is_named(url, fields, status, param, text):
    got, found = post(url, "/v1/embeddings", **fields)
    assert (got, found["error"]["param"]) == (status, param)
    assert text in found["error"]["message"]


def test_an_encoder_generates_nothing(url):
    assert post(url, prompt="a")[0] == 404
    broken = Lengths()
    broken.tokenizer = None
    with pytest.raises(ValueError, match="the encoder has no tokenizer"), running(broken):
        pass
