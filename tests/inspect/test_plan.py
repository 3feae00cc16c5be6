"""The plan: every product with its rule, types, sizes and reasons; rules that do nothing are errors."""

import io
import json

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import octavo
from octavo.hlo import Collective, Communication, read_communication
from octavo.inspect.plan import weights_of_arguments

INT8 = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


PARAMS = {"up": {"w": shape(64, 256)}, "down": {"w": shape(256, 64)}, "stack": {"w": shape(3, 64, 64)}}
X = shape(8, 64)


def model(params, x):
    x = jnp.tanh(x @ params["up"]["w"]) @ params["down"]["w"]
    x = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, params["stack"]["w"])[0]
    return x, x @ x.T


def test_a_row_says_everything_about_a_product():
    row = octavo.plan(model, INT8, PARAMS, X).rows[0]
    assert (row.path, row.op, row.weight, row.shapes, row.rule) == ("up", "dot_general", "up/w", "(8,64) x (64,256)", 0)
    assert (row.fwd, row.dlhs, row.drhs) == ("int8 x int8",) * 3
    assert (row.scales, row.lowering, row.reason) == ("(8,1) (1,256)", "int8 -> int32", None)
    assert (row.bytes_before, row.bytes_after) == (64 * 256 * 4, 64 * 256 + 256 * 4)
    assert row.flops == 2 * 8 * 64 * 256


def test_a_scanned_layer_counts_its_length():
    row = octavo.plan(model, INT8, PARAMS, X).rows[2]
    assert (row.path, row.times, row.flops, row.bytes_before) == ("stack", 3, 3 * 2 * 8 * 64 * 64, 3 * 64 * 64 * 4)


def test_types_follow_the_mode():
    types = {
        "qat": (octavo.QuantizationRule(weight_qtype="int8", act_qtype="int8"), "int8 x int8", "float", "float"),
        "weight-only": (octavo.QuantizationRule(weight_qtype="int4"), "float x int4", "float", "float"),
        "fp8": (
            octavo.QtRule(weight_qtype="fp8", act_qtype="fp8", bwd_qtype="float8_e5m2"),
            "float8_e4m3fn x float8_e4m3fn",
            "float8_e5m2 x float8_e4m3fn",
            "float8_e5m2 x float8_e4m3fn",
        ),
    }
    for rule, *wanted in types.values():
        row = octavo.plan(model, rule, PARAMS, X).rows[0]
        assert [row.fwd, row.dlhs, row.drhs] == wanted


def test_packed_types_count_their_bits():
    row = octavo.plan(model, octavo.QuantizationRule(weight_qtype="int4"), PARAMS, X).rows[0]
    assert row.bytes_after == 64 * 256 // 2 + 256 * 4
    assert row.lowering == "exact in float32"


def test_small_tiles_say_that_they_are_dequantized():
    rule = octavo.QuantizationRule(weight_qtype="int8", act_qtype="int8", tile_size=2)
    assert octavo.plan(model, rule, PARAMS, X).rows[0].lowering == "dequantized"


def test_reasons_for_what_is_left_alone():
    rules = [octavo.QuantizationRule(module_path="down", skip=True), octavo.QuantizationRule(weight_qtype="int8")]
    reasons = {row.path: row.reason for row in octavo.plan(model, rules, PARAMS, X).rows}
    assert reasons["up"] is None
    assert reasons["down"] == "a rule leaves it alone"
    assert "two activations, and the rule has no act_qtype" in reasons.values()
    only = octavo.plan(model, INT8.replace(module_path="up"), PARAMS, X)
    assert [row.reason for row in only.rows][1:] == ["no rule matches"] * 3
    assert only.share == pytest.approx(only.rows[0].flops / only.flops)


