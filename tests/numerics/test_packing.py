"""Packing is exact, jittable, and as small as it says."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.numerics import formats, pack_bits, unpack_bits


@pytest.mark.parametrize("bits", range(1, 9))
def test_unpacking_inverts_packing(bits):
    group = 8 // math.gcd(8, bits)  # as many codes as fill whole bytes
    for size in (0, 1, group + 1, 40):
        codes = np.random.default_rng(size).integers(0, 2**bits, (3, size), np.uint8)
        packed, back = jax.jit(lambda c, n=size: (p := pack_bits(c, bits), unpack_bits(p, bits, n)))(codes)
        assert packed.shape == (3, -(-size // group) * group * bits // 8)
        np.testing.assert_array_equal(back, codes)


@pytest.mark.parametrize(("axis", "bits"), [(0, 2), (1, 3), (2, 4), (-3, 6)])
def test_packs_along_any_axis_under_jit(axis, bits):
    codes = np.random.default_rng(0).integers(0, 2**bits, (8, 16, 24), np.uint8)
    packed = jax.jit(lambda c: pack_bits(c, bits, axis=axis))(codes)
    assert packed.nbytes * 8 == codes.size * bits
    unpack = jax.jit(lambda p: unpack_bits(p, bits, codes.shape[axis], axis=axis))
    np.testing.assert_array_equal(unpack(packed), codes)


def test_the_stream_is_little_endian():
    assert pack_bits(jnp.asarray([1, 2], jnp.uint8), 4).tolist() == [0x21]
    assert pack_bits(jnp.asarray([0, 1, 2, 3], jnp.uint8), 2).tolist() == [0b11100100]
    codes = np.arange(8, dtype=np.uint8) * 9 % 64
    stream = sum(int(c) << (6 * i) for i, c in enumerate(codes))
    assert pack_bits(jnp.asarray(codes), 6).tolist() == list(stream.to_bytes(6, "little"))


@pytest.mark.parametrize("name", sorted(n for n, f in formats().items() if f.bits <= 8))
def test_every_format_goes_through_bits_and_back(name):
    fmt = formats()[name]

    @jax.jit
    def run(grid):
        bits = fmt.to_bits(fmt.encode(grid))
        back = fmt.from_bits(unpack_bits(pack_bits(bits, fmt.bits), fmt.bits, bits.size))
        return bits, back, fmt.decode(back)

    bits, back, values = run(jnp.asarray(fmt.grid(), jnp.float32))
    assert bits.dtype == jnp.uint8
    assert int(bits.max()) < 2**fmt.bits
    assert back.dtype == fmt.storage
    np.testing.assert_array_equal(values, fmt.grid())
