"""The tensors of decoders and encoders in the files of other programs: a table of names for each format."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from octavo._tree import flatten_paths
from octavo.models import ModelConfig
from octavo.models.encoder import EncoderConfig
from octavo.pretrained.model import Leaf, to_float
from octavo.qarray import QArray

EMBEDDING = "token_embedder/embedding"
LOGITS = "decoder/logits_dense/kernel"
_LAYER = re.compile(r"(?:decoder|encoder)/(dense_)?layers_(\d+)/(.*)")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a file has a parameter.

    Args:
      name: The tensor, with {} for the number of the expert where each expert has its own.
      experts: How many tensors are stacked; 0 for a single one.
      part: Start, stop and step along the outputs, where the tensor has several parameters.
      transposed: Whether matrices are stored as [out, in].
      heads: Heads whose rows are in the order of interleaved RoPE; 0 for the order of halves.
      offset: What is added to the stored values.
    """

    name: str
    experts: int = 0
    part: tuple[int, int | None, int] | None = None
    transposed: bool = False
    heads: int = 0
    offset: float = 0.0

    @property
    def names(self) -> list[str]:
        """All of its tensors."""
        return [self.name.format(i) for i in range(self.experts)] if self.experts else [self.name]

    def leaf(
        self,
        info: Callable[[str], tuple[tuple[int, ...], str, str]],
        read: Callable[[str], Any],
        read_codes: Callable[[str], Any] | None = None,
    ) -> Leaf:
        """The parameter: `info` gives the shape, dtype and storage of a tensor, `read` its values.

        `read_codes` gives them as kernels multiply them: see `Leaf.load_codes`.
        """
        found = [info(name) for name in self.names]
        shape, dtype, stored = found[0]
        if any(other != found[0] for other in found):
            raise ValueError(f"the tensors {self.names[0]!r} to {self.names[-1]!r} differ in shape or dtype")
        size = list(shape)
        if self.part is not None:
            axis = self._axis(len(size))
            size[axis] = len(range(*slice(*self.part).indices(size[axis])))
        size = [self.experts, *size] if self.experts else size
        size = [*size[:-2], size[-1], size[-2]] if self.transposed else size
        codes = None if read_codes is None else lambda: self._load(read_codes)
        return Leaf(tuple(size), "float32" if self.offset else dtype, lambda: self._load(read), stored, codes)

    def _axis(self, ndim: int) -> int:
        return ndim - 2 if self.transposed else ndim - 1

    def _load(self, read: Callable[[str], Any]) -> np.ndarray | QArray:
        found = [self._load_one(read(name)) for name in self.names]
        value: Any = np.stack([to_float(one) for one in found]) if self.experts else found[0]
        return value.swapaxes(-1, -2) if self.transposed else value

    def _load_one(self, value: Any) -> Any:
        if self.part is not None:
            value = value[(slice(None),) * self._axis(len(value.shape)) + (slice(*self.part),)]
        if self.heads:
            value = value[half_rotary(value.shape[0], self.heads)]
        return value.astype(np.float32) + np.float32(self.offset) if self.offset else value

    def stored(self, value: np.ndarray) -> list[np.ndarray]:
        """The inverse: the float values of a parameter as those of its tensors."""
        value = value.swapaxes(-1, -2) if self.transposed else value
        if self.heads:
            value = value[interleaved_rotary(value.shape[0], self.heads)]
        if self.offset:
            value = value - np.asarray(self.offset, value.dtype)
        return [np.ascontiguousarray(one) for one in (value if self.experts else [value])]


def assemble(parts: list[tuple[Place, np.ndarray]]) -> np.ndarray:
    """A tensor from its parts, those of `Place.stored`."""
    first, value = parts[0]
    if first.part is None:
        return value
    axis = first._axis(value.ndim)
    values = [x for _, x in sorted(parts, key=lambda part: part[0].part or ())]
    if first.part[2] == 1:
        return np.concatenate(values, axis=axis)
    return np.stack(values, axis=axis + 1).reshape(*value.shape[:axis], -1, *value.shape[axis + 1 :])


