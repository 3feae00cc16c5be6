"""Experts on a mesh: ragged dots of sharded rows, dispatch and combine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from octavo.distributed import ExpertParallel, ExpertSharding, GradReduce, combine, dispatch, route
from octavo.hlo import partitioned_hlo, read_communication
from octavo.ops import DotConfig, Placement, Ragged, init_scaling, ragged_dot
from octavo.qarray import Quantizer

EXPERTS, INPUTS, OUTPUTS, ROWS = 4, 16, 24, 12
CONFIGS = {
    "float": None,
    "int8": DotConfig.qt("int8"),
    "asymmetric": DotConfig.qt("uint8", bwd="int8", calibration="minmax"),
    "per tensor": DotConfig.qt("int8", per_tensor=True),
    "fp8": DotConfig.qt("float8_e4m3fn", bwd="float8_e5m2"),
    "tiles": DotConfig.qt("int8", tile=8),
    "qat": DotConfig.qat("int4"),
}

# Of the product and its two gradients, so many are sums of integers.
EXACT = {"int8": 3, "per tensor": 3, "asymmetric": 1}


def mesh():
    return jax.make_mesh((2, 2, 2), ("fsdp", "tensor", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 3)


def sharding_of(**more) -> ExpertSharding:
    return ExpertSharding(mesh().abstract_mesh, ("fsdp",), ("expert",), **more)


SHARDINGS = {
    "columns": {"outputs": ("tensor",), "scattered": (1, ("fsdp",))},
    "contraction": {"inputs": ("tensor",), "scattered": (2, ("fsdp",))},
    "neither": {},
}


def operands():
    rng = np.random.default_rng(0)
    # Of 12 rows a device has 9, 12, 5 and none that belong to its two experts.
    sizes = np.asarray([[4, 5], [12, 0], [2, 3], [0, 0]], np.int32)
    lhs = rng.normal(size=(4 * ROWS, INPUTS)).astype(np.float32)
    rhs = rng.normal(size=(EXPERTS, INPUTS, OUTPUTS)).astype(np.float32)
    return jnp.asarray(lhs), jnp.asarray(rhs), sizes


def sorted_rows(sizes) -> tuple[np.ndarray, np.ndarray]:
    """The rows of all parts that have an expert, sorted by expert, and how many each has."""
    places, whose = [], []
    for part, own in enumerate(sizes):
        first = (part % 2) * len(own)
        for expert, count in enumerate(own):
            begin = part * ROWS + sum(own[:expert])
            places += range(begin, begin + count)
            whose += [first + expert] * count
    order = np.argsort(whose, kind="stable")
    return np.asarray(places)[order], np.bincount(whose, minlength=EXPERTS)


def reference(lhs, rhs, sizes, config):
    """The same product on one device."""
    places, counts = sorted_rows(sizes)
    out = ragged_dot(lhs[places], rhs, jnp.asarray(counts, jnp.int32), config=config)
    return jnp.zeros((lhs.shape[0], rhs.shape[2]), out.dtype).at[places].set(out)


def value_and_gradients(fn, lhs, rhs, g):
    out, back = jax.vjp(fn, lhs, rhs)
    return out, *back(g)


# Any config, and any sharding with integers and in float; sums over devices are rounded in bfloat16 alone.
CASES = [
    *((name, "contraction", "float32") for name in CONFIGS),
    *((name, cut, "float32") for name in ("float", "int8") for cut in SHARDINGS if cut != "contraction"),
    ("int8", "contraction", "bfloat16"),
]
QUICK = [("float", "columns", "float32"), ("int8", "contraction", "float32")]


@pytest.mark.parametrize(
    ("name", "cut", "dtype"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id="-".join(case)) for case in CASES],
)
def test_rows_in_parts_give_what_one_device_gives(name, cut, dtype):
    """Integers to the last bit; of bfloat16, what devices add up is rounded first."""
    config, (lhs, rhs, sizes) = CONFIGS[name], operands()
    g = jnp.asarray(np.random.default_rng(1).normal(size=(lhs.shape[0], OUTPUTS)), dtype)
    lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
    sharding = sharding_of(**SHARDINGS[cut])
    run = jax.jit(
        lambda lhs, rhs, g: value_and_gradients(
            lambda lhs, rhs: ragged_dot(lhs, rhs, jnp.asarray(sizes), config=config, sharding=sharding), lhs, rhs, g
        )
    )
    with jax.set_mesh(mesh()):
        found = run(lhs, rhs, g)
    wanted = jax.jit(functools.partial(value_and_gradients, lambda lhs, rhs: reference(lhs, rhs, sizes, config)))(
        lhs, rhs, g
    )
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a.dtype == b.dtype == dtype
        if dtype == "bfloat16":
            # A unit in the last place of the largest values; the gradient of rows is no sum over devices.
            off = 0 if number == 1 else 2**-4
            np.testing.assert_allclose(a.astype("float32"), b.astype("float32"), rtol=0, atol=off)
        elif number < EXACT.get(name, 0):
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cut", ["columns", pytest.param("contraction", marks=pytest.mark.slow)])
@pytest.mark.parametrize("feedback", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradients_of_experts_are_reduced_in_eight_bits(cut, feedback):
    """What arrives and what is lost are the gradient, to the rounding of float32."""
    lhs, rhs, sizes = operands()
    g = jnp.asarray(np.random.default_rng(1).normal(size=(lhs.shape[0], OUTPUTS)), jnp.float32)
    spec = ("expert", "fsdp", "tensor") if cut == "columns" else ("expert", "tensor", "fsdp")
    reduction = GradReduce(NamedSharding(mesh(), PartitionSpec(*spec)), (("fsdp",),), "int8", feedback)
    placement, config = Placement(reduction=reduction), CONFIGS["int8"]
    scaling = init_scaling(config, lhs, rhs, Ragged(), placement=placement)

    def loss(rhs, scaling):
        how = {"config": config, "scaling": scaling, "sharding": sharding_of(**SHARDINGS[cut]), "placement": placement}
        return jnp.sum(ragged_dot(lhs, rhs, jnp.asarray(sizes), **how) * g)

    with jax.set_mesh(mesh()):
        sent, state = jax.jit(jax.grad(loss, argnums=(0, 1)))(rhs, scaling)
    exact = jax.jit(jax.grad(lambda rhs: jnp.sum(reference(lhs, rhs, sizes, CONFIGS["int8"]) * g)))(rhs)
    # Half a step of what each of two devices has.
    assert 0 < float(jnp.abs(sent - exact).max()) < 2 * 1.1 * float(jnp.abs(exact).max()) / 254
    if feedback:
        np.testing.assert_allclose(sent + state["error_feedback"]["error"].sum(0), exact, rtol=0, atol=1e-4)
    else:
        assert state == {}


def test_a_weight_in_codes_is_multiplied_as_it_is():
    lhs, rhs, sizes = operands()
    q = Quantizer("int8", channelwise_axes=(0, 2)).quantize(jnp.asarray(rhs))
    sharding = sharding_of(**SHARDINGS["contraction"])
    with jax.set_mesh(mesh()):
        found = jax.jit(lambda x, q: ragged_dot(x, q, jnp.asarray(sizes), sharding=sharding))(lhs, q)
    np.testing.assert_allclose(found, reference(lhs, q, sizes, None), rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_raises():
    lhs, rhs, sizes = operands()
    with pytest.raises(ValueError, match=r"rows in 4 shards take group_sizes \(4, 2\), .*; got \(8,\), 48 rows"):
        ragged_dot(lhs, rhs, jnp.asarray(sizes).reshape(-1), sharding=sharding_of())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"outputs": ("width",)}, r"the mesh has the axes \('fsdp', 'tensor', 'expert'\), and not 'width'"),
        ({"inputs": ("fsdp",)}, r"one of \('fsdp', 'expert', 'fsdp'\) is given twice"),
        ({"scattered": (1, ("tensor",))}, r"mesh axes of rows, \('fsdp',\), and 'tensor' is none"),
    ],
)
def test_shardings_that_cannot_be(changes, text):
    with pytest.raises(ValueError, match=text):
        sharding_of(**changes)


def test_experts_that_cannot_be_shared():
    with pytest.raises(ValueError, match="5 experts of which a token has 2 cannot be shared by 2 devices"):
        ExpertParallel(mesh().abstract_mesh, ("fsdp",), (), ("expert",), 5, 2)


# Tokens.

BATCH, LENGTH, SIZE, K = 8, 6, 16, 2


def parallel(qtype=None, batch=("fsdp", "expert"), length=("tensor",)) -> ExpertParallel:
    return ExpertParallel(mesh().abstract_mesh, batch, length, ("expert",), EXPERTS, K, qtype)


def choices():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(BATCH, LENGTH, SIZE)).astype(np.float32)
    # Nobody chooses the last expert.
    experts = np.stack([rng.permutation(EXPERTS - 1)[:K] for _ in range(BATCH * LENGTH)])
    weights = rng.uniform(size=(BATCH, LENGTH, K)).astype(np.float32)
    return x, experts.reshape(BATCH, LENGTH, K).astype(np.int32), weights


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        (("fsdp", "expert"), ("tensor",)),
        pytest.param(("fsdp",), (), marks=pytest.mark.slow),
        pytest.param(("expert",), (), marks=pytest.mark.slow),
        pytest.param((), ("expert",), marks=pytest.mark.slow),
    ],
)
def test_each_token_meets_its_experts_and_comes_back(batch, length):
    """Expert e adds e + 1 times the token, by its weight."""
    how, (x, experts, weights) = parallel(batch=batch, length=length), choices()

    def through(x, weights):
        order, sizes = route(jnp.asarray(experts), how)
        rows = dispatch(x, order, how)
        scale = jnp.broadcast_to(1.0 + jnp.arange(EXPERTS, dtype=jnp.float32)[:, None, None], (EXPERTS, SIZE, SIZE))
        out = ragged_dot(rows, scale * jnp.eye(SIZE)[None], sizes, sharding=how.sharding)
        return combine(how, out, weights, order)

    def wanted(x, weights):
        return jnp.sum((experts + 1.0) * weights, axis=-1, keepdims=True) * x

    g = np.random.default_rng(3).normal(size=x.shape).astype(np.float32)
    with jax.set_mesh(mesh()):
        found = jax.jit(functools.partial(value_and_gradients, through))(x, weights, g)
    for a, b in zip(found, value_and_gradients(wanted, x, weights, g), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("qtype", "sent"), [("int8", "s8"), ("float8_e4m3fn", "u8")])
def test_tokens_are_sent_in_low_precision(qtype, sent):
    x, experts, _ = choices()

    def rows(how, x):
        order, _ = route(jnp.asarray(experts), how)
        return dispatch(x, order, how)

    with jax.set_mesh(mesh()):
        plain, low = (jax.jit(functools.partial(rows, how)) for how in (parallel(), parallel(qtype)))
        # A token has a scale of its own, and no two tokens have the same.
        want = Quantizer(qtype, channelwise_axes=(0, 1)).quantize(jnp.asarray(x)).dequantize()
        np.testing.assert_array_equal(low(x), plain(want))
        traffic = [read_communication(partitioned_hlo(fn.lower(x))) for fn in (plain, low)]
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(low(x) ** 2)))(x)
    kinds = zip(traffic, ("f32", sent), strict=True)
    wide, codes = (sum(c.total for c in sent.collectives if c.dtype == dtype) for sent, dtype in kinds)
    assert 0 < codes == wide / 4
    assert gradient.shape == x.shape


@pytest.mark.slow
def test_the_gradient_of_a_weight_is_summed_in_the_accumulator():
    lhs, rhs, sizes = operands()
    config, sharding = CONFIGS["fp8"], sharding_of(**SHARDINGS["columns"])
    low = config.replace(drhs=config.drhs.replace(accumulator="bfloat16"))

    def gradient(config, rhs):
        return jax.grad(
            lambda rhs: jnp.sum(ragged_dot(lhs, rhs, jnp.asarray(sizes), config=config, sharding=sharding))
        )(rhs)

    with jax.set_mesh(mesh()):
        wide, narrow = (jax.jit(functools.partial(gradient, c)) for c in (config, low))
        sent = [read_communication(partitioned_hlo(fn.lower(rhs))).collectives for fn in (wide, narrow)]
        a, b = wide(rhs), narrow(rhs)
    # The gradient of a device's two experts [16, 12], of which two devices send each other a half.
    assert [{c.dtype for c in found if c.kind == "reduce-scatter"} for found in sent] == [{"f32"}, {"bf16"}]
    assert b.dtype == jnp.float32
    np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-2)
