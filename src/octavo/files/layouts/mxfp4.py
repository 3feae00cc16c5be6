"""MXFP4 as gpt-oss has it: `NAME_blocks` uint8 [..., out, groups, 16] and `NAME_scales` uint8 [..., out, groups].

A byte has two e2m1 values, the first in its low half; 32 of them share a power of two, `2**(scale - 127)`. The weight
NAME is read as [..., out, in]; the model's own code transposes the last two axes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from octavo.files.errors import FileError
from octavo.files.layouts.assembly import check_tensor, checked_shape, fp4_weight
from octavo.files.layouts.base import Layout, register_layout
from octavo.files.layouts.config import strings
from octavo.files.safetensors import SafeTensors
from octavo.qarray import QArray

_BYTES = (np.dtype(np.uint8),)


@register_layout
@dataclasses.dataclass(frozen=True)
class Mxfp4(Layout):
    """The layout of gpt-oss."""

    method: ClassVar[str] = "mxfp4"
    code_suffixes: ClassVar[Mapping[str, str]] = {"_blocks": ""}
    part_suffixes: ClassVar[tuple[str, ...]] = ("_scales",)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Layout":
        return cls(ignore=strings(config, "modules_to_not_convert"))

    def is_quantized(self, file: SafeTensors, name: str) -> bool:
        return f"{name}_blocks" in file

    def _scale(self, file: SafeTensors, name: str) -> str:
        return f"{name}_scales"

    def _shape(self, file: SafeTensors, name: str) -> tuple[int, ...]:
        shape = checked_shape(file, f"{name}_blocks", _BYTES, None)
        if len(shape) < 3 or shape[-1] != 16:
            raise FileError(f"{name}_blocks is {list(shape)}, not [..., out, groups, 16]; is this another layout?")
        check_tensor(file, f"{name}_scales", _BYTES, shape[:-1], "the blocks")
        return (*shape[:-2], 32 * shape[-2])

    def _read(self, file: SafeTensors, name: str) -> QArray:
        shape = self._shape(file, name)
        packed = file.read(f"{name}_blocks").reshape(*shape[:-1], shape[-1] // 2)
        return fp4_weight(packed, file.read(f"{name}_scales").view(ml_dtypes.float8_e8m0fnu), "mxfp4")
