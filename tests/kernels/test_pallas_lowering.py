"""The kernels lowered ahead of time: for TPUs and GPUs that are not here, and compiled where TPU's compiler is."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import octavo
from octavo.kernels import pallas
from octavo.ops.ragged import ragged_dot
from octavo.qarray import Quantizer

F8, G8, BF16, F32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float32
M, K, N, G = 16384, 7168, 2048, 256
TYPES = {"int8": (jnp.int8, jnp.int8), "fp8": (F8, G8), "bf16": (BF16, BF16), "int8 weights": (BF16, jnp.int8),
         "int4 weights": (BF16, jnp.int4), "f32": (F32, F32)}  # fmt: skip
TRITON = "__gpu$xla.gpu.triton"
leaving = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


def quantize(x):
    q = Quantizer("int8", channelwise_axes=(0,)).quantize(x)
    return q.qvalue, q.scale.astype(F32)


def struct(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def calls(gmm, tgmm, types, m=M, k=K, n=N, g=G):
    """Every form of the kernels at one size: name, function, arguments."""
    lhs, rhs = types
    sizes = struct(g, dtype=jnp.int32)
    yield (
        "octavo_gmm",
        lambda x, w, s, a, b: gmm(x, w, s, lhs_scale=a, rhs_scale=b, dtype=BF16),
        (struct(m, k, dtype=lhs), struct(g, k, n, dtype=rhs), sizes, struct(m, 1), struct(g, 1, n)),
    )
    yield (
        "octavo_gmm",
        lambda x, w, s, a: gmm(x, w, s, lhs_scale=a, transposed=True),
        (struct(m, n, dtype=lhs), struct(g, k, n, dtype=rhs), sizes, struct(m, 1)),
    )
    yield (
        "octavo_tgmm",
        lambda x, y, s, a, b: tgmm(x, y, s, scales=(a, b)),
        (struct(m, k, dtype=lhs), struct(m, n, dtype=rhs), sizes, struct(g, 1, n), struct(1, k, 1)),
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("types", TYPES)
def test_lowers_for_tpu(types):
    for name, fn, args in calls(pallas.gmm, pallas.tgmm, TYPES[types]):
        text = export.export(jax.jit(fn), platforms=["tpu"])(*args).mlir_module()
        assert "tpu_custom_call" in text
        assert name in text


def test_scales_in_tiles_and_fused_quantization_lower_for_tpu():
    args = (struct(M, K, dtype=F8), struct(G, K, N, dtype=F8), struct(G, dtype=jnp.int32))
    scales = struct(M, K // 128), struct(G, K // 128, N)
    tiled = jax.jit(lambda x, w, s, a, b: pallas.gmm(x, w, s, lhs_scale=a, rhs_scale=b))
    assert "tpu_custom_call" in export.export(tiled, platforms=["tpu"])(*args, *scales).mlir_module()
    fused = jax.jit(lambda x, w, s: pallas.quantized_matmul(x, w, quantize=quantize, rhs_scale=s))
    args = struct(8192, 4096, dtype=BF16), struct(4096, 14336, dtype=jnp.int8), struct(1, 14336)
    assert "tpu_custom_call" in export.export(fused, platforms=["tpu"])(*args).mlir_module()


@leaving
@pytest.mark.sampled(3)
@pytest.mark.parametrize("types", TYPES)
def test_lowers_for_cuda(types):
    device = jax.sharding.AbstractDevice("NVIDIA H100", None, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    for _, fn, args in calls(pallas.gpu_gmm, pallas.gpu_tgmm, TYPES[types]):
        with jax.sharding.use_abstract_mesh(mesh):
            unchecked = [export.DisabledSafetyCheck.custom_call(TRITON)]
            text = export.export(jax.jit(fn), platforms=["cuda"], disabled_checks=unchecked)(*args).mlir_module()
        assert TRITON in text


def step(config):
    def run(x, w, sizes, g):
        out, pull = jax.vjp(lambda x, w: ragged_dot(x, w, sizes, config=config), x, w)
        return out, *pull(g)

    return jax.jit(run)


ARGS = struct(256, 128), struct(4, 128, 256), struct(4, dtype=jnp.int32), struct(256, 256)


def tpu_text(fn, *args):
    return export.export(fn, platforms=["tpu"])(*args).mlir_module()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn"])
def test_a_training_step_is_three_kernels_on_tpu(qtype):
    text = tpu_text(step(octavo.DotConfig.qt(qtype).replace(lowering="pallas")), *ARGS)
    assert text.count("tpu_custom_call") == 3
    assert "chlo.ragged_dot" not in text
    assert "stablehlo.dot_general" not in text


def test_auto_takes_kernels_where_a_device_has_its_own_program():
    auto = octavo.DotConfig.qt("int8")
    assert "tpu_custom_call" not in tpu_text(step(auto), *ARGS)  # XLA may have to partition it
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    fn = lambda x, w, s: ragged_dot(x, w, s[0], config=auto)  # noqa: E731
    args = struct(512, 128), struct(4, 128, 256), struct(2, 4, dtype=jnp.int32)
    how = {"mesh": mesh, "in_specs": (P("x"), P(), P("x")), "out_specs": P("x")}
    assert "tpu_custom_call" in tpu_text(jax.jit(jax.shard_map(fn, **how)), *args)
    assert "tpu_custom_call" not in tpu_text(jax.jit(jax.shard_map(fn, axis_names={"x"}, **how)), *args)


TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="TPU's compiler is not here: pip install libtpu")
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_tpu_compiles_them(chip):
    from jax.experimental import topologies

    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]
    here = jax.sharding.SingleDeviceSharding(device)
    every = [call for types in TYPES.values() for call in calls(pallas.gmm, pallas.tgmm, types)]
    fused = lambda x, w, s: pallas.quantized_matmul(x, w, quantize=quantize, rhs_scale=s)  # noqa: E731
    dense = struct(8192, 4096, dtype=BF16), struct(4096, 14336, dtype=jnp.int8), struct(1, 14336)
    for name, fn, args in [*every, ("octavo_matmul", fused, dense)]:
        placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for x in args]
        assert name in jax.jit(fn).lower(*placed).compile().as_text()
