"""What AQT's configs can express, case by case against aqtp 0.9: modes of quantization times configs.

A case is a value, and where gradients are compared three; all cases of a mode are one compiled program.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import octavo
from octavo.compat import aqt
from octavo.numerics import IntFormat
from tests.compat.test_aqt import BATCH, PLAIN, data, each, off, theirs
from tests.docs.test_pages import table

numerics = pytest.importorskip("aqt.jax.v2.numerics.numerics")
int_numerics = pytest.importorskip("aqt.jax.v2.numerics.int_numerics")
tiled = pytest.importorskip("aqt.jax.v2.tiled_dot_general")
tensor = pytest.importorskip("aqt.jax.v2.aqt_tensor")

pytestmark = [pytest.mark.standard_promotion, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

MATMULS, SIDES = ("fwd", "dlhs", "drhs"), ("lhs", "rhs")

# The constructor and its arguments. Gradients of codes that are quantized twice differ (from-aqt.md), so where both
# gradients are quantized their residuals are the float operands.
BASES = {
    "float": ("default_unquantized_config", {}),
    **{
        f"{lhs} x {rhs}": ("dot_general_make", {"lhs_bits": lhs, "rhs_bits": rhs})
        for lhs, rhs in [(1, 1), (1, 2), (2, 1), (2, 2), (3, 3), (4, 4), (8, 8), (8, 4), (None, 8), (8, None)]
    },
    "8 x 8, float residuals": ("dot_general_make", {"lhs_bits": 8, "rhs_bits": 8, "use_fwd_quant": False}),
    "all 8": ("fully_quantized", {"use_fwd_quant": False, "use_stochastic_rounding": False}),
    "all 4": (
        "fully_quantized",
        {"fwd_bits": 4, "bwd_bits": 4, "use_fwd_quant": False, "use_stochastic_rounding": False},
    ),
    "all 1": ("config_v4", {"fwd_bits": 1, "dlhs_bits": 1, "drhs_bits": 1}),
    "v3": ("config_v3", {"fwd_bits": 4}),
    "v4": ("config_v4", {"fwd_bits": 8, "dlhs_bits": 8, "drhs_bits": 4}),
    "v4 float8": ("config_v4", {"fwd_bits": "e4m3", "dlhs_bits": "e5m2", "drhs_bits": "e5m2"}),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A matmul of two arrays of a shape, by AQT and by Octavo; `gradients`: of which operands they are compared."""

    theirs: Callable
    ours: Callable
    shape: str
    gradients: tuple[int, ...] = (0, 1)

    def run(self, function, x, w, g):
        """The value, and the gradients for the cotangent g."""
        if not self.gradients:
            return (function(x, w),)
        out, vjp = jax.vjp(function, x, w)
        found = vjp(g)
        return out, *(found[operand] for operand in self.gradients)


def make(base):
    maker, arguments = BASES[base]
    their_config, our_config = getattr(theirs, maker)(**arguments), getattr(aqt, maker)(**arguments)
    theirs.set_stochastic_rounding(their_config, False, False, implementation="jax.uniform")
    return their_config, aqt.set_stochastic_rounding(our_config, False, False)


def quantizers(config, sides=SIDES, matmuls=MATMULS):
    return [(getattr(config, m), getattr(getattr(config, m).dg_quantizer, s), s) for m in matmuls for s in sides]


def is_int(quantizer):
    return isinstance(quantizer.numerics, int_numerics.IntSymmetric)


def in_float(config):
    """AQT keeps codes in float where they are dequantized before the dot, and sums in float."""
    for raw, quantizer, _ in quantizers(config):
        raw.dg_accumulator_dtype = None
        if is_int(quantizer):
            quantizer.numerics.dtype = None


def dequantized(config, lhs, rhs):
    for raw, _, side in quantizers(config):
        getattr(raw, side).dequant_mode = {"lhs": lhs, "rhs": rhs}[side]
    in_float(config)


def fake_quant(config, ours):
    dequantized(config, theirs.DequantMode.THIS_INPUT, theirs.DequantMode.THIS_INPUT)
    return each(dequant="input")(ours)