class TestUnmatched:
    def test_a_rule_that_matches_nothing_names_the_nearest_paths(self):
        rules = [INT8.replace(module_path="upp"), INT8]
        with pytest.raises(ValueError, match=r"rule 0 matches nothing: module_path='upp'; the nearest paths are 'up'"):
            octavo.plan(model, rules, PARAMS, X)

    def test_a_rule_whose_operation_does_not_occur(self):
        rules = [INT8.replace(op_names=("einsum",)), INT8]
        with pytest.raises(
            ValueError, match=r"rule 0 matches nothing: .*op_names=\('einsum',\) \(there are dot_general\)"
        ):
            octavo.plan(model, rules, PARAMS, X)

    def test_a_shadowed_rule_names_the_one_before_it(self):
        rules = [INT8, octavo.QuantizationRule(module_path="up", weight_qtype="int4")]
        with pytest.raises(ValueError, match="rule 1 is shadowed: rule 0 comes first and takes all 1 matmuls"):
            octavo.plan(model, rules, PARAMS, X)

    def test_a_rule_that_matches_only_matmuls_with_configs(self):
        fn = lambda params, x: octavo.dot(x, params["up"]["w"], config=octavo.DotConfig.qt("int8"))  # noqa: E731
        with pytest.raises(ValueError, match="rule 0 matches only matmuls with configs of their own, 1 of them"):
            octavo.plan(fn, INT8, PARAMS, X)

    def test_it_can_be_a_warning(self):
        rules = [INT8.replace(module_path="upp"), INT8]
        with pytest.warns(UserWarning, match="rule 0 matches nothing"):
            plan = octavo.plan(model, rules, PARAMS, X, on_unmatched="warn")
        assert "rule 0 matches nothing" in str(plan)

    def test_optional_rules_may_match_nothing(self):
        exclude = octavo.QuantizationRule(module_path=".*router.*", skip=True, optional=True)
        assert octavo.plan(model, [exclude, INT8], PARAMS, X).rows[0].rule == 1


class TestPrinting:
    plan = staticmethod(lambda: octavo.plan(model, INT8, PARAMS, X))

    def test_text(self):
        lines = str(self.plan()).splitlines()
        assert lines[0].split()[:4] == ["path", "op", "shapes", "rule"]
        assert lines[4].startswith("stack  dot_general  3 x (8,64) x (64,64)")
        assert lines[-1].startswith("4 of 4 matmuls quantized, 100.0 % of forward FLOPs; operands")

    def test_json(self):
        plan = self.plan()
        read = json.loads(plan.to_json())
        assert read["share"] == 1.0
        assert [row["path"] for row in read["rows"]] == [row.path for row in plan.rows]

    def test_html_is_escaped(self):
        text = self.plan()._repr_html_()
        assert text.startswith("<table>")
        assert "-&gt; int32" in text

    def test_rich(self):
        rich = pytest.importorskip("rich.console", reason="rich is an optional dependency")
        console = rich.Console(width=300, record=True, file=io.StringIO())
        console.print(self.plan())
        assert "int8 x int8" in console.export_text()


def test_nothing_is_computed_for_a_plan():
    huge = {"w": shape(1 << 20, 1 << 20)}
    assert octavo.plan(lambda params, x: x @ params["w"], INT8, huge, shape(8, 1 << 20)).flops == 2 * 8 << 40


@pytest.fixture(scope="module")
def told():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    cut, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
    where = {"up": {"w": cut}, "down": {"w": whole}, "stack": {"w": NamedSharding(mesh, P(None, "d"))}}
    low = octavo.quantized(lambda params, x: model(params, x)[0], INT8)
    compiled = jax.jit(low, in_shardings=(where, cut), out_shardings=cut).lower(PARAMS, X).compile()
    return octavo.plan(low, None, PARAMS, X), compiled


class TestCommunication:
    """What a device sends, told to a plan by a program that was compiled."""

    def test_rows_have_what_is_sent_of_their_weights(self, told):
        plan = told[0].with_communication(told[1])
        sent = [row.collective_bytes for row in plan.rows]
        assert [row.weight for row in plan.rows] == ["up/w", "down/w", "stack/w", None]
        assert sent == [64 * 256 * 7 // 8, None, 3 * 64 * 64 * 7 // 8, None]
        assert sum(filter(None, sent)) == plan.communication.weights()
        assert told[0].communication is None

    def test_a_text_and_a_communication_serve_as_well(self, told):
        plan, text = told[0], told[1].as_text()
        assert str(plan.with_communication(text)) == str(plan.with_communication(read_communication(text)))
        assert str(plan.with_communication(text)) == str(plan.with_communication(told[1]))

    def test_it_is_printed(self, told):
        plan = told[0].with_communication(told[1])
        head, _, up, down, *_, share, sums = str(plan).splitlines()
        assert head.split()[-3:] == ["collective", "bytes", "note"]
        assert (up.split()[-2:], down.split()[-1]) == (["14.3", "kB"], "%")
        assert share.startswith("4 of 4 matmuls quantized")
        assert sums == plan.communication.line()
        assert "; weights 25.1 kB, the rest " in sums
        assert "(s8)" in sums
        assert f"<p>{sums}</p>" in plan._repr_html_()
        assert "<th>collective bytes</th>" in plan._repr_html_()
        assert "collective" not in str(told[0])

    def test_json(self, told):
        plan = told[0].with_communication(told[1])
        read = json.loads(plan.to_json())
        assert [row["collective_bytes"] for row in read["rows"]] == [row.collective_bytes for row in plan.rows]
        assert read["communication"] == plan.communication.summary()
        assert read["communication"]["by_kind"]["all-gather"]["s8"] == plan.communication.weights()
        assert "communication" not in json.loads(told[0].to_json())

    def test_rich(self, told):
        rich = pytest.importorskip("rich.console", reason="rich is an optional dependency")
        console = rich.Console(width=300, record=True, file=io.StringIO())
        console.print(told[0].with_communication(told[1]))
        assert "; weights 25.1 kB, the rest " in console.export_text().splitlines()[-1]

    def test_a_weight_of_several_products_is_counted_once(self):
        twice = octavo.plan(lambda params, x: (x @ params["w"]) @ params["w"], INT8, {"w": shape(64, 64)}, X)
        gather = Collective("all-gather", "s8", (64, 64), 8, count=2, weights=("state.params['w']",))
        assert [row.collective_bytes for row in twice.with_communication(Communication((gather,))).rows] == [
            2 * 64 * 64 * 7 // 8,
            None,
        ]


def test_arguments_are_known_by_their_path_from_one_root():
    arguments = ["s.params['a']['w']", "s.params['b'][0].qvalue", "s.params['b'][0].scale", "s.params['c']['d']['w']"]
    assert weights_of_arguments([*arguments, "x"], ["a/w", "b/0", "w"]) == dict(
        zip(arguments, ["a/w", "b/0", "b/0"], strict=False)
    )
    assert weights_of_arguments(["rhs"], ["rhs"]) == {"rhs": "rhs"}
    assert weights_of_arguments(["params['lin/~/1']['w']"], ["lin/~/1/w"]) == {"params['lin/~/1']['w']": "lin/~/1/w"}
    assert weights_of_arguments(["x"], ["w"]) == {}


@jax.custom_vjp
def opaque(x, w):
    return x @ w


opaque.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))


