"""The configuration of a decoder."""

import dataclasses

from octavo._config import Config, check_choices, check_least
from octavo.models.layers import ACTIVATIONS, NORMS
from octavo.models.remat import POLICIES
from octavo.models.rope import RopeScaling

DTYPES = ("float32", "bfloat16", "float16")
_SIZES = ("vocab_size", "emb_dim", "num_layers", "num_query_heads", "num_kv_heads", "head_dim", "mlp_dim")
_SIZES += ("num_experts", "experts_per_token", "batch_split", "router_groups", "router_top_groups")
_COUNTS = ("shared_experts", "first_dense_layers", "unscanned_first", "unscanned_last", "moe_mlp_dim")
_COUNTS += ("sliding_window", "learned_positions", "attention_softcap", "logits_softcap")
_COUNTS += ("full_head_dim", "full_kv_heads", "kv_shared_layers", "kv_shared_mlp_dim", "layer_embed_dim")
_COUNTS += ("hadamard_inputs", "hadamard_mlp", "hadamard_keys", "kv_lora_rank", "q_lora_rank", "v_head_dim")
LATENT = ("kv_lora_rank", "q_lora_rank", "v_head_dim")
"""The fields of latent attention."""
VARIANTS = ("gated_mlp", "mlp_bias", "norm", "norm_place", "rotary_dim", "learned_positions", "sliding_window")
VARIANTS += ("attention_scale", "attention_softcap", "attention_sinks", "logits_softcap", "embedding_scale")
VARIANTS += ("out_bias", "qk_norm_wide", "shared_gate", "normalize_router", *LATENT, "rope_interleaved")
VARIANTS += ("router_scores", "router_bias", "router_groups", "router_top_groups", "router_scale")
PER_LAYER = ("full_head_dim", "full_kv_heads", "full_shared_kv", "kv_shared_layers", "layer_embed_dim")
"""The fields that make layers of several sizes, or that are of one layer only, so that none are scanned."""
VARIANTS += (*PER_LAYER, "value_norm", "kv_shared_mlp_dim", "layer_scale")
HADAMARD = ("hadamard_inputs", "hadamard_mlp", "hadamard_keys")
VARIANTS += HADAMARD
"""The fields that make blocks other than those of Llama and Qwen."""
NORM_PLACES = ("pre", "post", "both")
ROUTER_SCORES = ("softmax", "sigmoid")


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
    gated_mlp: bool = True
    """Whether MLPs have a gate; without one they are wo(activation(wi_0(x))), as in GPT-2."""
    mlp_bias: bool = False
    """Whether the matmuls of MLPs have a bias; also those of experts, and the router."""
    norm: str = "rms"
    """"rms", or "layer" for layer norms with a bias, as in GPT-2."""
    norm_place: str = "pre"
    """Whether attention and MLP normalize their input ("pre"), their output ("post", OLMo 2) or both (Gemma)."""
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | tuple[float, float, float, float] | None = None
    """Four numbers are those of "llama3": factor, low and high frequency factor, original length."""
    rotary_dim: int | None = None
    """How many of the values of a head are rotated, 0 for none; by default all."""
    rope_interleaved: bool = False
    """Whether neighboring values are a rotated pair, as in DeepSeek; otherwise the first half pairs with the second."""
    learned_positions: int = 0
    """Positions with a learned embedding, as in GPT-2; a text cannot be longer. 0 for none."""
    sliding_window: int = 0
    """How many of the last positions a query attends to, its own included; 0 for all."""
    sliding_layers: tuple[bool, ...] = (True,)
    """Which layers have the window, as a pattern that is repeated."""
    sliding_rope_theta: float | None = None
    """The base of the rotary frequencies in layers with the window, which then are not scaled, as in Gemma 3."""
    attention_scale: float | None = None
    """Multiplies scores; by default head_dim**-0.5."""
    attention_softcap: float = 0.0
    """Scores s become cap * tanh(s / cap), as in Gemma 2; 0 for no cap."""
    attention_sinks: bool = False
    """Whether each head has a learned score that takes part in the softmax without a value, as in gpt-oss."""
    logits_softcap: float = 0.0
    embedding_scale: float = 1.0
    """Multiplies embeddings, but not tied logits."""
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias, as in Qwen2."""
    out_bias: bool = False
    """Whether the output of attention has a bias."""
    qk_norm: bool = False
    """Whether each head's query and key are normalized before the rotation, as in Qwen3."""
    qk_norm_wide: bool = False
    """Whether queries and keys are normalized over all heads at once, as in OLMo 2."""
    value_norm: bool = False
    """Whether each head's value is normalized, without a learned scale, as in Gemma 4."""
    full_head_dim: int = 0
    """Width of a head in layers without a sliding window, as in Gemma 4; 0 for that of the others."""
    full_kv_heads: int = 0
    """The same of the number of key and value heads."""
    full_shared_kv: bool = False
    """Whether layers without a sliding window have one projection for keys and values."""
    kv_shared_layers: int = 0
    """How many of the last layers have no keys and values, as in Gemma 3n: they attend to those of the last of the
    others that has a sliding window, or has none, as they do."""
    kv_shared_mlp_dim: int = 0
    """The width of an MLP in these layers; 0 for that of the others."""
    layer_embed_dim: int = 0
    """Width of a further embedding of each token for each layer, which is added after the MLP; 0 for none."""
    layer_scale: bool = False
    """Whether the output of each layer is multiplied by a learned number."""
    kv_lora_rank: int = 0
    """Width of the latent from which keys and values are projected, as in DeepSeek-V2; 0 for attention without one. The
    last `rotary_dim` values of a key, which alone are rotated, are shared by all heads."""
    q_lora_rank: int = 0
    """The same of queries; 0 to project them from hidden states."""
    v_head_dim: int = 0
    """Width of a value head with a latent; that of queries and keys is `head_dim`."""
    hadamard_inputs: int = 0
    """Blocks of a Hadamard rotation of the inputs of all matmuls in attention and MLPs; 0 for none. Weights are rotated
    too, so that these cancel: see `octavo.pretrained.hadamard`."""
    hadamard_mlp: int = 0
    """The same of the second matmul of MLPs only: R4 of QuaRot."""
    hadamard_keys: int = 0
    """The same of queries and keys, which cancel in scores, for low-bit KV caches: R3 of QuaRot."""
    fused: bool = False
    """Whether query, key and value weights are fused, and the two input weights of an MLP: see `octavo.models.fuse`."""
    tied_logits: bool = True
    """Whether logits use the embedding table."""
    num_experts: int = 1
    """More than one makes the MLPs mixtures of experts."""
    experts_per_token: int = 1
    shared_experts: int = 0
    """Width of the MLP that all tokens share, in experts."""
    shared_gate: bool = False
    """Whether the shared MLP is multiplied by the sigmoid of a learned projection, as in Qwen2-MoE."""
    normalize_router: bool = True
    """Whether the weights of a token's experts sum to one; otherwise they are probabilities."""
    router_scores: str = "softmax"
    """What makes logits of the router probabilities: "softmax", or "sigmoid" of each by itself, as in DeepSeek-V3."""
    router_bias: bool = False
    """Whether experts are chosen by probability plus a bias of each expert, which is not part of their weights."""
    router_groups: int = 1
    """Equal groups of experts. A token goes to experts of its best groups only: by their best expert, or by their best
    two with `router_bias`."""
    router_top_groups: int = 1
    router_scale: float = 1.0
    """Multiplies the weights of experts."""
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
        object.__setattr__(self, "rope_scaling", self.rope)
        check_least(self, 1, *_SIZES)
        check_least(self, 0, *_COUNTS)
        check_choices(self, activation=ACTIVATIONS, remat=POLICIES, dtype=DTYPES, weight_dtype=DTYPES)
        check_choices(self, norm=NORMS, norm_place=NORM_PLACES, router_scores=ROUTER_SCORES)
        self._check_attention()
        self._check_latent()
        self._check_experts()
        self._check_layers()

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.num_experts > 1 and layer >= self.first_dense_layers

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer attends to a window only."""
        return self.sliding_window > 0 and self.sliding_layers[layer % len(self.sliding_layers)]

    def kv_layer(self, layer: int) -> int:
        """The layer to whose keys and values a layer attends; its own but for the last `kv_shared_layers`."""
        first = self.num_layers - self.kv_shared_layers
        kinds = [self.is_sliding(i) for i in range(first)]
        return layer if layer < first else first - 1 - kinds[::-1].index(self.is_sliding(layer))

    def of_layer(self, layer: int) -> "ModelConfig":
        """The same model with the sizes of one of its layers."""
        found = self if self.is_sliding(layer) else self.full
        if self.kv_shared_mlp_dim and self.kv_layer(layer) != layer:
            return found.replace(mlp_dim=self.kv_shared_mlp_dim)
        return found

    @property
    def full(self) -> "ModelConfig":
        """The same model with the sizes of layers without a sliding window."""
        if not self.full_head_dim and not self.full_kv_heads:
            return self
        heads, dim = self.full_kv_heads or self.num_kv_heads, self.full_head_dim or self.head_dim
        return self.replace(num_kv_heads=heads, head_dim=dim, full_kv_heads=0, full_head_dim=0)

    @property
    def rope(self) -> RopeScaling | None:
        """The scaling of rotary frequencies."""
        return None if self.rope_scaling is None else _as_scaling(self.rope_scaling)

    @property
    def rotated(self) -> int:
        """How many of the values of a head are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def variants(self) -> list[str]:
        """Which of `VARIANTS` differ from their defaults, for code that supports only these."""
        default = {field.name: field.default for field in dataclasses.fields(self)}
        return [name for name in VARIANTS if getattr(self, name) != default[name]]

    def _check_attention(self) -> None:
        for name in ("norm_eps", "rope_theta", "router_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is positive, got {getattr(self, name)}")
        if self.num_query_heads % self.num_kv_heads:
            raise ValueError(
                f"num_query_heads={self.num_query_heads} is no multiple of num_kv_heads={self.num_kv_heads}: each key "
                "and value head serves as many query heads as every other"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is even, because rotary embeddings rotate pairs of values; got {self.head_dim}")
        if not 0 <= self.rotated <= self.head_dim or self.rotated % 2:
            raise ValueError(f"rotary_dim is even and at most head_dim={self.head_dim}, got {self.rotary_dim}")
        if self.sliding_window and not self.sliding_layers:
            raise ValueError("sliding_layers is the pattern of layers with a window: it has at least one entry")
        if self.qk_norm_wide and not self.qk_norm:
            raise ValueError("qk_norm_wide is a kind of qk_norm: set that too")

    def _check_latent(self) -> None:
        if not self.kv_lora_rank:
            for name in LATENT:
                if getattr(self, name):
                    raise ValueError(f"{name}={getattr(self, name)} needs kv_lora_rank: it is of latent attention")
            return
        for name in ("qkv_bias", "out_bias", "qk_norm", "attention_sinks", "hadamard_inputs", "hadamard_keys"):
            if getattr(self, name):
                raise ValueError(f"{name} is not supported with latent attention (kv_lora_rank={self.kv_lora_rank})")
        if not self.v_head_dim:
            raise ValueError("kv_lora_rank needs v_head_dim, the width of a value head")
        if self.num_kv_heads != self.num_query_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} differs from num_query_heads={self.num_query_heads}: with latent "
                "attention every query head has keys and values of its own"
            )

    def _check_experts(self) -> None:
        if self.num_experts == 1:
            for name in ("shared_experts", "first_dense_layers", "shared_gate", "router_bias"):
                if getattr(self, name):
                    raise ValueError(f"{name}={getattr(self, name)} needs num_experts above 1: there are no experts")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} is more than there are: num_experts={self.num_experts}"
            )
        if self.num_experts % self.router_groups or self.router_top_groups > self.router_groups:
            raise ValueError(
                f"num_experts={self.num_experts} are {self.router_groups} equal groups (router_groups), of which "
                f"router_top_groups={self.router_top_groups} are used"
            )
        size = self.num_experts // self.router_groups
        if self.experts_per_token > size * self.router_top_groups:
            raise ValueError(
                f"groups of {size} experts, router_top_groups={self.router_top_groups} of them, are too small for "
                f"experts_per_token={self.experts_per_token}"
            )
        if self.num_experts > 1 and not self.moe_mlp_dim:
            raise ValueError(f"num_experts={self.num_experts} needs moe_mlp_dim, the width of one expert")

    def _check_layers(self) -> None:
        for name in PER_LAYER:
            if getattr(self, name) and (self.scan_layers or self.batch_split > 1):
                raise ValueError(f"{name} makes layers differ: set scan_layers=False and batch_split=1")
        if self.kv_shared_layers:
            own = range(self.num_layers - self.kv_shared_layers)
            if not {self.is_sliding(i) for i in range(self.num_layers)} <= {self.is_sliding(i) for i in own}:
                raise ValueError(
                    f"kv_shared_layers={self.kv_shared_layers} leaves no layer with keys and values for some of them, "
                    "which need one with a sliding window if they have one, and one without if not"
                )
            if self.kv_lora_rank or self.remat != "none":
                raise ValueError("kv_shared_layers is not supported with latent attention, and needs remat='none'")
        if self.num_experts > 1 and (self.hadamard_inputs or self.hadamard_mlp):
            raise ValueError(
                "the inputs of experts are not rotated: hadamard_inputs and hadamard_mlp are for dense MLPs"
            )
        widths = (self.emb_dim, self.num_query_heads * self.head_dim, self.mlp_dim)
        for name, sizes in zip(HADAMARD, (widths, (self.mlp_dim,), (self.head_dim,)), strict=True):
            block = getattr(self, name)
            if block & (block - 1) or (block and any(size % block for size in sizes)):
                raise ValueError(f"{name} is a power of two that divides {', '.join(map(str, sizes))}; got {block}")
        scanned = range(self.unscanned_first, self.num_layers - self.unscanned_last) if self.scan_layers else ()
        if len({self.is_sliding(layer) for layer in scanned}) > 1:
            raise ValueError("layers with and without a sliding window cannot be scanned: set scan_layers=False")
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


def _as_scaling(numbers: RopeScaling | tuple[float, ...]) -> RopeScaling:
    if isinstance(numbers, RopeScaling):
        return numbers
    if len(numbers) != 4 or not all(x > 0 for x in numbers):
        raise ValueError(
            "rope_scaling is four positive numbers (factor, low frequency factor, high frequency factor, original "
            f"length), got {numbers}"
        )
    factor, low, high, length = numbers
    return RopeScaling(kind="llama3", factor=factor, low=low, high=high, length=int(length))
