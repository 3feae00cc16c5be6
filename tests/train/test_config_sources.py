"""Sources of values: files, models, the environment and the command line, and which one overrides which."""

import json
import math
import time

import jax
import pytest

from octavo.models import abstract_params
from octavo.train.__main__ import _data
from octavo.train.config import Config, ConfigError, files, keys, load, maxtext
from octavo.train.program import model_config


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """In a directory without configs."""
    monkeypatch.chdir(tmp_path)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def config_errors(*argv, environ=()):
    with pytest.raises(ConfigError) as caught:
        load(argv, environ=dict(environ))
    return [problem.text for problem in caught.value.problems]


def test_from_weak_to_strong(tmp_path):
    write(tmp_path / "parent.yml", "steps: 1\nlog_period: 1\neval_steps: 1\nbase_emb_dim: 32\n")
    write(tmp_path / "child.yml", "base_config: parent.yml\nlog_period: 2\neval_steps: 2\n")
    config, sources = load(
        ["child.yml", "model_name=1m", "base_mlp_dim=64"], environ={"OCTAVO_EVAL_STEPS": "3", "M_HEAD_DIM": "16"}
    )
    assert (config.steps, config.log_period, config.eval_steps) == (1, 2, 3)
    assert (config.base_emb_dim, config.head_dim, config.base_mlp_dim) == (128, 16, 64)
    assert {key: sources[key] for key in ("steps", "log_period", "eval_steps", "head_dim", "base_mlp_dim")} == {
        "steps": "parent.yml:1",
        "log_period": "child.yml:2",
        "eval_steps": "OCTAVO_EVAL_STEPS",
        "head_dim": "M_HEAD_DIM",
        "base_mlp_dim": "command line",
    }
    assert sources["base_emb_dim"] == "configs/models/1m.yml:2"
    assert sources.notes == ("base_emb_dim=128 of configs/models/1m.yml:2 overrides 32 of parent.yml:4",)
    assert "packing" not in sources


def test_the_file_that_names_a_model_is_stronger_than_the_model(tmp_path):
    write(tmp_path / "mine.yml", "model_name: 1m\nbase_num_decoder_layers: 3\n")
    config, sources = load(["mine.yml"], environ={})
    assert (config.base_emb_dim, config.base_num_decoder_layers) == (128, 3)
    assert sources.notes == ("base_num_decoder_layers=3 of mine.yml:2 overrides 4 of configs/models/1m.yml:7",)


def test_the_model_of_the_command_line_replaces_that_of_a_file():
    config, _ = load(["configs/deepseek_fp8.yml", "model_name=10m"], environ={})
    assert (config.model_name, config.num_experts, config.base_emb_dim) == ("10m", 1, 384)
    assert config.quantization == "fp8_full"


def test_a_model_of_ones_own(tmp_path):
    write(tmp_path / "here/models/tiny.yml", "base_emb_dim: 16\n")
    write(tmp_path / "here/mine.yml", "model_name: tiny\n")
    assert load(["here/mine.yml"], environ={}).config.base_emb_dim == 16
    (problem,) = config_errors("model_name=tiny")
    assert problem.startswith("model_name=tiny: ")
    assert "There is no models/tiny.yml; known: 10m, 1m, 50m, deepseek-big, " in problem
    assert problem.endswith("(command line)")
    assert "did you mean 'deepseek-small'?" in config_errors("model_name=deepseek-smal")[0]


@pytest.mark.parametrize("path", ["configs/base.yml", "base.yml", "src/maxtext/configs/base.yml"])
def test_packaged_files_are_found_from_anywhere(path):
    assert load([path, "run_name=a"], environ={}).config == Config(run_name="a")


def test_a_file_in_the_working_directory_comes_first(tmp_path):
    write(tmp_path / "configs/base.yml", "steps: 3\n")
    config, sources = load(["configs/base.yml"], environ={})
    assert (config.steps, sources["steps"]) == (3, "configs/base.yml:1")


