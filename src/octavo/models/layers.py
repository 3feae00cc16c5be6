"""Layers of a decoder: dense, RMS norm, embedding and gated MLP."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from octavo._sharding import replicate_axes
from octavo._typing import Array, DTypeLike, Float, PRNGKeyArray, Shaped
from octavo.models.remat import name_result, recompute
from octavo.models.sharding import gather_rows, matmul_sharding
from octavo.ops.hadamard import walsh_hadamard

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "sigmoid": jax.nn.sigmoid,
    "linear": lambda x: x,
    "swiglu_clamped": lambda x: x * jax.nn.sigmoid(1.702 * x),
}
"""By name; "swiglu_clamped" of gpt-oss also clamps its two inputs and adds one to the second, see `gated`."""


def init_matrix(key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike, *, gain: float = 1.0) -> Array:
    """A random `[..., in, out]` that preserves the variance of its input, times `gain` squared."""
    stacked = tuple(range(len(shape) - 2))
    init = jax.nn.initializers.variance_scaling(gain**2, "fan_in", "truncated_normal", batch_axis=stacked)
    return init(key, shape, jnp.dtype(dtype))


class Dense(nnx.Module):
    """A matmul in the dtype of the input, and an optional bias; `hadamard` blocks of the input are rotated first."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        dtype: str,
        *,
        rngs: nnx.Rngs,
        gain: float = 1.0,
        use_bias: bool = False,
        hadamard: int = 0,
    ):
        self.kernel = nnx.Param(init_matrix(rngs.params(), (inputs, outputs), dtype, gain=gain))
        if use_bias:
            self.bias = nnx.Param(jnp.zeros(outputs, jnp.dtype(dtype)))
        self.use_bias, self.hadamard = use_bias, hadamard

    def __call__(
        self, x: Float[Array, "*batch inputs"], dtype: DTypeLike | None = None
    ) -> Float[Array, "*batch outputs"]:
        """The output, accumulated in `dtype` if given."""
        if self.hadamard:
            x = walsh_hadamard(x, self.hadamard)
        # As one matrix of rows: with a batch axis, the gradient takes XLA's CPU backend half as long again.
        rows, kernel = x.reshape(-1, x.shape[-1]), self.kernel[...].astype(x.dtype)
        out = jnp.matmul(rows, kernel, preferred_element_type=dtype, out_sharding=matmul_sharding(rows, kernel))
        if self.use_bias:
            out = out + jnp.broadcast_to(self.bias[...].astype(out.dtype), out.shape)
        return out.reshape(*x.shape[:-1], -1)


def rms(x: Float[Array, "*batch size"], eps: float) -> Float[Array, "*batch size"]:
    """x / sqrt(mean x^2 + epsilon), in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / sqrt(mean x^2 + epsilon) * scale, in float32."""

    def __init__(self, size: int, eps: float, dtype: str):
        self.scale = nnx.Param(jnp.ones(size, jnp.dtype(dtype)))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        def norm(x: Array, scale: Array) -> Array:
            wide = x.astype(jnp.float32)
            normal = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
            return (normal * jnp.broadcast_to(replicate_axes(scale.astype(jnp.float32)), x.shape)).astype(x.dtype)

        return recompute(norm)(x, self.scale[...])


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + epsilon) * scale, and an optional bias, in float32."""

    def __init__(self, size: int, eps: float, dtype: str, *, use_bias: bool = True):
        self.scale = nnx.Param(jnp.ones(size, jnp.dtype(dtype)))
        if use_bias:
            self.bias = nnx.Param(jnp.zeros(size, jnp.dtype(dtype)))
        self.eps, self.use_bias = eps, use_bias

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        def norm(x: Array, *params: Array) -> Array:
            wide = x.astype(jnp.float32)
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
            normal = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
            scale, *bias = (jnp.broadcast_to(replicate_axes(p.astype(jnp.float32)), x.shape) for p in params)
            scaled = normal * scale
            return (scaled + bias[0] if bias else scaled).astype(x.dtype)

        return recompute(norm)(x, self.scale[...], *((self.bias[...],) if self.use_bias else ()))


NORMS: dict[str, type[RMSNorm | LayerNorm]] = {"rms": RMSNorm, "layer": LayerNorm}


class Embed(nnx.Module):
    """A table of token embeddings, which also gives tied logits."""

    def __init__(self, count: int, size: int, dtype: str, *, rngs: nnx.Rngs, stddev: float):
        init = jax.nn.initializers.truncated_normal(stddev)
        self.embedding = nnx.Param(init(rngs.params(), (count, size), jnp.dtype(dtype)))

    def __call__(self, tokens: Shaped[Array, "*batch"], dtype: str) -> Float[Array, "*batch size"]:
        return gather_rows(self.embedding[...].astype(jnp.dtype(dtype)), tokens)

    def attend(self, x: Float[Array, "*batch size"], dtype: DTypeLike | None = None) -> Float[Array, "*batch count"]:
        """Tied logits, accumulated in `dtype` if given."""
        table, numbers = self.embedding[...].astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ()))
        sharding = matmul_sharding(x, table, columns=0)
        return jax.lax.dot_general(x, table, numbers, preferred_element_type=dtype, out_sharding=sharding)


def gated(activation: str, gate: Float[Array, "*shape"], up: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """activation(gate) * up."""

    def compute(gate: Array, up: Array) -> Array:
        if activation == "swiglu_clamped":
            gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7) + 1
        return ACTIVATIONS[activation](gate) * up

    return recompute(compute)(gate, up)


class Mlp(nnx.Module):
    """wo(activation(wi_0(x)) * wi_1(x)), or without a gate wo(activation(wi_0(x)))."""

    def __init__(
        self,
        size: int,
        hidden: int,
        activation: str,
        dtype: str,
        *,
        rngs: nnx.Rngs,
        gain: float,
        fused: bool = False,
        has_gate: bool = True,
        use_bias: bool = False,
        hadamard: tuple[int, int] = (0, 0),
    ):
        dense = functools.partial(Dense, size, dtype=dtype, rngs=rngs, use_bias=use_bias, hadamard=hadamard[0])
        if fused and has_gate:
            self.wi = dense(2 * hidden)
        else:
            self.wi_0 = dense(hidden)
        if has_gate and not fused:
            self.wi_1 = dense(hidden)
        self.wo = Dense(hidden, size, dtype, rngs=rngs, gain=gain, use_bias=use_bias, hadamard=hadamard[1])
        self.activation, self.fused, self.has_gate = activation, fused, has_gate

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        if not self.has_gate:
            hidden = recompute(ACTIVATIONS[self.activation])(name_result(self.wi_0(x), "mlpwi_0"))
            return name_result(self.wo(hidden), "mlpwo")
        gate, up = jnp.split(self.wi(x), 2, axis=-1) if self.fused else (self.wi_0(x), self.wi_1(x))
        gate, up = name_result(gate, "mlpwi_0"), name_result(up, "mlpwi_1")
        return name_result(self.wo(gated(self.activation, gate, up)), "mlpwo")
