"""Post-training quantization with calibration data, for any function and number format.

The outputs of a weight matmul change least if the rounding of its weights depends on its inputs. One pass over
calibration data collects the statistics of all inputs; scales are searched and weights rounded with their help.
"""

from octavo.ptq.api import quantize, quantize_weights
from octavo.ptq.autoround import autoround
from octavo.ptq.awq import awq
from octavo.ptq.budget import assign
from octavo.ptq.distillation import distill
from octavo.ptq.gptq import gptq
from octavo.ptq.low_rank import eora
from octavo.ptq.methods import QuantizedWeight, method_names, quantize_weight
from octavo.ptq.saved import load_statistics, save_statistics
from octavo.ptq.scales import Scales, scales_of, search
from octavo.ptq.sensitivity import Option, sensitivity
from octavo.ptq.smooth import Fold, smooth
from octavo.ptq.statistics import Statistics, collect_statistics

__all__ = [
    "Fold",
    "Option",
    "QuantizedWeight",
    "Scales",
    "Statistics",
    "assign",
    "autoround",
    "awq",
    "collect_statistics",
    "distill",
    "eora",
    "gptq",
    "load_statistics",
    "method_names",
    "quantize",
    "quantize_weight",
    "quantize_weights",
    "save_statistics",
    "scales_of",
    "search",
    "sensitivity",
    "smooth",
]
