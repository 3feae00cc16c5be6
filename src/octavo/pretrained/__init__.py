"""Pretrained models: reading the files of several programs, conversion to low precision, and writing."""

from octavo.pretrained import gguf, huggingface, native
from octavo.pretrained.adapter import Adapter, read_adapter, with_adapter, write_adapter
from octavo.pretrained.calibrated import CalibrationData
from octavo.pretrained.convert import Summary, convert_model, param_quantizers
from octavo.pretrained.encoder import Encoder, open_encoder
from octavo.pretrained.export import Export, Request, export_model, exporters, register_exporter
from octavo.pretrained.model import Leaf, ModelFormat, PretrainedModel, model_formats, open_model, register_format
from octavo.pretrained.rotation import hadamard, rotated
from octavo.pretrained.weight_rules import weight_rules

__all__ = [
    "Adapter",
    "CalibrationData",
    "Encoder",
    "Export",
    "Leaf",
    "ModelFormat",
    "PretrainedModel",
    "Request",
    "Summary",
    "convert_model",
    "export_model",
    "exporters",
    "hadamard",
    "model_formats",
    "open_encoder",
    "open_model",
    "param_quantizers",
    "read_adapter",
    "register_exporter",
    "register_format",
    "rotated",
    "weight_rules",
    "with_adapter",
    "write_adapter",
]

del gguf, huggingface, native  # imported so that what they register is known