def test_a_missing_file_names_those_there_are():
    (problem,) = config_errors("configs/deepsek_fp8.yml")
    assert problem.startswith("there is no file configs/deepsek_fp8.yml: did you mean 'configs/deepseek_fp8.yml'")
    assert config_errors("elsewhere/base.yml")[0].startswith("there is no file elsewhere/base.yml: ")


def test_a_cycle_of_files_is_an_error(tmp_path):
    write(tmp_path / "a.yml", "base_config: b.yml\n")
    write(tmp_path / "b.yml", "base_config: a.yml\n")
    assert config_errors("a.yml") == ["base_config: files inherit from each other in a circle, a.yml -> b.yml -> a.yml"]


def test_a_file_with_faults_says_on_which_line(tmp_path):
    write(tmp_path / "a.yml", "steps: 3\n\nsteps: 4\nlog_period: {a: 1}\n")
    assert config_errors("a.yml") == [
        "a.yml:3: steps is set already, on line 1",
        "a.yml:4: log_period is nested; a value is a number, a text or a list of them",
    ]
    write(tmp_path / "a.yml", "- steps\n")
    assert config_errors("a.yml") == ["a.yml is no mapping of keys to values"]
    write(tmp_path / "a.yml", "steps: [\n")
    assert config_errors("a.yml")[0].startswith("a.yml is no YAML: ")
    write(tmp_path / "a.yml", "base_config: [a.yml, b.yml]\n")
    assert config_errors("a.yml") == ["a.yml:1: base_config is one file, got a list"]
    write(tmp_path / "a.yml", "steps: 0\nstepz: 1\nlearning_rate: fast\n")
    assert config_errors("a.yml") == [
        "unknown key 'stepz' (a.yml:2): did you mean 'steps'?",
        "learning_rate=fast: a number (a.yml:3)",
        "steps=0: must be >= 1 (a.yml:1)",
    ]


def test_an_empty_file_is_the_defaults(tmp_path):
    write(tmp_path / "a.yml", "# nothing\n")
    assert load(["a.yml", "run_name=a"], environ={}).config == Config(run_name="a")


def test_values_in_a_file_are_read_as_on_the_command_line(tmp_path):
    write(
        tmp_path / "a.yml",
        "learning_rate: 3e-4\nmlp_activations: [gelu, linear]\nweight_sparsity_n: null\nquantization: ''\n"
        "packing: False\nrun_name: 007\nremat_policy: none\n",
    )
    file = load(["a.yml"], environ={}).config
    argv = [
        "learning_rate=3e-4",
        "mlp_activations=[gelu,linear]",
        "weight_sparsity_n=null",
        "quantization=",
        "packing=False",
    ]
    assert file == load([*argv, "run_name=007", "remat_policy=none"], environ={}).config
    assert (file.learning_rate, file.packing, file.run_name) == (3e-4, False, "007")


def test_a_key_set_twice_outside_files_is_an_error():
    assert config_errors("steps=5", environ={"OCTAVO_STEPS": "5"}) == [
        "steps is set by the command line and by OCTAVO_STEPS: unset one of them"
    ]
    assert config_errors(environ={"OCTAVO_STEPS": "5", "M_STEPS": "6"}) == [
        "OCTAVO_STEPS and M_STEPS are both set: unset one"
    ]


def test_misspelt_variables_are_errors_and_others_are_ignored():
    assert config_errors(environ={"OCTAVO_LEARNING_RAT": "5"}) == [
        "unknown key 'learning_rat' (OCTAVO_LEARNING_RAT): did you mean 'learning_rate'?"
    ]
    assert load(["run_name=a"], environ={"OCTAVO_HOME": "x", "M_PATH": "y", "HOME": "z"}).config == Config(run_name="a")


