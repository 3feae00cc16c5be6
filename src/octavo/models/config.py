"""The configuration of a decoder."""

import dataclasses

from octavo._config import Config, check_choices, check_least
from octavo.models.layers import ACTIVATIONS
from octavo.models.remat import POLICIES

DTYPES = ("float32", "bfloat16", "float16")
_SIZES = ("vocab_size", "emb_dim", "num_layers", "num_query_heads", "num_kv_heads", "head_dim", "mlp_dim")
_SIZES += ("num_experts", "experts_per_token", "batch_split")
_COUNTS = ("shared_experts", "first_dense_layers", "unscanned_first", "unscanned_last", "moe_mlp_dim")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ModelConfig(Config):
    """The architecture of a `Decoder`, validated when made.

    >>> small = dict(emb_dim=64, num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=128)
    >>> ModelConfig(vocab_size=256, **small).replace(remat="full")
    ModelConfig(vocab_size=256, emb_dim=64, ..., mlp_dim=128, remat='full')
    """

    vocab_size: int
    emb_dim: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    """Each key and value head serves an equal number of query heads."""
    head_dim: int
    mlp_dim: int
    activation: str = "silu"
    """Of the gated half of an MLP: wo(activation(wi_0(x)) * wi_1(x))."""
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: tuple[float, float, float, float] | None = None
    """Llama 3.1's frequency scaling for long contexts: factor, low and high frequency factor, original length."""
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias, as in Qwen2."""
    qk_norm: bool = False
    """Whether each head's query and key are normalized before the rotation, as in Qwen3."""
    fused: bool = False
    """Whether query, key and value weights are fused, and the two input weights of an MLP: see `octavo.models.fuse`."""
    tied_logits: bool = True
    """Whether logits use the embedding table."""
    num_experts: int = 1
    """More than one makes the MLPs mixtures of experts."""
    experts_per_token: int = 1
    shared_experts: int = 0
    """Width of the MLP that all tokens share, in experts."""
    moe_mlp_dim: int = 0
    first_dense_layers: int = 0
    """Leading layers with a dense MLP."""
    sparse_matmul: bool = True
    """Whether tokens are dispatched to their experts; otherwise all experts compute all tokens, as a reference."""
    scan_layers: bool = True
    """Whether equal layers are a `lax.scan` over stacked parameters, which compiles in the time of one layer."""
    unscanned_first: int = 0
    """Leading layers outside of the scan, with parameters of their own names."""
    unscanned_last: int = 0
    remat: str = "none"
    """Which results of a layer are saved for the backward pass: see `octavo.models.POLICIES`."""
    batch_split: int = 1
    """Into how many parts a layer splits its batch, so that collectives of one overlap with compute of another."""
    dtype: str = "float32"
    """The dtype of activations; norms, softmax, router and logits are float32."""
    weight_dtype: str = "float32"
    """The dtype of parameters."""
    float32_logits: bool = True
    """Whether the operands of the logits are float32; they are accumulated in float32 always."""
    placement: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Mesh axes for each logical axis of activations, as (name, axes); empty for no sharding constraints."""

    def __post_init__(self):
        check_least(self, 1, *_SIZES)
        check_least(self, 0, *_COUNTS)
        check_choices(self, activation=ACTIVATIONS, remat=POLICIES, dtype=DTYPES, weight_dtype=DTYPES)
        self._check_attention()
        self._check_experts()
        self._check_layers()

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.num_experts > 1 and layer >= self.first_dense_layers

    def _check_attention(self) -> None:
        for name in ("norm_eps", "rope_theta"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is positive, got {getattr(self, name)}")
        if self.num_query_heads % self.num_kv_heads:
            raise ValueError(
                f"num_query_heads={self.num_query_heads} is no multiple of num_kv_heads={self.num_kv_heads}: each key "
                "and value head serves as many query heads as every other"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is even, because rotary embeddings rotate pairs of values; got {self.head_dim}")
        if self.rope_scaling is None:
            return
        if len(self.rope_scaling) != 4 or not all(x > 0 for x in self.rope_scaling):
            raise ValueError(
                "rope_scaling is four positive numbers (factor, low frequency factor, high frequency factor, original "
                f"length), got {self.rope_scaling}"
            )
        _, low, high, _ = self.rope_scaling
        if not low < high:
            raise ValueError(f"rope_scaling has its low frequency factor below the high one, got {low} and {high}")

    def _check_experts(self) -> None:
        if self.num_experts == 1:
            for name in ("shared_experts", "first_dense_layers"):
                if getattr(self, name):
                    raise ValueError(f"{name}={getattr(self, name)} needs num_experts above 1: there are no experts")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} is more than there are: num_experts={self.num_experts}"
            )
        if self.num_experts > 1 and not self.moe_mlp_dim:
            raise ValueError(f"num_experts={self.num_experts} needs moe_mlp_dim, the width of one expert")

    def _check_layers(self) -> None:
        if self.first_dense_layers >= self.num_layers:
            raise ValueError(
                f"first_dense_layers={self.first_dense_layers} leaves no layer with experts: "
                f"num_layers={self.num_layers}"
            )
        if self.unscanned_first + self.unscanned_last > self.num_layers:
            raise ValueError(
                f"unscanned_first={self.unscanned_first} and unscanned_last={self.unscanned_last} are more layers than "
                f"num_layers={self.num_layers}"
            )
