"""The configuration: values, errors and their messages, and its files."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import octavo._config
from octavo.models.layers import ACTIVATIONS
from octavo.models.remat import POLICIES
from octavo.rules import recipes
from octavo.train.config import GROUPS, Config, ConfigError, Sources, files, keys, load
from octavo.train.config.conflicts import CONFLICTS as ALL_CONFLICTS
from octavo.train.config.text import RECIPES, WIDTH, base_yaml, format_config, help_text, to_yaml, with_tables
from octavo.train.config.values import parse

ROOT = Path(__file__).parents[2]
FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def problems(**values):
    with pytest.raises(ConfigError) as caught:
        Config(**values)
    return [problem.text for problem in caught.value.problems]


def test_a_config_prints_as_what_it_changes_and_goes_through_json():
    config = Config(steps=5, mlp_activations=("gelu", "linear"), weight_sparsity_n=2, weight_sparsity_m=4)
    assert (
        repr(config) == "Config(steps=5, mlp_activations=('gelu', 'linear'), weight_sparsity_n=2, weight_sparsity_m=4)"
    )
    assert octavo._config.Config.from_json(config.to_json()) == config
    assert Config(**config.to_dict()) == config


def test_values_from_python_are_stored_by_their_types():
    config = Config(learning_rate=1, mlp_activations=["silu", "linear"], steps=7.0)
    assert (config.learning_rate, config.mlp_activations, config.steps) == (1.0, ("silu", "linear"), 7)
    assert type(config.learning_rate) is float
    assert type(config.steps) is int


def test_replace_checks_again():
    with pytest.raises(ConfigError, match="steps=0: must be >= 1"):
        Config().replace(steps=0)


def test_a_config_error_is_a_value_error_with_everything_in_it():
    with pytest.raises(ValueError, match=r"the configuration has 2 problems:\n  - steps=0.*\n  - dtype=int8"):
        Config(steps=0, dtype="int8")


def test_an_unknown_key_in_python():
    assert problems(stepz=3, lr=1e-3) == [
        "unknown key 'stepz': did you mean 'steps'?",
        "unknown key 'lr': write 'learning_rate'",
    ]


def test_the_run_directory():
    assert Config(run_name="a/b", base_output_directory="out").run_directory == Path("out/a/b")
    assert Config().run_directory == Path("runs/unnamed")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("steps", "1e3", 1000),
        ("steps", " 12.0 ", 12),
        ("learning_rate", "3e-4", 3e-4),
        ("learning_rate", "1", 1.0),
        ("packing", "True", True),
        ("packing", "off", False),
        ("weight_sparsity_n", "none", None),
        ("weight_sparsity_n", "null", None),
        ("weight_sparsity_n", "2", 2),
        ("mlp_activations", "[gelu, linear]", ("gelu", "linear")),
        ("mlp_activations", "['gelu','linear']", ("gelu", "linear")),
        ("mlp_activations", ["gelu", "linear"], ("gelu", "linear")),
        ("constant_bound_config", "1,2,3.5,4,5,6e-1", (1.0, 2.0, 3.5, 4.0, 5.0, 0.6)),
        ("constant_bound_config", "", ()),
        ("quantization", "none", ""),
        ("quantization", '""', ""),
        ("remat_policy", "none", "none"),
        ("quantization_exclude", "none", "none"),
        ("run_name", "007", "007"),
        ("run_name", "true", "true"),
    ],
)
def test_texts_are_read_by_the_type_of_their_key(key, text, value):
    found = parse(FIELDS[key], text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("steps", "1.5", "an integer"),
        ("steps", "nan", "an integer"),
        ("steps", "inf", "an integer"),
        ("steps", "", "an integer"),
        ("learning_rate", "fast", "a number"),
        ("learning_rate", "nan", "a number"),
        ("packing", "maybe", "true or false"),
        ("weight_sparsity_n", "two", "an integer or null"),
        ("constant_bound_config", "1,x", "numbers such as 1,2.5"),
        ("steps", ["1", "2"], "an integer, got a list"),
    ],
)
def test_texts_of_another_type_raise(key, text, words):
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        parse(FIELDS[key], text)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"steps": "5"}, "steps=5: an integer"),
        ({"steps": True}, "steps=true: an integer"),
        ({"packing": 1}, "packing=1: true or false"),
        ({"mlp_activations": "silu"}, "mlp_activations=silu: a list such as [a,b] or a,b"),
        ({"quantization": None}, "quantization=null: a text"),
        ({"adam_b1": 1.0}, "adam_b1=1: must be >= 0, < 1"),
        ({"adam_eps": 0.0}, "adam_eps=0: must be > 0"),
        ({"warmup_steps_fraction": 1.5}, "warmup_steps_fraction=1.5: must be 0 to 1"),
        ({"quantization_local_shard_count": -2}, "quantization_local_shard_count=-2: must be >= -1"),
        ({"checkpoint_period": 0}, "checkpoint_period=0: must be >= 1"),
        (
            {"lr_schedule_type": "cosin"},
            "lr_schedule_type=cosin: did you mean 'cosine'? Allowed: cosine | wsd | constant",
        ),
        ({"kv_quant_axis": "x"}, 'kv_quant_axis=x: Allowed: heads_and_dkv | dkv | ""'),
        (
            {"mlp_activations": ("swish", "linear")},
            "mlp_activations=swish,linear: Allowed: silu | gelu | gelu_exact | relu | relu2 | sigmoid | linear | "
            "swiglu_clamped",
        ),
        (
            {"dataset_type": "pyhton"},
            "dataset_type=pyhton: did you mean 'python'? Known: chat, grain, hf, python, synthetic, text, tfds, tokens",
        ),
        (
            {"tokenizer_type": "bytes"},
            "tokenizer_type=bytes: did you mean 'byte'? Known: bpe, byte, huggingface, model",
        ),
        ({"model_name": ""}, "model_name=: must not be empty"),
        ({"learning_rate_schedule_steps": 0}, "learning_rate_schedule_steps=0: -1 for the run's steps, or at least 1"),
        (
            {"constant_bound_config": (1, 2), "quantization": "aqt_fp8_full"},
            "constant_bound_config=1,2: six numbers above 0: the bounds of lhs and rhs in fwd, dlhs and drhs",
        ),
        (
            {"run_name": "../up"},
            "run_name=../up: a name is made of letters, digits and _ - . = + @, and does not begin with a dot",
        ),
        (
            {"quantization_exclude": "("},
            "quantization_exclude=(: no regular expression (missing ), unterminated subpattern at position 0); "
            "write one, or default, or none",
        ),
        (
            {"quantization_exclude": ""},
            "quantization_exclude=: none excludes nothing; an empty expression would match no path",
        ),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(values, text):
    assert problems(**values) == [text]


def test_an_unknown_recipe_or_method_names_the_nearest():
    assert problems(quantization="int9")[0].startswith("quantization=int9: did you mean 'int8'? Known: aqt_fp8, ")
    for key in ("quantization_calibration_method", "weight_quantization_calibration_method"):
        assert "unknown calibration 'absmx': did you mean 'absmax'" in problems(**{key: "absmx"})[0]
    assert "fixed range" in problems(act_quantization_calibration_method="fixed,3,4")[0]


MOE = {"num_experts": 4, "num_experts_per_tok": 2}
CONFLICTS = [
    (
        {"opt_state_dtype": "dynamic8", "mu_dtype": "bfloat16"},
        "opt_state_dtype=dynamic8 is the format of both moments, but mu_dtype=bfloat16: leave one of them empty",
    ),
    (
        {"opt_state_dtype": "dynamic8", "opt_type": "sgd"},
        "opt_state_dtype=dynamic8 needs a momentum, but opt_type=sgd has none with sgd_momentum=0",
    ),
    (
        {"weight_rounding": "stochastic"},
        "weight_rounding=stochastic is for weights in bfloat16, but weight_dtype=float",
    ),
    (
        {"ici_tensor_parallelism": -1},
        "of the sizes within a slice one may be -1: ici_data_parallelism=1, ici_stage_parallelism=1, "
        "ici_fsdp_parallelism=-1, ici_context_parallelism=1, ici_tensor_parallelism=-1, ici_expert_parallelism=1",
    ),
    (
        {"dcn_data_parallelism": -1, "dcn_fsdp_parallelism": -1},
        "of the sizes across slices one may be -1: dcn_data_parallelism=-1, dcn_stage_parallelism=1, ",
    ),
    (
        {"shard_mode": "explicit", "ici_context_parallelism": 2},
        "shard_mode=explicit does not shard sequences, but ici_context_parallelism=2 and dcn_context_",
    ),
    (
        {"shard_mode": "explicit", "gradient_scatter_dtype": "int8"},
        "shard_mode=explicit reduces gradients in float, but gradient_scatter_dtype=int8",
    ),
    (
        {"gradient_scatter_error_feedback": True},
        "gradient_scatter_error_feedback=true needs a quantized reduce-scatter, but gradient_scatter_dtype=",
    ),
    (
        {"gradient_scatter_dtype": "int8", "gradient_scatter_error_feedback": True, "gradient_reduce_dtype": "int8"},
        "gradient_scatter_error_feedback=true does not combine with gradient_reduce_dtype=int8, which has its own",
    ),
    (
        {"shard_mode": "explicit", "gradient_reduce_dtype": "int8"},
        "shard_mode=explicit reduces gradients in float, but gradient_reduce_dtype=int8",
    ),
    (
        {"expert_dispatch_dtype": "int8", "quantization": "int8"},
        "expert_dispatch_dtype=int8 needs experts, but num_experts=1",
    ),
    ({"mesh_axes": ("fsdp", "data", "fsdp")}, "mesh_axes=fsdp,data,fsdp: an axis is listed twice"),
    (
        {"num_processes": 2, "process_id": 2},
        "process_id=2 is not below num_processes=2: processes are numbered from 0",
    ),
    (
        {"base_num_query_heads": 8, "base_num_kv_heads": 3},
        "base_num_query_heads=8 is no multiple of base_num_kv_heads=3",
    ),
    ({"head_dim": 33}, "head_dim=33: rotary embeddings rotate pairs"),
    ({"q_lora_rank": 8}, "q_lora_rank=8 needs latent attention, but kv_lora_rank=0"),
    ({"v_head_dim": 8}, "v_head_dim=8 needs latent attention, but kv_lora_rank=0"),
    ({"qk_rope_head_dim": 8}, "qk_rope_head_dim=8 needs latent attention, but kv_lora_rank=0"),
    ({"kv_lora_rank": 8, "qk_rope_head_dim": 8}, "kv_lora_rank=8 needs the width of a value head, but v_head_dim=0"),
    (
        {"kv_lora_rank": 8, "qk_rope_head_dim": 64, "v_head_dim": 8},
        "qk_rope_head_dim=64 with kv_lora_rank=8: the rotated values of a head are even, and fewer than head_dim=64",
    ),
    (
        {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "base_num_kv_heads": 1},
        "base_num_kv_heads=1 with kv_lora_rank=8: there are as many as base_num_query_heads=5",
    ),
    ({"routed_bias": True}, "routed_bias=true needs routed experts, but num_experts=1"),
    (MOE | {"n_routing_groups": 3}, "num_experts=4 are n_routing_groups=3 equal groups"),
    (
        MOE | {"n_routing_groups": 4},
        "n_routing_groups=4 and topk_routing_group=1 leave a token less than num_experts_per_tok=2 of num_experts=4",
    ),
    ({"mlp_activations": ("silu",)}, "mlp_activations=silu: the MLP is gated"),
    (
        {"unscanned_first_layers": 4, "unscanned_last_layers": 3},
        "unscanned_first_layers=4 and unscanned_last_layers=3 are more than base_num_decoder_layers=3",
    ),
    ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than num_experts=4"),
    ({"shared_experts": 1}, "shared_experts=1 needs routed experts, but num_experts=1"),
    ({"first_num_dense_layers": 1}, "first_num_dense_layers=1: all layers are dense with num_experts=1"),
    (
        MOE | {"first_num_dense_layers": 3},
        "first_num_dense_layers=3 leaves no layer of base_num_decoder_layers=3 to the experts of num_experts=4",
    ),
    ({"dataset_type": "text"}, 'dataset_type=text needs a file, a directory or a pattern, but dataset_path=""'),
    ({"dataset_type": "tokens"}, 'dataset_type=tokens needs a file of tokens, but dataset_path=""'),
    ({"dataset_type": "chat"}, 'dataset_type=chat needs a file of JSON lines, but dataset_path=""'),
    ({"dataset_type": "hf"}, 'dataset_type=hf needs the name of a data set or a format, but hf_path=""'),
    ({"dataset_type": "tfds"}, 'dataset_type=tfds needs the name of a data set, but dataset_name=""'),
    ({"dataset_type": "grain"}, 'dataset_type=grain needs a pattern of files, but grain_train_files=""'),
    (
        {"tokenizer_type": "huggingface"},
        'tokenizer_type=huggingface needs a tokenizer.json or a directory with one, but tokenizer_path=""',
    ),
    ({"vocab_size": 100}, "vocab_size=100 is too small for dataset_type=python in bytes (tokenizer_type=byte)"),
    (
        {"per_device_batch_size": 8, "gradient_accumulation_steps": 3},
        "per_device_batch_size=8 does not divide into gradient_accumulation_steps=3 microbatches",
    ),
    (
        {"use_batch_split_schedule": True, "per_device_batch_size": 3},
        "per_device_batch_size=3 with gradient_accumulation_steps=1 does not divide by batch_split_factor=2, which "
        "use_batch_split_schedule=true needs",
    ),
    ({"target_eval_loss": 2.5}, "target_eval_loss=2.5 needs evaluations, but eval_interval=0"),
    ({"keep_period": 150}, "keep_period=150 is no multiple of checkpoint_period=100"),
    (
        {"lr_schedule_type": "wsd", "warmup_steps_fraction": 0.6, "wsd_decay_steps_fraction": 0.5},
        "lr_schedule_type=wsd: warmup_steps_fraction=0.6 and wsd_decay_steps_fraction=0.5 are more than 1 together",
    ),
    (
        {"checkpoint_is_quantized": True},
        'checkpoint_is_quantized=true needs a checkpoint to load, but load_parameters_path=""',
    ),
    (
        {"save_quantized_params_path": "out"},
        'save_quantized_params_path=out needs formats, but quantization="" and quantization_rules_path=""',
    ),
    (
        {"quantize_kvcache": True, "kv_quant_axis": ""},
        'quantize_kvcache=true needs kv_quant_axis, dkv or heads_and_dkv; kv_quant_axis=""',
    ),
    (
        {"quantization": "int8", "quantization_rules_path": "rules.yml"},
        "quantization=int8 and quantization_rules_path=rules.yml both give rules",
    ),
    ({"quantization": "intmp"}, 'quantization=intmp needs a JSON table of bits by layer, but quant_cfg_path=""'),
    (
        {"quantization": "int8", "quant_cfg_path": "bits.json"},
        "quant_cfg_path=bits.json is for quantization=intmp, but quantization=int8",
    ),
    (
        {"constant_bound_config": (1, 2, 3, 4, 5, 6)},
        'constant_bound_config=1,2,3,4,5,6 is for quantization=aqt_fp8_full, but quantization=""',
    ),
    *(
        (
            {"quantization_calibration_method": "rms,7", f"{side}_quantization_calibration_method": "minmax"},
            "quantization_calibration_method=rms,7 sets all three methods, "
            f"but {side}_quantization_calibration_method=minmax",
        )
        for side in ("weight", "act", "bwd")
    ),
    (
        {"quantization_start_step": 20, "quantization_stop_step": 10},
        "quantization_stop_step=10 is not after quantization_start_step=20",
    ),
    ({"quantization_start_step": 300}, "quantization_start_step=300 is not before the end, steps=200"),
    (
        {"quantization_first_layers": 2, "quantization_last_layers": 2},
        "quantization_first_layers=2 and quantization_last_layers=2 are more than base_num_decoder_layers=3",
    ),
    (
        {"quantization": "int8", "quantization_first_layers": 2, "quantization_last_layers": 1},
        "quantization_first_layers=2 and quantization_last_layers=1 leave none of base_num_decoder_layers=3 quantized",
    ),
    ({"weight_sparsity_n": 2}, "weight_sparsity_n=2 and weight_sparsity_m=null: set both"),
    (
        {"weight_sparsity_n": 4, "weight_sparsity_m": 4},
        "weight_sparsity_n=4 is not below weight_sparsity_m=4",
    ),
    ({"lora_rank": 2}, 'lora_rank=2 adapts a pretrained model, but load_parameters_path=""'),
    (
        {"lora_rank": 2, "load_parameters_path": "m", "quantization": "int8"},
        "lora_rank=2 freezes the weights, whose format is lora_weight_qtype: leave out quantization=int8",
    ),
    (
        {"lora_rank": 2, "load_parameters_path": "m", "weight_sparsity_n": 2, "weight_sparsity_m": 4},
        "lora_rank=2 freezes the weights, which weight_sparsity_n=2 would mask",
    ),
    (
        {"lora_rank": 2, "load_parameters_path": "m", "gradient_reduce_dtype": "int8"},
        "lora_rank=2 has small gradients, which are reduced in float, but gradient_reduce_dtype=int8",
    ),
    ({"lora_weight_qtype": "nf4"}, "lora_weight_qtype=nf4 is for adapters, but lora_rank=0"),
    (
        {"lora_rank": 2, "load_parameters_path": "m", "lora_weight_qtype": "source", "distillation_weight": 0.5},
        "lora_weight_qtype=source keeps the model as codes, so that it cannot be the teacher of distillation_weight",
    ),
    (
        {"lora_rank": 2, "load_parameters_path": "m", "lora_init": "loftq"},
        'lora_init=loftq makes up for the quantization of weights, but lora_weight_qtype=""',
    ),
    ({"distillation_weight": 0.5}, 'distillation_weight=0.5 needs a teacher, but distillation_teacher=""'),
    ({"distillation_teacher": "m"}, "distillation_teacher=m has no effect with distillation_weight=0:"),
]


@pytest.mark.parametrize(("values", "text"), CONFLICTS, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_keys_that_contradict_each_other_are_both_named(values, text):
    (found,) = problems(**values)
    assert found.startswith(text)


def test_every_conflict_is_tested():
    defaults = Config().to_dict()
    cases = [SimpleNamespace(**(defaults | values)) for values, _ in CONFLICTS]
    assert [conflict.text for conflict in ALL_CONFLICTS if not any(conflict.holds(case) for case in cases)] == []


def test_a_bad_value_is_not_blamed_twice():
    assert problems(num_experts="many", num_experts_per_tok=5) == ["num_experts=many: an integer"]


def test_choices_are_those_of_the_model():
    assert set(keys()["remat_policy"].choices) == set(POLICIES)
    assert set(keys()["mlp_activations"].choices) == set(ACTIVATIONS)


def test_yaml_gives_the_same_config_again(tmp_path):
    config = Config(
        run_name="a",
        steps=7,
        learning_rate=1e-5,
        quantization="aqt_fp8_full",
        constant_bound_config=(1, 2, 3, 4, 5, 6.5),
        weight_quantization_calibration_method="fixed,-224,224",
        quantization_exclude=".*: [x] #",
        weight_sparsity_n=2,
        weight_sparsity_m=4,
    )
    file = tmp_path / "config.yml"
    file.write_text(to_yaml(config))
    assert load([str(file)], environ={}).config == config
    plain = yaml.safe_load(to_yaml(config))
    assert {key: tuple(v) if isinstance(v, list) else v for key, v in plain.items()} == config.to_dict()


def test_a_saved_config_is_stronger_than_the_file_of_its_model(tmp_path):
    config = load(["model_name=10m", "base_num_decoder_layers=3", "num_experts=2", "run_name=a"], environ={}).config
    file = tmp_path / "config.yml"
    file.write_text(to_yaml(config))
    assert load([str(file)], environ={}).config == config


def test_the_base_file_has_all_keys_and_the_defaults():
    path = files.CONFIGS / "base.yml"
    assert path.read_text() == base_yaml(), "write it anew: python -m octavo.train.config"
    assert list(yaml.safe_load(path.read_text())) == list(FIELDS)
    assert load(["configs/base.yml", "run_name=a"], environ={}).config == Config(run_name="a")
    assert max(map(len, path.read_text().splitlines())) <= 120


def test_the_page_lists_the_keys_as_they_are():
    text = (ROOT / "docs/config.md").read_text()
    assert text == with_tables(text), "write it anew: python -m octavo.train.config"
    for name in FIELDS:
        assert f"\n| `{name}` |" in text
    assert "config.md" in (ROOT / "mkdocs.yml").read_text()


def test_help_names_every_key_in_a_hundred_columns():
    text = help_text()
    assert max(map(len, text.splitlines())) <= WIDTH == 100
    for name in FIELDS:
        assert re.search(rf"^  {name}  ", text, re.MULTILINE), name
    for title in GROUPS.values():
        assert f"\n\n{title}\n" in text
    assert "  steps                  200   training steps  [>= 1]\n" in text
    assert "usage: octavo train" in text
    assert recipes(aliases=True) == RECIPES
    assert "deepseek-small" in text
    assert {key.group for key in keys().values()} == set(GROUPS)


def test_a_printed_config_marks_what_was_changed_and_where():
    config = Config(steps=5, log_period=2)
    text = format_config(config, Sources({"steps": "mine.yml:3", "packing": "mine.yml:4"}, ["look here"]))
    assert "\n  * steps                  5     mine.yml:3\n" in text
    assert "\n  * log_period             2\n" in text
    assert "\n    packing                       true\n" in text
    assert text.endswith("\n\nnote: look here")
    for name in FIELDS:
        assert f" {name} " in text
    assert format_config(config).count("\n  * ") == 2