def test_a_matmul_with_a_custom_derivative_is_a_row_and_the_share_is_that_of_verify():
    fn = lambda params, x: jax.jit(opaque)(x, params["up"]["w"]) @ params["down"]["w"]  # noqa: E731
    plan = octavo.plan(fn, INT8, PARAMS, X)
    assert [(row.path, row.weight, row.reason) for row in plan.rows] == [
        ("up", "up/w", "in the body of a custom_vjp function"),
        ("down", "down/w", None),
    ]
    assert "1 of 2 matmuls quantized, 50.0 % of forward FLOPs" in str(plan)
    assert octavo.verify(octavo.quantized(fn, INT8), PARAMS, X).forward == plan.share


def test_a_kernel_is_a_row_that_is_not_counted():
    call = pl.pallas_call(lambda x, w, o: o.__setitem__(..., x[...] @ w[...]), out_shape=shape(8, 256))
    fn = lambda params, x: jax.jit(call)(x, params["up"]["w"]) @ params["down"]["w"]  # noqa: E731
    plan = octavo.plan(fn, INT8, PARAMS, X)
    assert plan.rows[0].op == "pallas_call"
    assert plan.rows[0].reason == "a Pallas kernel: it is not rewritten, and its FLOPs are not counted"
    assert str(plan).splitlines()[2].split()[-14] == "unknown"
    assert str(plan).endswith("; 1 kernel not counted")
    assert octavo.verify(octavo.quantized(fn, INT8), PARAMS, X).summary().endswith("; 1 kernel not counted")


def test_an_operation_with_its_own_config_under_vmap_is_a_row():
    config = octavo.quantized(model, INT8).sites(PARAMS, X)[0].config
    dot = lambda x, w: octavo.dot_general(x, w, (((1,), (0,)), ((), ())), config=config)  # noqa: E731
    fn = lambda params, x: jax.vmap(dot, (0, None))(x, params["up"]["w"]) @ params["down"]["w"]  # noqa: E731
    plan = octavo.plan(fn, INT8, PARAMS, shape(3, 8, 64))
    assert [(row.times, row.fwd, row.reason) for row in plan.rows] == [
        (3, "int8 x int8", None),
        (1, "int8 x int8", None),
    ]
    assert plan.rows[0].flops == plan.rows[1].flops


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda w, x: jax.lax.platform_dependent(w, x, default=lambda w, x: x @ w), "jax.lax.platform_dependent"),
        (
            lambda w, x: jax.lax.custom_linear_solve(lambda v: v @ w, x, lambda _, b: b, symmetric=True),
            "custom_linear_solve",
        ),
    ],
)
def test_a_call_that_is_not_rewritten_is_a_row(fn, reason):
    params = {"a": shape(64, 64), "b": shape(64, 64)}
    plan = octavo.plan(lambda params, x: fn(params["a"], x) @ params["b"], INT8, params, X)
    assert plan.rows[0].reason == f"in the body of {reason}"
    assert plan.rows[-1].reason is None
