"""tokamax's ragged dot, tuned for TPUs and GPUs; imported on first use.

tokamax is an optional dependency: after `pip install tokamax`, "auto" uses it for ragged dots on one device.
"""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from octavo import _sharding
from octavo._typing import Array
from octavo.ops.lowerings.cpu_ffi import is_partitioned

_DTYPES = (jnp.int8, jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2)


def unsupported(lhs: Array, rhs: Array) -> str | None:
    """The reason tokamax does not support this ragged dot; None if it does."""
    if jax.default_backend() not in ("tpu", "gpu"):
        return f"tokamax's kernels run on TPUs and GPUs, and this process computes on {jax.default_backend()}"
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed: pip install tokamax"
    if _sharding.explicit(lhs) or _sharding.explicit(rhs) or is_partitioned() or not is_local():
        return "XLA cannot partition the kernel: use jax.shard_map, or one device"
    if lhs.dtype != rhs.dtype or lhs.dtype not in _DTYPES:
        return f"tokamax multiplies int8, bfloat16, float32 or float8 of one dtype, not {lhs.dtype} with {rhs.dtype}"
    return None


def is_local() -> bool:
    """Whether the traced program runs on one device: there is only one, or this is inside a shard_map."""
    return jax.device_count() == 1 or not jax.sharding.get_abstract_mesh().empty


def ragged_dot(lhs: Array, rhs: Array, sizes: Array, *, numbers: Any, precision: Any, dtype: Any) -> Array:
    """`lax.ragged_dot_general` with tokamax: int8 to int32, floats to float32."""
    import tokamax  # pyrefly: ignore

    @jax.custom_batching.sequential_vmap
    def run(lhs: Array, rhs: Array, sizes: Array) -> Array:
        return tokamax.ragged_dot_general(
            lhs, rhs, sizes, numbers, precision=precision, preferred_element_type=dtype, implementation="mosaic"
        )

    return run(lhs, rhs, sizes)
