"""The compiler's estimates, from a text written by hand and from a program that was compiled for a TPU."""

import jax
import jax.numpy as jnp
import pytest

from octavo.hlo import compile_for, compiler_missing, get_accelerator, read_cost, read_cycles
from octavo.hlo.cost import OpCost, ProgramCost, read_kernels


def attributes(cycles, site=""):
    """What the compiler writes behind an instruction."""
    metadata = f'metadata={{op_name="jit(f)/{site}"}}, ' if site else ""
    return metadata + 'backend_config={"window_config":{"estimated_cycles":"' + str(cycles) + '"}}'


ATTRIBUTES = {
    "INSIDE": attributes(7),
    "TANH": attributes(100, "while/body/tanh"),
    "UP": attributes(250, "up/dot_general"),
    "LOOP": 'backend_config={"known_trip_count":{"n":"5"}}',
    "UNKNOWN": attributes(2**63 - 1),
}
TEXT = """HloModule jit_f, is_scheduled=true

%fused_computation (p.0: f32[8,128]) -> f32[8,128] {
  %p.0 = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %copy.9 = f32[8,128]{1,0:T(8,128)} copy(%p.0), INSIDE
}

%body (state: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %state = (s32[], f32[8,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8,128]{1,0} get-tuple-element(%state), index=1
  %fusion.1 = f32[8,128]{1,0:T(8,128)} fusion(%x), kind=kLoop, calls=%fused_computation, TANH
  ROOT %next = (s32[], f32[8,128]{1,0}) tuple(%i, %fusion.1)
}

%condition (state.1: (s32[], f32[8,128])) -> pred[] {
  %state.1 = (s32[], f32[8,128]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (x.1: f32[8,128]) -> f32[8,128] {
  %x.1 = f32[8,128]{1,0:T(8,128)} parameter(0)
  %zero = s32[] constant(0)
  %dot.1 = (s8[8,128]{1,0:T(8,128)(4,1)}, f32[8]{0}) fusion(%x.1), kind=kOutput, calls=%fused_computation, UP
  %init = (s32[], f32[8,128]{1,0}) tuple(%zero, %x.1)
  %while.1 = (s32[], f32[8,128]{1,0}) while(%init), condition=%condition, body=%body, LOOP
  %custom = f32[8,128]{1,0} fusion(%x.1), kind=kCustom, calls=%fused_computation, UNKNOWN
  ROOT %out = f32[8,128]{1,0} get-tuple-element(%while.1), index=1
}
"""
for word, written in ATTRIBUTES.items():
    TEXT = TEXT.replace(word, written)


def test_computations_of_other_cores_end_too():
    """TPU7x's compiler writes the thread of a computation behind its closing brace."""
    text = TEXT.replace("}\n\n%body", '}, execution_thread="sparsecore"\n\n%body')
    assert text != TEXT
    assert read_cycles(text) == read_cycles(TEXT)


def test_read_cycles():
    ops, unknown = read_cycles(TEXT)
    assert [(op.name, op.cycles, op.count) for op in ops] == [("fusion.1", 100, 5), ("dot.1", 250, 1)]
    assert [op.name for op in unknown] == ["custom"]
    assert ops[1] == OpCost("dot.1", "fusion", "(s8[8,128], f32[8])", "jit(f)/up/dot_general", 250)


KERNEL = """HloModule jit_f, is_scheduled=true

ENTRY %main (x.1: bf16[8,128]) -> s8[8,128] {
  %x.1 = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %other = bf16[8,128]{1,0} custom-call(%x.1), custom_call_target="ConcatBitcast"
  %k.1 = (s8[8,128]{1,0:T(8,128)S(1)}, f32[1,8]{1,0}) custom-call(%x.1), custom_call_target="tpu_custom_call", REST
  ROOT %out = s8[8,128]{1,0} get-tuple-element(%k.1), index=0
}
""".replace(
    "REST",
    'operand_layout_constraints={bf16[8,128]{1,0}}, metadata={op_name="jit(f)/k"}, '
    'backend_config={"custom_call_config":{"cost_estimate":{"flops":"512","bytes_accessed":"7"}}}',
)


def test_pallas_kernels_are_listed_with_their_arrays():
    (kernel,) = read_kernels(KERNEL)
    assert (kernel.name, kernel.site, kernel.flops, kernel.count) == ("k.1", "jit(f)/k", 512, 1)
    assert [str(array) for array in kernel.arrays] == ["bf16[8,128]", "s8[8,128]", "f32[1,8]"]
    assert kernel.bytes == 2 * 8 * 128 + 8 * 128 + 4 * 8
    assert "0 cycles and 1 Pallas kernels, " in str(ProgramCost((), kernels=(kernel,)))


def test_program_cost():
    cost = ProgramCost(*read_cycles(TEXT), bytes_accessed=3e9, temp_bytes=1000)
    assert cost.cycles == 750
    assert cost.cycles_at(r"/up/") == 250
    assert str(cost).splitlines() == [
        "cycles  share  op      result               site",
        "500     66.7%  fusion  f32[8,128]           jit(f)/while/body/tanh",
        "250     33.3%  fusion  (s8[8,128], f32[8])  jit(f)/up/dot_general",
        "750 cycles and 1 instructions without an estimate, 3 GB accessed, 1 kB temporary",
    ]


def test_accelerators():
    assert str(get_accelerator("v5e")) == "v5e:2x2"
    assert get_accelerator("v6e:16x16").topology == "16x16"
    assert get_accelerator("v6e").seconds(1.75e6) == pytest.approx(1e-3)
    for name, message in (
        ("v6", "unknown accelerator 'v6'.*v6e"),
        ("h100:2x2", "h100 is a single device"),
        ("v5p:2x2", "the topology of v5p is written as 2x2x1, got '2x2'"),
    ):
        with pytest.raises(ValueError, match=message):
            get_accelerator(name)


@pytest.mark.parametrize(("name", "extra"), [("v6e", "tpu"), ("b200", "cuda")])
def test_a_missing_compiler_is_one_line(monkeypatch, name, extra):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert f"pip install 'octavo[{extra}]'" in (compiler_missing(get_accelerator(name)) or "")
    with pytest.raises(ModuleNotFoundError, match=f"compiling for {name} needs"):
        compile_for(get_accelerator(name), jnp.tanh, jnp.ones(8))


@pytest.mark.slow
@pytest.mark.compiler("tpu")
def test_a_loop_on_a_tpu(capfd):
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)

    def loop(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0]

    once = read_cost(compile_for(get_accelerator("v6e"), lambda x, w: jnp.tanh(x @ w), x, x))
    thrice = read_cost(compile_for(get_accelerator("v6e"), loop, x, x))
    assert 0 < 2 * once.cycles < thrice.cycles < 6 * once.cycles
    assert once.bytes_accessed >= 3 * 2 * 1024**2
    assert once.cycles_at("dot_general") > 0
    assert not capfd.readouterr().err
