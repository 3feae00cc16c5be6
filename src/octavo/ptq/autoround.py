"""AutoRound: rounding up or down is trained by the sign of the gradient, block by block.

Cheng et al., Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs (arXiv 2309.05516). With
the outputs y of a block of the float model, the inputs x that it has in the quantized model, and an offset V in
[-1/2, 1/2] for each weight:

    W_q = s (clip(round(u + V)) - z)        V <- V - rate sign(d |f(x; W_q) - y|^2 / dV)

over some of the examples at a time, at a rate that decays linearly to zero and moves no V by more than 1/2 in all. The
paper starts at the nearest codes, u = W / s + z, and trains factors of the range too. Here the scales are searched and
the codes given, by GPTQ as a rule: u is the point nearest to W / s + z that is rounded to the given code. The result
is the best of several iterates on all examples, the start among them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from octavo._tree import flatten_paths, path_str
from octavo._typing import Array
from octavo.numerics import BlockFormat, Format, IntFormat
from octavo.ptq.scales import encode, scales_of
from octavo.qarray import QArray, is_qarray

_CHECKS = 8
"""The number of iterates whose loss on all examples is measured."""
_WITHIN = 0.49
"""How far a point may be from the code that it is rounded to."""


class _Grid(NamedTuple):
    """The grid of a weight, in the weight's shape, and points between its codes."""

    points: Array
    scale: Array
    zero: Array
    lowest: Array
    highest: Array


def autoround(
    fn: Callable[..., Any],
    params: Any,
    low: Any,
    inputs: Array,
    targets: Array | None = None,
    *,
    steps: int = 200,
    rows: int = 8,
    log: Callable[[str], None] | None = None,
) -> Any:
    """Train the codes of quantized parameters, such that the outputs are those of the float parameters.

    Args:
        fn: A function of parameters and inputs: a block of a model, or a whole one.
        params: The float parameters.
        low: The same tree with QArrays of integer formats, as `octavo.ptq.quantize` returns it: the start.
        inputs: Inputs of the quantized block, with examples along the first axis.
        targets: The outputs of the float block for the inputs that it has; by default for the same.
        steps: The number of steps.
        rows: Examples in each step.
        log: Called with the error before and after, relative to the square of the targets.

    Returns:
        A tree like `low` with other codes: on these examples, its error is at most that of `low`.

    >>> import octavo
    >>> def block(params, x):
    ...     return x + jnp.tanh(x @ params["up"]) @ params["down"]
    >>> keys = jax.random.split(jax.random.key(0), 3)
    >>> params = {"up": jax.random.normal(keys[0], (32, 64)) / 6, "down": jax.random.normal(keys[1], (64, 32)) / 8}
    >>> x = jax.random.normal(keys[2], (256, 32))
    >>> rule = octavo.QuantizationRule(weight_qtype="int2", tile_size=32)
    >>> low = octavo.ptq.quantize(block, params, rule, [x], method="search")
    >>> new = autoround(block, params, low, x, steps=50, rows=64)
    >>> def error(low):
    ...     return float(jnp.mean((block({n: q.dequantize() for n, q in low.items()}, x) - block(params, x)) ** 2))
    >>> error(new) < 0.5 * error(low)
    True
    """
    if steps < 1:
        raise ValueError(f"steps is the number of training steps, at least 1: got {steps}")
    floats = flatten_paths(params)
    codes = {path: q for path, q in flatten_paths(low, is_qarray).items() if is_qarray(q)}
    if not codes:
        raise ValueError("no parameter is quantized: train the rounding of what octavo.ptq.quantize returned")
    for path, q in codes.items():
        check_format(path, q.qtype)
    rows = min(rows, len(inputs))
    pieces = [slice(at, at + rows) for at in range(0, len(inputs) - rows + 1, rows)]
    if targets is None:
        run = jax.jit(fn)
        targets = jnp.concatenate([run(params, inputs[piece]) for piece in pieces])
        inputs = inputs[: len(targets)]
    grids = {path: _grid(floats[path], q) for path, q in codes.items()}
    offsets = {path: jnp.zeros(grid.points.shape) for path, grid in grids.items()}

    def total(offsets: Any) -> float:
        return sum(float(_loss(fn, offsets, grids, low, inputs[p], targets[p])) for p in pieces) / len(pieces)

    first = total(offsets)
    best, least, rng = offsets, first, np.random.default_rng(0)
    for step in range(1, steps + 1):
        some = rng.choice(len(inputs), rows, replace=False)
        rate = jnp.float32((1 - (step - 1) / steps) / steps)
        offsets = _step(fn, offsets, grids, low, inputs[some], targets[some], rate)
        if step == steps or step % max(1, steps // _CHECKS) == 0:
            now = total(offsets)
            best, least = (offsets, now) if now < least else (best, least)
    if log is not None:
        power = float(jnp.mean(jnp.square(targets)))
        log(f"error of the outputs {least / power:.3%} (at the start {first / power:.3%})")
    return _replaced(low, {path: _encoded(q, _values(best[path], grids[path])) for path, q in codes.items()})


def check_format(name: str, fmt: Format) -> None:
    """Raise unless the codes of a format are integers, between which an offset rounds up or down."""
    if not isinstance(fmt.element if isinstance(fmt, BlockFormat) else fmt, IntFormat):
        raise ValueError(f"{name} is quantized to {fmt.name}, but AutoRound is for integers: use 'gptq'")


@jax.jit
def _grid(x: Array, q: QArray) -> _Grid:
    scales, fmt = scales_of(q), q.qtype
    zero = jnp.zeros(()) if scales.zero_point is None else scales.zero_point
    code = scales.round(q.dequantize(jnp.float32), fmt) / jnp.where(scales.scale == 0, 1, scales.scale) + zero
    code = jnp.round(code)
    exact = x.astype(jnp.float32) / jnp.where(scales.scale == 0, 1, scales.scale) + zero
    points = code + jnp.clip(exact - code, -_WITHIN, _WITHIN)
    return _Grid(points, scales.scale, zero, jnp.float32(fmt.smallest), jnp.float32(fmt.largest))


def _values(offsets: Array, grid: _Grid) -> Array:
    """The rounded weights; their gradient is that of unrounded ones."""
    inside = jnp.clip(grid.points + offsets, grid.lowest, grid.highest)
    codes = inside + jax.lax.stop_gradient(jnp.round(inside) - inside)
    return (codes - grid.zero) * grid.scale


def _encoded(q: QArray, values: Array) -> QArray:
    new = encode(values, q)
    return new if q.packed is None else new.pack(q.packed[0])


def _replaced(low: Any, values: dict[str, Any]) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, x: values.get(path_str(path), x), low, is_leaf=is_qarray)


@functools.partial(jax.jit, static_argnums=0)
def _loss(fn: Callable[..., Any], offsets: Any, grids: Any, low: Any, x: Array, y: Array) -> Array:
    values = {path: _values(own, grids[path]) for path, own in offsets.items()}
    return jnp.mean(jnp.square(fn(_replaced(low, values), x).astype(jnp.float32) - y))


@functools.partial(jax.jit, static_argnums=0)
def _step(fn: Callable[..., Any], offsets: Any, grids: Any, low: Any, x: Array, y: Array, rate: Array) -> Any:
    gradients = jax.grad(_loss, argnums=1)(fn, offsets, grids, low, x, y)
    return jax.tree.map(lambda v, g: jnp.clip(v - rate * jnp.sign(g), -0.5, 0.5), offsets, gradients)
