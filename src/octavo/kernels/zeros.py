"""Arrays of zeros that take no memory until they are written."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from octavo._typing import Array
from octavo.kernels.library import ZEROS_TARGET, available


def zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    """`jnp.zeros` on the default device; on CPUs with kernels, the system assigns pages as they are written.

    >>> zeros((2, 3), "float32").sum().item()
    0.0
    """
    if not available() or jax.default_backend() != "cpu":
        return jnp.zeros(shape, dtype)
    return _lazy(tuple(shape), jnp.dtype(dtype))()


@functools.cache
def _lazy(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.jit(lambda: jax.ffi.ffi_call(ZEROS_TARGET, jax.ShapeDtypeStruct(shape, dtype))())
