"""`LoraRule`: which matmuls have an adapter, and of which rank."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax

from octavo.rules import QuantizationRule

_he_uniform, _zeros = jax.nn.initializers.he_uniform(), jax.nn.initializers.zeros


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class LoraRule(QuantizationRule):
    """Adds a low-rank adapter to the matmuls that a rule matches: x @ w + (x @ a) @ b * (alpha / rank).

    The fields of `QuantizationRule` say how the weight itself is stored: none for LoRA, `weight_qtype="nf4"` with
    `tile_size=64` for QLoRA. Names and defaults are Qwix's.

    Attributes:
        rank: The columns of a, and rows of b.
        alpha: The adapter is multiplied by alpha / rank.
        dropout: The share of inputs of the adapter that is set to zero when a random key is given, as in training.
        lora_a_initializer: Makes a, of the axes that are contracted; He's uniform distribution by default.
        lora_b_initializer: Makes b; zeros by default, so that a new adapter changes nothing.

    >>> LoraRule(module_path=".*/mlp/.*", rank=8, alpha=16.0, weight_qtype="nf4", tile_size=64)
    LoraRule(module_path='.*/mlp/.*', weight_qtype='nf4', tile_size=64, rank=8, alpha=16.0)
    """

    adapts: ClassVar[bool] = True

    rank: int
    alpha: float
    dropout: float = 0.0
    lora_a_initializer: Callable[..., Any] = _he_uniform
    lora_b_initializer: Callable[..., Any] = _zeros

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank={self.rank!r}: a whole number of at least 1")
        if not isinstance(self.alpha, int | float) or not self.alpha > 0:
            raise ValueError(f"alpha={self.alpha!r}: a positive number; the adapter is multiplied by alpha / rank")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout!r}: a share of at least 0 and below 1")

    @property
    def scale(self) -> float:
        """The factor of the adapter.

        >>> LoraRule(rank=4, alpha=8.0).scale
        2.0
        """
        return self.alpha / self.rank
