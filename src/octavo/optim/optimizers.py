"""AdamW, Lion, SGD and Muon with moments in few bits.

The formulas are Optax's; `moments` chooses how the state is stored:

    "dynamic8"  Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2021): blocks of 256, the dynamic map
    "linear8"   Gupta et al., Effective Quantization of Muon Optimizer States (2025): int8 in blocks of 2048, for Muon
    "dynamic4"  Li et al., Memory Efficient Optimizers with 4-bit States (2023): blocks of 128, no zero in v
    "float8"    Xi et al., COAT (2024): float8_e4m3fn in blocks of 128 with an expanded range
"""

from typing import Any

import optax
import optax.contrib

from octavo.optim.moment import MomentFormat
from octavo.optim.quantized import quantize_state

type Rate = float | optax.Schedule


def adamw(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    *,
    mask: Any = None,
    moments: str | MomentFormat = "dynamic8",
    **options: Any,
) -> optax.GradientTransformation:
    """`optax.adamw` with moments in few bits.

    Args:
      learning_rate: The learning rate, or a schedule.
      b1: The decay of the first moment.
      b2: The decay of the second moment.
      eps: Added to the root of the second moment.
      weight_decay: The weight decay, which the learning rate multiplies.
      mask: Which parameters have weight decay: a tree of bools, or a function of the parameters; None: all.
      moments: The format of both moments.
      **options: Which moments stay in float: `min_size`, `exclude` and `block_size` of `quantize_state`.

    Returns:
      The optimizer.

    >>> import jax, jax.numpy as jnp
    >>> params = {"w": jnp.ones((512, 512))}
    >>> sizes = [sum(x.nbytes for x in jax.tree.leaves(o(1e-3).init(params))) for o in (adamw, optax.adamw)]
    >>> round(sizes[0] / sizes[1], 3)
    0.254
    """
    return optax.chain(
        quantize_state(optax.scale_by_adam(b1, b2, eps), moments, **options),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def lion(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 1e-3,
    *,
    mask: Any = None,
    moments: str | MomentFormat = "dynamic8",
    **options: Any,
) -> optax.GradientTransformation:
    """`optax.lion` with its moment in few bits.

    Args:
      learning_rate: The learning rate, or a schedule.
      b1: The weight of the moment in an update.
      b2: The decay of the moment.
      weight_decay: The weight decay, which the learning rate multiplies.
      mask: Which parameters have weight decay: a tree of bools, or a function of the parameters; None: all.
      moments: The format of the moment.
      **options: Which moments stay in float: `min_size`, `exclude` and `block_size` of `quantize_state`.

    Returns:
      The optimizer.

    >>> import jax.numpy as jnp
    >>> lion(1e-4).init({"w": jnp.ones((64, 64))})[0].mu["w"].qtype.name
    'dynamic8'
    """
    return optax.chain(
        quantize_state(optax.scale_by_lion(b1, b2), moments, **options),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def sgd(
    learning_rate: Rate,
    momentum: float,
    *,
    nesterov: bool = False,
    moments: str | MomentFormat = "dynamic8",
    **options: Any,
) -> optax.GradientTransformation:
    """`optax.sgd` with its momentum in few bits.

    Args:
      learning_rate: The learning rate, or a schedule.
      momentum: The decay of the momentum.
      nesterov: Whether to use Nesterov's momentum.
      moments: The format of the momentum.
      **options: Which moments stay in float: `min_size`, `exclude` and `block_size` of `quantize_state`.

    Returns:
      The optimizer.

    >>> import jax.numpy as jnp
    >>> sgd(1e-2, 0.9, moments="linear8").init({"w": jnp.ones((64, 64))})[0].trace["w"].qtype.name
    'int8'
    """
    trace = optax.trace(momentum, nesterov)
    return optax.chain(quantize_state(trace, moments, **options), optax.scale_by_learning_rate(learning_rate))


def muon(
    learning_rate: Rate,
    *,
    moments: str | MomentFormat = "linear8",
    block_size: int | None = 2048,
    min_size: int = 4096,
    exclude: str = "(?i)embed|norm",
    **arguments: Any,
) -> optax.GradientTransformation:
    """`optax.contrib.muon` with moments in few bits, those of parameters that are left to AdamW included.

    Args:
      learning_rate: The learning rate, or a schedule.
      moments: The format of all moments.
      block_size: The largest number of values with one scale; None: the format's own.
      min_size: Moments with fewer values stay in float.
      exclude: A regular expression; moments of parameters whose path contains it stay in float.
      **arguments: The other arguments of `optax.contrib.muon`.

    Returns:
      The optimizer.

    >>> import jax.numpy as jnp
    >>> state = muon(1e-2).init({"w": jnp.ones((64, 64))})
    >>> state.inner_states["muon"].inner_state[0].mu["w"].qtype.name
    'int8'
    """
    return quantize_state(
        optax.contrib.muon(learning_rate, **arguments),
        moments,
        elementwise=False,
        block_size=block_size,
        min_size=min_size,
        exclude=exclude,
    )
