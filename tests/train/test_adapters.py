"""Adapters in the trainer's loss: dropout in training only."""

import jax
import jax.numpy as jnp

from octavo.train.adapters import AdapterLoss, lora_rule
from tests.train.common import small


def test_dropout_is_for_training_only():
    config = small(load_parameters_path="m.gguf", lora_rank=2, lora_dropout=0.5, lora_module_path=".*")
    loss = AdapterLoss(lambda params, x: jnp.sum(x @ params["w"]), lora_rule(config))
    params, x = {"w": jnp.ones((8, 4))}, jnp.ones((3, 8))
    adapters = jax.tree.map(jnp.ones_like, loss.init_adapters(jax.random.key(0), params, x))

    @jax.jit
    def value(key):
        run = lambda update: loss.stateful(step=0, key=key, update=update)((adapters, params), x)[0]  # noqa: E731
        return run(True), run(False)

    found = [value(jax.random.key(seed)) for seed in range(4)]
    trained, evaluated = (list(map(float, values)) for values in zip(*found, strict=True))
    assert len(set(trained)) > 1
    assert set(evaluated) == {3 * 8 * 4 + 3 * 8 * 2 * 4 * config.lora_alpha / 2}
