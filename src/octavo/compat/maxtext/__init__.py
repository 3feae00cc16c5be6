"""The functions of MaxText's `quantizations.py`: the quantization of a config, and helpers."""

from typing import Any

import jax
import jax.numpy as jnp

from octavo._names import unknown_name
from octavo.calibration import Fixed, get_calibration
from octavo.compat import aqt, transformer_engine
from octavo.compat.maxtext.rules import (
    ConstantBoundConfig,
    NANOOFp8Provider,
    NvidaFp8Provider,
    PerTensorScales,
    QwixDotGeneral,
    QwixEinsum,
    QwixQuantization,
    get_fp8_full_qwix_rule_w_sparsity,
    get_qt_provider,
    get_quantization_rule,
    maybe_quantize_model,
)
from octavo.compat.quantization import (
    AqtQuantization,
    Fp8Einsum,
    Fp8Quantization,
    NANOOFp8Quantization,
    Quantization,
    get_quant_mode,
)
from octavo.ops import DotConfig
from octavo.qarray import QArray, is_qarray, quantize
from octavo.rules import dot_config, mixed_precision, recipe, recipes

__all__ = [
    "DEFAULT",
    "AqtQuantization",
    "ConstantBoundConfig",
    "Fp8Einsum",
    "Fp8Quantization",
    "NANOOFp8Provider",
    "NANOOFp8Quantization",
    "NvidaFp8Provider",
    "PerTensorScales",
    "Quantization",
    "QwixDotGeneral",
    "QwixEinsum",
    "QwixQuantization",
    "aqt_int",
    "configure_quantization",
    "constant_bounds",
    "get_fp8_full_qwix_rule_w_sparsity",
    "get_qt_provider",
    "get_quant_mode",
    "get_quantization_rule",
    "in_convert_mode",
    "in_serve_mode",
    "manual_quantize",
    "match_aqt_and_unquantized_param",
    "maybe_quantize_model",
    "remove_quantized_params",
]

DEFAULT = "__default__"
"""The entry of a mixed-precision table for all other layers."""


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
    methods: dict[str, Any] = {
        f"{side}_calibration_method": getattr(config, f"{side}_quantization_calibration_method", None) or "absmax"
        for side in ("act", "weight", "bwd")
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
            return QwixQuantization(**methods, **options)
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
    """e4m3 forward, e5m2 gradients and residuals, one scale per tensor: dynamic, or of six constant bounds."""
    if len(bounds) not in (0, 6):
        raise ValueError(f"constant_bound_config has six bounds (fwd, dlhs, drhs; lhs and rhs of each), got {bounds}")
    compiled = dot_config(recipe("aqt_fp8_full", exclude=None)[0], lhs_weight=False, rhs_weight=True)
    assert compiled is not None
    return ConstantBoundConfig(*bounds).apply(compiled)


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


def match_aqt_and_unquantized_param(aqt_params: Any, params: Any) -> Any:
    """The path of the float parameter of each QArray, in the structure of `aqt_params`.

    Args:
      aqt_params: The collection "aqt" of a model in mode "convert", or what `octavo.convert` returns.
      params: The float parameters.
    """
    left = [path for path, _ in _leaves(params)]

    def match(path: Any, leaf: Any) -> Any:
        if not is_qarray(leaf):
            return None
        candidates = (k for k in left if k[:-1] == path[: len(k) - 1] and getattr(k[-1], "key", None) != "bias")
        found = path if path in left else next(candidates, None)
        if found is None:
            raise ValueError(f"quantized parameters without a float one: {jax.tree_util.keystr(path)}")
        left.remove(found)
        return found

    return jax.tree_util.tree_map_with_path(match, aqt_params, is_leaf=is_qarray)


def remove_quantized_params(params: Any, aqt_vars: Any) -> Any:
    """Float parameters with `{}` in place of those that are quantized in `aqt_vars`.

    >>> import octavo
    >>> params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    >>> remove_quantized_params(params, {"w": octavo.quantize(params["w"], "int8"), "b": params["b"]})["w"]
    {}
    """
    matched = match_aqt_and_unquantized_param(aqt_vars, params)
    gone = set(jax.tree.leaves(matched, is_leaf=lambda x: isinstance(x, tuple)))
    return jax.tree_util.tree_map_with_path(lambda path, leaf: {} if path in gone else leaf, params)


def _leaves(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    return jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_qarray)
