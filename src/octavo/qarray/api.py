"""The functions of QArrays: quantize, dequantize, fake_quant, stack, shardings, and plain arrays for files."""

import functools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from octavo import _sharding
from octavo._config import Config
from octavo._typing import Array, DTypeLike, Float, PRNGKeyArray
from octavo.calibration import Bounds, CalibrationLike
from octavo.numerics import FormatLike
from octavo.qarray.arithmetic import ARITHMETICS
from octavo.qarray.indexing import unpad
from octavo.qarray.qarray import QArray, Tiles
from octavo.qarray.quantizer import Quantizer


def quantize(
    array: Float[Array, "..."],
    qtype: FormatLike,
    *,
    channelwise_axes: Collection[int] = (),
    tiled_axes: Mapping[int, int | float] | None = None,
    calibration_method: CalibrationLike = "absmax",
    scale_dtype: DTypeLike | None = None,
    arithmetic: str = "float32",
) -> QArray:
    """Quantize an array with scales that are calibrated on the array itself.

    The arguments are Qwix's and so, for float32 inputs, are the results, except that a value halfway between two codes
    may round the other way.

    Args:
      array: The values, in float32, bfloat16, float16 or float64.
      qtype: The number format: a registered name such as "int8" or "nvfp4", a dtype, or a `Format`.
      channelwise_axes: Axes with one scale per index. Axes that are neither channelwise nor tiled share a scale.
      tiled_axes: The tile size of each tiled axis: a number of values, or 1/n for n tiles.
      calibration_method: How the range is measured: "absmax", "minmax", "rms,7", ... or a `Calibration`.
      scale_dtype: The dtype of the scales; by default the array's, float32 for float16, or the format's own.
      arithmetic: "float32"; "qwix" and "aqt" give the results of these libraries bit for bit, also in bfloat16.

    Returns:
      A `QArray` of the same shape.

    >>> quantize(jnp.asarray([0.1, 1.0, -0.7]), "int8").qvalue.tolist()
    [13, 127, -89]
    """
    quantizer = Quantizer(
        qtype,
        channelwise_axes=channelwise_axes,
        tiled_axes=tiled_axes,
        calibration=calibration_method,
        scale_dtype=scale_dtype,
        arithmetic=arithmetic,
    )
    return quantizer.quantize(jnp.asarray(array))


def dequantize(array: QArray, *, arithmetic: str = "float32") -> Float[Array, "..."]:
    """Dequantize a QArray.

    Args:
      array: The quantized array.
      arithmetic: "float32", or "qwix" or "aqt" for the results of these libraries bit for bit.

    Returns:
      The values, in the QArray's `dtype`.

    >>> dequantize(quantize(jnp.asarray([0.0, 100.0, 448.0]), "float8_e4m3fn")).tolist()
    [0.0, 96.0, 448.0]
    """
    if arithmetic == "float32":
        return array.dequantize()
    q = array._map(_sharding.without_reduced).unpack()
    tiles = Tiles(q._stored_shape, q.tile_shape, q.scale.shape)
    zero_point = None if q.zero_point is None else tiles.split_scale(q.zero_point)
    scale = tiles.split_scale(q.scale).astype(q.dtype)
    x = ARITHMETICS[arithmetic].decode(tiles.split(q.qvalue), q.qtype, scale, zero_point, q.dtype)
    return unpad(tiles.merge(x), q.padding)


def fake_quant(
    array: Float[Array, "..."],
    quantizer: Quantizer | FormatLike,
    *,
    key: PRNGKeyArray | None = None,
    clip_gradient: bool = True,
) -> Float[Array, "..."]:
    """Quantize and dequantize with a straight-through gradient, as in quantization-aware training.

    Args:
      array: The values.
      quantizer: A `Quantizer`, or a number format for one scale per tensor.
      key: A PRNG key, for stochastic rounding.
      clip_gradient: Whether the gradient is zero for values outside the calibrated range. With "absmax" and "minmax"
        no value is outside.

    Returns:
      The dequantized values, in the dtype of `array`.

    >>> x = jnp.asarray([0.2, -3.0, 1.0])
    >>> jax.grad(lambda x: fake_quant(x, Quantizer("int8", calibration="fixed,1")).sum())(x).tolist()
    [1.0, 0.0, 1.0]
    """
    quantizer = quantizer if isinstance(quantizer, Quantizer) else Quantizer(quantizer)
    masked = clip_gradient and quantizer.calibration.may_clip
    array = array if _sharding.explicit(array) is not None else _sharding.without_reduced(array)
    return _fake_quant(quantizer, masked, key, array)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _fake_quant(quantizer: Quantizer, masked: bool, key: PRNGKeyArray | None, x: Array) -> Array:
    return quantizer.quantize(x, key=key).dequantize()


