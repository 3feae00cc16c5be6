"""Which keys contradict each other: a table of conditions with their messages; all that hold are reported."""

import dataclasses
import string
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any

from octavo.train.config.checks import AXES, SOURCE
from octavo.train.config.values import Problem, format_value

METHODS = tuple(f"{operand}_quantization_calibration_method" for operand in ("weight", "act", "bwd"))


@dataclasses.dataclass(frozen=True)
class Conflict:
    """A condition under which values contradict each other, and its message, where `{key}` becomes `key=value`."""

    holds: Callable[[Any], Any]
    text: str

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that the message names.

        >>> Conflict(lambda c: c.a > c.b, "{a} is more than {b}").keys
        ('a', 'b')
        """
        return tuple(dict.fromkeys(name for _, name, _, _ in string.Formatter().parse(self.text) if name))

    def message(self, values: Mapping[str, Any]) -> str:
        """The message for some values."""
        return self.text.format(**{key: f"{key}={format_value(values[key]) or '""'}" for key in self.keys})


def find_conflicts(values: Mapping[str, Any], bad: Collection[str] = ()) -> list[Problem]:
    """The conflicts among values, each with the keys that it is about; those about a key in `bad` are left out."""
    config, checked = SimpleNamespace(**values), [c for c in CONFLICTS if not set(bad) & set(c.keys)]
    return [Problem(conflict.keys, conflict.message(values)) for conflict in checked if conflict.holds(config)]


def find_notes(values: Mapping[str, Any]) -> list[str]:
    """Messages about settings that have no effect."""
    config = SimpleNamespace(**values)
    return [note.message(values) for note in _NOTES if note.holds(config)]


def _needs(key: str, needed: str, what: str, *, value: Any = None, none: Any = "") -> Conflict:
    """A key, or one of its values, that needs another key, whose value `none` sets nothing."""

    def holds(c: Any) -> bool:
        given = getattr(c, key)
        return bool(given if value is None else given == value) and getattr(c, needed) == none

    return Conflict(holds, f"{{{key}}} needs {what}, but {{{needed}}}")


def _quantized(c: Any) -> bool:
    return bool(c.quantization or c.quantization_rules_path)


def _num_float_layers(c: Any) -> int:
    return c.quantization_first_layers + c.quantization_last_layers


def _method_conflict(method: str) -> Conflict:
    def holds(c: Any) -> bool:
        common = c.quantization_calibration_method
        return bool(common) and getattr(c, method) not in ("absmax", common)

    text = f"{{quantization_calibration_method}} sets all three methods, but {{{method}}}: set either it or the three"
    return Conflict(holds, text)


_MODEL = (
    Conflict(
        lambda c: c.base_num_query_heads % c.base_num_kv_heads,
        "{base_num_query_heads} is no multiple of {base_num_kv_heads}: each serves equally many",
    ),
    Conflict(lambda c: c.head_dim % 2, "{head_dim}: rotary embeddings rotate pairs of values, so it must be even"),
    _needs("q_lora_rank", "kv_lora_rank", "latent attention", none=0),
    _needs("v_head_dim", "kv_lora_rank", "latent attention", none=0),
    _needs("qk_rope_head_dim", "kv_lora_rank", "latent attention", none=0),
    _needs("kv_lora_rank", "v_head_dim", "the width of a value head", none=0),
    Conflict(
        lambda c: c.kv_lora_rank and (c.qk_rope_head_dim % 2 or not 0 < c.qk_rope_head_dim < c.head_dim),
        "{qk_rope_head_dim} with {kv_lora_rank}: the rotated values of a head are even, and fewer than {head_dim}",
    ),
    Conflict(
        lambda c: c.kv_lora_rank and c.base_num_query_heads != c.base_num_kv_heads,
        "{base_num_kv_heads} with {kv_lora_rank}: there are as many as {base_num_query_heads} with latent attention",
    ),
    Conflict(
        lambda c: len(c.mlp_activations) != 2 or c.mlp_activations[1] != "linear",
        "{mlp_activations}: the MLP is gated: give two, the second linear, as in silu,linear",
    ),
    Conflict(
        lambda c: c.unscanned_first_layers + c.unscanned_last_layers > c.base_num_decoder_layers,
        "{unscanned_first_layers} and {unscanned_last_layers} are more than {base_num_decoder_layers}",
    ),
    Conflict(lambda c: c.num_experts_per_tok > c.num_experts, "{num_experts_per_tok} is more than {num_experts}"),
    _needs("shared_experts", "num_experts", "routed experts", none=1),
    _needs("routed_bias", "num_experts", "routed experts", none=1),
    Conflict(
        lambda c: c.num_experts % c.n_routing_groups or c.topk_routing_group > c.n_routing_groups,
        "{num_experts} are {n_routing_groups} equal groups, of which {topk_routing_group} are used",
    ),
    Conflict(
        lambda c: (
            not c.num_experts % c.n_routing_groups
            and c.num_experts // c.n_routing_groups * c.topk_routing_group < c.num_experts_per_tok <= c.num_experts
        ),
        "{n_routing_groups} and {topk_routing_group} leave a token less than {num_experts_per_tok} of {num_experts}",
    ),
    Conflict(
        lambda c: c.first_num_dense_layers and c.num_experts == 1,
        "{first_num_dense_layers}: all layers are dense with {num_experts}",
    ),
    Conflict(
        lambda c: c.num_experts > 1 and c.first_num_dense_layers >= c.base_num_decoder_layers,
        "{first_num_dense_layers} leaves no layer of {base_num_decoder_layers} to the experts of {num_experts}",
    ),
)

_DATA = (
    _needs("dataset_type", "dataset_path", "a file, a directory or a pattern", value="text"),
    _needs("dataset_type", "dataset_path", "a file of tokens", value="tokens"),
    _needs("dataset_type", "dataset_path", "a file of JSON lines", value="chat"),
    _needs("dataset_type", "hf_path", "the name of a data set or a format", value="hf"),
    _needs("dataset_type", "dataset_name", "the name of a data set", value="tfds"),
    _needs("dataset_type", "grain_train_files", "a pattern of files", value="grain"),
    _needs("tokenizer_type", "tokenizer_path", "a tokenizer.json or a directory with one", value="huggingface"),
    Conflict(
        lambda c: c.tokenizer_type == "byte" and c.dataset_type in ("python", "text") and 0 < c.vocab_size < 256,
        "{vocab_size} is too small for {dataset_type} in bytes ({tokenizer_type}): at least 256, or 0",
    ),
    Conflict(
        lambda c: c.per_device_batch_size >= 1 and c.per_device_batch_size % c.gradient_accumulation_steps,
        "{per_device_batch_size} does not divide into {gradient_accumulation_steps} microbatches",
    ),
    Conflict(
        lambda c: (
            c.use_batch_split_schedule
            and c.per_device_batch_size % (c.gradient_accumulation_steps * c.batch_split_factor)
        ),
        "{per_device_batch_size} with {gradient_accumulation_steps} does not divide by {batch_split_factor}, which "
        "{use_batch_split_schedule} needs",
    ),
    _needs("target_eval_loss", "eval_interval", "evaluations", none=0),
)

_RUN = (
    Conflict(
        lambda c: c.keep_period % c.checkpoint_period,
        "{keep_period} is no multiple of {checkpoint_period}: only checkpoints that are written can be kept",
    ),
    Conflict(
        lambda c: c.lr_schedule_type == "wsd" and c.warmup_steps_fraction + c.wsd_decay_steps_fraction > 1,
        "{lr_schedule_type}: {warmup_steps_fraction} and {wsd_decay_steps_fraction} are more than 1 together",
    ),
    Conflict(
        lambda c: c.opt_state_dtype and c.mu_dtype,
        "{opt_state_dtype} is the format of both moments, but {mu_dtype}: leave one of them empty",
    ),
    Conflict(
        lambda c: c.weight_rounding == "stochastic" and c.weight_dtype != "bfloat16",
        "{weight_rounding} is for weights in bfloat16, but {weight_dtype}",
    ),
    Conflict(
        lambda c: c.opt_state_dtype and c.opt_type == "sgd" and not c.sgd_momentum,
        "{opt_state_dtype} needs a momentum, but {opt_type} has none with {sgd_momentum}",
    ),
    _needs("checkpoint_is_quantized", "load_parameters_path", "a checkpoint to load"),
    Conflict(
        lambda c: c.save_quantized_params_path and not _quantized(c),
        "{save_quantized_params_path} needs formats, but {quantization} and {quantization_rules_path}",
    ),
    Conflict(
        lambda c: c.quantize_kvcache and not c.kv_quant_axis,
        "{quantize_kvcache} needs kv_quant_axis, dkv or heads_and_dkv; {kv_quant_axis}",
    ),
)

_KINDS = {"ici": "within a slice", "dcn": "across slices"}

_MESH = (
    *(
        Conflict(
            lambda c, kind=kind: sum(getattr(c, f"{kind}_{axis}_parallelism") == -1 for axis in AXES) > 1,
            f"of the sizes {where} one may be -1: " + ", ".join(f"{{{kind}_{axis}_parallelism}}" for axis in AXES),
        )
        for kind, where in _KINDS.items()
    ),
    Conflict(
        lambda c: c.shard_mode == "explicit" and (c.ici_context_parallelism, c.dcn_context_parallelism) != (1, 1),
        "{shard_mode} does not shard sequences, but {ici_context_parallelism} and {dcn_context_parallelism}",
    ),
    *(
        Conflict(
            lambda c, key=key: c.shard_mode == "explicit" and getattr(c, key),
            f"{{shard_mode}} reduces gradients in float, but {{{key}}}",
        )
        for key in ("gradient_reduce_dtype", "gradient_scatter_dtype")
    ),
    _needs("gradient_scatter_error_feedback", "gradient_scatter_dtype", "a quantized reduce-scatter"),
    Conflict(
        lambda c: c.gradient_scatter_error_feedback and c.gradient_reduce_dtype,
        "{gradient_scatter_error_feedback} does not combine with {gradient_reduce_dtype}, which has its own",
    ),
    _needs("expert_dispatch_dtype", "num_experts", "experts", none=1),
    Conflict(lambda c: len(set(c.mesh_axes)) < len(c.mesh_axes), "{mesh_axes}: an axis is listed twice"),
    Conflict(
        lambda c: c.num_processes and c.process_id >= c.num_processes,
        "{process_id} is not below {num_processes}: processes are numbered from 0",
    ),
)

_QUANTIZATION = (
    Conflict(
        lambda c: c.quantization and c.quantization_rules_path,
        "{quantization} and {quantization_rules_path} both give rules: leave one of them empty",
    ),
    _needs("quantization", "quant_cfg_path", "a JSON table of bits by layer", value="intmp"),
    Conflict(
        lambda c: c.quant_cfg_path and c.quantization != "intmp",
        "{quant_cfg_path} is for quantization=intmp, but {quantization}",
    ),
    Conflict(
        lambda c: c.constant_bound_config and c.quantization != "aqt_fp8_full",
        "{constant_bound_config} is for quantization=aqt_fp8_full, but {quantization}",
    ),
    *(_method_conflict(method) for method in METHODS),
    Conflict(
        lambda c: 0 <= c.quantization_stop_step <= c.quantization_start_step,
        "{quantization_stop_step} is not after {quantization_start_step}: no step would be quantized",
    ),
    Conflict(
        lambda c: c.quantization_start_step >= c.steps,
        "{quantization_start_step} is not before the end, {steps}: no step would be quantized",
    ),
    Conflict(
        lambda c: _num_float_layers(c) > c.base_num_decoder_layers,
        "{quantization_first_layers} and {quantization_last_layers} are more than {base_num_decoder_layers}",
    ),
    Conflict(
        lambda c: _quantized(c) and _num_float_layers(c) == c.base_num_decoder_layers,
        "{quantization_first_layers} and {quantization_last_layers} leave none of {base_num_decoder_layers} quantized",
    ),
    Conflict(
        lambda c: (c.weight_sparsity_n is None) != (c.weight_sparsity_m is None),
        "{weight_sparsity_n} and {weight_sparsity_m}: set both, as 2 and 4 for 2:4, or none",
    ),
    Conflict(
        lambda c: None not in (c.weight_sparsity_n, c.weight_sparsity_m) and c.weight_sparsity_n >= c.weight_sparsity_m,
        "{weight_sparsity_n} is not below {weight_sparsity_m}: n of each m weights are kept",
    ),
)

_LORA = (
    Conflict(
        lambda c: c.lora_rank and not c.load_parameters_path,
        "{lora_rank} adapts a pretrained model, but {load_parameters_path}",
    ),
    Conflict(
        lambda c: c.lora_rank and _quantized(c),
        "{lora_rank} freezes the weights, whose format is lora_weight_qtype: leave out {quantization} and "
        "{quantization_rules_path}",
    ),
    Conflict(
        lambda c: c.lora_rank and c.weight_sparsity_n is not None,
        "{lora_rank} freezes the weights, which {weight_sparsity_n} would mask while they train",
    ),
    Conflict(
        lambda c: c.lora_rank and c.gradient_reduce_dtype,
        "{lora_rank} has small gradients, which are reduced in float, but {gradient_reduce_dtype}",
    ),
    Conflict(lambda c: c.lora_weight_qtype and not c.lora_rank, "{lora_weight_qtype} is for adapters, but {lora_rank}"),
    Conflict(
        lambda c: c.lora_weight_qtype == SOURCE and c.distillation_weight and not c.distillation_teacher,
        "{lora_weight_qtype} keeps the model as codes, so that it cannot be the teacher of {distillation_weight}: give "
        "distillation_teacher",
    ),
    Conflict(
        lambda c: c.lora_init != "zeros" and c.lora_weight_qtype in ("", SOURCE),
        "{lora_init} makes up for the quantization of weights, but {lora_weight_qtype}",
    ),
)

_DISTILLATION = (
    Conflict(
        lambda c: c.distillation_weight and not c.distillation_teacher and not c.load_parameters_path,
        "{distillation_weight} needs a teacher, but {distillation_teacher} and {load_parameters_path}",
    ),
    Conflict(
        lambda c: c.distillation_teacher and not c.distillation_weight,
        "{distillation_teacher} has no effect with {distillation_weight}: 1 is its KL divergence alone",
    ),
)

CONFLICTS = (*_MODEL, *_DATA, *_RUN, *_MESH, *_QUANTIZATION, *_LORA, *_DISTILLATION)

_NOTES = (
    *(
        Conflict(
            lambda c, key=key, default=default: getattr(c, key) != default and not _quantized(c),
            f"{{{key}}} has no effect: nothing is quantized with {{quantization}}",
        )
        for key, default in (
            ("use_qwix_quantization", False),
            ("use_manual_quantization", False),
            ("quantization_calibration_method", ""),
            ("expert_dispatch_dtype", ""),
            ("residual_dtype", ""),
            ("weight_gradient_accumulator", ""),
            ("gradient_scatter_dtype", ""),
            *((method, "absmax") for method in METHODS),
        )
    ),
    Conflict(
        lambda c: c.weight_sparsity_n is not None and c.weight_sparsity_start_step >= c.steps,
        "{weight_sparsity_n} has no effect: {weight_sparsity_start_step} is not before the end, {steps}",
    ),
    Conflict(
        lambda c: c.sgd_momentum and c.opt_type != "sgd",
        "{sgd_momentum} has no effect: it is for opt_type=sgd, but {opt_type}",
    ),
    Conflict(
        lambda c: c.quantize_kvcache, "{quantize_kvcache} is for `octavo generate` and `serve`: training keeps no cache"
    ),
    Conflict(
        lambda c: c.replicate_quant_scale and not c.save_quantized_params_path,
        "{replicate_quant_scale} has no effect: it is for the parameters of {save_quantized_params_path}",
    ),
    Conflict(
        lambda c: c.use_manual_quantization and _quantized(c) and c.num_experts == 1,
        "{use_manual_quantization} quantizes experts only, and there are none: {num_experts}",
    ),
)
