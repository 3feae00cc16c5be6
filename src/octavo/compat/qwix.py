"""Qwix's public names, as far as Octavo has them: `from octavo.compat import qwix` in place of `import qwix`.

They are Octavo's own functions and classes, which take Qwix's arguments.

>>> from octavo.compat import qwix
>>> rule = qwix.QtRule(module_path=".*", weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
>>> qwix.QtProvider([rule]).rules[0].weight_qtype
'int8'
"""

from octavo.frameworks import WithAux, quantize_model, quantize_params
from octavo.frameworks.nnx import QuantStat
from octavo.lora import LoraProvider, LoraRule, apply_lora_to_model
from octavo.ops import conv_general_dilated, dot, dot_general, einsum, ragged_dot, ragged_dot_general
from octavo.qarray import QArray, dequantize, quantize
from octavo.rules import QtRule, QuantizationRule
from octavo.transform import PtqProvider, QtProvider, QuantizationProvider, get_current_rule

__all__ = [
    "LoraProvider",
    "LoraRule",
    "PtqProvider",
    "QArray",
    "QtProvider",
    "QtRule",
    "QuantStat",
    "QuantizationProvider",
    "QuantizationRule",
    "WithAux",
    "apply_lora_to_model",
    "conv_general_dilated",
    "dequantize",
    "dot",
    "dot_general",
    "einsum",
    "get_current_rule",
    "quantize",
    "quantize_model",
    "quantize_params",
    "ragged_dot",
    "ragged_dot_general",
]