def without_rounding(config, ours):
    in_float(config)
    for _, quantizer, _ in quantizers(config):
        if is_int(quantizer):
            quantizer.numerics.round = False
    for name, operand in operands(ours).items():
        fmt = operand.qtype
        ours = ours.with_operands(**{name: {"qtype": aqt.int_symmetric(fmt.bits, fmt.preserve_zero, round=False)}})
    return ours


def operands(config):
    found = {f"{m}_{s}": getattr(getattr(config, m), s) for m in MATMULS for s in SIDES}
    return {name: operand for name, operand in found.items() if operand is not None}


def local(count):
    def change(config, ours):
        config.dlhs.local_aqt = config.drhs.local_aqt = theirs.LocalAqt(contraction_axis_shard_count=count)
        return ours.with_operands(**{m: {"tile": 1 / count, "tile_axis": 0} for m in ("dlhs", "drhs")})

    return change


def remaining(lhs, rhs):
    """A scale for each contracted index, applied to this operand or to the other one."""

    def change(config, ours):
        modes = {"input": theirs.DequantMode.THIS_INPUT, "other": theirs.DequantMode.OTHER_INPUT}
        dequantized(config, modes[lhs], modes[rhs])
        for raw, _, side in quantizers(config):
            getattr(raw, side).calibration_mode = theirs.CalibrationMode.REMAINING_AXIS
        theirs.set_use_fwd_quant(config, False, False)
        ours = ours.replace(**{m: getattr(ours, m).replace(residual="original") for m in ("dlhs", "drhs")})
        for name in operands(ours):
            mode = lhs if name.endswith("lhs") else rhs
            here = {"channelwise_axes": "contracted"} if mode == "input" else {}
            ours = ours.with_operands(**{name: {"dequant": mode, **here}})
        return ours

    return change


class TheirPositive(numerics.AqtNumerics):
    """-1, 0 and 1, with no gradient below zero."""

    get_dtype = staticmethod(lambda: None)
    get_quant_bound = staticmethod(lambda: 1.0)

    def vjp_fwd(self, x, context):
        return jax.lax.round(x, jax.lax.RoundingMethod.TO_NEAREST_EVEN), (x,)

    def vjp_bwd(self, res, grad):
        return grad * (res[0] >= 0), None


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Positive(IntFormat):
    """The same as a format."""

    def gradient(self, x):
        return jnp.where(x >= 0, 1.0, 0.0)


def own_gradient(*sides):
    def change(config, ours):
        for raw, quantizer, _ in quantizers(config, sides, ["fwd"]):
            raw.dg_accumulator_dtype = None
            quantizer.numerics = TheirPositive()
        fmt = Positive(bits=2, preserve_max=True, narrow=True)
        return ours.with_operands(**{f"fwd_{side}": {"qtype": fmt} for side in sides})

    return change


def mid(**alphas):
    def change(config, ours):
        arguments = {f"{m}_mid_alpha_both": alphas.get(m, theirs.SKIP) for m in MATMULS}
        theirs.set_use_mid_quant(config, **arguments)
        return aqt.set_use_mid_quant(ours, **arguments)

    return change


def smoothed(base, alpha):
    """Mid-quantization of any bits: AQT's config without it, given the scaled operands."""
    their_config, our_config = make(base)
    float_residuals = {m: getattr(our_config, m).replace(residual="original") for m in ("dlhs", "drhs")}
    our_config = aqt.set_use_mid_quant(our_config.replace(**float_residuals), alpha)

    def by_hand(x, w):
        factor = (jnp.max(jnp.abs(x), axis=0) / jnp.max(jnp.abs(w), axis=1)) ** alpha
        return their_config(x / factor, w * factor[:, None], PLAIN)

    return Case(by_hand, lambda x, w: octavo.dot_general(x, w, PLAIN, config=our_config), "plain", gradients=())


def shared(side, axes, channels):
    def change(config, ours):
        for _, quantizer, _ in quantizers(config, [side], ["fwd"]):
            quantizer.calib_shared_axes = axes
        return ours.with_operands(**{f"fwd_{side}": channels})

    return change