def half_rotary(rows: int, heads: int) -> np.ndarray:
    """Row indices from the order of interleaved RoPE, (0, 1), (2, 3), to that of halves, which Hugging Face uses.

    >>> half_rotary(8, 2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def interleaved_rotary(rows: int, heads: int) -> np.ndarray:
    """The inverse of `half_rotary`.

    >>> half_rotary(8, 2)[interleaved_rotary(8, 2)].tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """The names of modules in a file format, by path or by path within a layer; `layer` is the prefix of the latter.

    A name may end with `:PART` where one tensor has several parameters, contain {} for the number of an expert, or end
    with `!` if the tensor has this name itself, is stored as [in, out], and has its bias under the name with `_bias`.

    >>> from octavo.models import abstract_params
    >>> sizes = dict(vocab_size=8, emb_dim=8, num_query_heads=1, num_kv_heads=1, head_dim=8, mlp_dim=8, num_layers=1)
    >>> GGUF.param_names(abstract_params(ModelConfig(**sizes, scan_layers=False)))["decoder/layers_0/mlp/wo/kernel"]
    'blk.0.ffn_down.weight'
    """

    layer: str
    modules: Mapping[str, str]
    transposed: bool = True
    """Whether matrices are stored as [out, in]."""
    norm_offset: float = 0.0
    """What is added to the scales of norms."""

    def places(
        self, params: Any, config: ModelConfig | EncoderConfig, *, interleaved: bool = False
    ) -> dict[str, Place]:
        """The place of each parameter of a tree, by its path."""
        return {path: self._place(path, leaf, config, interleaved) for path, leaf in flatten_paths(params).items()}

    def param_names(self, params: Any, first_dense_layers: int = 0) -> dict[str, str]:
        """The name of each parameter of a tree by its path, where no tensor has several."""
        return {path: self._name(path, first_dense_layers)[0] for path in flatten_paths(params)}

    def _name(self, path: str, first: int = 0) -> tuple[str, str, bool]:
        """The tensor of a parameter, its part, and whether it is the name itself; `first` dense layers are others."""
        match = _LAYER.fullmatch(path)
        inner = match[3] if match else path
        module, _, param = inner.rpartition("/")
        entry = self.modules.get(inner) or self.modules.get(module)
        if not entry:
            raise ValueError(f"{path!r} has no name in such files: use Octavo's own format instead")
        name, _, part = entry.partition(":")
        bare = name.endswith("!")
        if bare:
            name = name[:-1] + ("_bias" if param == "bias" else "")
        else:
            name += ".bias" if param == "bias" else ".weight"
        if match:
            name = self.layer.replace("{}", str(int(match[2]) + (0 if match[1] else first))) + name
        return name, part, bare

    def _place(self, path: str, leaf: Any, config: ModelConfig | EncoderConfig, interleaved: bool) -> Place:
        name, part, bare = self._name(path, config.first_dense_layers if isinstance(config, ModelConfig) else 0)
        is_kernel = path.endswith("/kernel")
        heads = config.num_query_heads if "/query/" in path else config.num_kv_heads if "/key/" in path else 0
        return Place(
            name,
            experts=leaf.shape[0] if "{}" in name else 0,
            part=_part(part, config) if part else None,
            transposed=is_kernel and self.transposed and not bare,
            heads=heads if interleaved else 0,
            offset=self.norm_offset if path.endswith("norm/scale") else 0.0,
        )


def _part(part: str, config: ModelConfig | EncoderConfig) -> tuple[int, int | None, int]:
    queries, keys = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "query": (0, queries, 1),
        "key": (queries, queries + keys, 1),
        "value": (queries + keys, queries + 2 * keys, 1),
        "gate": (0, config.mlp_dim, 1),
        "up": (config.mlp_dim, 2 * config.mlp_dim, 1),
        "even": (0, None, 2),
        "odd": (1, None, 2),
    }[part]


