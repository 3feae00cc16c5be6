"""Tunix's supervised fine-tuning and GRPO with `octavo.compat.qwix` in the place of `qwix`.

Not among the dependencies: `pip install google-tunix==0.1.7 octavo[flax] pytest` in an environment of its own.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from flax import nnx

import octavo.compat.qwix

pytest.importorskip("tunix", reason="Tunix needs 60 more packages: see the module's docstring")
llama, peft_trainer, utils, cli_model, rl_cluster, grpo_learner, base_rollout, toy = (
    importlib.import_module(f"tunix.{name}")
    for name in (
        *("models.llama3.model", "sft.peft_trainer", "sft.utils", "cli.utils.model", "rl.rl_cluster"),
        *("rl.grpo.grpo_learner", "rl.rollout.base_rollout", "tests.test_common"),
    )
)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of Tunix
LAYERS = ".*q_proj|.*k_proj|.*v_proj|.*o_proj|.*gate_proj|.*up_proj|.*down_proj"


@pytest.fixture(autouse=True)
def _promotion():
    """In all threads: Tunix trains in several."""
    before = jax.config.jax_numpy_dtype_promotion, jax.config.jax_numpy_rank_promotion
    for values in (("standard", "allow"), before):
        jax.config.update("jax_numpy_dtype_promotion", values[0])
        jax.config.update("jax_numpy_rank_promotion", values[1])
        if values is not before:
            yield


@pytest.fixture
def mesh():
    return jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def reset(model):
    """Adapters that do not depend on the library: a is random and b is zero."""
    flat, rng = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)), np.random.default_rng(0)
    for path, variable in sorted(flat, key=lambda entry: str(entry[0])):
        values = rng.normal(size=variable.get_value().shape) * str(path[-1]).endswith("_a")
        variable.set_value(jnp.asarray(0.1 * values, jnp.float32))
    nnx.update(model, nnx.from_flat_state(flat))
    return {path: variable.get_value().shape for path, variable in flat}


def tuned(mesh, **fields):
    """The shapes of adapters, and the losses of eight steps."""
    sizes = {"embed_dim": 64, "hidden_dim": 128, "num_heads": 4, "head_dim": 16, "num_kv_heads": 2}
    config = llama.ModelConfig(num_layers=2, vocab_size=256, rope_theta=10000, norm_eps=1e-5, **sizes)
    lora = {"module_path": LAYERS, "rank": 4, "alpha": 8.0, **fields}
    model = cli_model.apply_lora_to_model(llama.Llama3(config, rngs=nnx.Rngs(0)), None, lora)
    shapes, losses = reset(model), []

    def inputs(x):
        real = x.input_tokens != 0
        positions, mask = utils.build_positions_from_mask(real), utils.make_causal_attn_mask(real)
        return {
            "input_tokens": x.input_tokens,
            "input_mask": x.input_mask,
            "positions": positions,
            "attention_mask": mask,
        }

    tokens = [((i + 1) * np.arange(16)[None] + np.arange(4)[:, None]) % 200 + 1 for i in range(8)]
    batches = [peft_trainer.TrainingInput(t.astype(np.int32), np.ones(t.shape, bool)) for t in tokens]
    options = peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=8)
    trainer = peft_trainer.PeftTrainer(model, optax.adam(1e-2), options).with_gen_model_input_fn(inputs)
    trainer.metrics_logger.log = lambda _, name, value, *rest: losses.append(float(value)) if name == "loss" else None
    with mesh:
        trainer.train(batches)
    return shapes, losses


def test_supervised_fine_tuning_has_the_losses_of_qwix(mesh, monkeypatch):
    shapes, losses = tuned(mesh)
    monkeypatch.setattr(cli_model, "qwix", octavo.compat.qwix)
    own_shapes, own = tuned(mesh)
    assert own_shapes == shapes
    np.testing.assert_allclose(own, losses, rtol=1e-6)
    assert len(own) == 8


def test_qlora_where_qwix_cannot_tile_the_heads(mesh, monkeypatch):
    fields = {"weight_qtype": "nf4", "tile_size": 32}
    with pytest.raises(ValueError, match="cannot be tiled"):
        tuned(mesh, **fields)
    expected = tuned(mesh)[1]
    monkeypatch.setattr(cli_model, "qwix", octavo.compat.qwix)
    np.testing.assert_allclose(tuned(mesh, **fields)[1], expected, rtol=2e-3)


def rewarded(mesh):
    """The mean rewards of four steps of GRPO, and the adapters after them."""
    vocabulary = toy.MockVocab()
    base = toy.ToyTransformer(toy.ModelConfig(vocab_size=vocabulary.GetPieceSize()), rngs=nnx.Rngs(0))
    model = toy.get_lora_model(base, mesh=mesh)
    reset(model)
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    optimizer = optax.adam(1e-2)
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        training_config=rl_cluster.RLTrainingConfig(actor_optimizer=optimizer, eval_every_n_steps=100, max_steps=4),
        rollout_config=base_rollout.RolloutConfig(max_tokens_to_generate=6, max_prompt_length=8, kv_cache_size=32),
    )
    cluster = rl_cluster.RLCluster(actor=model, reference=base, tokenizer=vocabulary, cluster_config=config)
    means = []

    def reward(prompts, completions, **_):
        found = [len(set(text.split())) + 0.1 * len(text) for text in completions]
        means.append(float(np.mean(found)))
        return found

    options = grpo_learner.GRPOConfig(num_generations=4, num_iterations=1)
    learner = grpo_learner.GRPOLearner(rl_cluster=cluster, algo_config=options, reward_fns=reward)
    learner.train([{"prompts": np.array(["input string", "hello world"])} for _ in range(4)])
    return means, [np.asarray(v.get_value()) for _, v in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))]


def test_grpo_has_the_rewards_of_qwix(mesh, monkeypatch):
    expected, adapters = rewarded(mesh)
    assert toy.qwix is qwix
    monkeypatch.setattr(toy, "qwix", octavo.compat.qwix)
    found, own = rewarded(mesh)
    assert found == expected
    assert len(found) == 4
    for one, other in zip(own, adapters, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
