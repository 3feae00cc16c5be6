"""What the layouts of AWQ and GPTQ share: `qweight`, `qzeros` and `scales` in place of `weight`.

Codes are packed into int32 words. `scales` are [groups, out], and `value = (code - zero) * scale`.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from octavo.files.layouts.assembly import FLOATS, WORDS, check_groups, check_tensor, checked_shape, integer_weight
from octavo.files.layouts.base import Layout
from octavo.files.safetensors import SafeTensors
from octavo.qarray import QArray


@dataclasses.dataclass(frozen=True)
class QweightLayout(Layout):
    """A layout of integer codes in groups along the inputs."""

    code_suffixes: ClassVar[Mapping[str, str]] = {".qweight": ".weight"}

    bits: int
    group_size: int

    def is_quantized(self, file: SafeTensors, name: str) -> bool:
        return name.endswith(".weight") and part_name(name, "qweight") in file

    def _scale(self, file: SafeTensors, name: str) -> str:
        return part_name(name, "scales")

    def _shape(self, file: SafeTensors, name: str) -> tuple[int, ...]:
        out, size = self._code_shape(*checked_shape(file, part_name(name, "qweight"), WORDS, 2))
        scales, zeros = part_name(name, "scales"), part_name(name, "qzeros")
        groups = checked_shape(file, scales, FLOATS, 2)[0]
        check_tensor(file, scales, FLOATS, (groups, out), "the codes")
        check_tensor(file, zeros, WORDS, (groups, -(-out * self.bits // 32)), "the scales")
        return out, size

    def _read(self, file: SafeTensors, name: str) -> QArray | np.ndarray:
        out, size = self._shape(file, name)
        codes, zeros = self._codes(
            file.read(part_name(name, "qweight")), file.read(part_name(name, "qzeros")), out, size
        )
        scales = np.ascontiguousarray(file.read(part_name(name, "scales")).T)
        g_idx = None
        if ".g_idx" in self.part_suffixes and (part := part_name(name, "g_idx")) in file:
            check_tensor(file, part, WORDS, (size,), "the codes")
            g_idx = file.read(part)
        group = size if self.group_size == -1 else self.group_size
        g_idx = check_groups(name, g_idx, size, group, scales.shape[1])
        return integer_weight(codes, zeros, scales, bits=self.bits, group=group, g_idx=g_idx)

    @abc.abstractmethod
    def _code_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape [out, in] of a weight whose `qweight` has a shape."""

    @abc.abstractmethod
    def _codes(self, qweight: np.ndarray, qzeros: np.ndarray, out: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Unsigned codes [out, in] and zero points [out, groups]."""


def part_name(weight: str, part: str) -> str:
    """The name of a part of a weight.

    >>> part_name("up_proj.weight", "qzeros")
    'up_proj.qzeros'
    """
    return f"{weight.removesuffix('.weight')}.{part}"