def test_the_environment_is_that_of_the_process(monkeypatch):
    monkeypatch.setenv("OCTAVO_STEPS", "5")
    assert load([]).config.steps == 5


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("foo", "foo: neither a .yml file nor key=value"),
        ("--steps=5", "--steps=5: write steps=5, without dashes"),
        (" --steps=5", "unknown key ' --steps' (command line): did you mean 'steps'?"),
        ("base_config=base.yml", "base_config is for files; give the file itself as the first argument"),
        ("lr=3", "unknown key 'lr' (command line): write 'learning_rate'"),
        ("learning_rte=3", "unknown key 'learning_rte' (command line): did you mean 'learning_rate'?"),
        ("xyzzy=3", "unknown key 'xyzzy' (command line): `octavo train --help` lists the keys"),
        (
            "ici_sequence_parallelism=4",
            "unknown key 'ici_sequence_parallelism' (command line): a key of MaxText that Octavo does not have: "
            "the axes of the mesh are data, stage, fsdp, context, tensor and expert",
        ),
        ("steps=many", "steps=many: an integer (command line)"),
    ],
)
def test_words_that_are_not_understood(word, text):
    assert config_errors(word) == [text]


def test_a_flag_with_a_value_says_how_keys_are_written():
    assert config_errors("--quantization", "int8") == ["--quantization int8: write quantization=int8, without dashes"]
    assert config_errors("--steps") == ["--steps VALUE: write steps=VALUE, without dashes"]


def test_two_files_are_one_too_many():
    assert config_errors("base.yml", "deepseek_fp8.yml") == [
        "base.yml and deepseek_fp8.yml: one file is read; let it inherit from others by base_config"
    ]


def test_all_problems_come_together_with_their_places(tmp_path):
    write(tmp_path / "a.yml", "weight_sparsity_n: 2\n")
    found = config_errors(
        "a.yml", "stepz=3", "head_dim=x", "num_experts_per_tok=4", environ={"OCTAVO_NUM_EXPERTS": "2"}
    )
    assert found == [
        "unknown key 'stepz' (command line): did you mean 'steps'?",
        "head_dim=x: an integer (command line)",
        "num_experts_per_tok=4 is more than num_experts=2 (command line, OCTAVO_NUM_EXPERTS)",
        "weight_sparsity_n=2 and weight_sparsity_m=null: set both, as 2 and 4 for 2:4, or none (a.yml:1)",
    ]


def test_a_method_for_all_beside_an_explicit_absmax():
    both = ("quantization=fp8_full", "quantization_calibration_method=rms,7")
    (problem,) = config_errors(*both, "bwd_quantization_calibration_method=absmax")
    assert problem.startswith("quantization_calibration_method=rms,7 and bwd_quantization_calibration_method=absmax: ")
    assert load(["configs/base.yml", *both], environ={}).config.quantization_calibration_method == "rms,7"


MOE = ("num_experts=4", "num_experts_per_tok=2")


def test_the_sparsity_test_of_maxtext_is_accepted():
    """tests/integration/sparsity_test.py in both of its forms, and the tiles of the DeepSeek recipe, with notes."""
    words = (
        "run_name=a base_emb_dim=128 base_num_query_heads=4 base_num_kv_heads=4 base_mlp_dim=128 base_moe_mlp_dim=128 "
        "base_num_decoder_layers=8 head_dim=128 num_experts=2 shared_experts=1 sparse_matmul=True "
        'quantization="fp8_full" use_qwix_quantization=True per_device_batch_size=2 max_target_length=1024 '
        "dataset_type=synthetic steps=10 enable_checkpointing=False metrics_file=metrics.json sharding_tolerance=0.08 "
        "weight_sparsity_n=2 weight_sparsity_m=4 weight_sparsity_update_step=1 weight_sparsity_start_step=0 "
    )
    noted = (
        "decoder_block=deepseek attention_type=mla pure_nnx_decoder=true megablox=False use_tokamax_gmm=True "
        "use_gmm_v2=true override_model_config=true enable_goodput_recording=False monitor_goodput=False "
        "enable_checkpoint_cloud_logger=False retry_when_tokens_dropped=True use_ragged_sort=True "
        "ragged_buffer_factor=2 use_ring_of_experts=true wi_tile_fwd_batch_seq=256 wo_tile_drhs_mlp_dim=2048"
    )
    config, sources = load([*words.split(), *noted.split()], environ={})
    assert (config.quantization, config.weight_sparsity_m) == ("fp8_full", 4)
    assert [note.split(" ")[0] for note in sources.notes] == [word.split("=")[0] for word in noted.split()]
    assert config_errors("wi_tile_fwd=3")[0].startswith("unknown key 'wi_tile_fwd'")


