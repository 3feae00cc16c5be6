"""The model of blocks, and the visits that steer a grouped kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.kernels import pallas
from octavo.kernels.pallas import tiles, visits
from octavo.kernels.pallas.tiles import Problem, Tiling, check, choose, forced, resolve, tiled

SHAPES = [
    (16384, 7168, 2048, 256), (16384, 2048, 7168, 256), (131072, 4096, 14336, 8), (64, 7168, 2048, 256),
    (1, 4096, 4096, 8), (1000, 1000, 300, 8), (3, 96, 40, 8),
]  # fmt: skip
TYPES = [("int8", "int8", "bfloat16"), ("float8_e4m3fn", "float8_e5m2", "float32"), ("bfloat16", "int4", "bfloat16")]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_legal_and_fit(shape, transposed):
    for lhs, rhs, out in TYPES:
        problem = Problem(*shape, lhs, rhs, out, transposed=transposed)
        chosen = choose(problem)
        assert problem.vmem(chosen) <= tiles.VMEM
        assert check(chosen, problem, "gmm") == chosen
        assert not shape[1] % chosen.k or transposed or chosen.k % 128 == 0


def test_deep_tiles_follow_the_scales():
    problem = Problem(16384, 7168, 2048, 256, "float8_e4m3fn", "float8_e4m3fn", "bfloat16", depth=128)
    chosen = choose(problem)
    assert chosen.k % 128 == 0
    assert 7168 % chosen.k == 0


def test_the_model_prefers_what_moves_less():
    many = Problem(131072, 4096, 4096, 8, "bfloat16", "bfloat16", "bfloat16")
    small, large = Tiling(128, 128, 128), choose(many)
    assert many.seconds(large) < many.seconds(small)
    few = Problem(16, 4096, 4096, 8, "bfloat16", "bfloat16", "bfloat16")
    assert choose(few).m == 16  # no more rows than there are
    integers = Problem(131072, 4096, 4096, 8, "int8", "int8", "bfloat16")
    assert integers.seconds(choose(integers)) < many.seconds(large)


def test_tiles_are_overridden():
    problem = Problem(1024, 1024, 1024, 4, "int8", "int8", "int32")
    assert resolve("gmm", problem, (128, 256, 512)) == (128, 256, 512)
    with tiled(gmm=(64, 128, 128)):
        assert resolve("gmm", problem, None) == (64, 128, 128)
        assert resolve("gmm", problem, (128, 256, 512)) == (128, 256, 512)
        assert forced("tgmm") is None
    assert resolve("gmm", problem, None) == choose(problem)


ERRORS = {
    "name": (lambda p: tiled(gm=(1, 2, 3)), "'gm' is no kernel; known are gmm, matmul, tgmm"),
    "rows": (lambda p: check((20, 128, 128), p, "gmm"), r"20 rows is neither a multiple of 32 nor all 1024; the model"),
    "depth": (lambda p: check((32, 100, 128), p, "gmm"), "100 depth is neither"),
    "columns": (lambda p: check((32, 128, 0), p, "gmm"), "0 columns is neither"),
    "fit": (lambda p: choose(p, budget=1000), "fit 1000 bytes of VMEM; the smallest take"),
    "scales": (
        lambda p: check((32, 128, 128), Problem(64, 1024, 128, 1, "int8", "int8", "int8", depth=256), "gmm"),
        "scales change every 256 along a depth of 1024, which blocks of 128 do not follow",
    ),
    "fused": (
        lambda p: check((32, 384, 128), Problem(64, 1024, 128, 1, "bfloat16", "int8", "int8", fused=True), "matmul"),
        "blocks of 384 do not divide a depth of 1024",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    call, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        call(Problem(1024, 1024, 1024, 4, "int8", "int8", "int32"))


def test_unknown_names():
    with pytest.raises(AttributeError, match="no attribute 'gnn'"):
        pallas.gnn  # noqa: B018


@pytest.mark.parametrize("size", [8, 32])
def test_visits(size):
    rows, groups, rng = 100, 5, np.random.default_rng(size)
    blocks = -(-rows // size)
    to_blocks, to_groups = (jax.jit(fn, static_argnums=(1, 2)) for fn in (visits.to_blocks, visits.to_groups))
    draws = [np.diff(np.sort(rng.integers(0, rows + 1, groups)), prepend=0) for _ in range(50)]
    edges = [[0] * 5, [100, 0, 0, 0, 0], [0, 0, 0, 0, 100], [32, 32, 32, 4, 0], [8, 8, 8, 8, 8], [0, 0, 1, 0, 0]]
    for sizes in [*draws, *map(np.asarray, edges)]:
        owner = np.searchsorted(np.cumsum(sizes), np.arange(rows), side="right")
        found = jax.device_get(to_blocks(jnp.asarray(sizes, jnp.int32), rows, size))
        pairs = list(zip(found.block[: found.count].tolist(), found.group[: found.count].tolist(), strict=True))
        assert pairs == sorted({(i // size, int(owner[i])) for i in range(rows)})
        assert {b for b, _ in pairs} == set(range(blocks))
        found = jax.device_get(to_groups(jnp.asarray(sizes, jnp.int32), rows, size))
        pairs = list(zip(found.group[: found.count].tolist(), found.block[: found.count].tolist(), strict=True))
        assert [g for g, _ in pairs] == sorted(g for g, _ in pairs)
        assert {p for p in pairs if sizes[p[0]]} == {(int(owner[i]), i // size) for i in range(rows) if owner[i] < 5}
        assert [g for g, _ in pairs if not sizes[g]] == [g for g, s in enumerate(sizes) if not s]
        assert all(0 <= b < blocks for _, b in pairs)
