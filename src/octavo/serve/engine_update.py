"""New parameters for a running engine: floats are quantized as the engine's codes were."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from octavo._tree import flatten_paths, unflatten_paths
from octavo.calibration import AbsMax
from octavo.frameworks.serving import stored_quantizers
from octavo.models import ModelConfig, apply, unstack_layers
from octavo.models.functional import STACK
from octavo.qarray import QArray, Quantizer, is_qarray


def unstacked(params: Any) -> Any:
    """Parameters with a name for each layer."""
    is_stacked = any(STACK.fullmatch(f"decoder/{name}/") for name in params.get("decoder", {}))
    return unstack_layers(params) if is_stacked else params


class Layouts:
    """The shapes, dtypes and formats of an engine's parameters, by path, before weights are fused.

    Args:
        config: The model, with unscanned layers.
        params: Its parameters: arrays or QArrays.
        rules: The rules of the engine; quantizers of weights are theirs.
    """

    def __init__(self, config: ModelConfig, params: Any, rules: Any):
        self.leaves = flatten_paths(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params), is_qarray)
        self.config, self._rules = config, rules

    @functools.cached_property
    def quantizers(self) -> Mapping[str, Quantizer]:
        """How each weight that the engine holds as codes is quantized."""
        found = {path: _quantizer_of(leaf) for path, leaf in self.leaves.items() if isinstance(leaf, QArray)}
        if self._rules and found:
            floats = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in self.leaves.items()}
            tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
            model = functools.partial(apply, self.config)
            found |= stored_quantizers(model, self._rules, unflatten_paths(floats), tokens)
        if learned := [path for path, quantizer in found.items() if quantizer.calibration.learned]:
            raise ValueError(
                f"the scale of {learned[0]!r} is learned (lsq), so floats alone are not enough: update the engine with "
                "octavo.convert(model, params, *inputs, rules=rules, state=state)"
            )
        return found

    def matched(self, params: Any) -> Any:
        """New parameters in these formats.

        Args:
            params: The parameters, stacked or not, in float or as codes of the same layout.

        Raises:
            ValueError: They are of another model.
        """
        given = flatten_paths(unstacked(params), is_qarray)
        if names := sorted(set(given) ^ set(self.leaves)):
            what = "does not have" if names[0] in given else "needs"
            raise ValueError(f"these are not the parameters of the engine's model, which {what} {names[0]!r}")
        return unflatten_paths({path: self._match(path, leaf) for path, leaf in given.items()})

    def _match(self, path: str, leaf: Any) -> Any:
        wanted = self.leaves[path]
        if tuple(leaf.shape) != tuple(wanted.shape):
            raise ValueError(f"{path!r} has the shape {tuple(leaf.shape)}, and the engine's {tuple(wanted.shape)}")
        if isinstance(leaf, QArray) and not isinstance(wanted, QArray):
            raise ValueError(f"{path!r} has codes, and the engine's is {wanted.dtype}: dequantize it first")
        if not isinstance(leaf, QArray):
            leaf = jnp.asarray(leaf)
            if not isinstance(wanted, QArray):
                return leaf.astype(wanted.dtype)
            # Not cast before: codes of rounded weights would be others than those of training.
            leaf = _quantize(self.quantizers[path], leaf).astype(wanted.dtype)
        if wanted.packed is not None:
            leaf = leaf.pack(wanted.packed[0])
        if (made := _layout(leaf)) != (held := _layout(wanted)):
            raise ValueError(
                f"{path!r}: the engine has codes of the layout {held}, and quantizing gives {made}: pass codes of the "
                "engine's layout, or make the engine from parameters that octavo.convert quantized"
            )
        return leaf


def _quantize(quantizer: Quantizer, x: jax.Array) -> QArray:
    """An array quantized in two passes over it; `Quantizer.quantize` needs three on CPUs, where it looks for NaN apart.

    As integers, the bits of magnitudes are in their order, and those of NaN are above those of any number.
    """
    if not isinstance(quantizer.calibration, AbsMax) or quantizer.calibration.headroom != 1 or not x.size:
        return quantizer.quantize(x)
    tiles = quantizer.tiles(x.shape)
    bits = jax.lax.bitcast_convert_type(jnp.abs(tiles.split(x.astype(jnp.float32))), jnp.int32)
    largest = jax.lax.bitcast_convert_type(jnp.max(bits, axis=tiles.axes, keepdims=True), jnp.float32)
    bounds = {"absmax": tiles.merge(largest * quantizer.calibration.factor)}
    return quantizer.quantize(x, bounds=bounds, check_finite=False)


def _layout(array: QArray) -> str:
    """What the buffers of a QArray depend on."""
    parts = ", ".join(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(array))
    return f"{array.qtype.name} as {parts} for {array.dtype}, packed={array.packed}, padding={array.padding}"


def _quantizer_of(array: QArray) -> Quantizer:
    """A quantizer that gives QArrays of a layout; ranges are measured as the largest magnitude, or minimum and maximum.

    >>> import octavo
    >>> _quantizer_of(octavo.quantize(jnp.ones((64, 3)), "int4", channelwise_axes=(1,), tiled_axes={0: 32}))
    Quantizer('int4', channelwise_axes=(1,), tiled_axes={0: 32}, scale_dtype='float32')
    """
    tiles = array.tile_shape
    shared = [i for i, size in enumerate(array.scale.shape) if size == 1]
    tiled = {i: size for i, size in enumerate(tiles) if size > 1 and i not in shared}
    own = array.qtype.tile  # of a block format
    if own is not None and not tiled:
        tiled = {tiles.index(own): own}
    return Quantizer(
        array.qtype,
        channelwise_axes=tuple(i for i, size in enumerate(tiles) if size == 1 and i not in shared),
        tiled_axes=tiled,
        calibration="absmax" if array.zero_point is None else "minmax",
        scale_dtype=array.scale.dtype if own is None else None,
    )
