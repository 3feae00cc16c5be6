"""Quantize and dequantize against a NumPy float64 reference: no value may be further away than the nearest code."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import octavo
from octavo.numerics import BlockFormat
from tests.fuzz.runner import Case, DefectError, Fuzzer
from tests.reference import groups, ideal_scale, outer_scale, quantize_dequantize, stored_zero_point

FORMATS = [name for name in octavo.formats() if octavo.get_format(name).tile is None]
BLOCKS = [name for name in octavo.formats() if octavo.get_format(name).tile is not None]
DTYPES = ("float32", "bfloat16", "float16")
SIZES = (1, 2, 3, 5, 16, 31, 32, 33, 64)


def draw(rng: np.random.Generator) -> Case:
    shape = [int(rng.choice(SIZES)) for _ in range(rng.integers(1, 4))]
    block = bool(rng.random() < 0.3)
    name = str(rng.choice(BLOCKS if block else FORMATS))
    axis = int(rng.integers(len(shape)))
    tile = None
    if not block and rng.random() < 0.5:
        tile = int(rng.choice([n for n in (1, 2, 3, 4, 8, 16, 32) if shape[axis] % n == 0]))
    channelwise = [i for i in range(len(shape)) if i != axis and rng.random() < 0.7]
    return {
        "format": name,
        "shape": shape,
        "axis": axis,
        "tile": tile,
        "channelwise": channelwise,
        "asymmetric": name.startswith("uint") or (name[:3] == "int" and name != "int1" and bool(rng.random() < 0.3)),
        "dtype": str(rng.choice(DTYPES)),
        "exponent": int(rng.integers(-20, 20) if rng.random() < 0.5 else 0),
        "outlier": bool(rng.random() < 0.2),
        "zeros": bool(rng.random() < 0.1),
        "jit": bool(rng.random() < 0.5),
        "seed": int(rng.integers(2**31)),
    }


def values(case: Case) -> np.ndarray:
    rng = np.random.default_rng(case["seed"])
    x = rng.standard_normal(case["shape"]) * 2.0 ** case["exponent"]
    if case["outlier"]:
        x.flat[rng.integers(x.size)] *= 100
    if case["zeros"]:
        x[rng.random(x.shape) < 0.5] = 0
    largest = 60_000 if case["dtype"] == "float16" else 1e30
    return np.asarray(np.clip(x, -largest, largest)).astype(jnp.dtype(case["dtype"]))


def check(case: Case) -> str:
    fmt, x = octavo.get_format(case["format"]), values(case)
    tile = fmt.tile if fmt.tile is not None else case["tile"]
    axis = case["axis"]
    options = {"channelwise_axes": tuple(case["channelwise"])}
    if tile is not None:
        options["tiled_axes"] = {axis: tile}
    if case["asymmetric"]:
        options["calibration_method"] = "minmax"
    fn = functools.partial(octavo.quantize, qtype=case["format"], **options)
    q = (jax.jit(fn) if case["jit"] else fn)(jnp.asarray(x))
    got = np.asarray(q.dequantize(jnp.float32), np.float64)
    if got.shape != x.shape:
        raise DefectError(f"shape {got.shape} from {x.shape}")
    # Only values of a tile share the scale of a block, never other rows.
    whole = () if fmt.tile is not None else [i for i in range(x.ndim) if i not in case["channelwise"]]
    sizes = [n if i in whole else 1 for i, n in enumerate(x.shape)]
    if tile is not None:
        sizes[axis] = min(tile, x.shape[axis])
    x64 = x.astype(np.float64)
    want, scales = quantize_dequantize(x64, fmt, sizes, scale_dtype=q.scale.dtype, asymmetric=case["asymmetric"])
    if near_another_scale(x64, fmt, sizes, case["asymmetric"], q.scale.dtype):
        return "scale on a boundary"
    slack = 4e-6 * scales * max(fmt.bound, 1)
    worse = np.abs(got - x64) - np.abs(want - x64) - slack
    if not (worse <= 0).all():
        i = np.unravel_index(np.nanargmax(np.where(np.isnan(worse), np.inf, worse)), worse.shape)
        raise DefectError(
            f"x{list(map(int, i))} = {x64[i]} became {got[i]}, but {want[i]} is nearer (scale {scales[i]})"
        )
    return "blocks" if fmt.tile is not None else "values"


def near_another_scale(x: np.ndarray, fmt: octavo.Format, sizes: list[int], asymmetric: bool, dtype: np.dtype) -> bool:
    """Whether rounding in float32 may choose another low-precision scale or zero point than float64 does."""
    ideal, lowest = np.array([ideal_scale(x[tile], fmt, asymmetric=asymmetric) for tile in groups(x.shape, sizes)]).T
    if not isinstance(fmt, BlockFormat):
        # A range divided by 7 can be just between two bfloat16 scales, and its product with 1/7 is an ulp above.
        low, high = (np.asarray(ideal * f, np.float32).astype(dtype) for f in (1 - 1e-6, 1 + 1e-6))
        return dtype != np.float32 and bool((low != high).any())
    nudged = [np.asarray(ideal * f, np.float32) for f in (1 - 1e-5, 1 + 1e-5)]
    if fmt.scale_dtype == "float8_e8m0fnu":
        low, high = (np.ceil(np.log2(n, where=n > 0, out=np.zeros_like(n))) for n in nudged)
        return bool((low != high).any())
    outer = outer_scale(x, fmt, sizes, asymmetric=asymmetric)
    low, high = ((n / outer).astype(jnp.dtype(fmt.scale_dtype)).astype(np.float32) for n in nudged)
    if (low != high).any():
        return True
    tiles = [(bottom, scale * outer) for bottom, scale in zip(lowest, low, strict=True) if scale and asymmetric]
    points = [{stored_zero_point(fmt, bottom, scale * f) for f in (1 - 1e-5, 1 + 1e-5)} for bottom, scale in tiles]
    return any(len(point) > 1 for point in points)


def shrink(case: Case) -> Iterator[Case]:
    for field, simple in (("jit", False), ("zeros", False), ("outlier", False), ("exponent", 0), ("dtype", "float32")):
        if case[field] != simple:
            yield case | {field: simple}
    for i in case["channelwise"]:
        yield case | {"channelwise": [a for a in case["channelwise"] if a != i]}
    for i, n in enumerate(case["shape"]):
        for smaller in (1, n // 2, n - 1):
            if 0 < smaller < n and (i != case["axis"] or not case["tile"] or smaller % case["tile"] == 0):
                yield case | {"shape": [*case["shape"][:i], smaller, *case["shape"][i + 1 :]]}


QUANTIZERS = Fuzzer("quantizers", draw, check, shrink)
