"""Functions that the command line is pointed at in tests."""

import jax
import jax.numpy as jnp

import octavo

F32 = jnp.float32
NUMBER = 3


def predict(params, x):
    hidden = jax.nn.relu(x @ params["up"]["w"])
    return hidden @ params["down"]["w"], jnp.int32(0)


def example_inputs():
    weights = {"up": {"w": jax.ShapeDtypeStruct((64, 128), F32)}, "down": {"w": jax.ShapeDtypeStruct((128, 64), F32)}}
    return weights, jax.ShapeDtypeStruct((8, 64), F32)


def matmul(lhs, rhs):
    return lhs @ rhs


def already_low(x, weights):
    return octavo.dot(x, weights, config=octavo.DotConfig.qat("int8"))


def counts(params, x):
    return jnp.argmax(x @ params)


def nothing():
    return jnp.zeros(3)


def broken(params, x):
    return x @ params["wrong"]


def not_a_tuple():
    return {}


def on_devices():
    """The inputs of `predict`, cut over all devices."""
    cut = jax.NamedSharding(jax.make_mesh((jax.device_count(),), ("d",)), jax.P("d"))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cut), example_inputs())
