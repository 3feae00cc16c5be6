"""Einsums of any number of operands, with pairwise contractions in low precision."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from octavo import _sharding
from octavo._typing import Array, DTypeLike, PRNGKeyArray
from octavo.ops.config import DotConfig
from octavo.ops.operands import ArrayOrQArray, widen_integer
from octavo.ops.product import Scaling
from octavo.ops.products.dot import dot_general, init_scaling
from octavo.qarray import QArray

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def einsum(
    subscripts: Any,
    /,
    *operands: Any,
    optimize: Any = "optimal",
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    config: DotConfig | None = None,
    key: PRNGKeyArray | None = None,
    scaling: Scaling | Sequence[Scaling] | None = None,
) -> Array:
    """`jax.numpy.einsum` in low precision: any number of operands, ellipses, repeated and summed-out indices.

    Operands may be QArrays in any mix with arrays; with a `config`, float operands of every pairwise contraction are
    quantized, the one that comes first in the call being its lhs. Steps that contract nothing (an outer product, a
    diagonal, a sum over an index of one operand) are no matmul and stay in float. As in Qwix, an index of the result
    may be shorter in one operand, by a whole factor: its values are repeated, as keys are for groups of heads.

    Args:
      subscripts: as in `jax.numpy.einsum`.
      *operands: arrays or QArrays.
      optimize: as in `jax.numpy.einsum`.
      precision: as in `jax.numpy.einsum`, for dots computed in float.
      preferred_element_type: the dtype of the result; by default the operands' promoted dtype.
      out_sharding: the sharding of the result, on a mesh with explicit axes.
      config: the quantization of the operands of every contraction.
      key: for stochastic rounding.
      scaling: external ranges, as in `octavo.dot_general`: of the single contraction, or a sequence with one for each.

    Returns:
      The einsum.

    >>> import octavo
    >>> x, w = jnp.ones((2, 3, 4)), jnp.ones((4, 5))
    >>> run = jax.jit(octavo.einsum, static_argnums=0, static_argnames="config")
    >>> run("...d,df->...f", x, w, config=octavo.DotConfig.qt("int8")).shape
    (2, 3, 5)
    """
    ranges = [scaling] if isinstance(scaling, Mapping) else [*(scaling or ())]
    done = 0

    def product(lhs: ArrayOrQArray, rhs: ArrayOrQArray, numbers: Any, *, step: int, **kinds: Any) -> Array:
        nonlocal done
        own = None if key is None else jax.random.fold_in(key, step)
        given = ranges[done] if done < len(ranges) else None
        done += 1
        return dot_general(lhs, rhs, numbers, **kinds, config=config, key=own, scaling=given)

    kinds = {"precision": precision, "preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
    out = pairwise(product, subscripts, *operands, optimize=optimize, **kinds)
    if ranges and done != len(ranges):
        raise ValueError(f"einsum {subscripts!r} contracts {done} times, but scaling has the ranges of {len(ranges)}")
    return out


def init_einsum_scaling(
    config: DotConfig, subscripts: Any, /, *operands: Any, optimize: Any = "optimal"
) -> Scaling | tuple[Scaling, ...]:
    """The initial state of every tracker of a config, for an einsum of operands of these shapes.

    Args:
      config: the config of the einsum.
      subscripts: as in `einsum`.
      *operands: the operands, or anything with their shapes and dtypes.
      optimize: as in `einsum`.

    Returns:
      The `scaling` argument of `einsum`: one scaling, or a tuple with one for each of several contractions.

    >>> from octavo.calibration import AmaxHistory
    >>> delayed = {"tracker": AmaxHistory(length=4), "per_tensor": True}
    >>> delayed = DotConfig.qt("float8_e4m3fn").with_operands(fwd_lhs=delayed)
    >>> state = init_einsum_scaling(delayed, "bi,io->bo", jnp.ones((2, 8)), jnp.ones((8, 4)))
    >>> state["lhs"]["amax_history"].shape
    (4, 1, 1)
    """
    found: list[Any] = []

    def product(lhs: Array, rhs: Array, numbers: Any, *, step: int, **kinds: Any) -> Array:
        del step
        found.append((*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (lhs, rhs)), numbers))
        return jax.lax.dot_general(lhs, rhs, numbers, **kinds)

    jax.eval_shape(lambda operands: pairwise(product, subscripts, *operands, optimize=optimize), operands)
    states = tuple(init_scaling(config, *each) for each in found)
    return states[0] if len(states) == 1 else states


def pairwise(
    product: Callable[..., Array],
    subscripts: Any,
    /,
    *operands: Any,
    optimize: Any = "optimal",
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> Array:
    """An einsum whose pairwise contractions call `product`: a dot_general with an additional argument `step`."""
    terms, out, arrays = _parse(subscripts, operands)
    if preferred_element_type is None and len(arrays) > 1:
        dtypes = [x.dtype for x in arrays]
        preferred_element_type = widen_integer(dtypes[0] if len(set(dtypes)) == 1 else jnp.result_type(*dtypes))
    kinds = {"precision": precision, "preferred_element_type": preferred_element_type}
    sizes = _sizes(terms, arrays)
    pool = [_Term(_broadcast(x, term, sizes, out), i) for i, (term, x) in enumerate(zip(terms, arrays, strict=True))]
    steps = _path([p.indices for p in pool], out, [p.x.shape for p in pool], optimize)
    for step, pair in enumerate(steps):
        first, second = sorted((pool[i] for i in pair), key=lambda p: p.place)
        pool = [p for i, p in enumerate(pool) if i not in pair]
        keep = set(out).union(*(p.indices for p in pool))
        options = {**kinds, "step": step, "out_sharding": out_sharding if not pool else None}
        pool.append(_contract(product, first, second, keep, out if not pool else None, options))
    (last,) = pool
    return _finish(last, out, preferred_element_type)


class _Term:
    """An intermediate operand: an array, the index of each of its axes, and its position among the operands."""

    def __init__(self, named: tuple[ArrayOrQArray, str], place: int):
        self.x, self.indices = named
        self.place = place


def _parse(subscripts: Any, operands: tuple[Any, ...]) -> tuple[list[str], str, list[ArrayOrQArray]]:
    if not isinstance(subscripts, str):
        subscripts, operands = _from_lists((subscripts, *operands))
    arrays = [x if isinstance(x, QArray) else jnp.asarray(x) for x in operands]
    text = subscripts.replace(" ", "")
    left, arrow, out = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(arrays):
        raise ValueError(f"einsum {subscripts!r} names {len(terms)} operands, but {len(arrays)} are given")
    widths = [x.ndim - (len(t) - 3) if "..." in t else 0 for t, x in zip(terms, arrays, strict=True)]
    for term, x, width in zip(terms, arrays, widths, strict=True):
        named = term.replace("...", "")
        if width < 0 or ("..." not in term and len(named) != x.ndim) or not all(c in _LETTERS for c in named):
            raise ValueError(f"einsum {subscripts!r}: {term!r} does not fit an operand of shape {x.shape}")
    free = [c for c in _LETTERS if c not in text]
    dots = "".join(free[: max(widths, default=0)])
    terms = [t.replace("...", dots[len(dots) - n :]) for t, n in zip(terms, widths, strict=True)]
    if arrow:
        out = out.replace("...", dots)
    else:
        once = sorted(c for c in set("".join(terms)) - set(dots) if "".join(terms).count(c) == 1)
        out = dots + "".join(once)
    if unknown := set(out) - set("".join(terms)):
        raise ValueError(f"einsum {subscripts!r}: {sorted(unknown)} of the result are in no operand")
    return terms, out, arrays


def _from_lists(parts: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """The other calling convention: operand, list of axes, operand, list of axes, ..., list of result axes."""
    *pairs, out = parts if len(parts) % 2 else (*parts, None)
    name = lambda axes: "".join("..." if a is Ellipsis else _LETTERS[a] for a in axes)  # noqa: E731
    text = ",".join(name(axes) for axes in pairs[1::2])
    return text if out is None else f"{text}->{name(out)}", tuple(pairs[::2])


def _sizes(terms: list[str], operands: list[ArrayOrQArray]) -> dict[str, int]:
    """The size of each index: the largest of its axes, or 0 if one is empty and none is longer than 1."""
    found: dict[str, set[int]] = {}
    for term, array in zip(terms, operands, strict=True):
        for c, n in zip(term, array.shape, strict=True):
            found.setdefault(c, set()).add(n)
    return {c: max(sizes - {1} or {1}) for c, sizes in found.items()}


def _broadcast(x: ArrayOrQArray, term: str, size: dict[str, int], out: str) -> tuple[ArrayOrQArray, str]:
    """Take the diagonal of repeated indices, drop axes of size one, and repeat the values of shorter ones.

    Qwix also repeats along contracted axes, where sizes that differ are hardly meant.
    """
    if len(set(term)) < len(term):
        unique = "".join(dict.fromkeys(term))
        x, term = jnp.einsum(f"{term}->{unique}", _float(x)), unique
    for axis, c in enumerate(term):
        n = x.shape[axis]
        if n in (1, size[c]):
            continue
        if c not in out or not n or size[c] % n:
            raise ValueError(
                f"einsum: index {c!r} has sizes {n} and {size[c]}, but only an index of the result may be shorter, "
                "by a whole factor: repeat the shorter operand by jnp.repeat before it is quantized"
            )
        x = _repeat(x, size[c] // n, axis)
    kept = [i for i, c in enumerate(term) if x.shape[i] == size[c]]
    if len(kept) < len(term):
        x = x[tuple(slice(None) if i in kept else 0 for i in range(len(term)))]
    return x, "".join(term[i] for i in kept)


def _repeat(x: ArrayOrQArray, count: int, axis: int) -> ArrayOrQArray:
    """`jnp.repeat`; each scale of a QArray is that of a longer tile then."""
    if not isinstance(x, QArray):
        return jnp.repeat(x, count, axis=axis)
    x = x.unpack()
    return x.replace(qvalue=jnp.repeat(x.qvalue, count, axis=axis))


def _path(terms: list[str], out: str, shapes: list[tuple[int, ...]], optimize: Any) -> list[tuple[int, ...]]:
    """Pairs of positions to contract; each result is appended to the list."""
    if len(terms) <= 2:
        return [tuple(range(len(terms)))] if len(terms) == 2 else []
    kind = {True: "optimal", False: "greedy", "auto": "optimal"}.get(optimize, optimize)
    # A symbolic size stands for a batch: it counts as a large one.
    numbers = [tuple(n if isinstance(n, int) else 1024 for n in shape) for shape in shapes]
    dummies = [np.broadcast_to(np.float32(0), shape) for shape in numbers]
    present = "".join(c for c in out if any(c in t for t in terms))
    path, _ = np.einsum_path(f"{','.join(terms)}->{present}", *dummies, optimize=(kind, 2**60))
    steps = [tuple(p) for p in path[1:]]
    count, pairs = len(terms), []
    for step in steps:
        for _ in range(len(step) - 1):
            pairs.append(step if len(step) == 2 else (count - 2, count - 1))
            count -= 1
    return pairs


def _contract(
    product: Callable[..., Array], a: _Term, b: _Term, keep: set[str], order: str | None, options: dict[str, Any]
) -> _Term:
    a, b = (_sum_out(term, keep | set(other.indices)) for term, other in ((a, b), (b, a)))
    shared = [c for c in a.indices if c in b.indices]
    batch = [c for c in shared if c in keep]
    contract = [c for c in shared if c not in keep]
    if order is not None:
        batch.sort(key=order.index)
    at = lambda term, names: tuple(term.indices.index(c) for c in names)  # noqa: E731
    numbers = ((at(a, contract), at(b, contract)), (at(a, batch), at(b, batch)))
    result = "".join([*batch, *(c for c in a.indices if c not in shared), *(c for c in b.indices if c not in shared)])
    options = options | {"out_sharding": _in_order(options["out_sharding"], order, result)}
    if not contract:
        del options["step"]
        product = dot_general
    return _Term((product(a.x, b.x, numbers, **options), result), min(a.place, b.place))


def _in_order(sharding: Any, order: str | None, result: str) -> Any:
    """The sharding of the einsum's result, permuted to the axes of a dot's result."""
    if sharding is None or order is None:
        return None
    spec = _sharding.spec_of(sharding)
    axes = dict(zip(order, _sharding.partitions(sharding, len(order)), strict=True))
    own = PartitionSpec(*(axes[c] for c in result), unreduced=spec.unreduced, reduced=spec.reduced)
    return _sharding.with_spec(sharding, own)


def _sum_out(term: _Term, keep: set[str]) -> _Term:
    gone = tuple(i for i, c in enumerate(term.indices) if c not in keep)
    if not gone:
        return term
    return _Term((jnp.sum(_float(term.x), axis=gone), "".join(c for c in term.indices if c in keep)), term.place)


def _finish(term: _Term, out: str, dtype: Any) -> Array:
    """Transpose the result; indices that had size one in every operand are added back with size one."""
    x = _float(_sum_out(term, set(out)).x)
    indices = "".join(c for c in term.indices if c in out)
    x = jnp.transpose(x, [indices.index(c) for c in out if c in indices])
    shape = iter(x.shape)
    x = x.reshape([next(shape) if c in indices else 1 for c in out])
    return x if dtype is None else x.astype(dtype)


def _float(x: ArrayOrQArray) -> Array:
    return x.dequantize() if isinstance(x, QArray) else x