HUGGINGFACE = TensorNames(
    "model.layers.{}.",
    {
        "token_embedder": "model.embed_tokens",
        "decoder/decoder_norm": "model.norm",
        "decoder/logits_dense": "lm_head",
        "pre_self_attention_layer_norm": "input_layernorm",
        "post_self_attention_layer_norm": "post_attention_layernorm",
        "self_attention/query": "self_attn.q_proj",
        "self_attention/key": "self_attn.k_proj",
        "self_attention/value": "self_attn.v_proj",
        "self_attention/out": "self_attn.o_proj",
        "self_attention/query_norm": "self_attn.q_norm",
        "self_attention/key_norm": "self_attn.k_norm",
        "self_attention/wq_a": "self_attn.q_a_proj",
        "self_attention/q_norm": "self_attn.q_a_layernorm",
        "self_attention/wq_b": "self_attn.q_b_proj",
        "self_attention/wkv_a": "self_attn.kv_a_proj_with_mqa",
        "self_attention/kv_norm": "self_attn.kv_a_layernorm",
        "self_attention/wkv_b": "self_attn.kv_b_proj",
        "mlp/wi_0": "mlp.gate_proj",
        "mlp/wi_1": "mlp.up_proj",
        "mlp/wo": "mlp.down_proj",
        "moe_block/router": "mlp.gate",
        "moe_block/router_bias": "mlp.gate.e_score_correction_bias!",
        "moe_block/wi_0": "mlp.experts.{}.gate_proj",
        "moe_block/wi_1": "mlp.experts.{}.up_proj",
        "moe_block/wo": "mlp.experts.{}.down_proj",
        "moe_block/shared_experts/wi_0": "mlp.shared_expert.gate_proj",
        "moe_block/shared_experts/wi_1": "mlp.shared_expert.up_proj",
        "moe_block/shared_experts/wo": "mlp.shared_expert.down_proj",
        "moe_block/shared_gate": "mlp.shared_expert_gate",
        "layer_embedder/embedder": "model.embed_tokens_per_layer",
        "layer_embedder/projection": "model.per_layer_model_projection",
        "layer_embedder/projection_norm": "model.per_layer_projection_norm",
        "layer_input/gate": "per_layer_input_gate",
        "layer_input/projection": "per_layer_projection",
        "layer_input/out_norm": "post_per_layer_input_norm",
        "layer_scale": "layer_scalar!",
    },
)

GGUF = TensorNames(
    "blk.{}.",
    {
        "token_embedder": "token_embd",
        "decoder/decoder_norm": "output_norm",
        "decoder/logits_dense": "output",
        "pre_self_attention_layer_norm": "attn_norm",
        "post_self_attention_layer_norm": "ffn_norm",
        "self_attention/query": "attn_q",
        "self_attention/key": "attn_k",
        "self_attention/value": "attn_v",
        "self_attention/out": "attn_output",
        "self_attention/query_norm": "attn_q_norm",
        "self_attention/key_norm": "attn_k_norm",
        "self_attention/wq_a": "attn_q_a",
        "self_attention/q_norm": "attn_q_a_norm",
        "self_attention/wq_b": "attn_q_b",
        "self_attention/wkv_a": "attn_kv_a_mqa",
        "self_attention/kv_norm": "attn_kv_a_norm",
        "self_attention/wkv_b": "attn_kv_b",
        "mlp/wi_0": "ffn_gate",
        "mlp/wi_1": "ffn_up",
        "mlp/wo": "ffn_down",
        "position_embedder": "position_embd",
        "self_attention_out_norm": "post_attention_norm",
        "mlp_out_norm": "post_ffw_norm",
        "self_attention/sinks": "attn_sinks",
        "moe_block/router": "ffn_gate_inp",
        "moe_block/router_bias": "exp_probs_b.bias!",
        "moe_block/wi_0": "ffn_gate_exps",
        "moe_block/wi_1": "ffn_up_exps",
        "moe_block/wo": "ffn_down_exps",
        "moe_block/shared_experts/wi_0": "ffn_gate_shexp",
        "moe_block/shared_experts/wi_1": "ffn_up_shexp",
        "moe_block/shared_experts/wo": "ffn_down_shexp",
        "moe_block/shared_gate": "ffn_gate_inp_shexp",
        "layer_embedder/embedder": "per_layer_token_embd",
        "layer_embedder/projection": "per_layer_model_proj",
        "layer_embedder/projection_norm": "per_layer_proj_norm",
        "layer_input/gate": "inp_gate",
        "layer_input/projection": "proj",
        "layer_input/out_norm": "post_norm",
        "layer_scale": "layer_output_scale",
    },
)
