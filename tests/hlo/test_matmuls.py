"""The types of matmuls in compiled programs, from texts written by hand in the forms that the compilers write."""

import pytest

from octavo.hlo import count_types, describe_quantized, read_matmuls

TPU = """HloModule jit_f, is_scheduled=true

%widen (p.0: s8[64,64], p.1: bf16[64,1]) -> bf16[64,64] {
  %p.0 = s8[64,64]{1,0} parameter(0)
  %p.1 = bf16[64,1]{1,0} parameter(1)
  %wide = bf16[64,64]{1,0} convert(%p.0)
  %scale = bf16[64,64]{1,0} broadcast(%p.1), dimensions={0,1}
  ROOT %product = bf16[64,64]{1,0} multiply(%wide, %scale)
}

%matmul (p.2: bf16[64,64], p.3: bf16[64,64]) -> f32[64,64] {
  %p.2 = bf16[64,64]{1,0} parameter(0)
  %p.3 = bf16[64,64]{1,0} parameter(1)
  ROOT %convolution.1 = f32[64,64]{1,0} convolution(%p.2, %p.3), dim_labels=bf_io->bf, FORWARD
}

ENTRY %main (x: bf16[64,64], q: s8[64,64], s: bf16[64,1]) -> f32[64,64] {
  %x = bf16[64,64]{1,0} parameter(0)
  %q = s8[64,64]{1,0} parameter(1)
  %s = bf16[64,1]{1,0} parameter(2)
  %fusion.1 = bf16[64,64]{1,0} fusion(%q, %s), kind=kLoop, calls=%widen
  %fusion.2 = f32[64,64]{1,0} fusion(%fusion.1, %x), kind=kOutput, calls=%matmul
  %convolution.2 = s32[64,64]{1,0} convolution(%q, %q), dim_labels=bf_oi->bf, BACKWARD
  %convolution.3 = f32[64,64]{1,0} convolution(%x, %x), dim_labels=bf_io->bf, FLOAT
  ROOT %out = f32[64,64]{1,0} add(%fusion.2, %convolution.3)
}
"""
SITES = {
    "FORWARD": "jit(f)/jvp(Model.apply)/Model/up/jit(_product_fwd)/dot_general",
    "BACKWARD": "jit(f)/transpose(jvp(Model.apply))/Model/up/jit(_product_bwd)/cond/branch_0_fun/dot_general",
    "FLOAT": "jit(f)/head/dot_general",
}
for word, site in SITES.items():
    TPU = TPU.replace(word, f'metadata={{op_name="{site}"}}')

GPU = """HloModule jit_f

%gemm (p.0: f8e4m3fn[64,64], p.1: f8e8m0fnu[64,2]) -> f32[64,64] {
  %p.0 = f8e4m3fn[64,64]{1,0} parameter(0)
  %p.1 = f8e8m0fnu[64,2]{1,0} parameter(1)
  ROOT %dot.1 = f32[64,64]{1,0} scaled-dot(%p.0, %p.0, %p.1, %p.1), metadata={op_name="jit(_primal)/scaled_dot"}
}

ENTRY %main (x: f8e4m3fn[64,64], s: f8e8m0fnu[64,2], one: f32[]) -> (f32[64,64], s8[64]) {
  %x = f8e4m3fn[64,64]{1,0} parameter(0)
  %s = f8e8m0fnu[64,2]{1,0} parameter(1)
  %one = f32[] parameter(2)
  %fusion.1 = f32[64,64]{1,0} fusion(%x, %s), kind=kCustom, calls=%gemm
  ROOT %call.1 = (f32[64,64]{1,0}, s8[64]{0}) custom-call(%x, %x, %one, %one), CUBLAS
}
""".replace("CUBLAS", 'custom_call_target="__cublas$lt$matmul$f8"')


def test_the_reason_of_a_matmul_that_is_not_low():
    wide, low, float_ = read_matmuls(TPU)
    assert (wide.path, wide.is_quantized, wide.is_low, wide.is_backward) == ("Model/up", True, False, False)
    assert wide.reason == "the left operand is s8 converted to bf16, the right operand is bf16 throughout"
    assert (low.types, low.is_low, low.is_backward, low.reason) == ("s8 x s8 -> s32", True, True, "")
    assert (float_.path, float_.is_quantized) == ("head", False)
    assert describe_quantized([wide, low, float_]) == [
        "1 of 2 quantized matmuls have operands of 8 bits or fewer on the device",
        "path      pass     types               count  reason",
        "Model/up  forward  bf16 x bf16 -> f32  1      " + wide.reason,
    ]
    assert describe_quantized([float_]) == ["the program has no quantized matmuls"]


def test_library_calls_and_block_scaled_dots():
    scaled, library = read_matmuls(GPU)
    assert (scaled.op, scaled.is_low, scaled.is_quantized) == ("scaled-dot", True, True)
    assert library.types == "f8e4m3fn x f8e4m3fn -> f32 (__cublas$lt$matmul$f8)"
    assert count_types([scaled, scaled, library])[scaled.types] == 2


@pytest.mark.parametrize("derived", ["path", "is_low", "reason"])
def test_json_has_what_follows_from_the_fields(derived):
    assert derived in read_matmuls(TPU)[0].to_dict()
