"""The optimizer and its learning-rate schedule, from the configuration."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from octavo import optim
from octavo._tree import path_str
from octavo.train.config import Config


def learning_rate_schedule(config: Config) -> Callable[[Any], jax.Array]:
    """The learning rate by the step: a linear warm-up, then a cosine, a plateau with a decay, or a constant.

    >>> rate = learning_rate_schedule(Config(steps=100, learning_rate=1e-3, warmup_steps_fraction=0.1))
    >>> [round(float(rate(step)), 6) for step in (0, 9, 100)]
    [0.0001, 0.001, 0.0001]
    """
    peak, last = config.learning_rate, config.learning_rate * config.learning_rate_final_fraction
    total = config.steps if config.learning_rate_schedule_steps < 0 else config.learning_rate_schedule_steps
    warmup = int(total * config.warmup_steps_fraction)
    decay = total - warmup
    match config.lr_schedule_type:
        case "cosine":
            then = optax.cosine_decay_schedule(peak, max(1, decay), config.learning_rate_final_fraction)
        case "wsd":
            falling = int(total * config.wsd_decay_steps_fraction)
            stages = [optax.constant_schedule(peak), optax.linear_schedule(peak, last, max(1, falling))]
            then = optax.join_schedules(stages, [max(0, decay - falling)])
        case _:
            then = optax.constant_schedule(peak)

    def rate(step: Any) -> jax.Array:
        # The first step has the learning rate peak/warmup, not 0, so it updates parameters.
        rising = peak * (jnp.asarray(step, jnp.float32) + 1) / max(1, warmup)
        return jnp.where(step < warmup, rising, then(step - warmup)).astype(jnp.float32)

    return rate


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """The optimizer without clipping, which the step does itself because it logs the norm anyway.

    With moments in few bits the state has the same structure.
    """
    rate, moments = learning_rate_schedule(config), config.opt_state_dtype
    decay = {"b1": config.adam_b1, "b2": config.adam_b2, "weight_decay": config.adam_weight_decay, "mask": _decayed}
    muon = {
        "weight_decay": config.adam_weight_decay,
        "adam_b1": config.adam_b1,
        "adam_b2": config.adam_b2,
        "adam_weight_decay": config.adam_weight_decay,
        "muon_weight_dimension_numbers": _matrices,
    }
    low: dict[str, Any] = {"moments": moments}
    mu: dict[str, Any] = {"mu_dtype": config.mu_dtype or None}
    match config.opt_type, bool(moments):
        case "sgd", False:
            optimizer = optax.sgd(rate, config.sgd_momentum or None)
        case "sgd", True:
            optimizer = optim.sgd(rate, config.sgd_momentum, **low)
        case "lion", False:
            optimizer = optax.lion(rate, **decay)
        case "lion", True:
            optimizer = optim.lion(rate, **decay, **low)
        case "muon", False:
            optimizer = optax.contrib.muon(rate, **muon, **mu)
        case "muon", True:
            optimizer = optim.muon(rate, **muon, **low, block_size=2048 if moments == "linear8" else None)
        case _, False:
            optimizer = optax.adamw(rate, **decay, eps=config.adam_eps, **mu)
        case _:
            optimizer = optim.adamw(rate, **decay, eps=config.adam_eps, **low)
    if config.weight_rounding == "stochastic":
        optimizer = optim.with_stochastic_rounding(optimizer, seed=config.init_weights_seed)
    return optimizer


def _decayed(params: Any) -> Any:
    """Which parameters have weight decay: all but the scales of norms and the biases of routers."""
    return jax.tree_util.tree_map_with_path(lambda path, x: not _is_vector(path), params)


def _matrices(params: Any) -> Any:
    """The axes of the matrix that Muon orthogonalizes, for each parameter; None: AdamW.

    Stacked layers and experts are batches of matrices.
    """

    def axes(path: Any, x: Any) -> Any:
        name = path_str(path)
        if _is_vector(path) or x.ndim < 2 or "token_embedder" in name or "logits" in name:
            return None
        return optax.contrib.MuonDimensionNumbers(reduction_axis=x.ndim - 2, output_axis=x.ndim - 1)

    return jax.tree_util.tree_map_with_path(axes, params)


def _is_vector(path: Any) -> bool:
    return path_str(path[-1:]) in ("scale", "router_bias")