def test_maxtext_keys_without_meaning_are_noted():
    config, sources = load(["run_name=a", "hardware=cpu", "megablox=true"], environ={"M_ATTENTION": "dot_product"})
    assert config == Config(run_name="a")
    assert [note.split(":")[0] for note in sources.notes] == [
        "attention has no effect",
        "hardware has no effect",
        "megablox has no effect",
    ]
    assert not set(maxtext.NO_EFFECT) & set(keys())
    assert set(maxtext._NAMES.values()) <= set(keys())
    assert not {*maxtext._NAMES, *maxtext._ELSEWHERE} & {*keys(), *maxtext.NO_EFFECT}


@pytest.mark.parametrize(
    ("argv", "note"),
    [
        (
            ["use_qwix_quantization=true"],
            'use_qwix_quantization=true has no effect: nothing is quantized with quantization=""',
        ),
        (["expert_dispatch_dtype=int8", *MOE], "expert_dispatch_dtype=int8 has no effect: nothing is quantized with "),
        (["weight_gradient_accumulator=bfloat16"], "weight_gradient_accumulator=bfloat16 has no effect: "),
        (["gradient_scatter_dtype=int8"], "gradient_scatter_dtype=int8 has no effect: "),
        (["act_quantization_calibration_method=rms,3"], "act_quantization_calibration_method=rms,3 has no effect: "),
        (
            ["weight_sparsity_n=2", "weight_sparsity_m=4", "steps=10"],
            "weight_sparsity_n=2 has no effect: weight_sparsity_start_step=50 is not before the end, steps=10",
        ),
        (
            ["use_manual_quantization=true", "quantization=fp8_full"],
            "use_manual_quantization=true quantizes experts only, and there are none: num_experts=1",
        ),
    ],
)
def test_what_has_no_effect_is_noted(argv, note):
    (found,) = load(argv, environ={}).sources.notes
    assert found.startswith(note)


def test_files_that_a_run_needs_are_looked_for(tmp_path):
    assert config_errors("dataset_type=text", "dataset_path=no.txt") == [
        "dataset_path=no.txt: there is no such file or directory (command line)"
    ]
    write(tmp_path / "books/a.txt", "words")
    assert load(["dataset_type=text", "dataset_path=books/*.txt"], environ={}).config.dataset_path == "books/*.txt"
    assert config_errors("load_parameters_path=no") == [
        "load_parameters_path=no: there is no such file or directory (command line)"
    ]
    assert load(["load_parameters_path=memory://a/b"], environ={}).config.load_parameters_path == "memory://a/b"
    assert config_errors("load_parameters_path=gs://a/b")[0].startswith(
        "load_parameters_path=gs://a/b: the package for gs:// is missing: "
    )


def test_rules_and_tables_are_read_before_the_run(tmp_path):
    write(tmp_path / "rules.yml", "- weight_qtype: int9\n")
    assert "weight_qtype='int9'" in config_errors("quantization_rules_path=rules.yml")[0]
    write(tmp_path / "bits.json", json.dumps({"__default__": {"bits": 8}}))
    assert "unknown key 'bits'" in config_errors("quantization=intmp", "quant_cfg_path=bits.json")[0]
    for no_table in ('["w_bits"]', "[]", "8", '"w_bits"', "null"):
        write(tmp_path / "bits.json", no_table)
        assert (
            "a table of bits by layer is a mapping"
            in config_errors("quantization=intmp", "quant_cfg_path=bits.json")[0]
        )
    write(tmp_path / "bits.json", '{"__default__": ["w_bits", 8]}')
    assert (
        "'__default__' has ['w_bits', 8]; a mapping"
        in config_errors("quantization=intmp", "quant_cfg_path=bits.json")[0]
    )
    write(tmp_path / "bits.json", json.dumps({"__default__": {"w_bits": 8}}))
    assert load(["quantization=intmp", "quant_cfg_path=bits.json"], environ={}).config.quant_cfg_path == "bits.json"


