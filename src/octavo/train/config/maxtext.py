"""Keys of MaxText that Octavo does not have: some are accepted without effect, others have a replacement.

Commands from MaxText's guides run, or raise an error that names the replacement.
"""

import re

_BACKEND = "XLA chooses the code for the backend that JAX finds"
_TILES = "tiles of grouped matmuls are chosen by octavo.ops"
_GROUPED = "grouped matmuls have one implementation for each backend, chosen by octavo.ops"

NO_EFFECT = {
    "hardware": _BACKEND,
    "attention": "there is one attention, in plain JAX",
    "megablox": _GROUPED,
    "use_tokamax_gmm": _GROUPED,
    "use_gmm_v2": _GROUPED,
    "shard_exp_on_fsdp": "logical_axis_rules shards experts, as exp:expert+fsdp,embed_moe:",
    "moe_fsdp_use_two_stage_all_gather": "the compiler schedules all-gathers",
    "enable_goodput_recording": "nothing is recorded elsewhere",
    "monitor_goodput": "nothing is recorded elsewhere",
    "enable_single_controller": "every process runs the same program",
    "override_model_config": "the command line always overrides the model's file",
    "save_config_to_gcs": "config.yml is always in the run directory",
    "compiled_trainstep_file": "the step is compiled when the run starts",
    "pure_nnx": "the model is Flax NNX",
    "enable_nnx": "the model is Flax NNX",
    "pure_nnx_decoder": "the model is Flax NNX",
    "decoder_block": "there is one decoder, whose sizes are keys of their own or in the file of model_name",
    "attention_type": "kv_lora_rank makes the attention latent; it always sees all earlier positions",
    "enable_checkpoint_cloud_logger": "nothing is recorded elsewhere",
    "retry_when_tokens_dropped": "no token is dropped",
    "use_ragged_sort": "tokens are sorted by expert",
    "ragged_buffer_factor": "buffers have room for all tokens",
    "use_ring_of_experts": "tokens are dispatched by an all-to-all",
}
"""Keys that are accepted and change nothing, with the reason."""

_NO_EFFECT_PATTERNS = {r"w[io]_tile_(fwd|dlhs|drhs)_(batch_seq|embed_dim|mlp_dim)": _TILES}


def no_effect(name: str) -> str | None:
    """Why a key of MaxText is accepted and changes nothing; None for other keys.

    >>> no_effect("wi_tile_fwd_embed_dim"), no_effect("steps")
    ('tiles of grouped matmuls are chosen by octavo.ops', None)
    """
    found = (reason for pattern, reason in _NO_EFFECT_PATTERNS.items() if re.fullmatch(pattern, name))
    return NO_EFFECT.get(name) or next(found, None)


_ELSEWHERE = {
    "load_full_state_path": "a run resumes from its own directory; load_parameters_path starts a new one",
    "grad_dtype": "gradients have the dtype of the weights, weight_dtype",
    "matmul_precision": "dtype is that of activations",
    "te_comm_gemm_overlap": "Transformer Engine's recipes are values of quantization, in Octavo's own matmuls",
}
_PATTERNS = {
    r"(ici|dcn)_\w+_parallelism": "the axes of the mesh are data, stage, fsdp, context, tensor and expert",
}
_NAMES = {
    "lr": "learning_rate",
    "jax_coordinator_address": "coordinator_address",
    "jax_num_processes": "num_processes",
    "jax_process_id": "process_id",
    "peak_learning_rate": "learning_rate",
    "batch_size": "per_device_batch_size",
    "global_batch_size": "per_device_batch_size",
    "micro_batch_size": "per_device_batch_size",
    "seq_len": "max_target_length",
    "sequence_length": "max_target_length",
    "max_seq_len": "max_target_length",
    "seed": "init_weights_seed",
    "recipe": "quantization",
    "quant": "quantization",
    "layers": "base_num_decoder_layers",
    "num_layers": "base_num_decoder_layers",
    "num_heads": "base_num_query_heads",
    "optimizer": "opt_type",
    "weight_decay": "adam_weight_decay",
    "clip": "gradient_clipping_threshold",
    "grad_clip": "gradient_clipping_threshold",
    "model": "model_name",
    "dataset": "dataset_type",
    "tokenizer": "tokenizer_type",
    "output_dir": "base_output_directory",
    "train_steps": "steps",
    "num_steps": "steps",
    "max_steps": "steps",
    "warmup_steps": "warmup_steps_fraction",
    "per_device_eval_batch_size": "per_device_batch_size",
}


def replacement(name: str) -> str | None:
    """What to write for a key of another trainer, or None if it is not known.

    >>> replacement("lr"), replacement("matmul_precision")
    ("write 'learning_rate'", 'a key of MaxText that Octavo does not have: dtype is that of activations')
    """
    if name in _NAMES:
        return f"write {_NAMES[name]!r}"
    reasons = [reason for pattern, reason in _PATTERNS.items() if re.fullmatch(pattern, name)]
    reason = _ELSEWHERE.get(name) or next(iter(reasons), None)
    return None if reason is None else f"a key of MaxText that Octavo does not have: {reason}"
