"""Sensitivity: how much each weight costs in each format, predicted from one forward and one backward pass.

The divergence of a model's predictions is, to second order, half the Fisher information of the change. For an error
E = Q - W of one weight, with x its inputs and g the gradient of log p(y) at its outputs, y drawn from the model itself:

    KL(p || p_Q) per token  ~  1/2 sum_n E[g_n^2] e_n^T E[x x^T] e_n

which takes gradients at different outputs as uncorrelated and as independent of the inputs (the diagonal of K-FAC,
Martens and Grosse, Optimizing Neural Networks with Kronecker-factored Approximate Curvature, 2015).
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo._typing import Array
from octavo.frameworks.serving import stored_quantizers
from octavo.ptq.methods import get_method
from octavo.ptq.progress import ALL
from octavo.ptq.statistics import Recorder, Statistics, arguments, collect_statistics, named_leaves, site_state
from octavo.qarray import Quantizer
from octavo.transform import Quantized

_COLLECTION, _NAME = "ptq", "gradients"


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to store a weight.

    Attributes:
        kl: The predicted divergence from float, in nats per token.
        nbytes: The bytes of packed codes and scales.
    """

    kl: float
    nbytes: int


def sensitivity(
    fn: Callable[..., Any],
    params: Any,
    rules: Mapping[str, Any],
    batches: Iterable[Any],
    *,
    method: str = "search",
    key: Any = None,
) -> dict[str, dict[str, Option]]:
    """The predicted divergence and the size of each weight by each of several rules.

    Args:
        fn: A function of parameters and inputs that returns logits, with the vocabulary as the last axis.
        params: The parameters.
        rules: Rules by name, such as {"int4": rule, "int8": other}.
        batches: Batches of inputs, as for `quantize`; read twice.
        method: The method by which weights will be quantized, or a cheaper one of the same order.
        key: A PRNG key, for the tokens that are drawn from the model.

    Returns:
        An `Option` by weight and by name of rules.

    >>> import octavo
    >>> def predict(params, x):
    ...     return jnp.tanh(x @ params["up"]) @ params["down"]
    >>> keys = jax.random.split(jax.random.key(0), 3)
    >>> params = {"up": jax.random.normal(keys[0], (16, 32)), "down": jax.random.normal(keys[1], (32, 8))}
    >>> rules = {name: octavo.QuantizationRule(weight_qtype=name, tile_size=16) for name in ("int4", "int8")}
    >>> found = sensitivity(predict, params, rules, [jax.random.normal(keys[2], (64, 16))])
    >>> found["up"]["int4"].kl > 50 * found["up"]["int8"].kl, found["up"]["int8"].nbytes
    (True, 640)
    """
    batches = list(batches)
    if not batches:
        raise ValueError("there is no calibration data: batches is empty")
    args, kwargs = arguments(batches[0])
    quantizers = {name: stored_quantizers(fn, own, params, *args, **kwargs) for name, own in rules.items()}
    return weight_options(fn, params, quantizers, batches, method=method, key=key)


def weight_options(
    fn: Callable[..., Any],
    params: Any,
    quantizers: Mapping[str, Mapping[str, Quantizer]],
    batches: Sequence[Any],
    *,
    method: str = "search",
    key: Any = None,
    progress: Callable[[int], None] | None = None,
    checkpoint: Path | None = None,
) -> dict[str, dict[str, Option]]:
    """As `sensitivity`, for the quantizers of weights by option and weight.

    In the directory `checkpoint`, statistics are kept where `quantize` finds them.
    """
    kept = None if checkpoint is None else checkpoint / ALL
    names = {weight for own in quantizers.values() for weight in own}
    found, _ = collect_statistics(fn, params, batches, only=names, progress=progress, checkpoint=kept)
    gradients = squared_gradients(fn, params, batches, found, key=jax.random.key(0) if key is None else key)
    leaves = named_leaves(params)
    return {
        weight: {
            name: weight_option(leaves[weight], own[weight], found[weight], gradients[weight], method=method)
            for name, own in quantizers.items()
            if weight in own
        }
        for weight in found
        if weight in gradients
    }