# Shapes: x, w, the cotangent, and the dimension numbers.
SHAPES = {
    "plain": ((16, 32), (32, 8), (16, 8), PLAIN),
    "batch": ((3, 8, 16), (3, 16, 4), (3, 8, 4), BATCH),
    "two contracted": ((6, 4, 16), (4, 16, 8), (6, 8), (((1, 2), (0, 1)), ((), ()))),
    "two free": ((4, 6, 16), (16, 3, 8), (4, 6, 3, 8), (((2,), (0,)), ((), ()))),
    "rows of a cache": ((8, 4, 16), (2, 4, 16), (1,), None),
    "transposed": ((16, 24), (16, 8), (24, 8), (((0,), (0,)), ((), ()))),
}


def case(base, change=None, shape="plain", gradients=(0, 1)):
    their_config, our_config = make(base)
    our_config = our_config if change is None else change(their_config, our_config)
    numbers = SHAPES[shape][-1]
    return Case(
        lambda x, w: their_config(x, w, numbers),
        lambda x, w: octavo.dot_general(x, w, numbers, config=our_config),
        shape,
        gradients,
    )


def with_ints(*sides):
    """The bases with integers on these sides of the forward."""
    return [b for b in BASES if all(is_int(q) for _, q, _ in quantizers(make(b)[0], sides, ["fwd"]))]


def tiles(shape, sizes, base="v4"):
    """AQT tiles both operands along all contracted axes."""
    *_, numbers = SHAPES[shape]
    their_config, our_config = make(base)
    sides = [
        tiled.TensorTiling(
            contraction_axes=[
                tiled.AxisTiling(axis=a, tile_size=n, tile_count=None) for a, n in zip(axes, sizes, strict=True)
            ],
            remaining_axes=[],
        )
        for axes in numbers[0]
    ]
    for side, axes in zip(SIDES, numbers[0], strict=True):
        our_config = our_config.with_operands(**{f"fwd_{side}": {"tile": dict(zip(axes, sizes, strict=True))}})
    return Case(
        lambda x, w: tiled.tiled_dot_general(
            tiled.Cfg(lhs=sides[0], rhs=sides[1]), x, w, numbers, dot_general=their_config
        ),
        lambda x, w: octavo.dot_general(x, w, numbers, config=our_config),
        shape,
        gradients=(),
    )


def update(channels, starts):
    """A slice of a stored array is replaced, here with AQT's arrays made of ours."""

    def pair(x, new):
        return [octavo.quantize(a, aqt.int_symmetric(8), channelwise_axes=channels) for a in (x, new)]

    def other(x, new):
        return tensor.dynamic_update_slice(*map(aqt.to_qtensor, pair(x, new)), starts).dequant()

    def ours(x, new):
        return octavo.qarray.dynamic_update_slice(*pair(x, new), starts).dequantize()

    return Case(other, ours, "rows of a cache", gradients=())


def beside(base, side):
    """An operand that is quantized beforehand, by AQT and by Octavo; the config quantizes the other one.

    The gradient is that of the other one. Where a residual is in float it is what the codes stand for, in both.
    """
    their_config, our_config = make(base)
    their_config.fwd.allow_dummy_gradient_into_qtensor = True
    place = SIDES.index(side)
    axes = PLAIN[0][place]

    def ours(x, w):
        pair = [x, w]
        pair[place] = getattr(our_config.fwd, side).quantizer(2, contracting=axes).quantize(pair[place])
        return octavo.dot_general(*pair, PLAIN, config=our_config)

    def other(x, w):
        quantizer = getattr(make(base)[0].fwd.dg_quantizer, side)
        if quantizer._calibrator is None:
            quantizer.init_calibration()
        pair = [x, w]
        q, _ = quantizer.quant(pair[place], calibration_axes=list(axes))
        pair[place] = q.dequant()
        given = {f"{s}_qt": q if s == side else None for s in SIDES}
        return their_config.dg_core(*pair, given["lhs_qt"], given["rhs_qt"], PLAIN)[0]

    return Case(other, ours, "plain", gradients=(1 - place,))


def quantized_bases():
    """Those with an operand in low precision, and those of them with integers only."""
    low = {base: operands(make(base)[1]).values() for base in BASES}
    return [b for b in low if low[b]], [b for b in low if low[b] and not any("float" in o.qtype.name for o in low[b])]


