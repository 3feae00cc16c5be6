"""Quantized layouts of other tools in safetensors files, selected by the `quantization_config` of `config.json`.

A layout reads the weights of a file by their names in the float model, each as a `QArray` of shape [out, in] with the
codes and scales of the file, or as an array where it is not quantized.
"""

from octavo.files.layouts.awq import Awq
from octavo.files.layouts.base import Layout, WeightInfo, get_layout, layout_of, register_layout
from octavo.files.layouts.compressed_tensors import CompressedTensors
from octavo.files.layouts.config import Scheme
from octavo.files.layouts.fp8 import Fp8
from octavo.files.layouts.gptq import Gptq
from octavo.files.layouts.mxfp4 import Mxfp4

__all__ = [
    "Awq",
    "CompressedTensors",
    "Fp8",
    "Gptq",
    "Layout",
    "Mxfp4",
    "Scheme",
    "WeightInfo",
    "get_layout",
    "layout_of",
    "register_layout",
]
