"""The configuration of a run: every key with its type, default, group and allowed values.

Names follow MaxText. Values are checked one by one here and against each other in `conflicts`.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import octavo._config
from octavo import _remote
from octavo.data import datasets, register_tokenizer, tokenizers
from octavo.train.config import checks
from octavo.train.config.checks import AXES
from octavo.train.config.conflicts import find_conflicts
from octavo.train.config.values import ConfigError, Key, Problem, check_type, format_value, key, unknown_key

GROUPS = {
    "run": "Run",
    "checkpoints": "Checkpoints",
    "model": "Model",
    "experts": "Mixture of experts",
    "data": "Data",
    "mesh": "Devices and processes",
    "evaluation": "Evaluation",
    "optimizer": "Optimizer",
    "quantization": "Quantization",
    "schedule": "Where and when to quantize",
    "sparsity": "Weight sparsity",
    "serving": "Quantized parameters and KV cache",
    "lora": "LoRA",
    "distillation": "Distillation",
}
"""The groups of keys, in order, with their titles."""

_groups = [functools.partial(key, group=group) for group in GROUPS]
_run, _checkpoints, _model, _experts, _data, _mesh, _evaluation, _optimizer, *_groups = _groups
_quantization, _schedule, _sparsity, _serving, _lora, _distillation = _groups
_FLOATS = ("float32", "bfloat16", "float16")
_REDUCED = ("int8", "float8_e4m3fn", "float8_e5m2")
_MOMENTS = ("dynamic8", "linear8", "dynamic4", "float8")
_ACTIVATIONS = ("silu", "gelu", "gelu_exact", "relu", "relu2", "sigmoid", "linear", "swiglu_clamped")
_REMAT = (
    *("none", "full", "minimal", "minimal_with_context", "dots"),
    *("save_qkv_proj", "save_out_proj", "save_dot_except_mlp"),
)


def _model_tokenizer(config: Any, texts: Any) -> Any:
    """The tokenizer of the model at `load_parameters_path`."""
    del texts
    from octavo.pretrained import open_model

    found = open_model(config.load_parameters_path).tokenizer if config.load_parameters_path else None
    if found is None:
        raise ValueError("tokenizer_type=model needs a model with a tokenizer: set load_parameters_path to one")
    return found


register_tokenizer("model", _model_tokenizer)


def _size(open_size: str) -> dict[str, Any]:
    return {"check": functools.partial(checks.check_size, open_size=open_size), "hint": "-1 | >= 1"}


def _registered(names: Callable[[], tuple[str, ...]]) -> dict[str, Any]:
    return {"check": lambda name: checks.check_known(name, names()), "hint": " | ".join(names())}


_SIZE = _size("what the other sizes leave")
_METHOD = {"check": checks.check_method, "hint": "absmax | rms,7 | ..."}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Config(octavo._config.Config):
    """All keys of a training run; `octavo train --help` lists them.

    Made by `octavo.train.config.load` from a command line, or in Python. All problems are listed in one
    `ConfigError`.

    >>> Config(steps=50, quantization="int8").replace(steps=100)
    Config(steps=100, quantization='int8')
    """

    run_name: str = _run("", "name of the run and its directory; empty: model, recipe, time", check=checks.check_name)
    base_output_directory: str = _run(
        "runs", "directory of the run directories, also gs://...", check=checks.check_path
    )
    steps: int = _run(200, "training steps", low=1)
    init_weights_seed: int = _run(0, "seed of the initial weights", low=0)
    log_period: int = _run(1, "steps between two lines of the log", low=1)
    metrics_file: str = _run("", "JSON-lines file of metrics; empty: in the run directory", check=checks.check_path)
    enable_tensorboard: bool = _run(True, "write TensorBoard events")
    wandb_project_name: str = _run("", "Weights & Biases project that metrics are sent to; empty: none")
    abort_on_nan_loss: bool = _run(True, "stop when the loss is not finite")

    enable_checkpointing: bool = _checkpoints(True, "save the training state; the same run_name resumes from it")
    async_checkpointing: bool = _checkpoints(True, "write checkpoints in the background")
    checkpoint_period: int = _checkpoints(100, "steps between two checkpoints", low=1)
    max_num_checkpoints_to_keep: int = _checkpoints(3, "older checkpoints are deleted", low=1)
    keep_period: int = _checkpoints(0, "keep every checkpoint at a multiple of this; 0: none", low=0)
    load_parameters_path: str = _checkpoints(
        "", "model or checkpoint whose parameters a new run starts from", check=checks.check_path
    )

    model_name: str = _model("default", "a file configs/models/<model_name>.yml", check=checks.check_not_empty)
    base_emb_dim: int = _model(320, "width of the residual stream", low=1)
    base_num_query_heads: int = _model(5, "attention heads", low=1)
    base_num_kv_heads: int = _model(5, "key and value heads, each shared by a group of query heads", low=1)
    head_dim: int = _model(64, "width of a head; even", low=2)
    kv_lora_rank: int = _model(0, "latent attention: width of the latent of keys and values; 0: none", low=0)
    q_lora_rank: int = _model(0, "latent attention: width of the latent of queries; 0: none", low=0)
    qk_rope_head_dim: int = _model(0, "latent attention: values of head_dim that are rotated; even", low=0)
    v_head_dim: int = _model(0, "latent attention: width of a value head", low=0)
    base_mlp_dim: int = _model(1280, "width inside the MLP", low=1)
    base_num_decoder_layers: int = _model(3, "layers", low=1)
    vocab_size: int = _model(0, "vocabulary size; 0: that of the tokenizer", low=0)
    mlp_activations: tuple[str, ...] = _model(
        ("silu", "linear"), "activations of the MLP's two branches, gate first", choices=_ACTIVATIONS
    )
    normalization_layer_epsilon: float = _model(1e-5, "added to the mean square in RMSNorm", above=0)
    rope_max_timescale: float = _model(10000.0, "longest wavelength of rotary embeddings", above=1)
    logits_via_embedding: bool = _model(True, "tie the logits to the embedding table")
    scan_layers: bool = _model(True, "scan over the layers: one layer is compiled")
    unscanned_first_layers: int = _model(0, "layers before the scan", low=0)
    unscanned_last_layers: int = _model(0, "layers after the scan", low=0)
    use_batch_split_schedule: bool = _model(False, "split the batch of each layer so that collectives overlap compute")
    batch_split_factor: int = _model(2, "splits, with use_batch_split_schedule", low=1)
    remat_policy: str = _model("none", "rematerialization; full: the whole layer", choices=_REMAT)
    dtype: str = _model("float32", "dtype of activations", choices=_FLOATS)
    weight_dtype: str = _model("float32", "dtype in which weights are stored", choices=_FLOATS)
    weight_rounding: str = _model(
        "nearest", "rounding of updated weights; stochastic: of bfloat16", choices=("nearest", "stochastic")
    )
    logits_dot_in_fp32: bool = _model(False, "compute the logits matmul in float32; it always accumulates in it")

    num_experts: int = _experts(1, "routed experts; 1: a dense MLP", low=1)
    num_experts_per_tok: int = _experts(1, "experts per token", low=1)
    shared_experts: int = _experts(0, "shared experts, which see every token", low=0)
    base_moe_mlp_dim: int = _experts(0, "width inside an expert; 0: base_mlp_dim", low=0)
    first_num_dense_layers: int = _experts(0, "first layers with a dense MLP", low=0)
    norm_topk_prob: bool = _experts(True, "the weights of a token's experts sum to one")
    routed_score_func: str = _experts("softmax", "what makes logits probabilities", choices=("softmax", "sigmoid"))
    routed_bias: bool = _experts(False, "choose experts by probability plus a bias, which is not trained")
    n_routing_groups: int = _experts(1, "equal groups of experts", low=1)
    topk_routing_group: int = _experts(1, "groups whose experts a token may have", low=1)
    routed_scaling_factor: float = _experts(1.0, "factor of the weights of experts", above=0)
    load_balance_loss_weight: float = _experts(0.01, "weight of the load-balancing loss", low=0)
    sparse_matmul: bool = _experts(True, "grouped matmuls; false: every expert computes every token")

    dataset_type: str = _data("python", "python: the standard library's source", **_registered(datasets))
    synthetic_kind: str = _data("language", "a language to learn, or one fixed batch", choices=("language", "fixed"))
    dataset_path: str = _data("", "text, tokens, tfds: file, directory or pattern; chat: JSON lines")
    tokenizer_type: str = _data(
        "byte", "bpe: learned from the text; model: of load_parameters_path", **_registered(tokenizers)
    )
    tokenizer_path: str = _data("", "huggingface: a tokenizer.json or its directory")
    max_target_length: int = _data(128, "tokens in a sequence", low=2)
    per_device_batch_size: int | float = _data(16, "sequences per device and step; 0.5: one for two devices", above=0)
    packing: bool = _data(True, "pack several documents into a sequence, with separate attention")
    sft_train_on_completion_only: bool = _data(True, "chat: the loss is that of answers; false: of all tokens")
    data_shuffle_seed: int = _data(0, "seed of the data order", low=0)
    reuse_example_batch: int = _data(0, "repeat the first N batches; 0: all", low=0)
    hf_path: str = _data("", "hf: data set, or format such as json or parquet")
    hf_data_dir: str = _data("", "hf: directory inside the data set")
    hf_train_files: str = _data("", "hf: files to train on, with ; between them")
    dataset_name: str = _data("", "tfds: name and version, such as c4/en:3.0.1")
    train_split: str = _data("train", "hf, tfds: split to train on")
    grain_train_files: str = _data("", "grain: pattern of the files to train on")
    grain_file_type: str = _data(
        "arrayrecord", "grain: type of the files", choices=("arrayrecord", "parquet", "tfrecord")
    )

    num_devices: int = _mesh(0, "devices of the run; 0: all", low=0)
    ici_data_parallelism: int = _mesh(1, "data parallelism: replicas of the model", **_SIZE)
    ici_fsdp_parallelism: int = _mesh(-1, "batch and parameters sharded; -1: what is left", **_SIZE)
    ici_tensor_parallelism: int = _mesh(1, "heads and MLPs sharded", **_SIZE)
    ici_expert_parallelism: int = _mesh(1, "experts and batch sharded", **_SIZE)
    ici_context_parallelism: int = _mesh(1, "sequences sharded", **_SIZE)
    ici_stage_parallelism: int = _mesh(1, "stacked layers sharded", **_SIZE)
    dcn_data_parallelism: int = _mesh(1, "data across slices", **_SIZE)
    dcn_fsdp_parallelism: int = _mesh(1, "fsdp across slices", **_SIZE)
    dcn_tensor_parallelism: int = _mesh(1, "tensor across slices", **_SIZE)
    dcn_expert_parallelism: int = _mesh(1, "expert across slices", **_SIZE)
    dcn_context_parallelism: int = _mesh(1, "context across slices", **_SIZE)
    dcn_stage_parallelism: int = _mesh(1, "stage across slices", **_SIZE)
    mesh_axes: tuple[str, ...] = _mesh(AXES, "mesh axes in order, fastest links last", choices=AXES)
    data_sharding: tuple[str, ...] = _mesh(
        ("data", "fsdp", "expert"), "mesh axes that the batch is sharded along", choices=AXES
    )
    logical_axis_rules: tuple[str, ...] = _mesh(
        (), "such as embed:fsdp+expert; replace the default rules of the same names", check=checks.check_axis_rules,
        hint="name:axis+axis",
    )  # fmt: skip
    sharding_tolerance: float = _mesh(0.02, "share of unsharded parameters that is accepted", low=0)
    quantized_all_gather: bool = _mesh(True, "all-gather quantized weights over fsdp as codes")
    weight_gradient_accumulator: str = _mesh(
        "", "dtype in which quantized weight gradients are reduced", choices=("", "float32", "bfloat16")
    )
    expert_dispatch_dtype: str = _mesh(
        "", "format of the expert-parallel dispatch", choices=("", "int8", "float8_e4m3fn")
    )
    gradient_reduce_dtype: str = _mesh("", "format of the gradient all-reduce over data", choices=("", *_REDUCED))
    gradient_reduce_error_feedback: bool = _mesh(True, "error feedback of that all-reduce")
    gradient_scatter_dtype: str = _mesh(
        "", "format of the weight-gradient reduce-scatter over data_sharding", choices=("", *_REDUCED)
    )
    gradient_scatter_error_feedback: bool = _mesh(False, "error feedback of that reduce-scatter")
    shard_mode: str = _mesh("auto", "who chooses the shardings of activations", choices=("auto", "explicit"))
    skip_jax_distributed_system: bool = _mesh(False, "run as one process, whatever the cluster says")
    coordinator_address: str = _mesh("", "host:port of process 0; empty: found by jax.distributed, or one process")
    num_processes: int = _mesh(0, "processes of the run; 0: from the cluster", low=0)
    process_id: int = _mesh(-1, "index of this process; -1: from the cluster", low=-1)
    jax_distributed_initialization_timeout: int = _mesh(300, "seconds to wait for all processes", low=1)
    jax_distributed_heartbeat_timeout_seconds: int = _mesh(60, "seconds until a silent process counts as dead", low=1)

    eval_interval: int = _evaluation(0, "steps between two evaluations; 0: none", low=0)
    eval_steps: int = _evaluation(10, "batches in an evaluation", low=1)
    target_eval_loss: float = _evaluation(0.0, "stop at this loss; 0: never", low=0)
    eval_dataset_path: str = _evaluation("", "text, tokens, chat: held-out data; empty: a share of dataset_path")
    eval_split: str = _evaluation("validation", "hf, tfds: split to evaluate on")
    hf_eval_files: str = _evaluation("", "hf: files to evaluate on")
    grain_eval_files: str = _evaluation("", "grain: pattern of the files to evaluate on")

    opt_type: str = _optimizer(
        "adamw", "muon: matrices by Muon, the rest by AdamW", choices=("adamw", "sgd", "muon", "lion")
    )
    opt_state_dtype: str = _optimizer("", "format of the moments; empty: float", choices=("", *_MOMENTS))
    learning_rate: float = _optimizer(1e-3, "peak of the schedule", low=0)
    adam_b1: float = _optimizer(0.9, "decay of the first moment", low=0, below=1)
    adam_b2: float = _optimizer(0.95, "decay of the second moment", low=0, below=1)
    adam_eps: float = _optimizer(1e-8, "added to the root of the second moment", above=0)
    adam_weight_decay: float = _optimizer(0.1, "decay of weights, times the learning rate", low=0)
    mu_dtype: str = _optimizer("", "dtype of the first moment; empty: that of the weights", choices=("", *_FLOATS))
    sgd_momentum: float = _optimizer(0.0, "momentum of sgd; 0: none", low=0, below=1)
    gradient_clipping_threshold: float = _optimizer(1.0, "bound on the global gradient norm; 0: none", low=0)
    lr_schedule_type: str = _optimizer("cosine", "wsd: warm up, stay, decay", choices=("cosine", "wsd", "constant"))
    warmup_steps_fraction: float = _optimizer(0.1, "share of the steps for the warm-up", low=0, high=1)
    learning_rate_final_fraction: float = _optimizer(0.1, "final learning rate as a share of the peak", low=0, high=1)
    wsd_decay_steps_fraction: float = _optimizer(0.1, "wsd: share of the steps for the decay", low=0, high=1)
    learning_rate_schedule_steps: int = _optimizer(-1, "length of the schedule; -1: steps", **_size("the run's steps"))
    gradient_accumulation_steps: int = _optimizer(1, "microbatches per step", low=1)
    z_loss_multiplier: float = _optimizer(0.0, "weight of the squared log-partition", low=0)

    quantization: str = _quantization("", "name of a recipe; empty: float", check=checks.check_recipe)
    use_qwix_quantization: bool = _quantization(False, "numerics of Qwix; false: of AQT")
    use_manual_quantization: bool = _quantization(False, "only the experts' grouped matmuls")
    calibration: str = _quantization("", "auto: propose static bounds from the first batch", choices=("", "auto"))
    quantization_calibration_method: str = _quantization(
        "", "sets the next three", check=lambda method: method and checks.check_method(method)
    )
    weight_quantization_calibration_method: str = _quantization("absmax", "range of weights", **_METHOD)
    act_quantization_calibration_method: str = _quantization("absmax", "range of activations", **_METHOD)
    bwd_quantization_calibration_method: str = _quantization("absmax", "range of gradients", **_METHOD)
    quantization_local_shard_count: int = _quantization(
        -1, "tiles of the weight gradient's contraction; -1: devices; 0: float", low=-1
    )
    constant_bound_config: tuple[float, ...] = _quantization(
        (), "six bounds for aqt_fp8_full", check=checks.check_bounds, hint="six numbers > 0"
    )
    replicate_quant_scale: bool = _quantization(False, "replicate scales on every device")
    quant_cfg_path: str = _quantization("", "table of bits by layer, for intmp")
    quantization_rules_path: str = _quantization("", "file of rules, JSON or YAML")
    residual_dtype: str = _quantization(
        "", "format of the residuals of norms, activations and softmaxes", choices=("", "int8", "float8_e4m3fn")
    )

    quantization_exclude: str = _schedule(
        "default", "paths kept in float; default: router, embedding, logits", check=checks.check_pattern,
        hint="regex | none",
    )  # fmt: skip
    quantization_start_step: int = _schedule(0, "first quantized step", low=0)
    quantization_stop_step: int = _schedule(-1, "float from this step on; -1: never", low=-1)
    quantization_first_layers: int = _schedule(0, "first layers kept in float", low=0)
    quantization_last_layers: int = _schedule(0, "last layers kept in float", low=0)
    quantization_metrics_interval: int = _schedule(100, "steps between telemetry measurements; 0: none", low=0)

    weight_sparsity_n: int | None = _sparsity(None, "weights kept of each weight_sparsity_m", low=1)
    weight_sparsity_m: int | None = _sparsity(None, "group size, as 4 in 2:4", low=2)
    weight_sparsity_start_step: int = _sparsity(50, "step of the first mask", low=0)
    weight_sparsity_update_step: int = _sparsity(10, "steps between two masks", low=1)

    checkpoint_is_quantized: bool = _serving(False, "load_parameters_path holds quantized parameters")
    save_quantized_params_path: str = _serving(
        "", "directory for the quantized parameters at the end", check=checks.check_path
    )
    quantize_kvcache: bool = _serving(False, "quantize the KV cache when generating")
    kv_quant_axis: str = _serving(
        "heads_and_dkv", "one scale per token, or per token and head", choices=("heads_and_dkv", "dkv", "")
    )
    kv_quant_dtype: str = _serving("int8", "format of the KV cache", choices=("int8", "int4", "fp8"))

    lora_rank: int = _lora(0, "rank of adapters of the weights of load_parameters_path; 0: all weights train", low=0)
    lora_alpha: float = _lora(16.0, "adapters are multiplied by lora_alpha / lora_rank", above=0)
    lora_dropout: float = _lora(0.0, "share of the inputs of adapters that is dropped", low=0, below=1)
    lora_module_path: str = _lora(
        ".*/(self_attention|mlp|moe_block)/.*", "paths of the weights with an adapter", check=checks.check_pattern,
        hint="regex",
    )  # fmt: skip
    lora_weight_qtype: str = _lora(
        "", "format of those weights, as nf4 for QLoRA; source: that of the file; empty: weight_dtype",
        check=checks.check_frozen_format, hint="a number format",
    )  # fmt: skip
    lora_init: str = _lora(
        "zeros",
        "adapters begin without effect (zeros; gptq: weights are calibrated), or as what quantization loses of the "
        "weights (loftq) or outputs (eora)",
        choices=("zeros", "gptq", "loftq", "eora"),
    )  # fmt: skip
    lora_calibration_tokens: int = _lora(
        8192, "tokens of the training data that lora_init=gptq or eora calibrates on", low=1
    )
    lora_tile_size: int = _lora(64, "weights that share a scale; 0: one scale per channel", low=0)

    distillation_weight: float = _distillation(
        0.0, "share of the KL divergence from a teacher in the loss; 0: no teacher", low=0, high=1
    )
    distillation_teacher: str = _distillation("", "the teacher; empty: the float model of load_parameters_path")
    distillation_temperature: float = _distillation(1.0, "divides both models' logits", above=0)

    if not TYPE_CHECKING:

        def __init__(self, **values: Any):
            """Values by key; the keys' own checks say more than a signature would."""
            for name, value in _validate(values).items():
                object.__setattr__(self, name, value)

    @property
    def run_directory(self) -> Path:
        """The directory of the run's checkpoints, metrics and report; of a run in an object store, its local copy.

        >>> Config(run_name="first").run_directory.as_posix()
        'runs/first'
        """
        return _remote.local(self.run_path)

    @property
    def run_path(self) -> str:
        """The path of the run, or its URL."""
        return f"{self.base_output_directory.rstrip('/')}/{self.run_name or 'unnamed'}"

    def to_dict(self) -> dict[str, Any]:
        """Key by key, tuples as tuples: `Config(**config.to_dict()) == config`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def keys() -> dict[str, Key]:
    """The description of each key, by name and in order.

    >>> keys()["steps"].allowed
    '>= 1'
    """
    return {field.name: field.metadata["key"] for field in dataclasses.fields(Config)}


def _validate(given: dict[str, Any]) -> dict[str, Any]:
    """The values as they are stored; raises all problems. Keys with an invalid value are not checked for conflicts."""
    fields = {field.name: field for field in dataclasses.fields(Config)}
    problems = [Problem((), unknown_key(name, fields)) for name in given if name not in fields]
    values = {name: field.default for name, field in fields.items()}
    for name in (name for name in fields if name in given):
        try:
            value = check_type(fields[name], given[name])
            fields[name].metadata["key"].check_value(value)
            values[name] = value
        except ValueError as error:
            problems.append(Problem((name,), f"{name}={format_value(given[name])}: {error}"))
    problems += find_conflicts(values, {name for problem in problems for name in problem.keys})
    if problems:
        raise ConfigError(problems)
    return values
