"""What a layer keeps for its backward pass; the rest is computed again there."""

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
"""The results that are kept, by the policy's name; None keeps whatever the backward pass reads.

"full" keeps a layer's input only, "minimal" every product with a weight, "dots" every product.

Policies go by the names of results, not by the primitives that made them, so they mean the same for a model whose
products have been replaced.
"""

RESULTS = (*_QKV, "out_proj", *_MLP, *_ATTENTION)
"""The results of a layer that have a name."""


def named[T](x: T, name: str) -> T:
    """`x`, as a result that a policy may keep."""
    if name not in RESULTS:
        raise ValueError(f"no policy knows a result named {name!r}; there are {', '.join(RESULTS)}")
    return checkpoint_name(x, name)


def light(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, of which only the arguments are kept for the backward pass, whatever the policy.

    For work on single values, which is done again in less time than its parts take to be stored and read.

    >>> jax.grad(light(jax.nn.silu))(0.0)
    Array(0.5, dtype=float32, weak_type=True)
    """
    return jax.checkpoint(fn, prevent_cse=False)


def remat(fn: Callable[..., Any], policy: str, *, in_scan: bool) -> Callable[..., Any]:
    """`fn`, of which only what the policy names is kept for the backward pass.

    >>> import jax.numpy as jnp
    >>> jax.grad(remat(lambda x: named(x * x, "context"), "minimal_with_context", in_scan=False))(3.0)
    Array(6., dtype=float32, weak_type=True)
    """
    kept = POLICIES[policy]
    if kept is None:
        return fn
    # A loop's body cannot be merged with its recomputation, so it needs no barrier against that.
    policy_fn = jax.checkpoint_policies.save_only_these_names(*kept)
    return jax.checkpoint(fn, policy=policy_fn, prevent_cse=not in_scan)
