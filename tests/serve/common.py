"""Small models to serve, and plain ways to do what the engine does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import octavo
from octavo.models import ModelConfig, apply, init_params

DENSE = ModelConfig(
    vocab_size=31,
    emb_dim=16,
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=24,
    scan_layers=False,
)
MOE = DENSE.replace(num_experts=4, experts_per_token=2, moe_mlp_dim=12, shared_experts=1)


@functools.cache
def params_of(config):
    return jax.jit(init_params, static_argnums=0)(config, jax.random.key(0))


@functools.cache
def quantized_params(config, name="int8", tile=None):
    """Random parameters with kernels and the embedding table quantized, by one program."""

    def leaf(path, x):
        kind = path[-1].key
        if kind == "bias":
            return jnp.asarray(np.random.default_rng(0).standard_normal(x.shape), x.dtype)
        if kind not in ("kernel", "embedding") or "router" in jax.tree_util.keystr(path):
            return x
        axis = x.ndim - 2 if kind == "kernel" else 1
        channels = tuple(i for i in range(x.ndim) if i != axis)
        tiling = {} if tile is None else {"tiled_axes": {axis: tile}, "scale_dtype": "bfloat16"}
        q = octavo.quantize(x, name, channelwise_axes=channels, **tiling)
        return q.pack(axis) if q.qtype.bits < 8 else q

    make = lambda: jax.tree_util.tree_map_with_path(leaf, init_params(config, jax.random.key(0)))  # noqa: E731
    return jax.jit(make)()


def dequantized(params):
    """The same parameters as floats."""
    is_qarray = lambda x: isinstance(x, octavo.QArray)  # noqa: E731
    floats = lambda p: jax.tree.map(lambda x: x.dequantize() if is_qarray(x) else x, p, is_leaf=is_qarray)  # noqa: E731
    return jax.jit(floats)(params)


run = jax.jit(apply, static_argnums=0)


def tokens_of(config, shape):
    return jnp.asarray(np.random.default_rng(1).integers(0, config.vocab_size, shape), jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def _padded(config, params, tokens):
    return apply(config, params, tokens)[0]


def greedy(config, params, prompt, count, adjust=lambda logits, answer: logits):
    """The likeliest tokens one after the other, without a cache; `adjust` changes the logits after an answer so far."""
    tokens = list(prompt)
    for _ in range(count):
        row = np.zeros((1, 64), np.int32)
        row[0, : len(tokens)] = tokens
        logits = np.asarray(_padded(config, params, row)[0, len(tokens) - 1])
        tokens.append(int(np.argmax(adjust(logits, tokens[len(prompt) :]))))
    return tokens[len(prompt) :]


class Bytes:
    """A tokenizer of bytes: 256 of them, and an end."""

    eos_ids = (256,)
    bos_id = 256

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_bytes(self):
        return [bytes((i,)) for i in range(256)]

    def chat(self, messages):
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))
