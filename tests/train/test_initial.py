"""Runs that start from a pretrained model: architecture, tokenizer and parameters of its file."""

import functools

import jax
import numpy as np
import pytest

from octavo._tree import flatten_paths
from octavo.checkpoint import CheckpointManager
from octavo.data import SubwordTokenizer
from octavo.data.subwords import train_bpe
from octavo.models import ModelConfig, abstract_params, apply
from octavo.pretrained import PretrainedModel, Request, export_model, open_model, read_adapter
from octavo.pretrained.model import to_float
from octavo.ptq import collect_statistics, quantize_weight
from octavo.qarray import is_qarray
from octavo.train import ConfigError, train
from octavo.train.config import Config
from octavo.train.initial import load_codes, load_params, open_source, open_teacher, with_architecture
from octavo.train.program import model_config
from octavo.train.trainer import Trainer
from tests.arrays import random_params
from tests.pretrained.test_architectures import GOLDEN, write_golden
from tests.train.common import SMALL

pytestmark = pytest.mark.standard_promotion
MODEL = ModelConfig(
    vocab_size=300, emb_dim=32, num_layers=3, num_query_heads=2, num_kv_heads=1, head_dim=16, mlp_dim=64,
    norm_eps=1e-6, rope_theta=5e4, qkv_bias=True, tied_logits=False, scan_layers=False,
)  # fmt: skip
ARCHITECTURE = [name for name in SMALL if name.startswith("base_")] + ["head_dim"]
TEXT = "def add(a, b):\n    return a + b\n" * 40


def started(path, **changes) -> Config:
    """A configuration that leaves the architecture to the file."""
    rest = {name: value for name, value in SMALL.items() if name not in ARCHITECTURE}
    return Config(**{**rest, "load_parameters_path": str(path), **changes})


@functools.cache
def source() -> PretrainedModel:
    params = random_params(abstract_params(MODEL))
    bias = jax.tree_util.tree_map_with_path(
        lambda path, x: x + 0.1 if "bias" in jax.tree_util.keystr(path) else x, params
    )
    tokenizer = SubwordTokenizer(train_bpe([TEXT], 300), bos_id=0, eos_ids=(0,), add_bos=True)
    return PretrainedModel.from_params(MODEL, bias, tokenizer=tokenizer, origin={"name": "tiny", "path": "tiny"})


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same model as a Hugging Face directory, a GGUF file and in Octavo's own format."""
    root = tmp_path_factory.mktemp("files")
    for name, kind, recipe in (("hf", "safetensors", "int8"), ("q8.gguf", "gguf", "q8_0"), ("own", "octavo", "int4")):
        export_model(kind, source(), root / name, Request(recipe))
    return root


