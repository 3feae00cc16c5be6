"""A few rows times a quantized matrix, which is read once, as stored: the matmuls of decoding a token.

    y[m, n] = sum_k x[m, k] * (value(code[k, n]) - zero[k // group, n]) * scale[k // group, n] * outer[n]

The matrix is stored as [K, N] ("in, out", like the kernel of a dense layer) or, `transposed`, as [N, K] ("out, in",
like an embedding tied to the head). The specification is `reference`; results differ only by the rounding of float32
sums.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import mlir

from octavo._typing import Array, Float, Shaped
from octavo.kernels.library import FLOAT_TARGET, INT_TARGET, TILED_TARGET, require


def matvec(
    x: Float[Array, "m k"],
    codes: Shaped[Array, "a b"],
    scale: Shaped[Array, "c d"],
    zero: Shaped[Array, "c d"] | None = None,
    outer: Float[Array, "o"] | None = None,
    *,
    table: Sequence[float] | None = None,
    transposed: bool = False,
    isa: str = "",
    threads: int = 0,
) -> Float[Array, "m n"]:
    """The float32 matmul of float32 rows and a quantized matrix, on CPUs; gradients are unsupported.

    Args:
      x: the rows.
      codes: int8; or with a `table`, 4-bit codes packed in uint8, two per byte along K, the first in the low half.
      scale: [groups, N] or, transposed, [N, groups], in float32, bfloat16 or float16; not transposed, also in
        float8_e3m4.
      zero: zero points like the scale, not transposed: both in float8_e3m4, or in float32 with other scales; None for
        zero.
      outer: the float32 scale of the scales of each column or of all, if these are float8_e3m4; None for one.
      table: the 16 values of 4-bit codes; None for int8.
      transposed: whether the matrix is stored as [N, K].
      isa: forces one of `versions()`; "" for the fastest.
      threads: forces a number of threads; 0 for the default.

    Returns:
      The float32 result, [m, n].

    >>> x, codes, scale = jnp.ones((1, 2)), jnp.asarray([[1, 2, 3], [4, 5, 6]], jnp.int8), jnp.full((1, 3), 0.5)
    >>> reference(x, codes, scale).tolist()
    [[2.5, 3.5, 4.5]]
    """
    require()
    values = None if table is None else tuple(float(v) for v in table)
    call = _call(FLOAT_TARGET, codes.shape[0 if transposed else 1], transposed, isa, threads, values)
    return call(x, codes, scale, *levels(zero, outer))


def levels(zero: Array | None, outer: Array | None) -> tuple[Array, ...]:
    """The operands of zero points and outer scales: two, of which one may be empty, or none."""
    if zero is None and outer is None:
        return ()
    nothing = jnp.zeros(0, jnp.float32)
    return nothing if zero is None else zero, nothing if outer is None else outer


def int_matvec(
    x: Shaped[Array, "m k"], w: Shaped[Array, "a b"], *, transposed: bool = False, isa: str = "", threads: int = 0
) -> Shaped[Array, "m n"]:
    """The int32 matmul of int8 rows and an int8 matrix, on CPUs: bit-exact with `lax.dot_general`.

    Args:
      x: the rows.
      w: the matrix, [K, N] or, transposed, [N, K].
      transposed: as in `matvec`, like the following arguments.
      isa: the instruction set.
      threads: the number of threads.

    Returns:
      The int32 result, [m, n].
    """
    require()
    return _call(INT_TARGET, w.shape[0 if transposed else 1], transposed, isa, threads)(x, w)


def tiled_matmul(
    x: Shaped[Array, "m k"],
    x_scale: Float[Array, "m g"],
    codes: Shaped[Array, "a n"],
    scale: Shaped[Array, "c n"],
    zero: Shaped[Array, "c n"] | None = None,
    outer: Float[Array, "o"] | None = None,
    *,
    isa: str = "",
    threads: int = 0,
) -> Float[Array, "m n"]:
    """The float32 matmul of int8 rows and a quantized matrix, both with scales along K, on CPUs.

    Integers are multiplied and summed up exactly within the shorter of two groups. The specification is `reference` of
    the dequantized rows.

    Args:
      x: the codes of the rows.
      x_scale: the scale of each group of a row.
      codes: [K, N] in int8, or int4 packed in uint8, two per byte along K.
      scale: [groups, N] as in `matvec`, like the following arguments. One group is a multiple of the other, and both
        are of 4 values.
      zero: the zero points.
      outer: the scale of the scales.
      isa: the instruction set.
      threads: the number of threads.

    Returns:
      The float32 result, [m, n].
    """
    require()
    return _call(TILED_TARGET, codes.shape[1], False, isa, threads)(x, x_scale, codes, scale, *levels(zero, outer))


def reference(
    x: Float[Array, "m k"],
    codes: Shaped[Array, "a b"],
    scale: Shaped[Array, "c d"],
    zero: Shaped[Array, "c d"] | None = None,
    outer: Float[Array, "o"] | None = None,
    *,
    table: Sequence[float] | None = None,
    transposed: bool = False,
) -> Float[Array, "m n"]:
    """The reference of `matvec`, with the same arguments, in plain JAX."""
    if transposed:
        codes, scale = codes.T, scale.T
    if table is None:
        values = codes.astype(jnp.float32)
    else:
        halves = jnp.stack([codes & jnp.uint8(15), codes >> jnp.uint8(4)], axis=1)
        places = halves.reshape(2 * codes.shape[0], codes.shape[1])[: x.shape[1]]
        values = jnp.asarray(table, jnp.float32)[places.astype(jnp.int32)]
    each = x.shape[1] // scale.shape[0]
    scale = jnp.repeat(scale.astype(jnp.float32), each, axis=0)
    values = values if zero is None else values - jnp.repeat(zero.astype(jnp.float32), each, axis=0)
    scale = scale if outer is None else scale * outer[None]
    return jax.lax.dot(x, values * scale, precision=jax.lax.Precision.HIGHEST)


@functools.cache
def _call(
    target: str, columns: int, transposed: bool, isa: str, threads: int, table: tuple[float, ...] | None = None
) -> Callable[..., Array]:
    """The custom call. Under vmap, a batch of `x` alone becomes more rows; a batch of matrices becomes a loop."""
    static = {"target": target, "columns": columns, "transposed": transposed, "isa": isa, "threads": threads}

    @jax.custom_batching.custom_vmap
    def call(x: Array, *weights: Array) -> Array:
        return matvec_p.bind(x, *weights, **static, table=table)

    @call.def_vmap
    def batched(size: int, is_batched: Any, x: Array, *weights: Array) -> tuple[Array, bool]:
        if not any(is_batched[1:]):
            out = call(x.reshape(size * x.shape[1], x.shape[2]), *weights)
            return out.reshape(size, x.shape[1], columns), True
        axes = [i for i, batch in enumerate(is_batched) if batch]
        args = (x, *weights)

        def one(moving: tuple[Array, ...]) -> Array:
            now = dict(zip(axes, moving, strict=True))
            return call(*(now.get(i, arg) for i, arg in enumerate(args)))

        return jax.lax.map(one, tuple(args[i] for i in axes)), True

    return call


INT4 = tuple(float(v - 16 * (v > 7)) for v in range(16))
"""The values of int4's codes."""

