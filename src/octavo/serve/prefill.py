"""Prefill in integers: activations in int8, with a scale for each 32 values, times the codes of weights.

CPUs multiply int8 three times as fast as floats (`octavo.kernels.tiled_matmul`). Decoding keeps activations in float:
its time is that of reading weights.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax

from octavo import kernels
from octavo._tree import flatten_paths
from octavo.frameworks import served
from octavo.ops.lowerings import cpu_ffi
from octavo.qarray import QArray, is_qarray
from octavo.rules import QtRule

PREFILL = ("float", "int8", "auto")
_GROUP = 32


def prefill_model(
    model: Callable[..., Any], params: Any, rules: Any, prefill: str, *, latent: bool = False
) -> Callable[..., Any] | None:
    """The model with activations in int8, or None for the one that also decodes.

    Args:
        model: The function of the parameters.
        params: The parameters.
        rules: The quantization rules of the model.
        prefill: One of `PREFILL`.
        latent: Whether the cache is latent, where weights multiply queries.

    Raises:
        ValueError: "int8" is asked for and is not possible.
    """
    if prefill not in PREFILL:
        raise ValueError(f"prefill={prefill!r} is not one of {', '.join(map(repr, PREFILL))}")
    if prefill == "float":
        return None
    modules, reason = ([], "weights of a latent cache multiply queries") if latent else _modules(params, rules)
    if reason is None:
        # The weights are codes already, and remain what they are.
        pattern = "|".join(sorted({re.sub(r"\d+", r"\\d+", re.escape(name)) for name in modules}))
        int8 = {"weight_qtype": "int8", "act_qtype": "int8", "tile_size": _GROUP}
        rule = QtRule(module_path=f"({pattern})", scope="weights", **int8)
        return functools.wraps(model)(served(model, [rule])) if hasattr(model, "__name__") else served(model, [rule])
    if prefill == "int8":
        raise ValueError(f"prefill='int8' is not possible: {reason}; use prefill='float'")
    return None


def _modules(params: Any, rules: Any) -> tuple[list[str], str | None]:
    """The modules whose matrices the kernel multiplies, and the reason there are none."""
    if rules:
        return [], "the rules say how activations are quantized"
    if jax.default_backend() != "cpu" or not kernels.available():
        return [], kernels.status() if jax.default_backend() == "cpu" else "it is for CPUs"
    found = [
        name.removesuffix("/kernel")
        for name, leaf in flatten_paths(params, is_leaf=is_qarray).items()
        if isinstance(leaf, QArray) and re.match(r"decoder/\w*layers", name) and _is_integer(leaf)
    ]
    return found, None if found else "no matrix of a layer is stored in int8 or int4 in groups of 32"


def _is_integer(q: QArray) -> bool:
    return q.ndim == 2 and q.shape[0] % _GROUP == 0 and cpu_ffi.unsupported_tiles(q, _GROUP) is None
