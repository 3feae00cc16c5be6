"""Starting from a pretrained model: its architecture and tokenizer, and its parameters in the layout of a run."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo import _remote
from octavo._tree import flatten_paths, unflatten_paths
from octavo.data import Dataset, Tokenizer
from octavo.models import ModelConfig, abstract_params
from octavo.models.config import VARIANTS
from octavo.models.decoder import layer_groups
from octavo.pretrained import PretrainedModel, open_model
from octavo.pretrained.model import to_float
from octavo.qarray import QArray, stack
from octavo.train.config import Config, ConfigError

ARCHITECTURE = {
    "base_emb_dim": "emb_dim",
    "base_num_decoder_layers": "num_layers",
    "base_num_query_heads": "num_query_heads",
    "base_num_kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "v_head_dim": "v_head_dim",
    "base_mlp_dim": "mlp_dim",
    "vocab_size": "vocab_size",
    "normalization_layer_epsilon": "norm_eps",
    "rope_max_timescale": "rope_theta",
    "logits_via_embedding": "tied_logits",
    "num_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "shared_experts": "shared_experts",
    "first_num_dense_layers": "first_dense_layers",
    "norm_topk_prob": "normalize_router",
    "routed_score_func": "router_scores",
    "routed_bias": "router_bias",
    "n_routing_groups": "router_groups",
    "topk_routing_group": "router_top_groups",
    "routed_scaling_factor": "router_scale",
}
"""The keys of an architecture, with the fields of `ModelConfig` that they set."""
UNCONFIGURED = ("rope_scaling", "sliding_layers", "sliding_rope_theta", "qkv_bias", "qk_norm")
UNCONFIGURED += tuple(name for name in VARIANTS if name not in ARCHITECTURE.values())
"""Fields of an architecture that only a pretrained model sets."""

_PROBE = "The 3 naïve cafés; def f(x):\n\treturn x**2 # 日本"


def open_source(config: Config) -> PretrainedModel | None:
    """The model at `load_parameters_path`; None if there is none, or if it is a checkpoint without a description."""
    path = config.load_parameters_path
    if not path:
        return None
    from octavo.checkpoint import CheckpointError, load_abstract

    try:
        return open_model(path)
    except (ValueError, OSError) as error:
        local = _remote.local(path)
        for place in (local / "checkpoints", local):
            try:
                if "model" not in load_abstract(place, subtree="params").extra:
                    return None
            except (CheckpointError, OSError):
                continue
        raise ConfigError([f"load_parameters_path={path}: {error}"]) from error


def with_architecture(config: Config, source: PretrainedModel | None) -> Config:
    """A configuration with the architecture and the tokenizer of a model.

    Raises:
      ConfigError: Keys of the architecture have values that are neither their defaults nor those of the model.

    >>> with_architecture(Config(base_emb_dim=64), None).base_emb_dim
    64
    """
    if source is None:
        return config
    given: dict[str, Any] = {key: getattr(source.config, field) for key, field in ARCHITECTURE.items()}
    given["qk_rope_head_dim"] = source.config.rotated if source.config.kv_lora_rank else 0
    given["mlp_activations"] = (source.config.activation, "linear")
    given["base_moe_mlp_dim"] = source.config.moe_mlp_dim if source.config.num_experts > 1 else config.base_moe_mlp_dim
    default = Config().to_dict()
    problems = [
        f"{key}={getattr(config, key)}, but the model at load_parameters_path has {value}: leave {key} out"
        for key, value in given.items()
        if getattr(config, key) not in (value, default[key])
    ]
    if problems:
        raise ConfigError(problems)
    tokenizer = source.tokenizer
    if config.tokenizer_type == "byte" and tokenizer is not None and tokenizer.name != "byte":
        given["tokenizer_type"] = "model"
    return config.replace(**given)


def open_teacher(path: str, model: ModelConfig, tokenizer: Tokenizer | None = None) -> PretrainedModel:
    """The teacher of a distillation, which has the vocabulary of the model.

    Args:
      path: The teacher.
      model: The model.
      tokenizer: The tokenizer of the model, if it is known.

    Raises:
      ConfigError: It cannot be opened, or has another vocabulary.
    """
    try:
        teacher = open_model(path)
    except (ValueError, OSError) as error:
        raise ConfigError([f"distillation_teacher={path}: {error}"]) from error
    if teacher.config.vocab_size != model.vocab_size:
        raise ConfigError([
            f"distillation_teacher={path} has {teacher.config.vocab_size} ids and the model {model.vocab_size}: "
            "a teacher needs the same vocabulary"
        ])  # fmt: skip
    own = teacher.tokenizer
    if (
        own is not None
        and tokenizer is not None
        and own.digest != tokenizer.digest
        and _probe(own) != _probe(tokenizer)
    ):
        raise ConfigError([
            f"distillation_teacher={path} tokenizes {_PROBE[:12]!r} as {own.tokenize(_PROBE[:12]).tolist()}, and the "
            f"model as {tokenizer.tokenize(_PROBE[:12]).tolist()}: a teacher needs the same vocabulary"
        ])  # fmt: skip
    return teacher


def check_tokenizer(source: PretrainedModel | None, data: Dataset) -> None:
    """Raise unless the data has the tokens that a model knows.

    Raises:
      ConfigError: The text of the data is tokenized in another way than the model's.
    """
    if source is None or data.tokenizer is None:
        return
    own, other = source.tokenizer, data.tokenizer
    if own is None:
        if other.name == "byte" and source.config.vocab_size != other.vocab_size:
            raise ConfigError([
                f"{source.name} comes without a tokenizer, and its {source.config.vocab_size} ids are not bytes: set "
                "tokenizer_type=huggingface with tokenizer_path, or give dataset_type=tokens"
            ])  # fmt: skip
        return
    if own.digest != other.digest and _probe(own) != _probe(other):
        raise ConfigError([
            f"tokenizer_type={other.name} is not the tokenizer of {source.name}: {_PROBE[:12]!r} is "
            f"{other.tokenize(_PROBE[:12]).tolist()} instead of {own.tokenize(_PROBE[:12]).tolist()}; leave "
            "tokenizer_type and tokenizer_path out, or set tokenizer_type=model"
        ])  # fmt: skip


def _probe(tokenizer: Tokenizer) -> tuple[Any, ...]:
    return (*tokenizer.tokenize(_PROBE).tolist(), tokenizer.eos_ids and tokenizer.eos_id)


def load_codes(source: PretrainedModel, model: ModelConfig) -> dict[str, Any]:
    """The parameters of a model in the layout of a run on one device, as the source holds them: floats and codes."""
    dtype = jnp.dtype(model.weight_dtype)

    def load(path: str) -> Any:
        value = source.leaves[path].load()
        if not isinstance(value, QArray):
            return jnp.asarray(to_float(value, str(dtype)), dtype)
        value = jax.tree.map(jnp.asarray, value).astype(dtype)
        return value.pack() if value.packed is None and value.qtype.bits < 8 else value

    def join(layers: Sequence[Any], path: str) -> Any:
        if not any(isinstance(layer, QArray) for layer in layers):
            return jnp.stack(layers)
        if len({jax.tree.structure(layer) for layer in layers}) > 1:
            raise ConfigError([
                f"lora_weight_qtype=source keeps the codes of {source.name}, but layers have {path!r} in several "
                "formats: set scan_layers=false, or name a format"
            ])  # fmt: skip
        return stack(layers)

    found = dict(_in_layout(source, model, load, join))
    if not any(isinstance(x, QArray) for path, x in found.items() if path.startswith("decoder/")):
        stored = sorted({leaf.stored for path, leaf in source.leaves.items() if path.endswith("/kernel")})
        raise ConfigError([
            f"lora_weight_qtype=source keeps codes, but the layers of {source.name} ({', '.join(stored)}) are read as "
            "floats: name a format, such as nf4"
        ])  # fmt: skip
    return unflatten_paths(found)


def _in_layout(
    source: PretrainedModel,
    model: ModelConfig,
    load: Callable[[str], Any],
    join: Callable[[Sequence[Any], str], Any],
) -> Iterator[tuple[str, Any]]:
    """The parameters of `model` with their paths; `load` gives one of the source, `join` stacks those of its layers."""
    names = {i: group.name for group in layer_groups(source.config) for i in group.layers}
    groups = {group.name: group for group in layer_groups(model)}

    for path in flatten_paths(abstract_params(model)):
        top, _, rest = path.partition("/")
        name, _, rest = rest.partition("/")
        if top != "decoder" or name not in groups:
            yield path, load(path)
            continue
        layers = [load(f"{top}/{names[i]}/{rest}") for i in groups[name].layers]
        yield path, join(layers, path) if groups[name].is_stack else layers[0]


def load_params(source: PretrainedModel, model: ModelConfig, shardings: Any = None) -> dict[str, Any]:
    """The parameters of a model in the layout of a run, in float: layers are stacked as `model` scans them.

    Args:
      source: The pretrained model. QArrays are dequantized.
      model: The model of the run: the same architecture, with its own scan and dtypes.
      shardings: A tree of shardings like the parameters; None on one device. Each parameter is loaded by itself.
    """
    dtype = jnp.dtype(model.weight_dtype)
    placed = {} if shardings is None else flatten_paths(shardings)

    def load(path: str) -> np.ndarray:
        return np.asarray(to_float(source.leaves[path].load(), str(dtype)), dtype)

    def place(path: str, host: np.ndarray) -> Any:
        if path not in placed:
            return jnp.asarray(host)
        return jax.make_array_from_callback(host.shape, placed[path], lambda index: host[index])

    values = _in_layout(source, model, load, lambda layers, path: np.stack(layers))
    return unflatten_paths({path: place(path, host) for path, host in values})
