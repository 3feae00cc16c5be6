"""Every number format: its size, its error on four kinds of data, and its speed, against Qwix and AQT.

python benchmarks/formats.py [--quick] [--json FILE] [--formats int8,nvfp4] [--shape 2048,2048] [--repeats 21]
"""

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from aqt.jax.v2 import aqt_quantizer
from timing import Results, Table, Timing, arguments, progress, side_by_side

import octavo

KINDS = {
    "norm": lambda rng, shape: rng.normal(size=shape),
    "unif": lambda rng, shape: rng.uniform(-1, 1, size=shape),
    "heavy": lambda rng, shape: rng.standard_t(3, size=shape),
    "outl": lambda rng, shape: _one_outlier(rng.normal(size=shape), rng),
}
PARTS = ("quantize", "dequantize")
LEGEND = """\
tile   values that share a scale along a row; - is the whole row
bits   per value, packed, the scales counted
SQNR   in dB, on normal, uniform and heavy-tailed data (Student's t, 3 degrees of freedom), and on normal data with
       one value in each row multiplied by 100
quant  throughput of quantizing a float32 array, as a ratio to copying that array: 0.5 takes twice as long
deq    the same for dequantizing back to float32; above 1 is possible, because less is read
-      the library does not have the format, or fails"""

# The formats of Qwix. It also accepts float6, which XLA's CPU backend fails to compile.
QWIX = {
    *("int1", "int2", "int3", "int4", "int5", "int6", "int7", "int8", "nf4", "mxfp8", "mxfp4", "nvfp4"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e3m4", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("float8_e4m3b11fnuz", "float4_e2m1fn"),
}
AQT = {f"int{bits}": bits for bits in (1, 2, 3, 4, 5, 6, 7, 8, 16)} | {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
# The codes of these represent a typical magnitude, not the largest.
CALIBRATIONS = {"binary": "absmean", "ternary": "absmean"}


def _one_outlier(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    x[np.arange(len(x)), rng.integers(x.shape[1], size=len(x))] *= 100
    return x


@dataclass(frozen=True)
class Row:
    """A format, and how many values share a scale (None: a row)."""

    name: str
    tile: int | None

    @property
    def quantizer(self) -> octavo.Quantizer:
        fmt = octavo.get_format(self.name)
        calibration = CALIBRATIONS.get(self.name, "absmax" if fmt.signed else "minmax")
        return octavo.Quantizer(
            self.name, channelwise_axes=(0,), tiled_axes={1: self.tile} if self.tile else None, calibration=calibration
        )

    def libraries(self) -> dict[str, tuple[Callable, Callable]]:
        """The quantize and dequantize functions of each library that has the format."""
        tiled = {1: self.tile} if self.tile else None
        found = {"octavo": (self.quantizer.quantize, octavo.dequantize)}
        if self.name in QWIX:
            found["qwix"] = (
                lambda x: qwix.quantize(x, self.name, channelwise_axes=(0,), tiled_axes=tiled),
                qwix.dequantize,
            )
        if self.name in AQT:
            aqt = aqt_quantizer.quantizer_make(AQT[self.name])
            found["aqt"] = (
                lambda x: aqt.quant(x.reshape(len(x), -1, self.tile or x.shape[1]), calibration_axes=[2])[0],
                lambda q: q.dequant().reshape(len(q.qvalue), -1),
            )
        return found


@dataclass(frozen=True)
class Result:
    """The results of one library for one format."""

    sqnr: dict[str, float]
    quantize: Timing
    dequantize: Timing


def sqnr(x: np.ndarray, y: jax.Array) -> float:
    """Signal over quantization noise, in dB."""
    exact = np.asarray(x, np.float64)
    return 10 * np.log10(np.sum(exact**2) / np.sum((np.asarray(y, np.float64) - exact) ** 2))


def measure(row: Row, data: dict[str, jax.Array], repeats: int) -> tuple[Timing, dict[str, Result]]:
    """Errors of one format on all data, and its times on the normal data, and those of a copy."""
    errors: dict[str, dict[str, float]] = {}
    x = data["norm"]
    calls: dict[str, Any] = {"copy": (jax.jit(jnp.copy), (x,))}
    for name, functions in row.libraries().items():
        quantize, dequantize = map(jax.jit, functions)
        try:
            errors[name] = {kind: sqnr(v, dequantize(quantize(v))) for kind, v in data.items()}
        except Exception as error:
            if name == "octavo":
                raise
            print(f"{name} {row.name}: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        calls |= {f"{name} quantize": (quantize, (x,)), f"{name} dequantize": (dequantize, (quantize(x),))}
    times = side_by_side(calls, repeats=repeats)
    return times["copy"], {
        name: Result(errors[name], times[f"{name} quantize"], times[f"{name} dequantize"]) for name in errors
    }


def cells(result: Result | None, copy: Timing) -> str:
    if result is None:
        return "".join(["     -"] * 6)
    ratios = [copy.seconds / t.seconds for t in (result.quantize, result.dequantize)]
    return "".join(f"{v + 0.0:6.1f}" for v in result.sqnr.values()) + "".join(f"{r:6.2f}" for r in ratios)


def rows(names: list[str], tile: int) -> list[Row]:
    """Each format with a scale per row (block formats: per tile of theirs), and four-bit ones also per tile."""
    found = []
    for name in names:
        fmt = octavo.get_format(name)
        found.append(Row(name, fmt.tile))
        if fmt.tile is None and fmt.bits == 4 and fmt.signed:
            found.append(Row(name, tile))
    return found


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, quick="a smaller array (512,2048) and fewer rounds (7)")
    parser.add_argument("--formats", help="which formats, with commas between (default: all that are registered)")
    parser.add_argument("--shape", help="of the array (default: 2048,2048)")
    parser.add_argument("--repeats", type=int, help="rounds of which the fastest counts (default: 21)")
    parser.add_argument("--tile", type=int, default=32, help="of the tiled rows of four-bit formats (default: 32)")
    args = parser.parse_args()
    args.formats = args.formats.split(",") if args.formats else list(octavo.formats())
    args.shape = tuple(map(int, (args.shape or ("512,2048" if args.quick else "2048,2048")).split(",")))
    args.repeats = args.repeats or (7 if args.quick else 21)
    return args


def main() -> None:
    args = parse()
    rng = np.random.default_rng(0)
    data = {kind: jnp.asarray(make(rng, args.shape), jnp.float32) for kind, make in KINDS.items()}
    table, copies, spreads, kept = [], [], [], []
    todo = rows(args.formats, args.tile)
    for done, row in enumerate(todo, start=1):
        progress(f"{done}/{len(todo)} {row.name}")
        copy, results = measure(row, data, args.repeats)
        bits = row.quantizer.bits_per_value(args.shape)
        peers = "  |".join(cells(results.get(name), copy) for name in ("octavo", "qwix", "aqt"))
        table.append(f"{row.name:18}{row.tile or '-':>5}{bits:7.3f}  |{peers}")
        copies.append(copy)
        kept.append((row, bits, copy, results))
        spreads += [t.spread for r in results.values() for t in (r.quantize, r.dequantize)]
    progress("")

    shape, mega = " x ".join(map(str, args.shape)), data["norm"].nbytes / 2**20
    method = (
        f"float32 {shape} ({mega:.0f} MB), a scale per row or tile, compiled; times are the fastest of {args.repeats} "
        "interleaved rounds,\n"
        f"the median round {statistics.median(spreads):.0%} slower (at worst {max(spreads):.0%}); "
        f"copying takes {min(copy.seconds for copy in copies) * 1e3:.2f} ms"
    )
    page = Results("qwix", "aqtp", method=method, file=args.json)
    print(f"\n{LEGEND}\n")
    group = "".join(f"{v:>6}" for v in (*KINDS, "quant", "deq"))
    print(f"{'':30}  |" + "  |".join(f"{name:^36}" for name in ("octavo", "qwix", "aqt")))
    print(f"{'format':18}{'tile':>5}{'bits':>7}  |" + "  |".join([group] * 3))
    print("\n".join(table))
    for found in tables(kept):
        page.append(found)


def slower(kept: list[tuple[Row, float, Timing, dict[str, Result]]]) -> str:
    """A sentence on where peers are faster by more than 5 %."""
    ratios = [
        (getattr(results["octavo"], part).seconds / getattr(results[peer], part).seconds, peer, part, row)
        for row, _, _, results in kept
        for peer in ("qwix", "aqt")
        for part in PARTS
        if peer in results
    ]
    found = sorted((entry for entry in ratios if entry[0] > 1.05), key=lambda entry: -entry[0])
    if not found:
        return "octavo is nowhere slower by more than 5 %."
    most = ", ".join(f"{part} of {label(row)} ({ratio:.1f}x as long as {peer})" for ratio, peer, part, row in found[:6])
    half = statistics.median(ratio for ratio, *_ in found)
    return f"Slower in {len(found)} of {len(ratios)} comparisons, half of them by {half:.1f}x or more; most: {most}."


def label(row: Row) -> str:
    return f"`{row.name}`" + (f", tiles of {row.tile}" if row.tile else "")


def tables(kept: list[tuple[Row, float, Timing, dict[str, Result]]]) -> list[Table]:
    """Two tables for the page: errors and speeds."""
    names = ("octavo", "qwix", "aqt")
    errors, speeds = [], []
    for row, bits, copy, results in kept:
        ours = [f"{value + 0.0:.1f}" for value in results["octavo"].sqnr.values()]
        theirs = [f"{results[n].sqnr['norm'] + 0.0:.1f}" if n in results else "-" for n in names[1:]]
        errors.append((label(row), f"{bits:.3g}", *ours, *theirs))
        cells = []
        for timings in ([getattr(results[n], part) if n in results else None for n in names] for part in PARTS):
            cells += [f"{copy.seconds / t.seconds:.2f}" if t else "-" for t in timings]
        speeds.append((label(row), *cells))
    kinds = ("normal", "uniform", "heavy tails", "one outlier", "Qwix, normal", "AQT, normal")
    columns = tuple(f"{part} {name}" for part in PARTS for name in names)
    return [
        Table(
            "Signal to quantization noise, dB",
            ("format", "bits", *kinds),
            tuple(errors),
            "Bits per value with scales, packed. Heavy tails are Student's t with 3 degrees of freedom; the "
            "outlier is one value in each row, multiplied by 100. - : the library does not have the format, or fails.",
        ),
        Table(
            "Throughput as a ratio to copying the array",
            ("format", *columns),
            tuple(speeds),
            "0.5 takes twice as long as a copy; larger is faster. " + slower(kept),
        ),
    ]


if __name__ == "__main__":
    # AQT converts arrays to dtypes in a way that JAX has deprecated.
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    main()
