"""Weights in bfloat16, updated with stochastic rounding.

Zamirai et al., Revisiting BFloat16 Training (2020): rounded to nearest, an update below half a unit in the last place
is lost, and weight decay, lr * wd * w, always is. Stochastic rounding of a float32 value with the bits b,

    bits = (b + u) & 0xFFFF0000,    u uniform in 0 ... 65535,

is up with the probability of the fraction that bfloat16 has no bits for, so that the expected value is the value.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from octavo._typing import Array, Float, PRNGKeyArray
from octavo.numerics import Stochastic

_BITS = Stochastic(bits=16)


def stochastic_round(x: Float[Array, "*s"], *, key: PRNGKeyArray) -> Float[Array, "*s"]:
    """Round to bfloat16 stochastically, without bias.

    Args:
      x: The values, which are converted to float32.
      key: A PRNG key.

    Returns:
      For each value one of its two neighbors in bfloat16, and a bfloat16 itself as it is.

    >>> x = jnp.full(10000, 1 + 2**-9)  # a quarter of the way from 1 to the next bfloat16
    >>> rounded = stochastic_round(x, key=jax.random.key(0))
    >>> round(float(jnp.mean(rounded.astype(jnp.float32) > 1)), 2)
    0.25
    """
    x = x.astype(jnp.float32)
    noise = jnp.floor(_BITS.noise(key, x.shape) * 2.0**16).astype(jnp.uint32)  # the words of `jax.random.bits`
    word = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
    rounded = jax.lax.bitcast_convert_type(word & jnp.uint32(0xFFFF0000), jnp.float32)
    # The sum would change the bits of NaN into those of another number.
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


class StochasticRoundingState(NamedTuple):
    """The state of `with_stochastic_rounding`.

    Attributes:
      key: The data of the PRNG key, an ordinary array that can be saved and compared.
      inner_state: The state of the optimizer.
    """

    key: Any
    inner_state: Any


def with_stochastic_rounding(optimizer: optax.GradientTransformation, *, seed: int = 0) -> optax.GradientTransformation:
    """Update bfloat16 parameters with stochastic rounding, without a float32 copy of them.

    The optimizer sees gradients and parameters in float32, so that its moments are float32 and its weight decay is
    exact. The updates are differences of bfloat16 values, in float32: `optax.apply_updates` adds them exactly.
    Parameters of other dtypes are updated as they are without this function.

    Args:
      optimizer: The optimizer, weight decay and learning rate included.
      seed: The seed of the rounding.

    Returns:
      A transformation of whose updated parameters the expected value is that of float32.

    >>> params = {"w": jnp.ones(10000, jnp.bfloat16)}
    >>> decay = optax.chain(optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(1e-3))
    >>> optimizer = with_stochastic_rounding(decay)
    >>> updates, _ = optimizer.update({"w": jnp.zeros(10000, jnp.bfloat16)}, optimizer.init(params), params)
    >>> round(float(jnp.mean(updates["w"])), 5)  # rounded to nearest, it would be 0
    -0.0001
    """

    def init(params: Any) -> StochasticRoundingState:
        return StochasticRoundingState(jax.random.key_data(jax.random.key(seed)), optimizer.init(_to_float32(params)))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("stochastic rounding needs the parameters: call update(gradients, state, params)")
        wide = _to_float32(params)
        updates, inner = optimizer.update(_to_float32(updates), state.inner_state, wide)
        following, key = jax.random.split(jax.random.wrap_key_data(state.key))
        leaves, structure = jax.tree.flatten(params)
        keys = jax.tree.unflatten(structure, list(jax.random.split(key, len(leaves))))

        def difference(old: Any, x: Any, update: Any, key: Any) -> Any:
            if old.dtype != jnp.bfloat16:
                return update
            return stochastic_round(x + update, key=key).astype(jnp.float32) - x

        updates = jax.tree.map(difference, params, wide, updates, keys)
        return updates, StochasticRoundingState(jax.random.key_data(following), inner)

    return optax.GradientTransformation(init, update)


def _to_float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree)
