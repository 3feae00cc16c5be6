"""A product of ours is recognised in a jaxpr by the object in its parameters, wherever the equation ends up."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import octavo
from octavo import DotConfig, Operand
from octavo.calibration import AbsMax
from octavo.distributed import WeightGather
from octavo.ops import Placement, dot_general, marked_product
from tests.arrays import normal

PLAIN = (((1,), (0,)), ((), ()))
X, W = (normal(i, *shape) for i, shape in enumerate([(8, 64), (64, 32)]))
INT8 = DotConfig.qt("int8")


def found(jaxpr):
    """The products of ours in a jaxpr, in bodies of loops and calls as well."""
    products = []
    for eqn in jaxpr.eqns:
        bodies = [v for v in eqn.params.values() if hasattr(v, "eqns")]
        marks = [marked_product(body) for body in bodies] if eqn.primitive.name.startswith("custom_vjp") else []
        products += [mark for mark in marks if mark is not None] or [p for body in bodies for p in found(body)]
    return products


def product(x, w):
    return dot_general(x, w, PLAIN, config=INT8)


MESH = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
TRANSFORMED = {
    "plain": product,
    "jit": jax.jit(product),
    "remat": jax.checkpoint(product),
    "scan": lambda x, w: jax.lax.scan(lambda c, _: (c, product(x, w)), 0, length=2)[1],
    "shard_map": jax.shard_map(product, mesh=MESH, in_specs=(P("data"), P()), out_specs=P("data")),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_the_mark_is_found_under(name):
    (mark,) = found(jax.make_jaxpr(TRANSFORMED[name])(X, W))
    assert mark.call.config is INT8
    assert mark.call.params == {"dimension_numbers": PLAIN}


def test_under_vmap_shapes_tell_that_the_call_is_another():
    (mark,) = found(jax.make_jaxpr(jax.vmap(product, (0, None)))(X[None], W))
    assert mark.shapes == ((8, 64), (64, 32))


def test_the_mark_computes_nothing():
    text = jax.jit(product).lower(X, W).as_text()
    assert "octavo_product" not in text
    body = jax.make_jaxpr(product)(X, W).eqns[-1].params["call_jaxpr"]
    opened = lambda x, w: jax.core.eval_jaxpr(body, body.consts, x, w)[0]  # noqa: E731
    np.testing.assert_array_equal(opened(X, W), product(X, W))


def test_a_calibration_that_is_defined_twice():
    """As in a notebook: the second class prints like the first, and is another."""
    for factor in (1.0, 0.3):

        @dataclasses.dataclass(frozen=True, repr=False)
        class Mine(AbsMax):
            def measure(self, *args, factor=factor, **kwargs):
                return {name: factor * bound for name, bound in AbsMax.measure(self, *args, **kwargs).items()}

        config = DotConfig.qat("int8").with_operands(fwd_rhs=Operand("int8", calibration=Mine()))

        def predict(params, x, config=config):
            return octavo.dot(x, params["w"], config=config)

        low = octavo.convert(predict, {"w": W}, X)
        bound = float(jnp.abs(W[:, 0]).max())
        np.testing.assert_allclose(float(low["w"].scale[0, 0]), factor * bound / 127.5, rtol=1e-3)
        np.testing.assert_array_equal(octavo.served(predict)(low, X), predict({"w": W}, X))


def test_meshes_with_equal_axis_names_and_other_devices():
    """Two products that print alike but for the devices of their meshes are two products."""
    calls = []
    for devices in (jax.devices()[:2], jax.devices()[2:4]):
        mesh = Mesh(np.array(devices), ("x",))
        stored, used = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
        placement = Placement(gather=WeightGather(stored, used))

        def gathered(x, w, placement=placement):
            return dot_general(x, w, PLAIN, config=INT8, placement=placement)

        x, w = jax.device_put((X, W), used)
        (mark,) = found(jax.make_jaxpr(gathered)(x, w))
        assert mark.call.placement == placement
        out = jax.jit(gathered)(x, w)
        assert out.sharding.device_set == set(devices)
        np.testing.assert_array_equal(out, product(X, W))
        calls.append(mark.call)
    assert repr(calls[0].placement) == repr(calls[1].placement)
    assert calls[0] != calls[1]


def test_a_config_with_placement_beside_it_round_trips_through_json():
    params = {"w": jax.device_put(W, NamedSharding(MESH, P("data")))}
    rule = octavo.QtRule(
        weight_qtype="int8", act_qtype="int8", bwd_qtype="int8",
        gather_axes=("data",), reduce_qtype="int8", reduce_axes=("data",),
    )  # fmt: skip
    low = octavo.quantized(lambda params, x: x @ params["w"], [rule], shardings={"w": params["w"].sharding})
    (site,) = low.sites(params, X)
    assert site.placement.gather is not None
    assert site.placement.reduction is not None
    assert DotConfig.from_json(site.config.to_json()) == site.config
    assert eval(repr(site.config), vars(octavo.ops) | vars(octavo.numerics) | vars(octavo.calibration)) == site.config
