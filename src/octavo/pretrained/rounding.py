"""AutoRound on a decoder: the codes of each layer in turn, for the inputs that the quantized layers before it give."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo._tree import flatten_paths, unflatten_paths
from octavo._typing import Array
from octavo.models import Decoder, ModelConfig, layer_groups
from octavo.models.config import PER_LAYER
from octavo.models.decoder import DecoderLayer, LayerAngles
from octavo.models.module_params import bind
from octavo.ptq.autoround import autoround, check_format
from octavo.qarray import QArray, Quantizer, is_qarray


def check_rounding(config: ModelConfig, quantizers: Mapping[str, Quantizer]) -> None:
    """Raise unless the rounding of these weights of a decoder can be trained layer by layer."""
    if any(group.is_stack for group in layer_groups(config)):
        raise ValueError("autoround trains layer by layer, and the layers of this model are one stack: use gptq")
    for name in PER_LAYER:
        if getattr(config, name):
            raise ValueError(f"autoround trains layer by layer, which is not supported with {name}: use gptq")
    for name, quantizer in quantizers.items():
        check_format(name, quantizer.qtype)


def train_rounding(
    config: ModelConfig,
    floats: Mapping[str, Any],
    codes: Mapping[str, QArray],
    batches: Sequence[np.ndarray],
    *,
    steps: int = 200,
    log: Callable[[str], None] | None = None,
) -> dict[str, QArray]:
    """The codes of a decoder, trained layer by layer.

    Args:
      config: The decoder.
      floats: Its parameters in float, by path.
      codes: Quantized weights by path: the start. Those outside of layers stay as they are.
      batches: Windows of tokens.
      steps: Steps for each layer.
      log: Called with a line for each layer.
    """
    params, done = unflatten_paths(floats), dict(codes)
    embed = jax.jit(lambda params, tokens: bind(Decoder, config, params).embed(tokens, _positions(tokens)))
    exact = low = jnp.concatenate([embed(params, jnp.asarray(batch)) for batch in batches])
    for group in layer_groups(config):
        prefix = f"decoder/{group.name}/"
        own = {path.removeprefix(prefix): x for path, x in floats.items() if path.startswith(prefix)}
        start = {path: done.get(prefix + path, x) for path, x in own.items()}
        kind = (group.is_moe, config.is_sliding(group.layers[0]))
        layers = range(config.num_layers)
        run = layer_function(config, next(i for i in layers if (config.is_moe(i), config.is_sliding(i)) == kind))
        targets, new = _outputs(run, unflatten_paths(own), exact), unflatten_paths(start)
        if any(map(is_qarray, start.values())):
            report = None if log is None else lambda line, name=group.name: log(f"{name}: {line}")
            new = autoround(run, unflatten_paths(own), new, low, targets, steps=steps, log=report)
        trained = flatten_paths(new, is_qarray)
        done |= {prefix + path: x for path, x in trained.items() if is_qarray(x)}
        now = {path: x.dequantize(jnp.float32) if is_qarray(x) else x for path, x in trained.items()}
        exact, low = targets, _outputs(run, unflatten_paths(now), low)
    return done


@functools.lru_cache(maxsize=8)
def layer_function(config: ModelConfig, layer: int) -> Callable[[Any, Array], Array]:
    """A layer as a function of its parameters and hidden states: one for all layers of a kind, compiled once."""
    make = functools.partial(DecoderLayer, layer=layer)

    @jax.jit
    def run(params: Any, x: Array) -> Array:
        positions = _positions(x)
        angles = LayerAngles.of(config, positions, jnp.zeros_like(positions))
        return bind(make, config, params)(x, angles.sliding if config.is_sliding(layer) else angles.full)[0]

    return run


def _positions(x: Array) -> Array:
    return jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])


def _outputs(run: Callable[[Any, Array], Array], params: Any, x: Array, rows: int = 8) -> Array:
    return jnp.concatenate([run(params, x[at : at + rows]) for at in range(0, len(x), rows)])
