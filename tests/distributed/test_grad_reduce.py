"""Gradients of weights that are reduced in eight bits: the result and the rounding error are the gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import octavo
from octavo import DotConfig
from octavo.distributed import GradReduce
from octavo.ops import Placement, dot_general, init_scaling
from octavo.ops.vjp import ERROR_FEEDBACK

MESH = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
ROWS = ("data", "fsdp")
# What is multiplied, the sharding of the weight, and whether it is the left operand.
PLAIN = (((2,), (0,)), ((), ()))
CASES = {
    "as stored": ((8, 4, 64), (64, 32), PLAIN, P("fsdp", "tensor"), False),
    "last axis": ((8, 4, 64), (64, 32), PLAIN, P("tensor", "fsdp"), False),
    "both rows": ((8, 4, 64), (64, 32), PLAIN, P(("data", "fsdp")), False),
    "uncut": ((8, 4, 64), (64, 32), PLAIN, P(), False),
    "several axes": ((8, 4, 16, 8), (16, 8, 24), (((2, 3), (0, 1)), ((), ())), P("tensor", None, "fsdp"), False),
    "on the left": ((64, 32), (8, 4, 64), (((0,), (2,)), ((), ())), P("fsdp", "tensor"), True),
    "a batch of them": ((4, 8, 64), (4, 64, 32), (((2,), (1,)), ((0,), (0,))), P("tensor", "fsdp"), False),
}
EXACT = ["as stored", "on the left"]


def operands(name):
    left, right, numbers, spec, weight_left = CASES[name]
    keys = jax.random.split(jax.random.key(0), 3)
    lhs, rhs = jax.random.normal(keys[0], left), jax.random.normal(keys[1], right)
    out = jax.eval_shape(lambda a, b: jax.lax.dot_general(a, b, numbers), lhs, rhs)
    return lhs, rhs, numbers, NamedSharding(MESH, spec), weight_left, jax.random.normal(keys[2], out.shape)


INT8 = DotConfig.qt("int8")


@functools.partial(jax.jit, static_argnums=(3,), static_argnames=("config", "reduction"))
def gradients(lhs, rhs, g, numbers, scaling, *, reduction=None, config=INT8):
    """The gradients of both operands and the new state."""

    def loss(lhs, rhs, scaling):
        placement = Placement(reduction=reduction)
        return jnp.sum(dot_general(lhs, rhs, numbers, config=config, scaling=scaling, placement=placement) * g)

    return jax.grad(loss, argnums=(0, 1, 2))(lhs, rhs, scaling)


@functools.cache
def found(name, qtype="int8", how="int8"):
    lhs, rhs, numbers, where, left, g = operands(name)
    config, reduction = DotConfig.qt(how), GradReduce(where, (ROWS,), qtype, feedback=True, left=left)
    scaling = init_scaling(config, lhs, rhs, numbers, placement=Placement(reduction=reduction))
    plain = gradients(lhs, rhs, g, numbers, {}, config=config)
    return plain, gradients(lhs, rhs, g, numbers, scaling, reduction=reduction, config=config), left


@pytest.mark.parametrize("name", [n if n in EXACT else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_the_reduced_gradient_and_the_error_sum_to_the_gradient(name):
    (*wanted, _), (*grads, state), left = found(name)
    exact, sent, lost = wanted[1 - left], grads[1 - left], state[ERROR_FEEDBACK]["error"]
    assert lost.shape == (4, *exact.shape)
    size = float(jnp.abs(exact).max())
    np.testing.assert_allclose(sent + lost.sum(0), exact, rtol=0, atol=1e-5 * size)
    # Half a step of 127 of each device's own part, and of their sum.
    assert 1e-4 * size < float(jnp.abs(sent - exact).max()) < 5 * 1.1 * size / 254
    np.testing.assert_array_equal(grads[left], wanted[left])


@pytest.mark.slow
@pytest.mark.parametrize("flat", [False, True])
def test_rows_that_are_cut_along_two_axes(flat):
    """As sequences in parts are; of rows that are flattened, both cut the one that is left."""
    lhs, rhs, numbers, _, _, g = operands("as stored")
    if flat:
        lhs, g, numbers = lhs.reshape(-1, 64), g.reshape(-1, 32), (((1,), (0,)), ((), ()))
    where = NamedSharding(MESH, P(("fsdp", "tensor")))
    reduction = GradReduce(where, (ROWS, ("tensor",)), "int8", feedback=True)
    assert reduction.scatter == (0, ("fsdp", "tensor"))
    scaling = init_scaling(INT8, lhs, rhs, numbers, placement=Placement(reduction=reduction))
    _, sent, state = gradients(lhs, rhs, g, numbers, scaling, reduction=reduction)
    _, exact, _ = gradients(lhs, rhs, g, numbers, {})
    size = float(jnp.abs(exact).max())
    assert state[ERROR_FEEDBACK]["error"].shape == (8, 64, 32)
    np.testing.assert_allclose(sent + state[ERROR_FEEDBACK]["error"].sum(0), exact, rtol=0, atol=1e-5 * size)


@pytest.mark.slow
@pytest.mark.parametrize("qtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("how", ["int8", "float8_e4m3fn"])
def test_other_formats(qtype, how):
    (*wanted, _), (*grads, state), _ = found("as stored", qtype, how)
    size = float(jnp.abs(wanted[1]).max())
    np.testing.assert_allclose(grads[1] + state[ERROR_FEEDBACK]["error"].sum(0), wanted[1], rtol=0, atol=1e-5 * size)
    # Half a unit in the last place of 2 or 3 bits after the point, of parts whose errors are independent.
    off = jnp.sqrt(jnp.mean((grads[1] - wanted[1]) ** 2) / jnp.mean(wanted[1] ** 2))
    assert 0 < off < (2**-3 if qtype == "float8_e5m2" else 2**-4)


@pytest.mark.slow
def test_error_feedback_is_added_to_the_next_gradient():
    """The same gradient ten times: without feedback ever the same is missing."""
    lhs, rhs, numbers, where, _, g = operands("as stored")
    sums = []
    for feedback in (True, False):
        reduction = GradReduce(where, (ROWS,), "int8", feedback=feedback)
        scaling, total = init_scaling(INT8, lhs, rhs, numbers, placement=Placement(reduction=reduction)), 0.0
        for _ in range(10):
            _, grad, scaling = gradients(lhs, rhs, g, numbers, scaling, reduction=reduction)
            total = total + grad
        sums.append(total)
    exact = 10 * found("as stored")[0][1]
    off = [float(jnp.abs(total - exact).max()) for total in sums]
    assert off[0] < off[1] / 4


@pytest.mark.slow
def test_eight_bits_are_sent_and_each_device_gets_its_part():
    lhs, rhs, numbers, where, _, g = operands("as stored")
    placement = Placement(reduction=GradReduce(where, (ROWS,), "int8"))

    def drhs(lhs, rhs):
        return jax.grad(lambda w: jnp.sum(dot_general(lhs, w, numbers, config=INT8, placement=placement) * g))(rhs)

    rows = NamedSharding(MESH, P(ROWS))
    text = jax.jit(drhs, in_shardings=(rows, where), out_shardings=where).lower(lhs, rhs).compile().as_text()
    from octavo.hlo import read_communication

    sent = read_communication(text).collectives
    exchanged = {(c.kind, c.dtype) for c in sent if c.kind == "all-to-all"}
    assert exchanged == {("all-to-all", "s8"), ("all-to-all", "f32")}
    # A gradient of 64 x 32 values, half of it on a device: integers or floats of that size are not summed.
    assert not [c for c in sent if c.kind in ("all-reduce", "reduce-scatter") and c.total > 1024]


def test_rows_that_do_not_divide_raise():
    _, rhs, numbers, where, _, _ = operands("as stored")
    reduction = GradReduce(where, (ROWS,), "int8")
    with pytest.raises(ValueError, match=r"6 rows do not divide among the 4 devices along \('data', 'fsdp'\), over wh"):
        gradients(jnp.ones((6, 4, 64)), rhs, jnp.ones((6, 4, 32)), numbers, {}, reduction=reduction)


def test_feedback_needs_its_state():
    lhs, rhs, numbers, where, _, g = operands("as stored")
    reduction = GradReduce(where, (ROWS,), "int8", feedback=True)
    with pytest.raises(ValueError, match=r"error feedback needs its state: pass scaling=octavo\.ops\.init_scaling"):
        gradients(lhs, rhs, g, numbers, {}, reduction=reduction)


def test_meshes_with_explicit_axes_raise():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Explicit,))
    where = NamedSharding(mesh, P("fsdp"))
    options = {"config": INT8, "placement": Placement(reduction=GradReduce(where, (("fsdp",),), "int8"))}
    x, w = jax.device_put((jnp.ones((8, 64)), jnp.ones((64, 32))), where)
    numbers = (((1,), (0,)), ((), ()))
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="explicit axes reduces gradients in float: leav"):
        jax.eval_shape(jax.grad(lambda w: dot_general(x, w, numbers, **options, out_sharding=where).sum()), w)


def test_experts_without_a_sharding_raise():
    reduction = GradReduce(NamedSharding(MESH, P(None, "fsdp")), (ROWS,), "int8")
    options = {"config": INT8, "placement": Placement(reduction=reduction)}
    sizes = jnp.asarray([4, 4])
    with pytest.raises(ValueError, match="reduce_qtype='int8' reduces the gradient of experts over devices, but rows"):
        jax.eval_shape(
            jax.grad(lambda w: octavo.ragged_dot(jnp.ones((8, 16)), w, sizes, **options).sum()),
            jnp.ones((2, 16, 16)),
        )


# By a rule.


def predict(params, x):
    return jax.nn.relu(x @ params["up"]) @ params["down"]


def rule(**changes):
    return octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", **changes)


def test_a_rule_says_where_and_how():
    params = {"up": jnp.ones((64, 32)), "down": jnp.ones((32, 64))}
    where = {"up": NamedSharding(MESH, P("fsdp")), "down": NamedSharding(MESH, P(None, "fsdp"))}
    low = octavo.quantized(predict, rule(reduce_qtype="int8", reduce_axes=("data", "fsdp")), shardings=where)
    up, down = (site.placement.reduction for site in low.sites(params, jnp.ones((8, 64))))
    assert (up.rows, up.scatter, up.qtype) == ((("data", "fsdp"),), (0, ("fsdp",)), "int8")
    assert down.scatter == (1, ("fsdp",))
    wrong = octavo.quantized(predict, rule(reduce_qtype="int8", reduce_axes=("rows",)), shardings=where)
    with pytest.raises(
        ValueError, match=r"reduce_axes=\('rows',\): the mesh has the axes \('data', 'fsdp', 'tensor'\)"
    ):
        wrong.sites(params, jnp.ones((8, 64)))
    both = octavo.quantized(
        predict, rule(reduce_qtype="int8", reduce_axes=(("data", "fsdp"), ("tensor",))), shardings=where
    )
    assert both.sites(params, jnp.ones((8, 4, 64)))[0].placement.reduction.rows == (("data", "fsdp"), ("tensor",))
    assert rule(reduce_qtype="int8", reduce_axes=[["data"]]).reduce_axes == ("data",)
    alone = octavo.quantized(predict, rule(reduce_qtype="int8", reduce_axes=("data",)))
    assert [site.placement.reduction for site in alone.sites(params, jnp.ones((8, 64)))] == [None, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reduce_axes": ("fsdp",)}, r"reduce_axes=\('fsdp',\) without reduce_qtype: gradients are reduced in float"),
        ({"reduce_feedback": True}, "reduce_feedback=True without reduce_qtype"),
        ({"reduce_qtype": "int8"}, "reduce_qtype='int8' needs reduce_axes, the mesh axes along which rows are sharded"),
        ({"reduce_qtype": "int8", "reduce_axes": "fsdp"}, "reduce_axes='fsdp': a tuple of names such as"),
        ({"reduce_qtype": "nvfp4", "reduce_axes": ("fsdp",)}, "reduce_qtype='nvfp4' has tiles of its own"),
    ],
)
def test_what_contradicts_itself_raises(changes, message):
    with pytest.raises(ValueError, match=message):
        rule(**changes)


def test_products_of_activations_have_no_gradients_to_add_up():
    with pytest.raises(ValueError, match="reduce_qtype='int8' with scope='activations'"):
        octavo.QtRule(act_qtype="int8", scope="activations", reduce_qtype="int8", reduce_axes=("fsdp",))
