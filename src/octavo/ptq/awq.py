"""AWQ: weights that read large inputs are scaled up before they are rounded, and the inputs down.

Lin, Tang, Tang, Yang, Chen, Wang, Xiao, Dang, Gan and Han, AWQ: Activation-aware Weight Quantization for LLM
Compression and Acceleration (2024). For the inputs x of some weights W, over alpha in [0, 1]:

    s = mean|x|^alpha / sqrt(max s min s)        argmin_alpha  E |x (Q(s W) / s - W)|^2

The error needs only the Hessian of x. The inputs are divided by s where they are made, as in `octavo.ptq.smooth`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo._typing import Array, Float
from octavo.ptq.smooth import Fold, apply_folds, fold_statistics
from octavo.ptq.statistics import Statistics
from octavo.qarray import Quantizer

_GRID = 20
"""The number of exponents that are tried."""


def awq(
    fn: Callable[..., Any],
    params: Any,
    batches: Iterable[Any],
    folds: Sequence[Fold],
    quantizers: Mapping[str, Quantizer],
) -> Any:
    """Parameters of the same function in float, whose weights lose less when they are rounded.

    Args:
        fn: A function of parameters and inputs.
        params: The parameters.
        batches: Batches of inputs, as for `quantize`.
        folds: Where activations are scaled, and the weights that read them.
        quantizers: The quantizers of the weights by name, as `Quantized.stored_quantizers` gives them.

    Returns:
        The parameters, with other scales of norms and other weights. Where no scaling helps, they are unchanged.

    >>> import octavo
    >>> def predict(params, x):
    ...     return (x * params["scale"][None]) @ params["w"]
    >>> key = jax.random.key(0)
    >>> x, w = jax.random.normal(key, (64, 32)), jax.random.normal(key, (32, 8))
    >>> params = {"scale": jnp.geomspace(0.1, 10, 32), "w": w}
    >>> rule = octavo.QuantizationRule(weight_qtype="int3")
    >>> quantizers = octavo.quantized(predict, rule).stored_quantizers(params, x)
    >>> new = awq(predict, params, [x], [Fold("scale", ("w",))], quantizers)
    >>> run, wanted = jax.jit(octavo.served(predict, rule)), predict(params, x)
    >>> errors = [jnp.mean((run(octavo.convert(predict, p, x, rules=rule), x) - wanted) ** 2) for p in (new, params)]
    >>> bool(errors[0] < errors[1])
    True
    """
    found, leaves = fold_statistics(fn, params, batches, folds)
    factors = []
    for fold in folds:
        names = [name for name in fold.weights if name in quantizers]
        factors.append(
            best_factor(
                [leaves[name] for name in names],
                [quantizers[name] for name in names],
                [found[name] for name in names],
                found[fold.weights[0]].mean_abs,
            )
        )
    return apply_folds(params, folds, factors, found)


def best_factor(
    weights: Sequence[Array],
    quantizers: Sequence[Quantizer],
    statistics: Sequence[Statistics],
    mean: Float[Array, "s k"],
    *,
    grid: int = _GRID,
) -> Float[Array, "s k"]:
    """The factor of each input with the least error, for each matrix of a stack by itself."""

    @jax.jit
    def error(alpha: Array) -> tuple[Array, Array]:
        factor = jnp.maximum(mean, 1e-8) ** alpha
        low, high = jnp.min(factor, axis=-1, keepdims=True), jnp.max(factor, axis=-1, keepdims=True)
        factor = factor / jnp.sqrt(low * high)
        total = jnp.zeros(len(factor))
        for w, quantizer, stats in zip(weights, quantizers, statistics, strict=True):
            spread = stats.view.by_input(factor, w.shape)
            w = w.astype(jnp.float32)
            off = stats.view.matrices(quantizer.quantize(w * spread).dequantize(jnp.float32) / spread - w)
            total = total + jnp.sum((stats.hessian @ off) * off, axis=(1, 2))
        return total, factor

    tried = [error(jnp.float32(alpha)) for alpha in np.linspace(0, 1, grid)]
    best = jnp.argmin(jnp.stack([total for total, _ in tried]), axis=0)
    return jnp.take_along_axis(jnp.stack([factor for _, factor in tried]), best[None, :, None], axis=0)[0]
