"""Models that the command line is pointed at in tests."""

import equinox as eqx
import flax.linen as nn
import jax
from flax import nnx


class Linen(nn.Module):
    width: int = 32

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(self.width, name="up")(x))
        return nn.Dense(16, name="down")(x)


class NeedsWidth(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(nn.Dense(16)(x))


def linen():
    return Linen()


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def nnx_model():
    return Nnx(nnx.Rngs(0))


def equinox():
    return eqx.nn.MLP(16, 16, 32, 1, key=jax.random.key(0))


linen_model = Linen(width=48)
