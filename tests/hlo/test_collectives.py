"""Bytes between devices, from texts written by hand and from programs that were compiled."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from octavo.hlo import Collective, Communication, partitioned_hlo, read_communication
from octavo.hlo.text import Shape, bits, group_size


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))


def compiled(mesh, fn, *shapes, specs, out=None):
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    placed = None if out is None else NamedSharding(mesh, out)
    return jax.jit(fn, in_shardings=shardings, out_shardings=placed).lower(*shapes)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# Types and groups.


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("f32", 32), ("bf16", 16), ("f8e4m3fn", 8), ("f8e8m0fnu", 8), ("f4e2m1fn", 4), ("s4", 4), ("u2", 2), ("pred", 8)],
)
def test_bits(dtype, size):
    assert bits(dtype) == size
    assert Shape(dtype, (3, 5)).bytes == -(-15 * size // 8)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("replica_groups={{0,1,2},{3,4,5}}", 3),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}", 4),
        ("replica_groups=mesh['x'=8] {'x':(1)4}", 4),
    ],
)
def test_group_size(text, size):
    assert group_size(f", channel_id=1, {text}, dimensions={{0}}") == size


def test_group_size_without_devices():
    with pytest.raises(ValueError, match="a collective names them by replica_groups"):
        group_size(", channel_id=1")


# Texts.

_FORMS = """HloModule forms

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[16], y: s4[32]) -> f32[128] {
  %x = f32[16]{0} parameter(0), metadata={op_name="params['w']"}
  %y = s4[32]{0} parameter(1), metadata={op_name="batch"}
  %start = (f32[16]{0}, f32[128]{0}) all-gather-start(%x), replica_groups=[1,8]<=[8], dimensions={0}
  %done = f32[128]{0} all-gather-done(%start)
  %all = (f32[16]{0}, /*index=1*/s4[32]{0}) all-reduce(%x, %y), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %part = f32[2]{0} reduce-scatter(%x), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, to_apply=%add
  %swap = (f32[2]{0}, f32[2]{0}) all-to-all(%part, %part), replica_groups={{0,1},{2,3},{4,5},{6,7}}
  %moving = (s4[32]{0}, s4[32]{0}, u32[], u32[]) collective-permute-start(%y), source_target_pairs={{0,1},{1,0}}
  %moved = s4[32]{0} collective-permute-done(%moving)
  ROOT %copy = f32[128]{0} copy(%done)
}
"""


def test_every_form_is_counted_by_what_the_ring_sends():
    found = read_communication(_FORMS)
    assert [(c.kind, c.dtype, c.shape, c.group_size, c.bytes) for c in found.collectives] == [
        ("all-gather", "f32", (128,), 8, 128 * 4 * 7 // 8),
        ("all-reduce", "f32", (16,), 4, 2 * 16 * 4 * 3 // 4),
        ("all-reduce", "s4", (32,), 4, 2 * 16 * 3 // 4),
        ("reduce-scatter", "f32", (2,), 8, 16 * 4 * 7 // 8),
        ("all-to-all", "f32", (2,), 2, 4),
        ("all-to-all", "f32", (2,), 2, 4),
        ("collective-permute", "s4", (32,), 2, 16),
    ]
    assert found.total() == 448 + 96 + 24 + 56 + 8 + 16
    assert found.weights() == 448
    assert found.by_kind() == {
        "all-gather": 448, "all-reduce": 120, "reduce-scatter": 56, "all-to-all": 8, "collective-permute": 16
    }  # fmt: skip
    assert found.by_dtype() == {"f32": 608, "s4": 40}


def test_ragged_all_to_all_is_counted_in_full():
    text = """ENTRY %main (x: f8e4m3fn[64,32]) -> f8e4m3fn[64,32] {
      %x = f8e4m3fn[64,32]{1,0} parameter(0)
      %n = s64[8]{0} constant({0,1,2,3,4,5,6,7})
      ROOT %out = f8e4m3fn[64,32]{1,0} ragged-all-to-all(%x, %x, %n, %n, %n, %n), replica_groups={{0,1,2,3}}
    }"""
    assert read_communication(text).by_kind() == {"ragged-all-to-all": 64 * 32 * 3 // 4}


def test_a_line_has_kinds_types_and_uses():
    assert read_communication(_FORMS).line() == (
        "a device sends 648 B: all-gather 448 B (f32), all-reduce 120 B (f32 96 B, s4 24 B), "
        "reduce-scatter 56 B (f32), all-to-all 8 B (f32), collective-permute 16 B (s4); weights 448 B, the rest 200 B"
    )
    assert read_communication(_FORMS).summary()["by_kind"]["all-reduce"] == {"f32": 96, "s4": 24}


_TOGETHER = """ENTRY %main (v: f32[4], w: f32[4], x: f32[4]) -> (f32[32], f32[32], f32[64]) {
  %v = f32[4]{0} parameter(0), metadata={op_name="params[\\'v\\']"}
  %w = f32[4]{0} parameter(1), metadata={op_name="params[\\'w\\']"}
  %x = f32[4]{0} parameter(2), metadata={op_name="x"}
  %each = (f32[32]{0}, f32[32]{0}) all-gather(%w, %x), replica_groups=[1,8]<=[8], dimensions={0}
  %one = f32[32]{0} get-tuple-element(%each), index=0
  %two = f32[32]{0} get-tuple-element(%each), index=1
  %both = f32[8]{0} concatenate(%v, %w), dimensions={0}
  %all = f32[64]{0} all-gather(%both), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %out = (f32[32]{0}, f32[32]{0}, f32[64]{0}) tuple(%one, %two, %all)
}
"""


def test_arrays_of_one_collective_are_distinguished_and_one_array_of_two_weights_is_not():
    found = read_communication(_TOGETHER)
    assert [c.weights for c in found.collectives] == [("params['w']",), (), ("params['v']", "params['w']")]
    assert found.by_weight() == {"params['w']": 32 * 4 * 7 // 8}
    assert found.weights() == (32 + 64) * 4 * 7 // 8


def _loop(head: str = "", start: int = 0, step: int = 1, direction: str = "LT") -> str:
    return f"""HloModule loops

