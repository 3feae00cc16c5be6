"""What `verify` says of a function, against FLOPs counted by hand."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import octavo
from octavo import DotConfig
from octavo.inspect.stablehlo import read_stablehlo
from octavo.inspect.verify import Verification, verify

PLAIN = (((1,), (0,)), ((), ()))
X, W = jax.ShapeDtypeStruct((16, 64), jnp.float32), jax.ShapeDtypeStruct((64, 32), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
ONE = 2 * 16 * 64 * 32  # FLOPs of X @ W
INT8 = DotConfig.qt("int8")


def quantized(x, w, config=INT8):
    return octavo.dot_general(x, w, PLAIN, config=config)


def training(fn, argnums=(0, 1)):
    """A loss whose gradient depends on the result, and its gradients."""
    return jax.value_and_grad(lambda *args: jnp.sum(fn(*args) ** 2), argnums)


def rows(v):
    return [(p.kind, p.backward, p.count, p.flops) for p in v.matmuls]


def test_a_float_function_has_no_low_precision():
    v = verify(training(jnp.matmul), X, W)
    assert rows(v) == [("float", False, 1, ONE), ("float", True, 1, ONE), ("float", True, 1, ONE)]
    assert v.share() == v.forward == v.backward == 0
    assert v.share("float") == 1
    assert str(v).endswith("low precision: 0.0 % of matmul FLOPs forward, 0.0 % backward")


@pytest.mark.parametrize(
    ("config", "platform", "kinds"),
    [
        (INT8, "cpu", ("native", "native", "native")),
        (INT8, "tpu", ("native", "native", "native")),
        (DotConfig.qat("int8"), "cpu", ("native", "float", "float")),
        (DotConfig.weight_only("int8"), "tpu", ("weight_only", "float", "float")),
        (DotConfig.weight_only("int4"), "cpu", ("weight_only", "float", "float")),
        (DotConfig.qt("fp8"), "cpu", ("emulated", "emulated", "emulated")),
        (DotConfig.qt("fp8"), "cuda", ("native", "native", "native")),
        (DotConfig.qt("mxfp4"), "tpu", ("emulated", "emulated", "emulated")),
        (DotConfig.qt("nvfp4"), "cpu", ("emulated", "emulated", "emulated")),
        (DotConfig.qt("nf4"), "cpu", ("emulated", "emulated", "emulated")),
        (DotConfig.qt("fp6_e3m2"), "cpu", ("emulated", "emulated", "emulated")),
        (DotConfig.qat("int4", calibration="minmax"), "cpu", ("native", "float", "float")),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_kinds_by_recipe_and_platform(config, platform, kinds):
    v = verify(training(functools.partial(quantized, config=config)), X, W, platform=platform)
    assert rows(v) == [(kind, i > 0, 1, ONE) for i, kind in enumerate(kinds)]
    low = [kind in ("native", "emulated") for kind in kinds]
    assert v.forward == low[0]
    assert v.backward == sum(low[1:]) / 2
    assert v.lowered_share == pytest.approx(kinds.count("native") / 3)


def test_mixed_precision_by_hand():
    def model(x, w, v):
        return quantized(x, w) @ v  # 16 x 64 x 32 in int8, then 16 x 32 x 8 in float

    v = verify(model, X, W, jax.ShapeDtypeStruct((32, 8), jnp.float32))
    assert [p.flops for p in v.matmuls] == [65536, 8192]
    assert v.share("native") == v.forward == 65536 / 73728
    assert v.flops() == 73728
    assert v.share("float", backward=True) == 0
    assert str(v).splitlines()[-1] == "low precision: 88.9 % of matmul FLOPs forward (native 100.0 %)"


def test_names_lengths_and_directions_through_scan_remat_and_jit():
    @jax.jit
    def model(x, ws):
        @jax.checkpoint
        def block(x, w):
            with jax.named_scope("mlp"):
                return jnp.sin(quantized(x, w)) @ w

        with jax.named_scope("stack"):
            return jax.lax.scan(lambda x, w: (block(x, w), None), x, ws)[0]

    v = verify(training(model), X, jax.ShapeDtypeStruct((5, 64, 64), jnp.float32))
    each = 5 * 2 * 16 * 64 * 64
    assert {(p.path, p.count, p.flops) for p in v.matmuls} == {("stack/mlp", 5, each)}
    # The float product recomputes nothing; the int8 one is done again for the gradient of the sine.
    assert sorted((p.kind, p.backward) for p in v.matmuls) == [
        ("float", False),
        ("float", True),
        ("float", True),
        ("native", False),
        ("native", True),
        ("native", True),
        ("native", True),
    ]
    assert (v.forward, v.backward) == (1 / 2, 3 / 5)


def test_codes_are_followed_through_scans_and_calls():
    def model(x, codes, scale):
        def turn(carry, i):
            weights = jax.lax.dynamic_index_in_dim(carry, i, keepdims=False)
            wide = jax.jit(lambda w, s: w.astype(jnp.float32) * s)(weights, scale)
            return carry, jnp.where(x.sum() > 0, x, 0.0) @ jnp.where(wide > 3, wide, 0.0)

        return jax.lax.scan(turn, codes, jnp.arange(3))[1]

    codes = jax.ShapeDtypeStruct((3, 64, 32), jnp.int8)
    of = lambda *shape: verify(model, X, codes, jax.ShapeDtypeStruct(shape, jnp.float32))  # noqa: E731
    assert rows(of(1, 32)) == [("weight_only", False, 3, 3 * ONE)]
    assert rows(of(64, 32)) == [("float", False, 3, 3 * ONE)]  # not a scale: as many values as codes


@pytest.mark.parametrize("spoil", [lambda w: w * w, jnp.exp, lambda w: w + jnp.sin(w), lambda w: 1 / w])
def test_arithmetic_that_does_not_decode_ends_the_claim(spoil):
    codes = jax.ShapeDtypeStruct(W.shape, jnp.int8)
    fn = lambda change, x, w: x @ change(w.astype(jnp.float32))  # noqa: E731
    assert verify(fn, lambda w: w * 0.5 - 1, X, codes).matmuls[0].kind == "weight_only"
    assert verify(fn, spoil, X, codes).matmuls[0].kind == "float"


def test_a_carry_that_stops_being_codes_is_float():
    def model(x, codes):
        def turn(w, _):
            return jnp.sin(w), x @ w

        return jax.lax.scan(turn, codes.astype(jnp.float32), None, length=2)[1]

    assert rows(verify(model, X, jax.ShapeDtypeStruct(W.shape, jnp.int8))) == [("float", False, 2, 2 * ONE)]


def test_a_while_loop_counts_once_and_is_reported():
    def model(x, w):
        with jax.named_scope("solve"):
            return jax.lax.while_loop(lambda x: x[0, 0] < 3, lambda x: quantized(x, w), x)

    v = verify(model, X, SQUARE)
    assert rows(v) == [("native", False, 1, 2 * ONE)]
    assert v.unknown_loops == ("solve/while",)
    assert "counted once, unknown trip count: solve/while" in str(v)
    assert verify(lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x + 1, x), X).unknown_loops == ()


def test_of_a_cond_the_dearest_branch_counts():
    def model(p, x, w):
        return jax.lax.cond(p, lambda: (quantized(x, w) @ w).sum(), lambda: (x @ w).sum())

    v = verify(model, jax.ShapeDtypeStruct((), jnp.bool_), X, SQUARE)
    assert rows(v) == [("native", False, 1, 2 * ONE), ("float", False, 1, 2 * ONE)]


def test_of_a_platform_choice_the_platform_s_branch_counts():
    def model(x, w):
        return jax.lax.platform_dependent(x, w, tpu=quantized, default=lambda x, w: (x @ w) * 2)

    assert [p.kind for p in verify(model, X, W).matmuls] == ["float"]
    assert [p.kind for p in verify(model, X, W, platform="tpu").matmuls] == ["native"]


@pytest.mark.parametrize("axes", [("a",), ("a", "b")])
def test_shard_map_counts_all_devices(axes):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    # Sixteen rows for every device, since fewer than eight would be padded.
    rows_of_all = 16 * (4 if axes == ("a",) else 8)
    spec = P(axes)
    fn = jax.shard_map(
        quantized, mesh=mesh, in_specs=(spec, P()), out_specs=spec, axis_names=set(axes), check_vma=False
    )
    v = verify(training(jax.jit(fn)), jax.ShapeDtypeStruct((rows_of_all, 64), jnp.float32), W)
    devices = rows_of_all // 16
    assert rows(v) == [("native", i > 0, devices, devices * ONE) for i in range(3)]


def test_digits_count_as_the_integer_product_that_they_are():
    config = DotConfig.weight_only("int8")
    row = jax.ShapeDtypeStruct((1, 64), jnp.float32)
    # Three digits of one row, padded to the eight rows that a CPU is fast with.
    assert rows(verify(quantized, row, W, config)) == [("native", False, 1, 2 * 8 * 64 * 32)]
    assert rows(verify(quantized, row, W, config, platform="tpu")) == [("weight_only", False, 1, 2 * 64 * 32)]


def test_what_no_result_depends_on_does_not_count():
    loss = training(quantized, argnums=1)
    assert [(p.backward, p.lhs, p.rhs) for p in verify(loss, X, W, platform="tpu").matmuls] == [
        (False, (16, 64), (64, 32)),
        (True, (64, 16), (16, 32)),
    ]


CONVOLUTIONS = {
    # 2 x (batch 2) x (6 outputs) x (2 inputs a group) x (4 x 3 places)^2: no padding, so every pair counts
    "strided": ({"window_strides": (2, 2), "padding": "VALID"}, 2 * 2 * 6 * 2 * (4 * 3) ** 2),
    # pairs on an axis: three for each of nine places, less one at either end
    "padded": ({"window_strides": (1, 1), "padding": "SAME"}, 2 * 2 * 6 * 2 * (9 * 3 - 2) ** 2),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_by_hand_and_as_xla_counts(name):
    options, flops = CONVOLUTIONS[name]
    conv = functools.partial(
        jax.lax.conv_general_dilated,
        **options,
        feature_group_count=2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 9, 9, 4), (3, 3, 2, 6))]
    v = verify(training(conv), *shapes, platform="tpu")
    assert rows(v) == [("float", False, 1, flops), ("float", True, 1, flops), ("float", True, 1, flops)]
    assert [(r.op, r.count, r.flops) for r in v.lowered] == [("convolution", 1, flops)] * 3
    assert jax.jit(conv).lower(*shapes).cost_analysis()["flops"] == flops


def test_quantized_convolution_is_native():
    conv = functools.partial(
        octavo.conv_general_dilated, window_strides=(1, 1), padding="VALID", config=DotConfig.qat("int8")
    )
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 4, 9, 9), (6, 4, 3, 3))]
    v = verify(conv, *shapes, platform="tpu")
    assert rows(v) == [("native", False, 1, 2 * 2 * 6 * 4 * (7 * 3) ** 2)]
    assert [(r.op, r.is_low) for r in v.lowered] == [("convolution", True)]


def test_ragged_matmuls_by_hand():
    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
    experts = jax.ShapeDtypeStruct((3, 64, 32), jnp.float32)
    v = verify(training(jax.lax.ragged_dot), X, experts, sizes, platform="tpu")
    # Every row meets one expert, whatever their number; so does every row in the experts' gradients.
    assert rows(v) == [("float", False, 1, ONE), ("float", True, 1, ONE), ("float", True, 1, ONE)]
    assert {p.op for p in v.matmuls} == {"ragged_dot"}
    assert [(r.op, r.count, r.flops) for r in v.lowered] == [("ragged_dot", 1, ONE)] * 3
    codes = [jax.ShapeDtypeStruct(x.shape, jnp.int8) for x in (X, experts)]
    ragged = functools.partial(jax.lax.ragged_dot, preferred_element_type=jnp.int32)
    assert rows(verify(ragged, *codes, sizes)) == [("native", False, 1, ONE)]


def ragged_texts(fn, *shapes):
    """The program for tpu as it is exported, and as it is lowered: ragged matmuls are written in two forms."""
    exported = export.export(jax.jit(fn), platforms=["tpu"])(*shapes).mlir_module()
    return exported, jax.jit(fn).trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("kind", ["float", "int8", "gradients"])
def test_ragged_matmuls_in_both_forms(kind):
    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
    experts = jax.ShapeDtypeStruct((3, 64, 32), jnp.float32)
    low = functools.partial(octavo.ragged_dot, config=DotConfig.qat("int8"))
    fn = {"float": jax.lax.ragged_dot, "int8": low, "gradients": training(jax.lax.ragged_dot)}[kind]
    exported, lowered = ragged_texts(fn, X, experts, sizes)
    assert '"chlo.ragged_dot"(' in lowered
    assert '"chlo.ragged_dot" %' in exported
    wanted = {
        "float": [("16x64xf32", "3x64x32xf32", "16x32xf32")],
        "int8": [("16x64xi8", "3x64x32xi8", "16x32xi32")],
        "gradients": [
            ("16x64xf32", "3x64x32xf32", "16x32xf32"),
            ("16x64xf32", "16x32xf32", "3x64x32xf32"),
            ("16x32xf32", "3x64x32xf32", "16x64xf32"),
        ],
    }[kind]
    for text in (exported, lowered):
        assert sorted(read_stablehlo(text)) == sorted(("ragged_dot", *types, 1, ONE) for types in wanted)


def test_batched_matmuls_by_hand():
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, 5, 7), (3, 7, 11)))
    v = verify(jnp.matmul, x, w, platform="cuda")
    assert v.flops() == 2 * 3 * 5 * 7 * 11
    assert [(r.op, r.flops) for r in v.lowered] == [("dot_general", 2 * 3 * 5 * 7 * 11)]


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_stablehlo_has_int8_operands(platform):
    v = verify(quantized, X, W, platform=platform)
    assert v.lowered == (("dot_general", "16x64xi8", "64x32xi8", "16x32xi32", 1, ONE),)
    assert v.platform == platform
    assert f"StableHLO for {platform}: 1 x dot_general 16x64xi8 x 64x32xi8 -> 16x32xi32" in str(v)


def test_stablehlo_types_of_eight_bits_or_fewer():
    dot = "stablehlo.dot_general %0, %1, contracting_dims = [1] x [0]"
    line = dot + " : (tensor<2x4x{}>, tensor<4x8x{}>) -> tensor<2x8xf32>"
    low = {t: read_stablehlo(line.format(t, t))[0].is_low for t in ("i8", "ui4", "f8E4M3FN", "f4E2M1FN", "i1", "bf16")}
    assert low == {"i8": True, "ui4": True, "f8E4M3FN": True, "f4E2M1FN": True, "i1": False, "bf16": False}
    assert not read_stablehlo(line.format("i8", "f32"))[0].is_low
    assert [r.count for r in read_stablehlo("\n".join([line.format("i8", "i8")] * 3))] == [3]


def test_qarrays_keywords_and_settings_as_arguments():
    q = octavo.quantize(jnp.ones((64, 32)), "int8", channelwise_axes=(1,))

    def model(params, *, x, act, repeat):
        for _ in range(repeat):
            x = octavo.dot_general(x, params["w"], PLAIN)
            x = {"relu": jax.nn.relu}[act](x) @ params["v"]
        return x

    v = verify(model, {"w": q, "v": jnp.ones((32, 64))}, x=X, act="relu", repeat=2)
    assert rows(v) == [("weight_only", False, 1, ONE), ("float", False, 1, ONE)] * 2
    both = verify(lambda a, b: octavo.dot_general(a, b, PLAIN), octavo.quantize(jnp.ones((16, 64)), "int8"), q)
    assert rows(both) == [("native", False, 1, ONE)]


def test_kernels_are_listed_not_counted():
    def double(x_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], x_ref[...])

    def model(x):
        with jax.named_scope("kernel"):
            return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="double")(x)

    v = verify(model, SQUARE)
    assert v.matmuls == ()
    assert v.opaque == ("kernel/double/pallas_call",)
    assert str(v).splitlines() == [
        "not counted, opaque: kernel/double/pallas_call",
        "no matmuls found; 1 kernel not counted",
    ]


def test_nothing_to_count():
    v = verify(jnp.sin, X)
    assert (v.matmuls, v.share(), v.flops()) == ((), 0, 0)
    assert str(v) == "no matmuls found"


def test_json_html_and_merged_rows():
    v = verify(lambda x, w: [x @ w, jnp.sin(x) @ w], X, W)
    assert len(v.matmuls) == 2
    assert str(v).splitlines()[1].split()[-3:] == ["2", "1.311e+05", "float"]
    assert json.loads(v.to_json())["matmuls"][0] == {
        "path": "",
        "op": "dot_general",
        "lhs": [16, 64],
        "rhs": [64, 32],
        "lhs_dtype": "float32",
        "rhs_dtype": "float32",
        "out_dtype": "float32",
        "flops": ONE,
        "count": 1,
        "backward": False,
        "kind": "float",
        "stored": False,
    }
    assert json.loads(verify(quantized, X, W, platform="tpu").to_json())["lowered"][0]["lhs"] == "16x64xi8"
    assert "<td>float32[16,64] x float32[64,32]</td>" in v._repr_html_()
    assert isinstance(hash(v), int)


def test_a_long_table_is_cut():
    shapes = [jax.ShapeDtypeStruct((n, n), jnp.float32) for n in range(1, 31)]
    text = str(verify(lambda *xs: [x @ x for x in xs], *shapes)).splitlines()
    assert len(text) == 1 + 24 + 1 + 1
    assert text[-2].split() == ["and", "6", "smaller", str(sum(2 * n**3 for n in range(1, 7)))]


def test_errors_say_what_to_do():
    with pytest.raises(TypeError, match=r"takes a function and its arguments, got int: verify\(fn, \*args\)"):
        verify(3, X)
    with pytest.raises(ValueError, match=r"platform is one of .*'tpu'\), got 'abacus'"):
        verify(quantized, X, W, platform="abacus")
    only = lambda x: jax.lax.platform_dependent(x, cpu=jnp.sin)  # noqa: E731
    with pytest.raises(ValueError, match=r"cannot be lowered for 'tpu': .*Leave platform out"):
        verify(only, X, platform="tpu")


def test_an_empty_verification():
    assert Verification((), platform="cpu").summary() == "no matmuls found"


@pytest.mark.parametrize("stored", [False, True])
def test_the_summary_of_weight_only_rules_says_how_weights_are_read_and_stored(stored):
    w = jnp.ones((64, 32))
    low = octavo.quantized(lambda params, x: x @ params["w"], octavo.QuantizationRule(weight_qtype="int8"))
    given = {"w": octavo.quantize(w, "int8", channelwise_axes=(1,)) if stored else w}
    summary = verify(low, given, X).summary()
    assert summary == (
        "low precision: 0.0 % of matmul FLOPs forward; weights in low bits: read by 100.0 % of matmul FLOPs, "
        f"stored for {'100.0' if stored else '0.0'} %"
    )