MATVEC = "octavo_matvec"
"""The name of the primitive."""

matvec_p = core.Primitive(MATVEC)
"""The custom call or, in programs that are exported, its reference: a machine that runs those may have no kernels."""


def _ffi(x: Array, *weights: Array, target: str, columns: int, table: Any, threads: int, **static: Any) -> Array:
    out = jax.ShapeDtypeStruct((x.shape[0], columns), _dtype(target))
    if target == TILED_TARGET:
        del static["transposed"]
    if target == FLOAT_TARGET:
        static["bits"] = np.int32(8 if table is None else 4)
        static["table"] = np.asarray(table or (0.0,), np.float32)
    return jax.ffi.ffi_call(target, out)(x, *weights, threads=np.int32(threads), **static)


def _exported(x: Array, *weights: Any, target: str, transposed: bool, table: Any, **_: Any) -> Array:
    if target == TILED_TARGET:
        x_scale, weights = weights[0], weights[1:]
        x = x.astype(jnp.float32) * jnp.repeat(x_scale, x.shape[1] // x_scale.shape[1], axis=1)
        table = INT4 if weights[0].dtype == jnp.uint8 else None
    if target != INT_TARGET:
        codes, *rest = weights
        parts: Any = (a if a.size else None for a in rest)
        return reference(x, codes, *parts, table=table, transposed=transposed)
    contract = ((1,), (1 if transposed else 0,))
    return jax.lax.dot_general(x, weights[0], (contract, ((), ())), preferred_element_type=jnp.int32)


def _dtype(target: str) -> Any:
    return jnp.dtype(jnp.int32 if target == INT_TARGET else jnp.float32)


def _lower(ctx: Any, *args: Any, **params: Any) -> Any:
    call = _exported if ctx.module_context.lowering_parameters.for_export else _ffi
    return mlir.lower_fun(call, multiple_results=False)(ctx, *args, **params)


matvec_p.def_impl(lambda *args, **params: jax.jit(functools.partial(matvec_p.bind, **params))(*args))
matvec_p.def_abstract_eval(
    lambda x, *_, target, columns, **__: x.update(shape=(x.shape[0], columns), dtype=_dtype(target), weak_type=False)
)
mlir.register_lowering(matvec_p, _lower)
