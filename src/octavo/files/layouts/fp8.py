"""Block-scaled 8-bit floats as DeepSeek-V3 writes them (`quant_method` "fp8").

`weight` is F8_E4M3 [out, in] and `weight_scale_inv` has one scale per 128x128 block, [ceil(out/128), ceil(in/128)];
`value = weight * scale`, despite the name. The last blocks may be partly empty. Without `weight_block_size`
there is one scale for the weight or for each row, in `weight_scale` or `weight_scale_inv`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from octavo.files.errors import FileError
from octavo.files.layouts.assembly import FLOATS, block_weight, checked_shape
from octavo.files.layouts.base import Layout, register_layout
from octavo.files.layouts.config import strings
from octavo.files.safetensors import SafeTensors
from octavo.qarray import QArray

FLOAT8 = tuple(map(np.dtype, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)))
_SCALES = (*FLOATS, np.dtype(ml_dtypes.float8_e8m0fnu))


@register_layout
@dataclasses.dataclass(frozen=True)
class Fp8(Layout):
    """The layout of DeepSeek's block-scaled fp8."""

    method: ClassVar[str] = "fp8"
    code_suffixes: ClassVar[Mapping[str, str]] = {".weight": ".weight"}
    part_suffixes: ClassVar[tuple[str, ...]] = (".weight_scale_inv", ".weight_scale")
    ignored_suffixes: ClassVar[tuple[str, ...]] = (".input_scale", ".activation_scale", ".k_scale", ".v_scale")

    block: tuple[int, int] | None = (128, 128)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Layout":
        ignore = strings(config, "modules_to_not_convert") + strings(config, "ignored_layers")
        return cls(parse_block(config, "weight_block_size"), ignore=ignore)

    def is_quantized(self, file: SafeTensors, name: str) -> bool:
        if name not in file or file.info(name).dtype not in FLOAT8:
            return False
        if self._find_scale(file, name) is not None:
            return True
        if self.ignores(name.removesuffix(".weight")):
            return False
        raise FileError(f"{name!r} is {file.info(name).dtype.name} but has no scales; is a shard missing?")

    def _find_scale(self, file: SafeTensors, name: str) -> str | None:
        return next((name + end for end in ("_scale_inv", "_scale") if name + end in file), None)

    def _scale(self, file: SafeTensors, name: str) -> str:
        scale = self._find_scale(file, name) or f"{name}_scale_inv"
        checked_shape(file, scale, _SCALES, None)
        return scale

    def _shape(self, file: SafeTensors, name: str) -> tuple[int, ...]:
        return checked_shape(file, name, FLOAT8, None)

    def _read(self, file: SafeTensors, name: str) -> QArray:
        scale = self._scale(file, name)
        if len(file.info(name).shape) < 2:
            raise FileError(f"{name!r} is {list(file.info(name).shape)}; a weight in fp8 has at least two axes")
        return block_weight(name, file.read(name), file.read(scale), self.block)


def parse_block(config: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    """Rows and columns of a block."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise FileError(f"quantization_config has {key} {value!r}; it is the rows and columns of a block")
    return value[0], value[1]
