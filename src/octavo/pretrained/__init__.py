"""Pretrained models: opened from the files of several programs, converted to low precision, and written again."""

from octavo.pretrained import gguf, huggingface, llama2c, own, to_huggingface
from octavo.pretrained.bert import Encoder, open_encoder
from octavo.pretrained.convert import Summary, convert_model, quantizers_of
from octavo.pretrained.registry import Kind, kinds, open_model, register_kind
from octavo.pretrained.source import Leaf, Source
from octavo.pretrained.tokenizer import TextTokenizer
from octavo.pretrained.weights import weight_rules

__all__ = [
    "Encoder",
    "Kind",
    "Leaf",
    "Source",
    "Summary",
    "TextTokenizer",
    "convert_model",
    "kinds",
    "open_encoder",
    "open_model",
    "quantizers_of",
    "register_kind",
    "weight_rules",
]

del gguf, huggingface, llama2c, own, to_huggingface  # imported so that what they register is known
