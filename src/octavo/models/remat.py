"""Rematerialization policies: which results of a layer are saved for the backward pass."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

_QKV = ("query_proj", "key_proj", "value_proj")
_MLP = ("mlpwi_0", "mlpwi_1", "mlpwo")
_ATTENTION = ("attention_scores", "context")

POLICIES: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "full": (),
    "save_qkv_proj": _QKV,
    "save_out_proj": ("out_proj",),
    "save_dot_except_mlp": (*_QKV, "out_proj"),
    "minimal": (*_QKV, "out_proj", *_MLP),
    "minimal_with_context": (*_QKV, "out_proj", *_MLP, "context"),
    "dots": (*_QKV, "out_proj", *_MLP, *_ATTENTION),
}
"""The names of the saved results by policy; None saves whatever the backward pass reads.

"full" saves a layer's input only, "minimal" every matmul with a weight, "dots" every matmul.

Policies select results by name, not by primitive, so they mean the same for a model whose matmuls are quantized.
"""

RESULTS = (*_QKV, "out_proj", *_MLP, *_ATTENTION)
"""The names of a layer's results."""


def name_result[T](x: T, name: str) -> T:
    """`x`, as a result that a policy may save by its name."""
    if name not in RESULTS:
        raise ValueError(f"no policy knows a result named {name!r}; there are {', '.join(RESULTS)}")
    return checkpoint_name(x, name)


def recompute(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, of which only the arguments are saved for the backward pass, whatever the policy.

    For elementwise functions, which take less time to compute again than their intermediates to store and load.

    >>> jax.grad(recompute(jax.nn.silu))(0.0)
    Array(0.5, dtype=float32, weak_type=True)
    """
    return jax.checkpoint(fn, prevent_cse=False)


def remat(fn: Callable[..., Any], policy: str, *, in_scan: bool) -> Callable[..., Any]:
    """`fn`, of which only the results that the policy names are saved for the backward pass.

    >>> import jax.numpy as jnp
    >>> jax.grad(remat(lambda x: name_result(x * x, "context"), "minimal_with_context", in_scan=False))(3.0)
    Array(6., dtype=float32, weak_type=True)
    """
    saved = POLICIES[policy]
    if saved is None:
        return fn
    # The body of a scan cannot be merged with its recomputation, so it needs no barrier against CSE.
    policy_fn = jax.checkpoint_policies.save_only_these_names(*saved)
    return jax.checkpoint(fn, policy=policy_fn, prevent_cse=not in_scan)