%turn (s: (s32[], f32[16])) -> (s32[], f32[16]) {{
  %s = (s32[], f32[16]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[16]{{0}} get-tuple-element(%s), index=1
  %by = s32[] constant({step})
  %next = s32[] add(%i, %by)
  %all = f32[128]{{0}} all-gather(%x), replica_groups=[1,8]<=[8], dimensions={{0}}
  ROOT %out = (s32[], f32[16]{{0}}) tuple(%next, %x)
}}

%goes_on (t: (s32[], f32[16])) -> pred[] {{
  %t = (s32[], f32[16]{{0}}) parameter(0)
  %limit = s32[] constant(9)
  ROOT %test = pred[] compare(%t#0, %limit), direction={direction}
}}

ENTRY %main (x: f32[16]) -> f32[16] {{
  %x = f32[16]{{0}} parameter(0)
  %zero = s32[] constant({start})
  %init = (s32[], f32[16]{{0}}) tuple(%zero, %x)
  %loop = (s32[], f32[16]{{0}}) while(%init), condition=%goes_on, body=%turn{head}, metadata={{op_name="a/while"}}
  ROOT %r = f32[16]{{0}} get-tuple-element(%loop), index=1
}}
"""


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (_loop(), 9),
        (_loop(start=3), 6),
        (_loop(step=2), 5),
        (_loop(direction="LE"), 10),
        (_loop(', backend_config={"known_trip_count":{"n":"4"}}'), 4),
    ],
)
def test_loops_turn_as_noted_or_as_their_counter_says(text, count):
    found = read_communication(text)
    assert [c.count for c in found.collectives] == [count]
    assert found.unknown_loops == ()


def test_a_loop_that_nobody_can_count_is_named():
    found = read_communication(_loop(direction="NE"))
    assert (found.collectives[0].count, found.unknown_loops) == (1, ("a/while",))
    assert "counted once, unknown trip count: a/while" in str(found)


def _branches(index: str) -> str:
    return f"""%small (a: f32[16]) -> f32[32] {{
  %a = f32[16]{{0}} parameter(0)
  ROOT %one = f32[32]{{0}} all-gather(%a), replica_groups=[4,2]<=[8], dimensions={{0}}
}}

%large (b: f32[16]) -> f32[32] {{
  %b = f32[16]{{0}} parameter(0)
  %more = f32[128]{{0}} all-gather(%b), replica_groups=[1,8]<=[8], dimensions={{0}}
  ROOT %cut = f32[32]{{0}} slice(%more), slice={{[0:32]}}
}}

ENTRY %main (x: f32[16], n: s32[]) -> f32[32] {{
  %x = f32[16]{{0}} parameter(0)
  %n = s32[] parameter(1)
  %known = s32[] constant(0)
  ROOT %which = f32[32]{{0}} conditional({index}, %x, %x), branch_computations={{%small, %large}}
}}
"""


def test_of_branches_the_costliest_counts_unless_it_is_known():
    assert read_communication(_branches("%n")).total() == 128 * 4 * 7 // 8
    assert read_communication(_branches("%known")).total() == 32 * 4 // 2


def test_a_text_that_is_no_module():
    with pytest.raises(ValueError, match="the text has no ENTRY computation"):
        read_communication("stablehlo.add")


def test_unknown_kind():
    with pytest.raises(ValueError, match=r"kind is one of .* got 'broadcast'"):
        Collective("broadcast", "f32", (1,), 2)


# Programs.


def test_a_sum_over_eight_devices(mesh):
    lowered = compiled(mesh, lambda x: x.sum(0), f32(8, 1024), specs=[P("d")], out=P())
    found = read_communication(lowered.compile().as_text())
    assert found.by_kind() == {"all-reduce": 2 * 7 * 1024 * 4 // 8}
    assert found.weights() == 0
    assert found.line() == "a device sends 7.17 kB: all-reduce 7.17 kB (f32)"


@pytest.mark.parametrize("read_text", [lambda lowered: lowered.compile().as_text(), partitioned_hlo])
def test_gathers_in_a_scan(mesh, read_text):
    def run(params, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0]

    lowered = compiled(mesh, run, f32(5, 64, 64), f32(8, 64), specs=[P(None, "d"), P("d")], out=P("d"))
    found = read_communication(read_text(lowered))
    gathers = [c for c in found.collectives if c.kind == "all-gather"]
    assert [(c.shape, c.count, c.is_weight) for c in gathers] == [((64, 64), 5, True)]
    assert found.weights() == 5 * 64 * 64 * 4 * 7 // 8


def test_nested_scans_multiply(mesh):
    def run(params, x):
        turn = lambda x, _: (jnp.tanh(x @ params), None)  # noqa: E731
        outer = lambda x, _: (jax.lax.scan(turn, x, None, length=3)[0] + 1, None)  # noqa: E731
        return jax.lax.scan(outer, x, None, length=4)[0]

    lowered = compiled(mesh, run, f32(64, 64), f32(64, 64), specs=[P(), P("d", None)], out=P("d", None))
    assert read_communication(partitioned_hlo(lowered)).total() == 0
    split = compiled(mesh, run, f32(64, 64), f32(64, 64), specs=[P("d"), P(None, "d")], out=P(None, "d"))
    found = read_communication(partitioned_hlo(split))
    assert {c.count for c in found.collectives if c.shape == (64, 64)} == {12}


@pytest.mark.parametrize(
    ("dtype", "name"), [("bfloat16", "bf16"), ("float8_e4m3fn", "f8e4m3fn"), ("float8_e5m2", "f8e5m2"), ("int8", "s8")]
)
def test_types_are_those_of_the_platform_and_not_of_the_cpu(mesh, dtype, name):
    def run(params, x):
        return jax.lax.dot(x.astype(dtype), params.astype(dtype), preferred_element_type=jnp.float32)

    lowered = compiled(mesh, run, f32(64, 64), f32(8, 64), specs=[P("d"), P("d")], out=P("d"))
    found = read_communication(partitioned_hlo(lowered))
    assert [(c.dtype, c.is_weight) for c in found.collectives] == [(name, True)]


def test_activations_and_gradients_are_not_weights(mesh):
    def loss(params, x):
        return jnp.sum(jnp.tanh(x @ params) ** 2)

    specs = [P("d"), P("d")]
    lowered = compiled(mesh, jax.grad(loss), f32(64, 32), f32(16, 64), specs=specs, out=P("d"))
    found = read_communication(partitioned_hlo(lowered))
    assert found.weights() == 64 * 32 * 4 * 7 // 8
    assert [c.kind for c in found.collectives if sorted(c.shape) == [32, 64] and not c.is_weight] == ["all-reduce"]
    # The rows of x, gathered, are no weights though they are of the same shape.
    moved = compiled(mesh, lambda params, x: x + 1, f32(8), f32(16, 64), specs=specs, out=P())
    assert read_communication(partitioned_hlo(moved)).weights() == 0


def stepped(mesh, gradient, params, x, specs, x_spec, *, donated=True):
    """What a step of gradient descent sends, from the text right after it was cut."""
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda spec: isinstance(spec, P))

    def step(params, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradient(params, x))

    jitted = jax.jit(
        step,
        in_shardings=(places, NamedSharding(mesh, x_spec)),
        out_shardings=places,
        donate_argnums=(0,) if donated else (),
    )
    return read_communication(partitioned_hlo(jitted.lower(params, x)))


def test_gradients_are_what_becomes_a_weight(mesh):
    def clipped(params, x):
        loss = lambda params: jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0] ** 2)  # noqa: E731
        gradient = jax.grad(loss)(params)
        return gradient / jnp.maximum(jnp.sqrt(jnp.sum(gradient**2)), 1.0)

    arguments = clipped, f32(5, 64, 64), f32(16, 64), P(None, "d"), P("d")
    found = stepped(mesh, *arguments)
    assert {(c.kind, c.shape, c.count) for c in found.collectives if c.is_gradient} == {("all-reduce", (64, 64), 5)}
    assert found.gradients() == 5 * 2 * 64 * 64 * 4 * 7 // 8
    # What is left is the norm of them, which scales but is none.
    rest = [c for c in found.collectives if not c.is_weight and not c.is_gradient]
    assert [(c.kind, c.shape) for c in rest] == [("all-reduce", ())]
    # The new weights are not known as such if they take no one's place.
    assert stepped(mesh, *arguments, donated=False).gradients() == 0


@pytest.mark.parametrize(
    ("specs", "x_spec", "shape"),
    [
        # Of the activations, which are multiplied: the first product is cut along what it sums over.
        ({"scale": P("d"), "w": P("d"), "v": P()}, P(None, "d"), (16, 128)),
        # Of their gradient, which comes to the scale by a sum: the first product is cut by columns, the second by rows.
        ({"scale": P(), "w": P(None, "d"), "v": P("d")}, P(), (16, 64)),
    ],
)
def test_sums_of_activations_are_no_gradients(mesh, specs, x_spec, shape):
    def loss(params, x):
        return jnp.sum(jnp.tanh((x * params["scale"][None]) @ params["w"]) @ params["v"])

    params = {"scale": f32(64), "w": f32(64, 128), "v": f32(128, 32)}
    found = stepped(mesh, jax.grad(loss), params, f32(16, 64), specs, x_spec)
    assert [(c.kind, c.shape, c.is_gradient) for c in found.collectives] == [("all-reduce", shape, False)]


def test_exchanged_parts_that_are_summed_are_gradients():
    """A sum over one axis; over another a reduce-scatter written as an all-to-all and a sum, and an all-gather."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def own(w, x):
        g = jax.lax.psum(jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w), "a")
        parts = jax.lax.all_to_all(g.reshape(4, -1), "b", 0, 0)
        return jax.lax.all_gather(jnp.sum(parts, axis=0), "b").reshape(g.shape)

    rows = P(("a", "b"))
    gradient = jax.shard_map(own, mesh=mesh, in_specs=(P(), rows), out_specs=P(), check_vma=False)
    found = stepped(mesh, gradient, f32(64, 64), f32(16, 64), P(), rows)
    assert {(c.kind, c.group_size): c.is_gradient for c in found.collectives} == {
        ("all-reduce", 2): True, ("all-to-all", 4): True, ("all-gather", 4): True
    }  # fmt: skip
    size = 64 * 64 * 4
    assert found.gradients() == found.total() == 2 * size // 2 + 2 * size * 3 // 4


def test_codes_that_were_scaled_by_what_was_measured_are_weights(mesh):
    def run(params, history, x):
        codes = jnp.round(params / history.max()).astype(jnp.int8)
        return jax.lax.dot(x.astype(jnp.int8), codes, preferred_element_type=jnp.int32)

    shapes = f32(64, 64), f32(16), f32(8, 64)
    lowered = compiled(mesh, run, *shapes, specs=[P("d"), P(), P("d")], out=P("d"))
    assert read_communication(partitioned_hlo(lowered)).weights() == 64 * 64 * 7 // 8


def test_weight_arguments_can_be_named(mesh):
    lowered = compiled(mesh, lambda w, x: x @ w, f32(64, 64), f32(8, 64), specs=[P("d"), P("d")], out=P("d"))
    text = partitioned_hlo(lowered)
    assert read_communication(text).weights() == 0
    assert (
        read_communication(text, weights="w").weights()
        == read_communication(text, weights=lambda n: n == "w").weights()
        > 0
    )


def test_a_program_in_the_compilation_cache_is_compiled_again(mesh):
    """The program of the CPU, which has no products of bfloat16, would be read in place of the one that was cut."""

    def lowered():
        shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 64), (8, 64)))
        return compiled(mesh, lambda params, x: x @ params, *shapes, specs=[P("d"), P("d")], out=P("d"))

    lowered().compile()
    assert [c.dtype for c in read_communication(partitioned_hlo(lowered())).collectives] == ["bf16"]
    assert jax.config.jax_enable_compilation_cache


def test_a_program_that_the_backend_cannot_compile_is_partitioned_all_the_same(mesh):
    def run(params, x):
        return jax.lax.ragged_dot(x, params, jnp.array([4, 4], jnp.int32))

    shardings = [NamedSharding(mesh, P(None, "d")), NamedSharding(mesh, P())]
    traced = jax.jit(run, in_shardings=shardings).trace(f32(2, 64, 64), f32(8, 64))
    lowered = traced.lower(lowering_platforms=("tpu",))
    with pytest.raises(Exception, match="ragged-dot"):
        lowered.compile()
    assert read_communication(partitioned_hlo(lowered)).total() > 0


def test_one_device_sends_nothing():
    text = partitioned_hlo(jax.jit(lambda x: x + 1).lower(f32(3)))
    assert read_communication(text) == Communication(())
    assert str(read_communication(text)) == "a device sends 0 B, 0 B of it weights"