@_fake_quant.defjvp
def _fake_quant_jvp(quantizer: Quantizer, masked: bool, primals: tuple[Any, Array], tangents: tuple[Any, Array]):
    (key, x), (_, dx) = primals, tangents
    out = _fake_quant(quantizer, masked, key, x)
    if masked:
        kept = _sharding.restore_reduced(inside(quantizer, x), _sharding.explicit(x))
        dx = jax.lax.select(kept, dx, jnp.zeros_like(dx))
    if (factor := quantizer.gradient(x)) is not None:
        dx = dx * _sharding.restore_reduced(factor, _sharding.explicit(x)).astype(dx.dtype)
    return out, dx.astype(out.dtype)


def inside(quantizer: Quantizer, x: Float[Array, "..."], bounds: Bounds | None = None) -> Array:
    """Whether each value is within the calibrated range or the given bounds: the mask of a clipped gradient."""
    tiles, x = quantizer.tiles(x.shape), _sharding.without_reduced(x)
    bounds = quantizer.measure(x) if bounds is None else bounds
    split = tiles.split(x).astype(jnp.float32)
    high = tiles.split_scale(bounds["absmax" if "absmax" in bounds else "max"])
    low = -high if "absmax" in bounds else tiles.split_scale(bounds["min"])
    mask = (split >= low.astype(jnp.float32)) & (split <= high.astype(jnp.float32))
    return unpad(tiles.merge(mask), tiles.padding)


def stack(arrays: Sequence[QArray], axis: int = 0) -> QArray:
    """Stack QArrays of the same structure along a new axis; each keeps its own scales."""
    first = arrays[0]
    if any(jax.tree.structure(a) != jax.tree.structure(first) for a in arrays):
        raise ValueError("only QArrays of the same format, dtype, tiles and packing can be stacked")
    new = axis % (first.ndim + 1) - (first.ndim + 1)
    moved = {a: a - (a <= new) for a in range(-first.ndim, 0)}
    return jax.tree.map(lambda *xs: jnp.stack(xs, axis=axis), *arrays)._replace(
        padding=tuple((moved[a], n) for a, n in first.padding),
        packed=None if first.packed is None else (moved[first.packed[0]], first.packed[1]),
    )


def shardings(q: QArray, like: NamedSharding | PartitionSpec) -> QArray:
    """The shardings (or partition specs) of a QArray's arrays, given the sharding of its values.

    A scale is sharded along the axes where it has an entry per value or tile. It is replicated along the others, and
    along axes whose tiles do not divide evenly among the devices. The QArray may be abstract.

    Returns:
      A QArray of shardings, for `jax.device_put`, `jax.jit` and checkpoints.
    """
    axes = _sharding.partitions(like, q.ndim)

    def divides(count: int, names: Any) -> bool:
        if count == 1 or not isinstance(like, NamedSharding) or names is None:
            return count != 1
        return count % math.prod(like.mesh.shape[n] for n in (names if isinstance(names, tuple) else (names,))) == 0

    def sharding(x: Any) -> Any:
        spec = PartitionSpec(*(names if divides(n, names) else None for n, names in zip(x.shape, axes, strict=True)))
        return NamedSharding(like.mesh, spec) if isinstance(like, NamedSharding) else spec

    return q._map(sharding)


def to_numpy(q: QArray) -> dict[str, np.ndarray]:
    """A QArray as plain NumPy arrays for any file format: packed codes, low-precision scales viewed as integers."""
    q = q.pack()
    meta = {
        "qtype": q.qtype.to_json(),
        "dtype": q.dtype.name,
        "padding": q.padding,
        "packed": q.packed,
        "codes": q.qvalue.dtype.name,
        "scale": q.scale.dtype.name,
        "zero_point": None if q.zero_point is None else q.zero_point.dtype.name,
    }
    parts = {k: getattr(q, k) for k in ("qvalue", "scale", "zero_point", "outer_scale")}
    arrays = {k: _plain(np.asarray(v)) for k, v in parts.items() if v is not None}
    return {**arrays, "meta": np.frombuffer(json.dumps(meta).encode(), np.uint8)}


def from_numpy(arrays: Mapping[str, np.ndarray]) -> QArray:
    """The QArray that `to_numpy` was called on."""
    meta = json.loads(bytes(np.asarray(arrays["meta"])))

    def part(name: str, dtype: str | None) -> Array | None:
        return None if name not in arrays or dtype is None else jnp.asarray(_restore(arrays[name], dtype))

    return QArray(
        part("qvalue", meta["codes"]),
        part("scale", meta["scale"]),
        part("zero_point", meta["zero_point"]),
        Config.from_json(meta["qtype"]),
        outer_scale=part("outer_scale", "float32"),
        dtype=meta["dtype"],
        padding=[(axis, count) for axis, count in meta["padding"]],
        packed=tuple(meta["packed"]) if meta["packed"] else None,
    )


def _plain(x: np.ndarray) -> np.ndarray:
    """The same bytes viewed as a dtype of NumPy itself."""
    return x if x.dtype.kind in "iuf" and x.dtype.isbuiltin == 1 else x.view(np.dtype(f"u{x.dtype.itemsize}"))


def _restore(x: np.ndarray, dtype: str) -> np.ndarray:
    return np.asarray(x).view(jnp.dtype(dtype))
