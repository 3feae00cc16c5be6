"""Distillation of a quantized model from its float model: scales and norms are trained, codes stay.

Chen et al., EfficientQAT (arXiv 2407.11062), trains the scales of fixed codes end to end; here the loss is the KL
divergence from the float model, so that any text will do. A parameter p is trained as p + m t, with t = 0 at first;
m is |p| for scales, so that steps are relative to each, and the root mean square of other parameters.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from octavo._tree import flatten_paths, path_str
from octavo._typing import Array
from octavo.ptq.statistics import arguments
from octavo.qarray import QArray, is_qarray

_BETAS = (0.9, 0.98)


def distill(
    fn: Callable[..., Any],
    params: Any,
    low: Any,
    batches: Iterable[Any],
    *,
    steps: int,
    learning_rate: float = 1e-3,
    temperature: float = 1.0,
    log: Callable[[str], None] | None = None,
) -> Any:
    """Train the scales of quantized parameters, and norms and biases, for the outputs of the float model.

    Codes do not change, so a step needs no gradients or optimizer states of weights, and the result is stored and
    served as `low` is. Scales are trained in the dtype that they are stored in, by Adam; the learning rate decays
    linearly to zero.

    Args:
        fn: A function of parameters and inputs that returns logits, or a tuple of which they are the first.
        params: The float parameters, the teacher.
        low: The same tree with QArrays, as `octavo.ptq.quantize` and `octavo.convert` return it.
        batches: Batches of inputs of equal shapes: an array each, a tuple of arguments, or a dictionary of keyword
            arguments. They are used again in order until all steps are done.
        steps: The number of steps.
        learning_rate: The first learning rate, relative to the size of each parameter.
        temperature: Divides the logits of both models.
        log: Called with the divergence, twenty times in all.

    Returns:
        A tree like `low`.

    >>> import octavo
    >>> def predict(params, x):
    ...     return x @ params["w"]
    >>> keys = jax.random.split(jax.random.key(0))
    >>> params, x = {"w": jax.random.normal(keys[0], (64, 8))}, jax.random.normal(keys[1], (256, 64))
    >>> rule = octavo.QuantizationRule(weight_qtype="int3", tile_size=32)
    >>> low = octavo.ptq.quantize(predict, params, rule, [x], method="round")
    >>> def divergence(low):
    ...     teacher, student = (jax.nn.log_softmax(x @ w) for w in (params["w"], low["w"].dequantize()))
    ...     return float(jnp.mean(jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1)))
    >>> trained = octavo.ptq.distill(predict, params, low, [x], steps=100, learning_rate=2e-2)
    >>> divergence(trained) < 0.7 * divergence(low)
    True
    """
    batches = [arguments(batch) for batch in batches]
    if not batches:
        raise ValueError("there is no data to distill on: batches is empty")
    if steps < 1:
        raise ValueError(f"steps is the number of training steps, at least 1: got {steps}")
    arrays = flatten_paths(low, is_qarray)
    if not any(is_qarray(x) for x in arrays.values()):
        raise ValueError("no parameter is quantized: distill what octavo.ptq.quantize or octavo.convert returned")
    start = _trained(arrays)
    sizes = {path: _size(arrays[path], value) for path, value in start.items()}
    state = tuple(jax.tree.map(jnp.zeros_like, start) for _ in range(3))
    step = jax.jit(functools.partial(_step, fn, temperature=temperature), donate_argnums=0)
    for i in range(steps):
        args, kwargs = batches[i % len(batches)]
        rate = learning_rate * (1 - i / steps)
        state, kl = step(state, start, sizes, params, low, jnp.float32(i + 1), jnp.float32(rate), args, kwargs)
        if log is not None and (i % max(1, steps // 20) == 0 or i + 1 == steps):
            log(f"step {i + 1} of {steps}: KL divergence {float(kl):.5f}")
    return _replaced(low, {path: value + sizes[path] * state[0][path] for path, value in start.items()})


def _trained(arrays: Mapping[str, Any]) -> dict[str, Array]:
    """What is trained, in float32: the scales of QArrays, and floats of up to a hundredth of the largest parameter."""
    few = max(x.size for x in arrays.values()) // 100
    found = {}
    for path, x in arrays.items():
        part = getattr(x, _scale_name(x)) if isinstance(x, QArray) else x
        if not jnp.issubdtype(part.dtype, jnp.floating) or jnp.dtype(part.dtype).itemsize < 2:
            continue  # powers of two
        if isinstance(x, QArray) or x.size <= few:
            found[path] = jnp.asarray(part, jnp.float32)
    return found


def _scale_name(x: QArray) -> str:
    return "scale" if x.outer_scale is None else "outer_scale"


def _size(x: Any, value: Array) -> Array:
    if isinstance(x, QArray):
        return jnp.abs(value)
    root = jnp.sqrt(jnp.mean(jnp.square(value)))
    return jnp.where(root > 0, root, 1)


def _replaced(low: Any, trained: Mapping[str, Array]) -> Any:
    """The parameters with trained values, in the dtypes that they are stored in."""

    def replace(path: Any, x: Any) -> Any:
        value = trained.get(path_str(path))
        if value is None:
            return x
        if not isinstance(x, QArray):
            return value.astype(x.dtype)
        name = _scale_name(x)
        return x._replace(**{name: value.astype(getattr(x, name).dtype)})

    return jax.tree_util.tree_map_with_path(replace, low, is_leaf=is_qarray)


def _step(
    fn: Callable[..., Any],
    state: Any,
    start: Any,
    sizes: Any,
    params: Any,
    low: Any,
    count: Array,
    rate: Array,
    args: Any,
    kwargs: Any,
    *,
    temperature: float,
) -> tuple[Any, Array]:
    """One step of Adam on the KL divergence from the teacher, and the divergence before it."""

    def logits(params: Any) -> Array:
        out = fn(params, *args, **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        return jax.nn.log_softmax(out.astype(jnp.float32) / temperature, axis=-1)

    teacher = logits(params)

    def loss(offsets: Any) -> Array:
        student = _replaced(low, {path: start[path] + sizes[path] * t for path, t in offsets.items()})
        student = jax.tree.map(lambda x: x.dequantize(jnp.float32) if is_qarray(x) else x, student, is_leaf=is_qarray)
        return jnp.mean(jnp.sum(jnp.exp(teacher) * (teacher - logits(student)), axis=-1))

    offsets, mean, square = state
    kl, gradients = jax.value_and_grad(loss)(offsets)
    first, second = _BETAS
    mean = jax.tree.map(lambda m, g: first * m + (1 - first) * g, mean, gradients)
    square = jax.tree.map(lambda v, g: second * v + (1 - second) * g * g, square, gradients)
    moved = jax.tree.map(
        lambda t, m, v: t - rate * (m / (1 - first**count)) / (jnp.sqrt(v / (1 - second**count)) + 1e-12),
        offsets,
        mean,
        square,
    )
    return (moved, mean, square), kl