def test_a_run_without_a_name_gets_one_that_is_free(tmp_path):
    config, sources = load(["model_name=1m", "quantization=int8"], environ={})
    assert config.run_name.startswith("1m-int8-20")
    assert sources["run_name"] == "from model, recipe and time"
    taken = [config.run_directory]
    for _ in range(3):
        taken[-1].mkdir(parents=True)
        taken.append(load(["model_name=1m", "quantization=int8"], environ={}).config.run_directory)
    assert len(set(taken)) == 4


def test_the_deepseek_run():
    config, sources = load(["configs/deepseek_fp8.yml"], environ={})
    assert (config.quantization, config.use_qwix_quantization) == ("fp8_full", True)
    assert config.weight_quantization_calibration_method == "fixed,-224,224"
    assert config.act_quantization_calibration_method == "fixed,-224,224"
    assert config.bwd_quantization_calibration_method == "absmax"
    assert (config.model_name, config.num_experts, config.shared_experts) == ("deepseek-small", 16, 1)
    assert not sources.notes


def test_the_default_model_is_the_default():
    assert load(["model_name=default", "run_name=a"], environ={}).config == Config(run_name="a")


MODELS = {
    "default": 4_999_360,
    "1m": 1_016_960,
    "10m": 9_835_392,
    "50m": 50_541_312,
    "moe-1m": 920_192,
    "deepseek-small": 10_411_264,
    "llama-1b": 1_235_814_400,  # as published for Llama 3.2 1B
    "deepseek-big": 667_672_212_480,
}


@pytest.mark.parametrize("name", files.model_names())
def test_models_have_as_many_parameters_as_they_say(name):
    config = load([f"model_name={name}"], environ={}).config
    params = jax.tree.leaves(abstract_params(model_config(config, 256)))
    assert sum(math.prod(x.shape) for x in params) == MODELS[name]


BAD_FILES = {
    "a list as a key": (b"[a, b]: 1", "a key is a sequence, not text"),
    "not UTF-8": (b"steps: \xff", "no YAML.*utf-8"),
    "deep": (b"steps: " + b"[" * 5000, "nested too deeply"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_are_no_configuration(name, tmp_path):
    data, match = BAD_FILES[name]
    (tmp_path / "bad.yml").write_bytes(data)
    with pytest.raises(ConfigError, match=match):
        load([str(tmp_path / "bad.yml")], environ={})


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["steps=3", "steps=4"], "steps=3 and steps=4: give it once"),
        (["learning_rate=" + "9" * 400], "learning_rate=9+: a number"),
        (["model_name=" + "m" * 400], "There is no models/m+.yml"),
    ],
)
def test_arguments_that_are_no_configuration(args, match):
    with pytest.raises(ConfigError, match=match):
        load(args, environ={})


def test_the_next_command_has_the_data_of_the_run():
    config = Config(dataset_type="hf", hf_path="json", hf_train_files="a b.json", eval_steps=3, run_name="r")
    assert _data(config) == ["dataset_type=hf", "hf_path=json", "hf_train_files=a b.json"]


@pytest.mark.parametrize(("name", "text"), [("r.json", "[]"), ("r.yml", "rules: []\n")])
def test_a_file_without_rules_does_not_train_in_float(tmp_path, name, text):
    path = write(tmp_path / name, text)
    (problem,) = config_errors(f"quantization_rules_path={path}")
    assert problem.endswith(f"{name}: there is no rule in it, so nothing would be quantized (command line)")


def test_deep_nesting_is_found_before_parsing(tmp_path):
    start = time.process_time()
    (problem,) = config_errors(write(tmp_path / "c.yml", "steps: " + "[" * 100_000))
    assert problem.endswith("c.yml: it is nested too deeply")
    assert time.process_time() - start < 2