REMAINING_AXES = [
    ("lhs, one of two", "two free", shared("lhs", [0, 2], {"channelwise_axes": (1,)})),
    ("lhs, the other", "two free", shared("lhs", [1, 2], {"channelwise_axes": (0,)})),
    ("lhs, per tensor", "two free", shared("lhs", "per_tensor", {"per_tensor": True})),
    ("rhs, one of two", "two free", shared("rhs", [0, 1], {"channelwise_axes": (2,)})),
    ("rhs, per tensor", "two free", shared("rhs", "per_tensor", {"per_tensor": True})),
    ("not the batch", "batch", shared("lhs", [0, 2], {"channelwise_axes": (1,)})),
]
TILES = [
    ("plain", (8,)), ("plain", (16,)), ("two contracted", (2, 4)), ("two contracted", (4, 8)),
    ("two contracted", (1, 16)), ("batch", (4,)), ("transposed", (8,)),
]  # fmt: skip


@functools.cache
def cases():
    """The cases of each mode, by name."""
    low, ints = quantized_bases()
    few = ("1 x 2", "8 x 4", "all 4", "v4 float8")
    return {
        "configs": {b: case(b) for b in BASES}
        | {f"{b}, {s}": case(b, shape=s) for b in few for s in ("batch", "two contracted", "two free", "transposed")},
        "fake quantization": {b: case(b, fake_quant) for b in low},
        "mid-quantization, gradients too": {  # with one bit, where AQT's is right: see test_aqt.py
            f"{alpha}, {'+'.join(where)}, {s}": case("all 1", mid(**dict.fromkeys(where, alpha)), s)
            for alpha in (0.3, 0.5, 1.0)
            for where in [("fwd",), ("dlhs",), ("drhs",), MATMULS]
            for s in ("plain", "batch", "two contracted")
        },
        "mid-quantization of the forward": {f"{b}, {alpha}": smoothed(b, alpha) for b in ints for alpha in (0.5, 1.0)},
        "numerics without rounding": {
            f"{b}, {s}": case(b, without_rounding, s) for b in ints for s in ("plain", "batch")
        },
        "numerics with a gradient of their own": {
            f"{b}, {'+'.join(sides)}": case(b, own_gradient(*sides))
            for sides in [("lhs",), ("rhs",), SIDES]
            for b in with_ints(*sides)
        },
        "a config next to a QArray": {f"{b}, {side}": beside(b, side) for side in SIDES for b in with_ints(side)},
        "scale axes among the remaining ones": {
            f"{b}, {name}": case(b, change, s, gradients=())
            for b in ("8 x 8", "4 x 4", "v4 float8")
            for name, s, change in REMAINING_AXES
        },
        "a scale for each contracted index": {
            f"{b}, {lhs} and {rhs}": case(b, remaining(lhs, rhs))
            for b in ints
            for lhs, rhs in [("input", "input"), ("other", "input"), ("input", "other")]
        },
        "several tiled contracted axes": {
            f"{b}, {s}, {sizes}": tiles(s, sizes, b) for b in ("v4", "8 x 4") for s, sizes in TILES
        },
        "dynamic_update_slice": {
            f"{channels}, {starts}": update(channels, starts)
            for channels in [(0,), (0, 1), (0, 1, 2)]
            for starts in [(0, 0, 0), (3, 0, 0), (6, 0, 0), (7, 0, 0)]
        },
        "shards of 2 to 16 values": {
            f"{b}, {count}, {s}": case(b, local(count), s)
            for b in ("all 8", "all 4", "v4")
            for count in (2, 4, 8)
            for s in ("plain", "transposed")
        },
    }


MODES = [line.strip("| ").split(" | ") for line in table("cases", "from-aqt.md")]


def test_the_table_of_cases_is_complete():
    counts = {mode: len(found) for mode, found in cases().items()}
    print(f"\n{sum(counts.values())} cases against aqtp 0.9: {counts}")
    assert {mode: int(count) for mode, count in MODES} == counts


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode, _ in MODES])
def test_every_case_equals_aqt(mode):
    """In one program, of which the inputs of a shape are an argument."""
    found = cases()[mode]
    inputs = {shape: data(*SHAPES[shape][:3]) for shape in {c.shape for c in found.values()}}

    @jax.jit
    def run(inputs):
        return {name: [c.run(f, *inputs[c.shape]) for f in (c.ours, c.theirs)] for name, c in found.items()}

    errors = {name: max(map(off, *pair)) for name, pair in run(inputs).items()}
    assert {name: error for name, error in errors.items() if not error < 2e-6} == {}
