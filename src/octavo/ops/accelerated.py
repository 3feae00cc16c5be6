"""Products that run as Pallas kernels: where, and how an operand becomes what a kernel takes.

On TPUs "auto" takes a kernel where the program that is traced is one device's: inside of `jax.shard_map` over all axes
of the mesh, or where there is one device. XLA cannot partition a kernel, and a program that it partitions goes on with
XLA's own products. Megablox, which comes with jax, accumulates float32 alone and knows no scales, so the kernels are
ours (`octavo.kernels.pallas`). On NVIDIA GPUs "auto" stays with `lax.ragged_dot`: jax announces the end of the backend
that the kernel is lowered by. "pallas" takes it there all the same, and on any other platform interprets the TPU's.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from octavo._typing import Array
from octavo.kernels import pallas
from octavo.ops import factor
from octavo.ops.factor import Factor
from octavo.ops.lowering import is_explicit
from octavo.qarray import QArray


def wanted(lowering: str) -> bool:
    """Whether kernels come into question."""
    return lowering == "pallas" or (lowering == "auto" and on_one_device())


def on_one_device() -> bool:
    """Whether what is traced here is the program of a single accelerator, as far as can be known."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return all(kind == jax.sharding.AxisType.Manual for kind in mesh.axis_types)
    return jax.default_backend() != "cpu" and jax.device_count() == 1


class Ways(NamedTuple):
    """The functions that give one product: the kernels, and what runs on a platform without."""

    tpu: Callable[..., Array]
    cuda: Callable[..., Array]
    otherwise: Callable[..., Array] | None = None


def choose(lowering: str, ways: Ways, *args: Array) -> Array:
    """A kernel on its platform; elsewhere what runs otherwise, or with "pallas" the TPU's kernel, interpreted."""
    one_by_one = jax.custom_batching.sequential_vmap
    tpu = one_by_one(functools.partial(ways.tpu, interpret=False))
    if lowering == "pallas":
        interpreted = one_by_one(functools.partial(ways.tpu, interpret=True))
        return lax.platform_dependent(*args, tpu=tpu, cuda=one_by_one(ways.cuda), default=interpreted)
    return lax.platform_dependent(*args, tpu=tpu, default=ways.otherwise)


def refuse(lowering: str, reason: str | None) -> bool:
    """Whether a kernel is out of the question; an error if it was asked for by name."""
    if reason is not None and lowering == "pallas":
        raise ValueError(f"lowering='pallas': {reason}; lowering='auto' takes another way where it must")
    return reason is not None


def raw_refusal(lhs: Array, rhs: Array) -> str | None:
    """Why the kernels cannot multiply two arrays without scales; None if they can."""
    if is_explicit(lhs) or is_explicit(rhs):
        return "the kernel knows no explicit shardings: use jax.shard_map"
    return pallas.type_refusal(lhs.dtype, rhs.dtype)


class Codes(NamedTuple):
    """An operand as a kernel takes it: numbers, and the float32 scale that belongs to them, if any."""

    values: Array
    scale: Array | None


def codes_of(lhs: Factor, rhs: Factor) -> tuple[Codes, Codes] | None:
    """Both operands for a kernel; None where none of them has codes, or codes do not multiply without more terms."""
    quantized = [x for x in (lhs, rhs) if isinstance(x, QArray)]
    kind = factor.kind(lhs, rhs)
    if not quantized or kind is None or any(x.zero_point is not None for x in quantized):
        return None
    return _codes(lhs, kind), _codes(rhs, kind)


def _codes(x: Factor, kind: Any) -> Codes:
    if not isinstance(x, QArray):
        return Codes(x.astype(kind), None)
    fmt = factor.element(x)
    if factor.is_integer(x):
        stored = x.qvalue if x.qvalue.dtype == jnp.int4 and fmt.has_zero else factor.integers(x)
        return Codes(stored, factor.scale(x, codes=True))
    values = x.qvalue if x.qvalue.dtype in pallas.FLOAT8 else factor.values(x, kind)
    return Codes(values, factor.scale(x, codes=False))


