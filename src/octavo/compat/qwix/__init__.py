"""Qwix's public names, as far as Octavo has them: `from octavo.compat import qwix` in place of `import qwix`.

They are Octavo's own functions and classes, which take Qwix's arguments.

>>> from octavo.compat import qwix
>>> rule = qwix.QtRule(module_path=".*", weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
>>> qwix.QtProvider([rule]).rules[0].weight_qtype
'int8'
"""

from collections.abc import Mapping
from typing import Any

from octavo.compat.qwix import contrib
from octavo.frameworks import WithAux, quantize_model, quantize_params
from octavo.frameworks.litert import OdmlConversionProvider, OdmlQatProvider
from octavo.frameworks.nnx import QuantStat
from octavo.frameworks.prequantized import flatten_prequantized, process_prequantized_params
from octavo.lora import LoraProvider, LoraRule, apply_lora_to_model
from octavo.ops import conv_general_dilated, dot, dot_general, einsum, ragged_dot, ragged_dot_general
from octavo.qarray import QArray, dequantize, quantize
from octavo.rules import QtRule, QuantizationRule
from octavo.transform import PtqProvider, QtProvider, QuantizationProvider, get_current_rule

__all__ = [
    "BoxedParamProvider",
    "LoraProvider",
    "LoraRule",
    "OdmlConversionProvider",
    "OdmlQatProvider",
    "PtqProvider",
    "QArray",
    "QtProvider",
    "QtRule",
    "QuantStat",
    "QuantizationProvider",
    "QuantizationRule",
    "WithAux",
    "apply_lora_to_model",
    "contrib",
    "conv_general_dilated",
    "dequantize",
    "dot",
    "dot_general",
    "einsum",
    "from_qwix",
    "get_current_rule",
    "process_prequantized_params",
    "quantize",
    "quantize_model",
    "quantize_params",
    "ragged_dot",
    "ragged_dot_general",
    "restore_quantization_rules",
    "to_qwix",
]

BoxedParamProvider = PtqProvider
"""Qwix's base of the providers that store parameters; here they have one class."""


def restore_quantization_rules(
    checkpoint_params: Mapping[Any, Any], rule_type: Any, *, tile_size: Any = None, **fields: Any
) -> list[Any]:
    """The rules that parameters were quantized by, one for each module; numbers in paths match any number.

    Args:
      checkpoint_params: Parameters as `process_prequantized_params` takes them.
      rule_type: `QuantizationRule` or `QtRule`.
      tile_size: The tiles of all of them.
      **fields: Other fields of the rules; `act_qtype` is the type of the weight if it is not among them.

    >>> import jax.numpy as jnp
    >>> codes = {"qvalue": jnp.ones((64, 2), jnp.int8), "scale": jnp.ones((2, 2))}
    >>> restore_quantization_rules({"layers": {0: {"kernel": codes}}}, QuantizationRule, tile_size=32, act_qtype=None)
    [QuantizationRule(module_path='layers/[^/]+', weight_qtype='int8', tile_size=32)]
    """
    rules = {}
    for path, leaf in flatten_prequantized(checkpoint_params):
        if isinstance(leaf, Mapping):
            parts = path[:-2] if path[-1] == "array" else path[:-1]
            where = "/".join("[^/]+" if isinstance(part, int) else str(part) for part in parts)
            method = "absmax" if leaf.get("zero_point") is None else "minmax"
            types = {"weight_qtype": leaf["qvalue"].dtype, "act_qtype": leaf["qvalue"].dtype} | fields
            rules[where] = rule_type(module_path=where, tile_size=tile_size, weight_calibration_method=method, **types)
    return list(rules.values())


def from_qwix(array: Any) -> QArray:
    """A `qwix.QArray` as a QArray of the same arrays."""
    return QArray(array.qvalue, array.scale, array.zero_point, array.qtype)


def to_qwix(array: QArray) -> Any:
    """A QArray as a `qwix.QArray`, which kernels of other libraries take; its scales have one level."""
    import qwix  # pyrefly: ignore

    if array.outer_scale is not None or array.padding:
        raise ValueError("qwix.QArray has neither scales of two levels nor padding: use another format or tile")
    plain = array.unpack()
    name = plain.qtype.name
    qtype = plain.qvalue.dtype if name == plain.qvalue.dtype.name else name
    return qwix.QArray(plain.qvalue, plain.scale.astype(plain.dtype), plain.zero_point, qtype)
