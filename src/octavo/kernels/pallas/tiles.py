"""How large the blocks of a kernel are: a small model of what a TPU does with them.

A product of blocks (tm, tk, tn) moves its operands once for each block of the output, multiplies whole blocks also
where a group fills only a part of one, and pays a little for each step. The model takes the larger of the time to move
and the time to multiply, for every size that fits the memory of the core, and keeps the fastest. Its constants are the
vendor's figures for a TPU v5e; no TPU was timed.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LANES = 128
# The compiler's own limit for one kernel is 16 MiB on the chips that have 64 or 128: some of it is left to it.
VMEM = 12 * 2**20
_BYTES_PER_SECOND = 819e9
_INT_OPS, _FLOPS = 394e12, 197e12
_STEP = 0.35e-6
_ROWS = (8, 16, 32, 64, 128, 256, 512)
_WIDTHS = (128, 256, 512, 768, 1024, 1536, 2048)


class Tiling(NamedTuple):
    """Rows, depth and columns of a block; of the transposed product, the rows are what is summed over."""

    m: int
    k: int
    n: int


# Part of the key of jit's caches, as the program depends on it.
_forced = jax.make_user_context(default_value=None)


def tiled(**tilings: tuple[int, int, int]):
    """A context in which kernels are traced with these blocks instead of those of the model.

    The names are those of kernels: `gmm`, `tgmm`, `matmul`.

    >>> with tiled(gmm=(128, 512, 256)):
    ...     forced("gmm")
    Tiling(m=128, k=512, n=256)
    """
    if unknown := sorted(set(tilings) - set(KERNELS)):
        raise ValueError(f"tiled: {unknown[0]!r} is no kernel; known are {', '.join(KERNELS)}")
    return _forced(tuple(sorted((name, Tiling(*sizes)) for name, sizes in tilings.items())))


KERNELS = ("gmm", "matmul", "tgmm")


def forced(name: str) -> Tiling | None:
    """The blocks that `tiled` gives a kernel here."""
    return dict(_forced.value or ()).get(name)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A grouped product of [m, k] and [g, k, n], or `transposed` the one that sums over rows, and what it is made of.

    `depth` is the step in which a block may be cut along k: that of scales that change along it, or one lane tile. Of a
    `fused` product the left operand comes in whole rows, which are quantized inside.
    """

    m: int
    k: int
    n: int
    groups: int
    lhs: Any
    rhs: Any
    out: Any
    transposed: bool = False
    depth: int | None = None
    fused: bool = False

    def __post_init__(self):
        for name in ("lhs", "rhs", "out"):
            object.__setattr__(self, name, jnp.dtype(getattr(self, name)))

    @property
    def integers(self) -> bool:
        return all(jnp.issubdtype(x, jnp.integer) for x in (self.lhs, self.rhs))

    @property
    def least_rows(self) -> int:
        """The rows of the smallest block of memory of the operands that are cut along rows."""
        if self.fused:
            return sublanes(jnp.int8)
        return max(sublanes(self.lhs), sublanes(self.rhs) if self.transposed else 1)

    def vmem(self, tiling: Tiling) -> int:
        """Bytes that a kernel holds at once: blocks twice, for the next is loaded meanwhile, and what it computes."""
        tm, tk, tn = (_up(t, LANES) if i else _up(t, 8) for i, t in enumerate(tiling))
        left, right = tm * (_up(self.k, LANES) if self.fused else tk), tm * tn if self.transposed else tk * tn
        out = tk * tn if self.transposed else tm * tn
        blocks = 2 * (left * self.lhs.itemsize + right * self.rhs.itemsize + out * self.out.itemsize)
        scales = 2 * 4 * (tk * LANES + 8 * tn if self.transposed else tm * LANES + 8 * tn)
        wide = 0 if self.integers else 2
        widened = wide * (left * (self.lhs.itemsize < 2) + right * (self.rhs.itemsize < 2))
        # Its codes, and two arrays of float32 on the way to them.
        turned = left * max(2, self.lhs.itemsize) if self.transposed else 0
        codes = left * (1 + 8) if self.fused else 0
        return blocks + scales + widened + turned + codes + 2 * 4 * out

    def seconds(self, tiling: Tiling) -> float:
        """What the model takes this product to last."""
        tm, tk, tn = tiling
        blocks, deep, wide = -(-self.m // tm), -(-self.k // tk), -(-self.n // tn)
        visits = blocks + min(self.groups, self.m) - 1
        # The systolic array loads as many rows of one operand as it has, however few of the other go through it.
        work = 2 * visits * max(tm, LANES) * _up(deep * tk, LANES) * _up(wide * tn, LANES)
        rows = visits * tm
        if self.transposed:
            moved = rows * (wide * self.k * self.lhs.itemsize + deep * self.n * self.rhs.itemsize)
            moved += self.groups * self.k * self.n * self.out.itemsize
        else:
            # A matrix that fits whole stays for all blocks of its group.
            read = min(self.groups, self.m) if deep == 1 else visits
            moved = wide * rows * self.k * self.lhs.itemsize + read * self.k * self.n * self.rhs.itemsize
            moved += self.m * self.n * self.out.itemsize
        peak = _INT_OPS if self.integers else _FLOPS
        return max(work / peak, moved / _BYTES_PER_SECOND) + visits * deep * wide * _STEP


def choose(problem: Problem, *, budget: int = VMEM) -> Tiling:
    """The blocks that the model finds fastest of all that fit.

    >>> choose(Problem(m=16384, k=7168, n=2048, groups=256, lhs="int8", rhs="int8", out="bfloat16"))
    Tiling(m=64, k=7168, n=512)
    """
    found = fitting(problem, budget=budget)
    if found is None:
        least = min(map(problem.vmem, _candidates(problem)))
        raise ValueError(f"no blocks of {problem} fit {budget} bytes of VMEM; the smallest take {least}")
    return found


def fitting(problem: Problem, *, budget: int = VMEM) -> Tiling | None:
    """What `choose` gives, or None where nothing fits."""
    return min((t for t in _candidates(problem) if problem.vmem(t) <= budget), key=problem.seconds, default=None)


def check(tiling: tuple[int, int, int], problem: Problem, name: str) -> Tiling:
    """Blocks that someone chose, or an error that says why the compiler would not take them."""
    tiling = Tiling(*tiling)
    for what, tile, size, step in zip(
        ("rows", "depth", "columns"),
        tiling,
        (problem.m, problem.k, problem.n),
        (problem.least_rows, LANES, LANES),
        strict=True,
    ):
        if tile <= 0 or (tile % step and tile != size):
            raise ValueError(
                f"{name}: a block of {tile} {what} is neither a multiple of {step} nor all {size}; "
                f"the model would take {tuple(choose(problem))}"
            )
    if problem.fused and problem.k % tiling.k:
        raise ValueError(
            f"{name}: blocks of {tiling.k} do not divide a depth of {problem.k}; the model would take "
            f"{tuple(choose(problem))}"
        )
    if problem.depth is not None and (tiling.k % problem.depth or problem.k % tiling.k):
        raise ValueError(
            f"{name}: scales change every {problem.depth} along a depth of {problem.k}, which blocks of {tiling.k} "
            f"do not follow; the model would take {tuple(choose(problem))}"
        )
    return tiling


def resolve(name: str, problem: Problem, tiling: tuple[int, int, int] | None) -> Tiling:
    """The blocks that were asked for, those of `tiled`, or the model's."""
    asked = tiling if tiling is not None else forced(name)
    return choose(problem) if asked is None else check(asked, problem, name)


def sublanes(dtype: Any) -> int:
    """The rows of the smallest block in which a TPU lays out this dtype."""
    bits = jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).bits
    return 8 * 32 // bits


def _candidates(problem: Problem) -> Iterator[Tiling]:
    least = problem.least_rows
    for m in (r for r in _ROWS if least <= r <= max(problem.m, least)):
        for k in _depths(problem):
            for n in _widths(problem.n):
                yield Tiling(m, k, n)


def _depths(problem: Problem) -> list[int]:
    step = problem.depth or LANES
    if problem.transposed:
        return _widths(problem.k)
    if problem.k % step:
        # Cut, the last block is masked; whole, nothing is.
        masked = () if problem.fused or problem.depth is not None else (w for w in _WIDTHS if w < problem.k)
        return sorted({problem.k, *masked})
    count = problem.k // step
    return [step * d for d in range(1, count + 1) if count % d == 0]


def _widths(size: int) -> list[int]:
    return sorted({w for w in _WIDTHS if w < size} | ({size} if size <= max(_WIDTHS) else set()))


def _up(x: int, step: int) -> int:
    return math.ceil(x / step) * step