def groups(lhs: Factor, rhs: Factor, sizes: Array, *, contract: int, dtype: Any, precision: Any, lowering: str):
    """How [m, k] x [g, k, n] (or [g, n, k]) runs with its scales in the kernel; None where it cannot.

    The result takes the way that the product runs where there is no kernel.
    """
    found = codes_of(lhs, rhs) if wanted(lowering) else None
    if found is None or raw_refusal(found[0].values, found[1].values) is not None:
        return None
    left, right = found
    ls, rs = _beside(left, 1), _beside(right, contract)
    if pallas.gmm_refusal(left.values, right.values, ls, rs, transposed=contract == 2) is not None:
        return None

    def kernel(which: Any, lhs: Array, rhs: Array, sizes: Array, *scales: Array, **how: Any) -> Array:
        at = iter(scales)
        ls_, rs_ = None if ls is None else next(at), None if rs is None else next(at)
        how |= {"lhs_scale": ls_, "rhs_scale": rs_, "transposed": contract == 2, "dtype": dtype, "precision": precision}
        return which(lhs, rhs, sizes, **how)

    ways = Ways(functools.partial(kernel, pallas.gmm), functools.partial(kernel, pallas.gpu_gmm))
    args = (left.values, right.values, sizes, *(s for s in (ls, rs) if s is not None))
    return _with_reference(lowering, ways, args, lhs, rhs, sizes)


def rows(
    lhs: Factor, rhs: Factor, sizes: Array, scales: tuple[Array, ...], *, dtype: Any, precision: Any, lowering: str
):
    """How [m, k] x [m, n] -> [g, k, n] runs with its scales in the kernel; None where it cannot."""
    found = codes_of(lhs, rhs) if wanted(lowering) else None
    if found is None or raw_refusal(found[0].values, found[1].values) is not None:
        return None
    left, right = found
    ls, rs = _beside(left, 0), _beside(right, 0)
    own = (*(() if rs is None else (rs[None],)), *(() if ls is None else (ls.T[None],)), *scales)
    if pallas.tgmm_refusal(left.values, right.values, sizes, own) is not None:
        return None

    def kernel(which: Any, lhs: Array, rhs: Array, sizes: Array, *scales: Array, **how: Any) -> Array:
        return which(lhs, rhs, sizes, scales=scales, dtype=dtype, precision=precision, **how)

    ways = Ways(functools.partial(kernel, pallas.tgmm), functools.partial(kernel, pallas.gpu_tgmm))
    return _with_reference(lowering, ways, (left.values, right.values, sizes, *own), lhs, rhs, sizes, scales)


def _beside(codes: Codes, contract: int) -> Array | None:
    """The scale with one entry or all on axes that are kept; along the contraction its tiles stay."""
    scale = codes.scale
    if scale is None:
        return None
    for axis, (count, size) in enumerate(zip(scale.shape, codes.values.shape, strict=True)):
        if axis != contract and 1 < count < size:
            scale = jnp.repeat(scale, size // count, axis=axis)
    return scale


def _with_reference(lowering: str, ways: Ways, args: tuple[Array, ...], *operands: Any) -> Any:
    """A function of the reference way, which gives the kernel's result with the gradients of the reference.

    Codes have no gradient; a float operand beside them, and scales, have the one of the plain product.
    """

    def run(reference: Callable[..., Array]) -> Array:
        leaves, structure = jax.tree.flatten(operands)
        plain = lambda *leaves: reference(*jax.tree.unflatten(structure, leaves))  # noqa: E731

        @jax.custom_vjp
        def product(args: tuple[Array, ...], leaves: list[Array]) -> Array:
            count = len(args)
            every = Ways(
                lambda *every, **how: ways.tpu(*every[:count], **how),
                lambda *every, **how: ways.cuda(*every[:count], **how),
                lambda *every: plain(*every[count:]),
            )
            return choose(lowering, every, *args, *leaves)

        def forward(args: tuple[Array, ...], leaves: list[Array]):
            return product(args, leaves), leaves

        def backward(leaves: list[Array], g: Array):
            return None, list(jax.vjp(plain, *leaves)[1](g))

        product.defvjp(forward, backward)
        return product(jax.tree.map(lax.stop_gradient, args), leaves)

    return run
