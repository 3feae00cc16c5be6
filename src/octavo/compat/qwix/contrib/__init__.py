"""The modules of `qwix.contrib`, by the same names: algorithms of `octavo.ptq` behind Qwix's functions."""

from octavo.compat.qwix.contrib import gptq, padded_ptq

__all__ = ["gptq", "padded_ptq"]
