"""How much memory a program needs at a time."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from octavo.hlo.collectives import compile_partitioned
from octavo.hlo.live import peak_bytes
from octavo.hlo.text import read


def test_products_lie_in_memory_until_they_are_last_read():
    text = """ENTRY %main (x: f32[10,10]) -> f32[10,10] {
      %x = f32[10,10]{1,0} parameter(0)
      %a = f32[10,10]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      %b = f32[10,10]{1,0} dot(%a, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      %c = f32[10,10]{1,0} dot(%b, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      ROOT %d = f32[10,10]{1,0} add(%c, %x)
    }"""
    assert peak_bytes(read(text)) == 2 * 400
    kept = text.replace("add(%c, %x)", "add(%c, %a)")
    assert peak_bytes(read(kept)) == 3 * 400


def test_what_is_done_element_by_element_is_fused_unless_a_product_reads_it():
    text = """ENTRY %main (x: f32[10,10]) -> f32[10,10] {
      %x = f32[10,10]{1,0} parameter(0)
      %y = f32[10,10]{1,0} tanh(%x)
      %z = s8[10,10]{1,0} convert(%y)
      ROOT %d = s32[10,10]{1,0} dot(%z, %z), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    }"""
    assert peak_bytes(read(text)) == 100 + 400


def test_a_loop_keeps_its_state_in_place():
    text = """%turn (s: (s32[], f32[100], f32[50])) -> (s32[], f32[100], f32[50]) {
      %s = (s32[], f32[100]{0}, f32[50]{0}) parameter(0)
      %by = s32[] constant(1)
      %next = s32[] add(%s#0, %by)
      %more = f32[200]{0} all-gather(%s#1), replica_groups={{0,1}}, dimensions={0}
      %less = f32[100]{0} slice(%more), slice={[0:100]}
      ROOT %out = (s32[], f32[100]{0}, f32[50]{0}) tuple(%next, %less, %s#2)
    }

    %goes_on (t: (s32[], f32[100], f32[50])) -> pred[] {
      %t = (s32[], f32[100]{0}, f32[50]{0}) parameter(0)
      %limit = s32[] constant(9)
      ROOT %test = pred[] compare(%t#0, %limit), direction=LT
    }

    ENTRY %main (x: f32[100], y: f32[50]) -> f32[100] {
      %x = f32[100]{0} parameter(0)
      %y = f32[50]{0} parameter(1)
      %zero = s32[] constant(0)
      %init = (s32[], f32[100]{0}, f32[50]{0}) tuple(%zero, %x, %y)
      %loop = (s32[], f32[100]{0}, f32[50]{0}) while(%init), condition=%goes_on, body=%turn
      ROOT %r = f32[100]{0} get-tuple-element(%loop), index=1
    }"""
    # The counter, the state that changes, and what a turn gathers; what is handed on as it is takes nothing.
    assert peak_bytes(read(text)) == 4 + 400 + 800


def test_a_conditional_needs_its_largest_branch():
    text = """%small (a: f32[10,10]) -> f32[10,10] {
      %a = f32[10,10]{1,0} parameter(0)
      ROOT %t = f32[10,10]{1,0} tanh(%a)
    }

    %large (b: f32[10,10]) -> f32[10,10] {
      %b = f32[10,10]{1,0} parameter(0)
      %p = f32[10,10]{1,0} dot(%b, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      ROOT %q = f32[10,10]{1,0} dot(%p, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    }

    ENTRY %main (x: f32[10,10], n: s32[]) -> f32[10,10] {
      %x = f32[10,10]{1,0} parameter(0)
      %n = s32[] parameter(1)
      ROOT %which = f32[10,10]{1,0} conditional(%n, %x, %x), branch_computations={%small, %large}
    }"""
    assert peak_bytes(read(text)) == 400 + 2 * 400


@pytest.mark.parametrize("layers", [2, 8])
def test_it_is_near_what_xla_needs(layers):
    def loss(params, x):
        turn = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(turn, x, params)[0])

    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    places = [NamedSharding(mesh, P(None, "d")), NamedSharding(mesh, P("d"))]
    shapes = jax.ShapeDtypeStruct((layers, 128, 128), jnp.float32), jax.ShapeDtypeStruct((2048, 128), jnp.float32)
    text, compiled = compile_partitioned(jax.jit(jax.grad(loss), in_shardings=places).lower(*shapes))
    found, real = peak_bytes(read(text)), compiled.memory_analysis().temp_size_in_bytes
    # What is kept for the backward pass at least.
    assert found >= layers * 256 * 128 * 4
    assert 0.6 * real <= found <= 1.6 * real
