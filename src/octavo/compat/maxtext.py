"""The functions of MaxText's `quantizations.py`: the quantization of a config, and helpers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from octavo._names import unknown_name
from octavo.calibration import Fixed, get_calibration
from octavo.compat import aqt, transformer_engine
from octavo.compat.quantization import (
    AqtQuantization,
    Fp8Quantization,
    NANOOFp8Quantization,
    Quantization,
    get_quant_mode,
)
from octavo.ops import DotConfig
from octavo.qarray import QArray, is_qarray, quantize
from octavo.rules import dot_config, mixed_precision, recipe, recipes

__all__ = [
    "AqtQuantization",
    "Fp8Quantization",
    "NANOOFp8Quantization",
    "Quantization",
    "aqt_int",
    "configure_quantization",
    "constant_bounds",
    "get_quant_mode",
    "in_convert_mode",
    "in_serve_mode",
    "manual_quantize",
    "match_quantized_params",
    "qwix_quantization",
    "remove_quantized_params",
]


def qwix_quantization(
    act_calibration_method: str = "absmax",
    weight_calibration_method: str = "absmax",
    bwd_calibration_method: str = "absmax",
) -> Quantization:
    """The `fp8_full` recipe: e4m3 forward, e5m2 gradients."""
    methods = (act_calibration_method, weight_calibration_method, bwd_calibration_method)
    rules = recipe(
        "fp8_full",
        exclude=None,
        act_calibration_method=methods[0],
        weight_calibration_method=methods[1],
        bwd_calibration_method=methods[2],
    )
    return Quantization(rules)


def configure_quantization(config: Any, quant_mode_str: str = "train") -> Quantization | None:
    """The quantization of a MaxText config.

    Args:
      config: An object with MaxText's keys: `quantization`, and optionally `quantization_local_shard_count`,
        `quant_cfg_path`, `constant_bound_config`, `replicate_quant_scale` and the three calibration methods.
      quant_mode_str: "train", "calibrate", "convert" or "serve".

    Returns:
      A `Quantization`; None for `quantization=""`.

    >>> import types
    >>> configure_quantization(types.SimpleNamespace(quantization="int8")).config.fwd.rhs.qtype.name
    'int8'
    """
    name = config.quantization or ""
    options = {"quant_mode": quant_mode_str, "replicate_scale": getattr(config, "replicate_quant_scale", False)}
    methods = {
        side: getattr(config, f"{short}_quantization_calibration_method", None) or "absmax"
        for side, short in (("act", "act"), ("weight", "weight"), ("bwd", "bwd"))
    }
    match name:
        case "":
            return None
        case "int8":
            return AqtQuantization(aqt_int(8, getattr(config, "quantization_local_shard_count", 1)), **options)
        case "intmp":
            return AqtQuantization(mixed_precision(_table(config), exclude=None), **options)
        case "fp8":
            return Fp8Quantization(**options)
        case "nanoo_fp8":
            return NANOOFp8Quantization(**options)
        case "aqt_fp8":
            return AqtQuantization(aqt.config_fwd_fp8("e4m3"), **options)
        case "aqt_fp8_full":
            return AqtQuantization(
                constant_bounds(tuple(getattr(config, "constant_bound_config", ()) or ())), **options
            )
        case "fp8_full":
            found = qwix_quantization(*(methods[side] for side in ("act", "weight", "bwd")))
            return dataclasses.replace(found, **options)
    if name not in recipes(aliases=True):
        raise ValueError(f"quantization={name!r} is no recipe: {unknown_name(name, recipes(aliases=True))}")
    if name in transformer_engine.RECIPES and transformer_engine.is_usable():
        return transformer_engine.TransformerEngineQuantization(recipe(name, exclude=None), name=name, **options)
    return Quantization(recipe(name, exclude=None), **options)


def aqt_int(bits: int, shards: int = 1) -> DotConfig:
    """AQT's integer config for all three matmuls, with the weight gradient quantized in `shards` tiles of the batch.

    With `shards=-1` there is one tile for each local device; with 0 the weight gradient is computed in float.
    """
    local = aqt.LocalAqt(contraction_axis_shard_count=shards if shards > 0 else jax.local_device_count())
    return aqt.config_v3(
        fwd_bits=bits, dlhs_bits=bits, drhs_bits=bits if shards else None, drhs_local_aqt=local if shards else None
    )


def constant_bounds(bounds: tuple[int | float, ...]) -> DotConfig:
    """e4m3 forward and e5m2 gradients with one scale per tensor: dynamic, or of six constant bounds."""
    if len(bounds) not in (0, 6):
        raise ValueError(f"constant_bound_config has six bounds (fwd, dlhs, drhs; lhs and rhs of each), got {bounds}")
    compiled = dot_config(recipe("aqt_fp8_full", exclude=None)[0], lhs_weight=False, rhs_weight=True)
    assert compiled is not None
    names = [f"{matmul}_{side}" for matmul in ("fwd", "dlhs", "drhs") for side in ("lhs", "rhs")]
    changes = {name: {"calibration": f"constant,{bound}"} for name, bound in zip(names, bounds, strict=False)}
    return compiled.with_operands(**changes)


def _table(config: Any) -> str:
    path = getattr(config, "quant_cfg_path", "")
    if not path:
        raise ValueError("quantization=intmp needs quant_cfg_path, a JSON file of bits by layer")
    return path


def manual_quantize(tensor: Any, calibration_method: str, dtype: Any = jnp.float8_e4m3fn) -> QArray:
    """Quantize a tensor with one scale for a fixed range, "fixed,low,high".

    >>> manual_quantize(jnp.ones((2, 2)), "fixed,-224,224").scale.tolist()
    [[0.5]]
    """
    method = get_calibration(calibration_method)
    if not isinstance(method, Fixed):
        raise ValueError(
            f"manual_quantize takes a range that is fixed, such as 'fixed,-224,224'; got {calibration_method!r}"
        )
    return quantize(tensor, dtype, calibration_method=method)


def in_convert_mode(quant: Quantization | None) -> bool:
    """Whether the mode of a quantization is "convert"."""
    return quant is not None and quant.quant_mode == "convert"


def in_serve_mode(quant: Quantization | None) -> bool:
    """Whether the mode of a quantization is "serve"."""
    return quant is not None and quant.quant_mode == "serve"


def match_quantized_params(quantized: Any, params: Any) -> list[tuple[Any, ...]]:
    """The paths of the float parameters that are quantized in `quantized`."""
    stored = {path for path, leaf in _leaves(quantized) if is_qarray(leaf)}
    found = [path for path, _ in _leaves(params) if path in stored]
    if missing := stored - set(found):
        raise ValueError(f"quantized parameters without a float one: {sorted(map(str, missing))[:5]}")
    return found


def remove_quantized_params(params: Any, quantized: Any) -> Any:
    """Float parameters with `{}` in place of those that are quantized in `quantized`.

    >>> import octavo
    >>> params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    >>> remove_quantized_params(params, {"w": octavo.quantize(params["w"], "int8"), "b": params["b"]})["w"]
    {}
    """
    gone = set(match_quantized_params(quantized, params))
    return jax.tree_util.tree_map_with_path(lambda path, leaf: {} if path in gone else leaf, params)


def _leaves(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    return jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_qarray)