def test_a_run_starts_from_latent_attention(tmp_path):
    config = started(write_golden("deepseek_v3", tmp_path), dataset_type="synthetic")
    opened = open_source(config)
    model = model_config(with_architecture(config, opened), source=opened)
    assert model.replace(scan_layers=False, float32_logits=True) == opened.config
    params = load_params(opened, model)
    assert params["decoder"]["layers"]["self_attention"]["wkv_b"]["kernel"].shape == (2, 16, 88)
    logits, _ = jax.jit(apply, static_argnums=0)(model, params, GOLDEN["tokens"][None])
    np.testing.assert_allclose(logits[0], GOLDEN["deepseek_v3/logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["hf", "q8.gguf", "own"])
def test_parameters_of_a_file_in_the_layout_of_the_run(name, files):
    config = started(files / name, unscanned_first_layers=1)
    opened = open_source(config)
    resolved = with_architecture(config, opened)
    assert (resolved.base_num_decoder_layers, resolved.rope_max_timescale) == (3, 5e4)
    layout = MODEL.replace(scan_layers=True, unscanned_first=1)
    params = load_params(opened, layout)
    assert params["decoder"]["layers"]["mlp"]["wo"]["kernel"].shape == (2, 64, 32)
    floats = jax.tree.map(lambda x: x.dequantize("float32") if is_qarray(x) else x, opened.params("float32"),
                          is_leaf=is_qarray)  # fmt: skip
    tokens = np.arange(24).reshape(2, 12)
    logits = jax.jit(apply, static_argnums=0)
    expected = logits(opened.config, floats, tokens)[0]
    np.testing.assert_allclose(logits(layout, params, tokens)[0], expected, rtol=1e-5, atol=1e-5)


def test_a_run_on_a_mesh_from_a_hugging_face_directory(files, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    config = started(
        files / "hf",
        dataset_type="text",
        dataset_path=str(tmp_path / "text.txt"),
        num_devices=2,
        per_device_batch_size=1,
    )
    trainer = Trainer(config)
    assert trainer.config.tokenizer_type == "model"
    assert trainer.model.qkv_bias
    assert trainer.model.vocab_size == 300
    kernel = trainer.state.params["decoder"]["layers"]["mlp"]["wo"]["kernel"]
    assert len(kernel.sharding.device_set) == 2
    assert not kernel.is_fully_replicated
    stored = open_model(files / "hf").leaves["decoder/layers_1/mlp/wo/kernel"].load()
    np.testing.assert_array_equal(kernel[1], to_float(stored, "float32"))
    assert Trainer(trainer.config).model == trainer.model  # the resolved configuration names the same model


def test_keys_that_contradict_the_file_are_all_listed(files):
    config = started(files / "hf", base_emb_dim=64, vocab_size=512)
    with pytest.raises(ConfigError) as caught:
        Trainer(config)
    text = str(caught.value)
    assert "base_emb_dim=64, but the model at load_parameters_path has 32: leave base_emb_dim out" in text
    assert "vocab_size=512, but the model at load_parameters_path has 300" in text


def test_another_tokenizer_is_an_error(files, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    data = {"dataset_type": "text", "dataset_path": str(tmp_path / "text.txt")}
    other = tmp_path / "tokenizer.json"
    other.write_text(train_bpe(["zzz yyy " * 50], 280))
    wrong = started(files / "hf", tokenizer_type="huggingface", tokenizer_path=str(other), **data)
    with pytest.raises(ConfigError, match=r"is not the tokenizer of .*leave tokenizer_type and tokenizer_path out"):
        Trainer(wrong)
    (files / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (files / "bare" / name).write_bytes((files / "hf" / name).read_bytes())
    with pytest.raises(ConfigError, match=r"comes without a tokenizer, and its 300 ids are not bytes"):
        Trainer(started(files / "bare", **data))


def test_a_directory_that_is_no_model(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(ConfigError, match=r"load_parameters_path=.*is not a model that Octavo can open"):
        Trainer(started(tmp_path))


def test_a_checkpoint_without_a_description_has_the_configured_architecture(tmp_path):
    config = Config(**SMALL)
    params = Trainer(config).state.params
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"params": params})
    again = Trainer(config.replace(load_parameters_path=str(tmp_path), init_weights_seed=1))
    jax.tree.map(np.testing.assert_array_equal, again.state.params, params)


def test_the_tokenizer_of_a_model_needs_one():
    with pytest.raises(ValueError, match=r"tokenizer_type=model needs a model with a tokenizer"):
        Trainer(Config(**{**SMALL, "dataset_type": "python", "tokenizer_type": "model"}))


@pytest.mark.slow
def test_adapters_train_while_packed_weights_stay(files, tmp_path):
    options = {"lora_rank": 2, "lora_weight_qtype": "nf4", "lora_tile_size": 16, "learning_rate": 1e-2}
    config = started(files / "hf", base_output_directory=str(tmp_path), steps=3, checkpoint_period=3, **options)
    said: list[str] = []
    assert train(config, log=said.append).step == 3
    assert any("adapters of rank 2; frozen weights" in line for line in said)
    model, adapter = open_model(tmp_path / "test"), read_adapter(tmp_path / "test" / "adapter", MODEL)
    assert adapter.rank == 2
    assert len(adapter.params) == 3 * 7 * 2
    assert max(np.abs(value).max() for path, value in adapter.params.items() if path.endswith("_b")) > 0
    # The run, opened as a model, is the frozen weights with the adapter merged.
    trainer = Trainer(config)
    kernel = trainer.state.frozen["decoder"]["layers"]["mlp"]["wo"]["kernel"]
    assert (kernel.qtype.name, kernel.packed is not None) == ("nf4", True)
    path = "decoder/layers_2/mlp/wo/kernel"
    expected = np.asarray(kernel.dequantize())[2] + adapter.delta(path)
    np.testing.assert_allclose(model.leaves[path].load(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_loftq_begins_nearer_to_the_float_model(files, tmp_path):
    options = {"lora_rank": 4, "lora_weight_qtype": "int3", "lora_tile_size": 16}
    kernels = []
    for init in ("zeros", "loftq"):
        place = tmp_path / init
        said: list[str] = []
        config = started(files / "hf", base_output_directory=str(place), steps=1, lora_init=init, **options)
        train(config.replace(learning_rate=1e-9), log=said.append)
        assert (place / "test" / "adapter").exists() == (init == "zeros")
        assert any("no adapter for PEFT" in line for line in said) == (init == "loftq")
        kernels.append(open_model(place / "test").leaves["decoder/layers_2/mlp/wo/kernel"].load())
    kernel = open_model(files / "hf").leaves["decoder/layers_2/mlp/wo/kernel"].load()
    errors = [np.sum((kernel - other) ** 2) for other in kernels]
    assert errors[1] < 0.75 * errors[0]


@pytest.mark.slow
def test_eora_begins_nearer_to_the_outputs_of_the_float_model(files):
    options = {"lora_rank": 4, "lora_weight_qtype": "int3", "lora_tile_size": 16, "lora_calibration_tokens": 1000}
    started_by = lambda **more: Trainer(started(files / "hf", lora_init="eora", **options, **more))  # noqa: E731
    eora, floats = started_by(), Trainer(started(files / "hf")).evaluate()
    params = load_params(eora.source, eora.model)
    assert _layout(eora.state) == _layout(eora.abstract_state)
    losses = [abs(eora.evaluate() - floats)]
    start = eora.state
    eora.resume(eora.init_state(params))  # by LoftQ
    losses.append(abs(eora.evaluate() - floats))
    eora.resume(start)
    assert losses[0] < 0.7 * losses[1]
    # Codes are those of GPTQ for the inputs of the training data, of all tokens of as many batches as it takes.
    batches = [(eora.data.batch(i), 1.0, 1.0) for i in range(4)]
    name = "decoder/layers/mlp/wo/kernel"
    statistics, _ = collect_statistics(eora.loss, params, batches, only=[name])
    assert statistics[name].tokens.tolist() == [4 * 8 * 32] * 3
    quantizer = eora.adapter_loss.low.stored_quantizers(*eora.loss_arguments)[name]
    codes = quantize_weight(flatten_paths(params)[name], quantizer, statistics[name], method="gptq").array
    kernel = eora.state.frozen["decoder"]["layers"]["mlp"]["wo"]["kernel"]
    np.testing.assert_array_equal(kernel.unpack().qvalue, codes.qvalue)
    run = functools.partial(eora.adapter_loss.init_calibrated, jax.random.key(0), params, batches, memory=1)
    few = run(eora=True)  # one weight at a time
    jax.tree.map(np.testing.assert_array_equal, few, (eora.state.params, eora.state.frozen))
    zeros, same = run(eora=False)
    jax.tree.map(np.testing.assert_array_equal, same, eora.state.frozen)
    assert _layout(zeros) == _layout(eora.state.params)
    assert all(not np.any(b) for path, b in flatten_paths(zeros).items() if path.endswith("_b"))
    two = started_by(num_devices=2, per_device_batch_size=4)
    np.testing.assert_allclose(two.evaluate(), eora.evaluate(), rtol=2e-3)


def _layout(tree):
    return jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


@pytest.mark.slow
def test_adapters_on_a_mesh_have_the_loss_of_one_device(files):
    options = {"lora_rank": 2, "lora_weight_qtype": "int8", "per_device_batch_size": 4}
    one = Trainer(started(files / "hf", **options))
    two = Trainer(started(files / "hf", **{**options, "num_devices": 2, "per_device_batch_size": 2}))
    kernel = two.state.frozen["decoder"]["layers"]["mlp"]["wo"]["kernel"]
    assert not kernel.qvalue.is_fully_replicated
    for _ in range(2):
        losses = [float(trainer.step()["learning/loss"]) for trainer in (one, two)]
        np.testing.assert_allclose(*losses, rtol=1e-4)


def test_a_rank_above_that_of_a_weight(files):
    with pytest.raises(ValueError, match=r"rank=64 is more than the rank of its \(32, 32\) weight"):
        Trainer(started(files / "hf", lora_rank=64))


@pytest.mark.slow
def test_distillation_lowers_the_divergence_from_the_float_model(files):
    options = {"quantization": "qat_int4", "distillation_weight": 1.0, "learning_rate": 1e-3, "steps": 12}
    trainer = Trainer(started(files / "hf", reuse_example_batch=1, warmup_steps_fraction=0.0, **options))
    losses = [trainer.step() for _ in range(12)]
    kl = [float(metrics["learning/kl_loss"]) for metrics in losses]
    assert kl[-1] < 0.7 * kl[0]
    assert kl[0] > 0
    np.testing.assert_allclose(losses[0]["learning/loss"], kl[0], rtol=1e-5)
    # The teacher is the model of the file, in float, and stays as it is.
    stored = open_model(files / "hf").leaves["decoder/layers_1/mlp/wo/kernel"].load()
    teacher = trainer.state.teacher["decoder"]["layers"]["mlp"]["wo"]["kernel"][1]
    np.testing.assert_array_equal(teacher, to_float(stored, "float32"))


@pytest.mark.slow
def test_a_teacher_of_another_architecture_on_a_mesh(files, tmp_path):
    config = MODEL.replace(num_layers=1, qkv_bias=False)
    params = random_params(abstract_params(config), 3)
    small = PretrainedModel.from_params(config, params, origin={"name": "small", "path": "small"})
    export_model("octavo", small, tmp_path / "teacher", Request("int8"))
    options = {"distillation_weight": 0.5, "distillation_teacher": str(tmp_path / "teacher")}
    losses = []
    for devices in (1, 2):
        sizes = {"num_devices": devices, "per_device_batch_size": 4 // devices}
        metrics = Trainer(started(files / "hf", **options, **sizes)).step()
        lm, kl = (float(metrics[f"learning/{name}_loss"]) for name in ("lm", "kl"))
        np.testing.assert_allclose(metrics["learning/loss"], 0.5 * lm + 0.5 * kl, rtol=1e-5)
        losses.append(kl)
    np.testing.assert_allclose(*losses, rtol=1e-4)
    other = PretrainedModel.from_params(
        config.replace(vocab_size=299),
        jax.tree.map(lambda x: x[:299] if x.shape[0] == 300 else x[..., :299] if x.shape[-1] == 300 else x, params),
    )
    export_model("octavo", other, tmp_path / "other", Request("int8"))
    with pytest.raises(ConfigError, match=r"other has 299 ids and the model 300: a teacher needs the same vocabulary"):
        Trainer(started(files / "hf", distillation_weight=1.0, distillation_teacher=str(tmp_path / "other")))


def test_a_teacher_with_another_vocabulary(files):
    with pytest.raises(ConfigError, match=r"own has 300 ids and the model 299: a teacher needs the same vocabulary"):
        open_teacher(str(files / "own"), MODEL.replace(vocab_size=299))
    other = SubwordTokenizer(train_bpe(["zzz yyy " * 50], 300), bos_id=0, eos_ids=(0,))
    with pytest.raises(ConfigError, match=r"own tokenizes 'The 3 naïve ' as .*a teacher needs the same vocabulary"):
        open_teacher(str(files / "own"), MODEL, other)
    assert open_teacher(str(files / "own"), MODEL, source().tokenizer).config.vocab_size == 300


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, False])
def test_adapters_on_the_codes_of_the_file(scan, files):
    options = {"lora_rank": 2, "lora_weight_qtype": "source", "scan_layers": scan, "learning_rate": 1e-2}
    trainer = Trainer(started(files / "own", **options))
    name = "layers" if scan else "layers_1"
    kernel = trainer.state.frozen["decoder"][name]["mlp"]["wo"]["kernel"]
    stored = open_model(files / "own").leaves["decoder/layers_1/mlp/wo/kernel"].load()
    assert (kernel.qtype.name, kernel.packed is not None) == ("int4", True)
    own = np.asarray(kernel.dequantize())
    np.testing.assert_array_equal(own[1] if scan else own, np.asarray(stored.dequantize(), np.float32))
    floats = Trainer(started(files / "own", lora_rank=2, scan_layers=scan, learning_rate=1e-2))
    for _ in range(2):
        losses = [float(t.step()["learning/loss"]) for t in (trainer, floats)]
        np.testing.assert_allclose(*losses, rtol=1e-4)
    assert trainer.verify().flops() == floats.verify().flops()


def test_the_codes_of_a_file_that_has_none(files):
    floats = PretrainedModel.from_params(MODEL, source().params("float32"), origin={"name": "tiny"})
    with pytest.raises(ConfigError, match=r"keeps codes, but the layers of tiny \(float32\) are read as floats: name"):
        load_codes(floats, MODEL)


def test_the_codes_of_the_file_are_for_one_device(files):
    with pytest.raises(ConfigError, match=r"lora_weight_qtype=source is for one device: set num_devices=1"):
        Trainer(started(files / "own", lora_rank=2, lora_weight_qtype="source", num_devices=2, per_device_batch_size=4))