def weight_option(x: Any, quantizer: Quantizer, statistics: Statistics, gradients: Array, *, method: str) -> Option:
    """The predicted divergence and the size of one weight."""
    x = jnp.asarray(x, jnp.float32)
    q = get_method(method)(x, quantizer, statistics)
    off = statistics.view.matrices(q.dequantize(jnp.float32) - x)
    kl = 0.5 * jnp.sum((statistics.hessian @ off) * off * gradients[:, None, :])
    return Option(float(kl), round(quantizer.bits_per_value(x.shape) * x.size / 8))


class _Tap(Recorder):
    """Runs matmuls in float, and returns the squared gradients at their outputs as gradients of zeros."""

    def _add(self, moments: Any) -> None:
        """Nothing: inputs are not recorded."""

    def dot_general(self, lhs, rhs, *args, **options):
        out = super().dot_general(lhs, rhs, *args, **options)
        site = self.operation.site
        if not self.records(site):
            return out
        right = site.weights[1]
        (contracted, _), (batch_axes, _) = site.params["dimension_numbers"]
        batch = len(batch_axes)
        free = (rhs if right else lhs).ndim - batch - len(contracted)
        kept = (*range(batch), *(range(out.ndim - free, out.ndim) if right else range(batch, batch + free)))
        shape = [out.shape[a] for a in kept]
        size = int(np.prod(shape[:batch])), int(np.prod(shape[batch:]))
        zeros = self.get_state(_NAME, lambda: jnp.zeros(size, jnp.float32), collection=_COLLECTION)
        return _tap(out, zeros, tuple(a for a in range(out.ndim) if a not in kept))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _tap(out: Array, zeros: Array, rows: tuple[int, ...]) -> Array:
    return out


def _tap_backward(rows: tuple[int, ...], shape: tuple[int, ...], g: Array) -> tuple[Array, Array]:
    return g, jnp.sum(jnp.square(g.astype(jnp.float32)), axis=rows).reshape(shape)


_tap.defvjp(lambda out, zeros, rows: (out, zeros.shape), _tap_backward)


def squared_gradients(
    fn: Callable[..., Any], params: Any, batches: Sequence[Any], found: Mapping[str, Statistics], *, key: Any
) -> dict[str, Array]:
    """The mean over tokens of the squared gradients of log p(y) at the outputs of weights, [matrices, outputs]."""
    names: Collection[str] = set(found)
    low = Quantized(fn, _Tap(names), 0, "ignore")

    def log_likelihood(state: Any, params: Any, args: Any, kwargs: Any, key: Any) -> Array:
        out = low.stateful(state)(params, *args, **kwargs)[0]
        logits = jax.nn.log_softmax((out[0] if isinstance(out, tuple) else out).astype(jnp.float32), axis=-1)
        drawn = jax.random.categorical(key, jax.lax.stop_gradient(logits))
        return jnp.sum(jnp.take_along_axis(logits, drawn[..., None], axis=-1))

    step = jax.jit(jax.grad(log_likelihood))
    args, kwargs = arguments(batches[0])
    empty = jax.eval_shape(low.init, params, *args, **kwargs)
    total = zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), empty)
    for number, batch in enumerate(batches):
        new = step(zeros, params, *arguments(batch), jax.random.fold_in(key, number))
        total = jax.tree.map(jnp.add, total, new)
    sums: dict[str, Array] = {}
    for site in low.sites(params, *args, **kwargs):
        if site.leaf is None or site.leaf not in names:
            continue
        view, own = found[site.leaf].view, site_state(total, site, _NAME)
        if own is None:  # experts: gradients are observed at dots only
            continue
        own = own.reshape(-1, view.shape[0], view.shape[2]) if not view.stack else own.reshape(1, view.shape[0], -1)
        sums[site.leaf] = sums.get(site.leaf, 0.0) + jnp.sum(own, axis=0)
    return {name: value / jnp.maximum(found[name].tokens, 1)[:, None] for name, value in sums.items()}
