"""Matmuls, convolutions and ragged dots, forward and backward, against NumPy in float64.

Operands are chosen halfway between a random value and its code, away from every rounding boundary, so that the codes
are known: the expected result is the float64 product of the reference's dequantized operands. The gradients of
quantization-aware training are products of the cotangent with those; low-precision gradients are compared within the
error of their format.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import octavo
from octavo import DotConfig
from tests.fuzz.runner import Case, DefectError, Fuzzer
from tests.reference import groups, quantize_dequantize

# The error that a cotangent in this format may add, relative to the largest sum of magnitudes.
FORMATS = {"int8": 0.03, "int4": 0.5, "float8_e4m3fn": 0.08, "float8_e5m2": 0.15, "mxfp8": 0.08, "nvfp4": 0.4}
SIZES = (1, 2, 3, 8, 16, 32)
EINSUMS = (
    "ab,bc->ac", "ab,cb->ca", "abc,cd->abd", "abc,bcd->bad", "abcd,cde->abe", "ab,b->a", "a,ab->b", "abc,acd->abd",
    "abcd,abed->abce", "ab,bc->ca",
)  # fmt: skip


def draw(rng: np.random.Generator) -> Case:
    op = str(rng.choice(["einsum", "einsum", "ragged", "conv"]))
    case: Case = {
        "op": op,
        "format": str(rng.choice(list(FORMATS))),
        "mode": str(rng.choice(["qt", "qat", "weight_only"])),
        "tile": None,
        "per_tensor": bool(rng.random() < 0.2),
        "vmap": bool(rng.random() < 0.2),
        "seed": int(rng.integers(2**31)),
    }
    if op == "einsum":
        case["spec"] = str(rng.choice(EINSUMS))
        letters = sorted(set(case["spec"]) - set(",->"))
        case["sizes"] = {letter: int(rng.choice(SIZES)) for letter in letters}
    elif op == "ragged":
        case["spec"], groups = "mk,gkn->mn", [int(n) for n in rng.integers(0, 6, rng.integers(1, 5))]
        case["groups"] = groups
        sizes = {"m": sum(groups) + int(rng.integers(0, 3)), "k": int(rng.choice(SIZES)), "n": int(rng.choice(SIZES))}
        case["sizes"] = sizes | {"g": len(groups)}
        case["sizes"]["m"] = max(case["sizes"]["m"], 1)
        case["per_tensor"] = False
    else:
        kernel = int(rng.integers(1, 4))
        case["spec"] = "nwc,kco->nwo"
        case["sizes"] = {
            "n": int(rng.integers(1, 4)),
            "w": kernel + int(rng.integers(0, 6)),
            "c": int(rng.choice(SIZES)),
        }
        case["sizes"] |= {"k": kernel, "o": int(rng.choice(SIZES))}
        case["stride"] = int(rng.integers(1, 3))
        case["format"] = str(rng.choice(["int8", "int4", "float8_e4m3fn"]))
    block = octavo.get_format(case["format"]).tile is not None
    if op == "einsum" and not block and not case["per_tensor"] and rng.random() < 0.3:
        contracted = case["sizes"][roles(case)[0][-1]] if roles(case)[0] else 1
        case["tile"] = int(rng.choice([n for n in (2, 4, 8, 16) if contracted % n == 0] or [contracted]))
    return case


def roles(case: Case) -> tuple[list[str], list[str]]:
    """The contracted letters in the left operand's order, and the batch letters."""
    left, right, out = case["spec"].replace("->", ",").split(",")
    if case["op"] == "conv":
        return ["w", "c"], []
    if case["op"] == "ragged":
        return ["k"], []
    return [x for x in left if x in right and x not in out], [x for x in left if x in right and x in out]


def scale_tiles(case: Case, letters: str, right: bool) -> list[int]:
    """The extent, along each axis, of the values that share a scale."""
    contracted, _ = roles(case)
    if case["op"] == "conv":
        contracted = ["k", "c"] if right else ["w", "c"]
    fmt, sizes = octavo.get_format(case["format"]), case["sizes"]
    tile = fmt.tile if fmt.tile is not None else case["tile"]
    extent = []
    for letter in letters:
        # Only values of a tile share the scale of a block, also where a second axis is contracted.
        whole = fmt.tile is None and (letter in contracted or case["per_tensor"])
        extent.append(sizes[letter] if whole else 1)
        if tile is not None and contracted and letter == contracted[-1]:
            extent[-1] = min(tile, sizes[letter])
    return extent


def operand(case: Case, letters: str, right: bool, quantized: bool) -> tuple[np.ndarray, np.ndarray]:
    """An operand and its dequantized value, in float64."""
    rng = np.random.default_rng([case["seed"], right])
    x = np.float32(rng.standard_normal([case["sizes"][letter] for letter in letters]))
    used = sum(case["groups"]) if case["op"] == "ragged" and not right else len(x)
    if not quantized or not used:
        return x, x.astype(np.float64)
    # Rows of no group do not count for the range of the tensor.
    x, unused = x[:used], 10 * x[used:]
    fmt, extent = octavo.get_format(case["format"]), scale_tiles(case, letters, right)
    largest = np.zeros(x.shape, bool)
    for tile in groups(x.shape, extent):
        part = np.abs(x[tile])
        largest[tile] = part == part.max()
    # The largest value of a tile, which is its range, stays; it is positive, since -7.5 is a tie of int4.
    x = np.where(largest, np.abs(x), np.float32(0.9) * x)
    code, _ = quantize_dequantize(x, fmt, extent)
    x = np.where(largest, x, np.float32((x + code) / 2))
    return tuple(np.concatenate([part, unused]) for part in (x, quantize_dequantize(x, fmt, extent)[0]))


