"""The cost of a function by number format: MACs weighted by the bits of their operands, and the bits of weights.

Zhang, Zhang and Lew, "PokeBNN: A Binary Pursuit of Lightweight Accuracy", CVPR 2022 (arXiv 2112.00133), measure the
arithmetic computation effort, ACE, by the multiply-adds n_ij between numbers of i and of j bits:

    ACE = sum_ij n_ij i j
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from octavo._text import format_table
from octavo.inspect.flops import count_flops
from octavo.numerics import FormatLike, get_format
from octavo.qarray import QArray, is_qarray
from octavo.transform.api import Weights, weight_names
from octavo.transform.jaxpr import as_array_function, current_platform, make_live_jaxpr


@dataclasses.dataclass(frozen=True)
class Compute:
    """The multiply-adds between numbers of two formats."""

    lhs: str
    rhs: str
    lhs_bits: int
    rhs_bits: int
    macs: int

    @property
    def ace(self) -> int:
        return self.macs * self.lhs_bits * self.rhs_bits


@dataclasses.dataclass(frozen=True)
class Memory:
    """The weights of a format: how many values, the bits of each, and the bits of all their scales and zero points."""

    format: str
    bits_per_value: int
    values: int
    scale_bits: int = 0

    @property
    def bits(self) -> int:
        return self.values * self.bits_per_value + self.scale_bits


@dataclasses.dataclass(frozen=True)
class Cost:
    """Multiply-adds and weights by number format, the costliest first; printed as a table.

    `opaque` are kernels, whose multiply-adds are missing here; `unknown_loops` are loops of unknown trip count, whose
    bodies count once.

    >>> Cost((Compute("int8", "int4", 8, 4, macs=100),), ()).ace
    3200
    """

    compute: tuple[Compute, ...]
    memory: tuple[Memory, ...]
    opaque: tuple[str, ...] = ()
    unknown_loops: tuple[str, ...] = ()

    @property
    def macs(self) -> int:
        """All multiply-adds."""
        return sum(row.macs for row in self.compute)

    @property
    def ace(self) -> int:
        """The arithmetic effort: multiply-adds times the bits of both operands."""
        return sum(row.ace for row in self.compute)

    @property
    def memory_bits(self) -> int:
        """The bits of all weights, scales included."""
        return sum(row.bits for row in self.memory)

    def to_json(self) -> str:
        """The costs as a JSON text."""
        return json.dumps(
            {
                "macs": self.macs,
                "ace": self.ace,
                "memory_bits": self.memory_bits,
                "compute": [dataclasses.asdict(row) | {"ace": row.ace} for row in self.compute],
                "memory": [dataclasses.asdict(row) | {"bits": row.bits} for row in self.memory],
                "opaque": self.opaque,
                "unknown_loops": self.unknown_loops,
            }
        )

    def __str__(self) -> str:
        rows = _table(
            ("operands", "bits", "MACs", "ACE", "share"),
            [
                (
                    f"{r.lhs} x {r.rhs}",
                    f"{r.lhs_bits} x {r.rhs_bits}",
                    f"{r.macs:.4g}",
                    f"{r.ace:.4g}",
                    r.ace / self.ace,
                )
                for r in self.compute
            ],
        )
        rows += _table(
            ("weights", "bits", "values", "bytes", "share"),
            [
                (r.format, f"{r.bits_per_value}", f"{r.values:.4g}", f"{r.bits / 8:.4g}", r.bits / self.memory_bits)
                for r in self.memory
            ],
        )
        lines = format_table(rows)
        lines += [f"not counted, opaque: {name}" for name in self.opaque]
        lines += [f"counted once, unknown trip count: {name}" for name in self.unknown_loops]
        total = f"{self.macs:.4g} multiply-adds, ACE {self.ace:.4g}, weights of {self.memory_bits / 8:.4g} bytes"
        return "\n".join([*lines, total])


def cost(fn: Any, *args: Any, formats: Mapping[str, FormatLike] | None = None, weights: Weights = None) -> Cost:
    """The cost of `fn(*args)` by number format, without running it.

    Multiply-adds are those of `octavo.verify`: of matmuls and convolutions, in every iteration of a scan. An operand
    has the bits of the codes that it was computed from, whatever the dtype of the matmul: those of the format for a
    QArray, those of the dtype for codes made inside.

    Args:
        fn: The function.
        *args: Arrays, QArrays, `jax.ShapeDtypeStruct`s or trees of them.
        formats: Formats of codes by dtype, where no dtype is as narrow as the format: `{"uint8": "fp6"}`.
        weights: Which arguments are weights, as for `quantized`. QArrays count with their packed bits and scales.

    >>> import octavo
    >>> def predict(params, x):
    ...     return x @ params["w"]
    >>> low = octavo.quantized(predict, "int8")
    >>> print(cost(low, {"w": jnp.ones((64, 32))}, jnp.ones((8, 64))))
    operands     bits   MACs       ACE        share
    int8 x int8  8 x 8  1.638e+04  1.049e+06  100.0 %
    weights      bits   values     bytes      share
    float32      32     2048       8192       100.0 %
    1.638e+04 multiply-adds, ACE 1.049e+06, weights of 8192 bytes
    """
    if not callable(fn):
        raise TypeError(f"cost takes a function and its arguments, got {type(fn).__name__}: cost(fn, *args)")
    whole = jax.tree.leaves(args, is_leaf=is_qarray)
    codes = _codes(whole)
    known = {q.qtype.name: q.qtype for q in codes.values()} | dict(formats or {})
    jaxpr, names = make_live_jaxpr(*as_array_function(fn, args, {})), {i: q.qtype.name for i, q in codes.items()}
    found = count_flops(jaxpr, platform=current_platform(), formats=names)
    macs: dict[tuple[tuple[str, int], ...], int] = {}
    for p, (lhs, rhs) in zip(found.matmuls, found.codes, strict=True):
        sides = _named(lhs or p.lhs_dtype, known), _named(rhs or p.rhs_dtype, known)
        macs[sides] = macs.get(sides, 0) + p.flops // 2
    rows = [Compute(lhs, rhs, i, j, n) for ((lhs, i), (rhs, j)), n in macs.items()]
    chosen = weight_names(fn, args, {}, weights)
    kept = [x for x, name in zip(whole, chosen, strict=True) if name is not None]
    dear = sorted(rows, key=lambda row: -row.ace)
    return Cost(tuple(dear), _memory(kept, known), found.opaque, found.loops)


def _codes(whole: list[Any]) -> dict[int, QArray]:
    """The QArrays by the index of their codes among all arrays."""
    place, found = 0, {}
    for x in whole:
        if isinstance(x, QArray):
            found[place] = x
        place += sum(hasattr(part, "dtype") for part in jax.tree.leaves(x))
    return found


def _memory(weights: list[Any], formats: Mapping[str, FormatLike]) -> tuple[Memory, ...]:
    rows: dict[str, Memory] = {}
    for x in weights:
        quantized = isinstance(x, QArray)
        name, bits = _named(x.qtype.name if quantized else str(x.dtype), formats)
        parts = [x.scale, x.zero_point, x.outer_scale] if quantized else []
        scales = sum(math.prod(p.shape) * _bits(str(p.dtype)) for p in parts if p is not None)
        values = math.prod(x._stored_shape if quantized else x.shape)
        before = rows.get(name, Memory(name, bits, 0))
        rows[name] = Memory(name, bits, before.values + values, before.scale_bits + scales)
    return tuple(sorted(rows.values(), key=lambda row: -row.bits))


def _named(name: str, formats: Mapping[str, FormatLike]) -> tuple[str, int]:
    """The name of the format of codes, and their bits."""
    if name not in formats:
        return name, _bits(name)
    fmt = get_format(formats[name])
    return fmt.name, fmt.bits


def _bits(dtype: str) -> int:
    kind = jnp.dtype(dtype)
    if jnp.issubdtype(kind, jnp.floating):
        return jnp.finfo(kind).bits
    return jnp.iinfo(kind).bits if jnp.issubdtype(kind, jnp.integer) else 8 * kind.itemsize


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[tuple[str, ...]]:
    if not rows:
        return []
    return [head, *((*row[:-1], f"{100 * row[-1]:.1f} %") for row in rows)]
