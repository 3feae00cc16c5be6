"""Where activations lie on a mesh of devices, by the logical names of their axes."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from octavo import _sharding
from octavo.models.config import ModelConfig

ROWS = ("activation_batch", "activation_length")


def place[T](config: ModelConfig, x: T, *names: str | None) -> T:
    """`x`, cut along the axes of JAX's current mesh that the model's `placement` has for the names of its axes.

    Without a placement `x` is left alone.

    >>> sizes = dict(emb_dim=16, num_layers=2, num_query_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32)
    >>> config = ModelConfig(vocab_size=8, placement=(("activation_batch", ("fsdp",)),), **sizes)
    >>> with jax.set_mesh(jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))):
    ...     place(config, jax.numpy.ones((4, 2)), "activation_batch", None).shape
    (4, 2)
    """
    if not config.placement:
        return x
    # In a shard_map, the axes that it is over are cut already.
    gone = set(jax.sharding.get_abstract_mesh().manual_axes)
    rules: dict[Any, tuple[str, ...]] = {
        name: tuple(a for a in axes if a not in gone) for name, axes in config.placement
    }
    spec = PartitionSpec(*(rules.get(name) or None for name in names))
    typed = _sharding.explicit(x) is not None
    return _sharding.reshard_if_explicit(x, spec) if typed else jax.lax.with_sharding_constraint(x, spec)


def cut_axes(config: ModelConfig, *names: str) -> tuple[tuple[str, ...], ...]:
    """The axes of JAX's current mesh that cut each of an array's axes: none cuts two, and none that is cut already.

    >>> sizes = dict(emb_dim=16, num_layers=2, num_query_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32)
    >>> config = ModelConfig(vocab_size=8, placement=(("exp", ("expert",)), ("mlp_moe", ("expert", "tensor"))), **sizes)
    >>> cut_axes(config, "exp", "mlp_moe")
    (('expert',), ('tensor',))
    """
    rules, taken = dict(config.placement), set(jax.sharding.get_abstract_mesh().manual_axes)
    found = []
    for name in names:
        found.append(tuple(axis for axis in rules.get(name, ()) if axis not in taken))
        taken.update(found[-1])
    return tuple(found)