def reference(case: Case, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    if case["op"] == "einsum":
        return np.einsum(case["spec"], lhs, rhs)
    if case["op"] == "ragged":
        out, start = np.zeros((lhs.shape[0], rhs.shape[2])), 0
        for group, n in enumerate(case["groups"]):
            out[start : start + n] = lhs[start : start + n] @ rhs[group]
            start += n
        return out
    windows = np.lib.stride_tricks.sliding_window_view(lhs, rhs.shape[0], axis=1)[:, :: case["stride"]]
    return np.einsum("nwck,kco->nwo", windows, rhs)


def gradients(case: Case, lhs: np.ndarray, rhs: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both gradients of <reference, g>; it is bilinear, so they are its values at unit vectors."""
    dlhs, drhs = np.zeros(lhs.shape), np.zeros(rhs.shape)
    if case["op"] == "einsum":
        left, right, out = case["spec"].replace("->", ",").split(",")
        return np.einsum(f"{out},{right}->{left}", g, rhs), np.einsum(f"{left},{out}->{right}", lhs, g)
    if case["op"] == "ragged":
        start = 0
        for group, n in enumerate(case["groups"]):
            rows = slice(start, start + n)
            dlhs[rows], drhs[group] = g[rows] @ rhs[group].T, lhs[rows].T @ g[rows]
            start += n
        return dlhs, drhs
    for w in range(g.shape[1]):
        window = slice(w * case["stride"], w * case["stride"] + rhs.shape[0])
        dlhs[:, window] += np.einsum("no,kco->nkc", g[:, w], rhs)
        drhs += np.einsum("nkc,no->kco", lhs[:, window], g[:, w])
    return dlhs, drhs


def apply(case: Case, config: DotConfig, lhs: Any, rhs: Any) -> Any:
    if case["op"] == "einsum":
        return octavo.einsum(case["spec"], lhs, rhs, config=config)
    if case["op"] == "ragged":
        return octavo.ragged_dot(lhs, rhs, jnp.asarray(case["groups"], jnp.int32), config=config)
    numbers = ("NWC", "WIO", "NWC")
    return octavo.conv_general_dilated(lhs, rhs, (case["stride"],), "VALID", dimension_numbers=numbers, config=config)


def check(case: Case) -> str:
    left, right, _ = case["spec"].replace("->", ",").split(",")
    lhs, lhs_q = operand(case, left, False, case["mode"] != "weight_only")
    rhs, rhs_q = operand(case, right, True, True)
    config = getattr(DotConfig, case["mode"])(case["format"], **({"tile": case["tile"]} if case["tile"] else {}))
    if case["per_tensor"] and octavo.get_format(case["format"]).tile is None:
        config = config.with_operands(fwd={"per_tensor": True})
    want = reference(case, lhs_q, rhs_q)
    g = np.float32(np.random.default_rng([case["seed"], 2]).standard_normal(want.shape))

    def step(lhs, rhs, g):
        out, vjp = jax.vjp(lambda a, b: apply(case, config, a, b), lhs, rhs)
        return out, *vjp(g)

    args = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(g)
    if case["vmap"] and case["op"] != "ragged":
        out, dlhs, drhs = (x[0] for x in jax.jit(jax.vmap(step))(*(jnp.stack([x, -x]) for x in args)))
    else:
        out, dlhs, drhs = jax.jit(step)(*args)
    size = reference(case, np.abs(lhs_q), np.abs(rhs_q))
    close("forward", out, want, 3e-6 * size + 1e-6)
    # The gradients of quantization-aware training multiply the original operands, those of `qt` the codes.
    operands = (lhs_q, rhs_q) if case["mode"] == "qt" else (np.float64(lhs), np.float64(rhs))
    wants = gradients(case, *operands, np.float64(g))
    sizes = gradients(case, np.abs(lhs), np.abs(rhs), np.abs(g))
    # A cotangent in low precision adds its format's error, and a requantized residual once more.
    tolerance = 2 * FORMATS[case["format"]] if case["mode"] == "qt" else 3e-6
    for name, got, want, size in zip(("dlhs", "drhs"), (dlhs, drhs), wants, sizes, strict=True):
        close(name, got, want, tolerance * size.max() + 1e-6 if case["mode"] == "qt" else tolerance * size + 1e-6)
    return f"{case['op']} {case['mode']}"


def close(name: str, got: Any, want: np.ndarray, bound: np.ndarray | float) -> None:
    got = np.asarray(got, np.float64)
    if got.shape != want.shape:
        raise DefectError(f"{name} has shape {got.shape}, not {want.shape}")
    if not (np.abs(got - want) <= bound).all():
        i = np.unravel_index(np.nanargmax(np.nan_to_num(np.abs(got - want) - bound, nan=np.inf)), got.shape)
        allowed = np.broadcast_to(bound, got.shape)[i]
        raise DefectError(f"{name}{list(map(int, i))} is {got[i]:.8g}, the reference {want[i]:.8g} +- {allowed:.2g}")


def shrink(case: Case) -> Iterator[Case]:
    if case["vmap"]:
        yield case | {"vmap": False}
    if case["tile"]:
        yield case | {"tile": None}
    if case["op"] == "ragged" and len(case["groups"]) > 1:
        groups = case["groups"][:-1]
        yield case | {"groups": groups, "sizes": case["sizes"] | {"g": len(groups)}}
    for letter, n in case["sizes"].items():
        if (letter in "kw" and case["op"] == "conv") or (letter in "gm" and case["op"] == "ragged"):
            continue
        for smaller in (1, n // 2):
            if 0 < smaller < n and not case["tile"]:
                yield case | {"sizes": case["sizes"] | {letter: smaller}}


PRODUCTS = Fuzzer("products", draw, check, shrink)
