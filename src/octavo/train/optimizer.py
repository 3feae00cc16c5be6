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
    """The optimizer without clipping, which the step does itself because it logs the norm anyway."""
    optimizer = _quantized(config) if config.opt_state_dtype else _float(config)
    if config.weight_rounding == "stochastic":
        optimizer = optim.with_stochastic_rounding(optimizer, seed=config.init_weights_seed)
    return optimizer


def _float(config: Config) -> optax.GradientTransformation:
    rate = learning_rate_schedule(config)
    match config.opt_type:
        case "sgd":
            return optax.sgd(rate, config.sgd_momentum or None)
        case "lion":
            return optax.lion(rate, **_betas(config))
        case "muon":
            return optax.contrib.muon(rate, **_muon(config), mu_dtype=config.mu_dtype or None)
        case _:
            return optax.adamw(rate, **_betas(config), eps=config.adam_eps, mu_dtype=config.mu_dtype or None)


def _quantized(config: Config) -> optax.GradientTransformation:
    """The same optimizer with moments in few bits, whose state has the same structure."""
    rate, moments = learning_rate_schedule(config), config.opt_state_dtype
    match config.opt_type:
        case "sgd":
            return optim.sgd(rate, config.sgd_momentum, moments=moments)
        case "lion":
            return optim.lion(rate, **_betas(config), moments=moments)
        case "muon":
            block_size = 2048 if moments == "linear8" else None
            return optim.muon(rate, **_muon(config), moments=moments, block_size=block_size)
        case _:
            return optim.adamw(rate, **_betas(config), eps=config.adam_eps, moments=moments)


def _betas(config: Config) -> dict[str, Any]:
    return {
        "b1": config.adam_b1,
        "b2": config.adam_b2,
        "weight_decay": config.adam_weight_decay,
        "mask": _decayed,
    }


def _muon(config: Config) -> dict[str, Any]:
    """Matrices by Newton-Schulz, everything else by AdamW; stacked layers and experts are batches of matrices."""
    return {
        "weight_decay": config.adam_weight_decay,
        "adam_b1": config.adam_b1,
        "adam_b2": config.adam_b2,
        "adam_weight_decay": config.adam_weight_decay,
        "muon_weight_dimension_numbers": _matrices,
    }


def _decayed(params: Any) -> Any:
    """Which parameters have weight decay: all but the scales of norms."""
    return jax.tree_util.tree_map_with_path(lambda path, x: not _is_scale(path), params)


def _matrices(params: Any) -> Any:
    """The axes of the matrix that Muon orthogonalizes, for each parameter; None: AdamW."""

    def axes(path: Any, x: Any) -> Any:
        name = path_str(path)
        if _is_scale(path) or x.ndim < 2 or "token_embedder" in name or "logits" in name:
            return None
        return optax.contrib.MuonDimensionNumbers(reduction_axis=x.ndim - 2, output_axis=x.ndim - 1)

    return jax.tree_util.tree_map_with_path(axes, params)


def _is_scale(path: Any) -> bool:
    return path_str(path[-1:]) == "scale"
