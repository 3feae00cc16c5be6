"""The compressed-tensors layouts of vLLM and LLM Compressor.

pack-quantized: `weight_packed` int32 [out, in/8] with fields of 4 (or 2 to 8) bits, the first lowest, codes stored with
`2**(bits-1)` added; `weight_scale` [out, groups]; `weight_zero_point` packed likewise along the outputs;
`weight_shape`; and `weight_g_idx` where groups are out of order, in which case the weight is read as its values.
int-quantized, float-quantized, naive-quantized, mxfp8-quantized: `weight` int8 or fp8 and `weight_scale`.
nvfp4-pack-quantized: `weight_packed` uint8 [out, in/2], two e2m1 to a byte, the first in the low half; `weight_scale`
e4m3 [out, in/16]; and `weight_global_scale`, by which scales are divided. mxfp4-pack-quantized: the same without it,
and uint8 powers of two, biased by 127, for 32 values.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from octavo.files import bits as streams
from octavo.files.errors import FileError
from octavo.files.layouts.assembly import (
    FLOATS,
    WORDS,
    block_weight,
    check_groups,
    check_integers,
    check_tensor,
    checked_shape,
    fp4_weight,
    integer_weight,
    unsigned_codes,
)
from octavo.files.layouts.base import Layout, register_layout
from octavo.files.layouts.compressed_tensors_config import Group, make_config, parse_groups
from octavo.files.layouts.config import Scheme, strings
from octavo.files.layouts.fp8 import FLOAT8
from octavo.files.safetensors import SafeTensors
from octavo.numerics import IntFormat
from octavo.qarray import QArray

_BYTE = np.dtype(np.uint8)
_INT8 = np.dtype(np.int8)
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_SHAPES = (np.dtype(np.int64), np.dtype(np.int32))
_FP8 = tuple(dtype.name for dtype in FLOAT8)
_FP4_SCALES = {"nvfp4": _E4M3, "mxfp4": _BYTE}
"""The dtypes of the scales of the formats with two codes to a byte."""


@register_layout
@dataclasses.dataclass(frozen=True)
class CompressedTensors(Layout):
    """The layouts of compressed-tensors, selected for each weight by its tensors in the file."""

    method: ClassVar[str] = "compressed-tensors"
    code_suffixes: ClassVar[Mapping[str, str]] = {".weight_packed": ".weight"}
    part_suffixes: ClassVar[tuple[str, ...]] = (
        ".weight_scale",
        ".weight_shape",
        ".weight_zero_point",
        ".weight_g_idx",
        ".weight_global_scale",
    )
    ignored_suffixes: ClassVar[tuple[str, ...]] = tuple(
        f".{what}_{part}"
        for what in ("input", "output", "k", "v", "q")
        for part in ("scale", "zero_point", "global_scale", "g_idx")
    )

    groups: tuple[Group, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Layout":
        return cls(parse_groups(config), ignore=strings(config, "ignore"))

    def is_quantized(self, file: SafeTensors, name: str) -> bool:
        if not name.endswith(".weight"):
            return False
        if f"{name}_packed" in file:
            return True
        if name not in file or file.info(name).dtype not in (*FLOAT8, _INT8):
            return False
        if f"{name}_scale" in file:
            return True
        if self.ignores(name.removesuffix(".weight")):
            return False
        raise FileError(f"{name!r} is {file.info(name).dtype.name} but has no {name}_scale; is a shard missing?")

    def _scale(self, file: SafeTensors, name: str) -> str:
        checked_shape(file, f"{name}_scale", (*FLOATS, _E4M3, _E8M0, _BYTE), None)
        return f"{name}_scale"

    def group(self, name: str) -> Group:
        """The group of a weight: one that names it, else one for all linear layers."""
        module = name.removesuffix(".weight")
        named = [group for group in self.groups if group.names(module)]
        found = named or [group for group in self.groups if group.by_class]
        if not found:
            raise FileError(f"{name!r} is quantized, but no group of the quantization_config is for it")
        return found[0]

    def _shape(self, file: SafeTensors, name: str) -> tuple[int, ...]:
        if f"{name}_packed" not in file:
            return checked_shape(file, name, (*FLOAT8, _INT8), None)
        packed = checked_shape(file, f"{name}_packed", (*WORDS, _BYTE), 2)
        if file.info(f"{name}_packed").dtype == _BYTE:
            return packed[0], 2 * packed[1]
        return self._logical(file, name, packed)

    def _logical(self, file: SafeTensors, name: str, packed: tuple[int, ...]) -> tuple[int, int]:
        """The shape of a weight packed into words: that of the file, if it agrees with the words."""
        bits = self.group(name).integer_bits(name)
        out, size = packed[0], packed[1] * 32 // bits
        if f"{name}_shape" in file:
            check_tensor(file, f"{name}_shape", _SHAPES, (2,), "matrices")
            given = file.read(f"{name}_shape").tolist()
            if given[0] != out or given[1] < 0 or -(-given[1] * bits // 32) != packed[1]:
                raise FileError(f"{name}_shape says {given}, which is not what fits the words {list(packed)}")
            size = given[1]
        return out, size

    def _read(self, file: SafeTensors, name: str) -> QArray | np.ndarray:
        if f"{name}_packed" not in file:
            return self._read_unpacked(file, name)
        if file.info(f"{name}_packed").dtype == _BYTE:
            return self._read_fp4(file, name)
        return self._read_words(file, name)

    def _read_words(self, file: SafeTensors, name: str) -> QArray | np.ndarray:
        out, size = self._shape(file, name)
        bits = self.group(name).integer_bits(name)
        fields = streams.unpack(file.read(f"{name}_packed"), bits, size)
        checked_shape(file, f"{name}_scale", FLOATS, None)
        scale = file.read(f"{name}_scale")
        scale = np.broadcast_to(scale.reshape(1, 1) if scale.size == 1 else scale, _rows(scale, out))
        groups = scale.shape[1]
        group = -(-size // max(1, groups)) if groups <= 1 else self.group(name).group_size(name)
        g_idx = None
        if f"{name}_g_idx" in file:
            check_tensor(file, f"{name}_g_idx", WORDS, (size,), "the codes")
            g_idx = file.read(f"{name}_g_idx")
            g_idx = None if -1 in g_idx else g_idx  # -1 means no reordering
        g_idx = check_groups(name, g_idx, size, group, groups)
        zeros = self._zeros(file, name, bits, out, groups)
        return integer_weight(fields, zeros, np.ascontiguousarray(scale), bits=bits, group=group, g_idx=g_idx)

    def _zeros(self, file: SafeTensors, name: str, bits: int, out: int, groups: int) -> np.ndarray | None:
        part = f"{name}_zero_point"
        if part not in file:
            return None
        checked_shape(file, part, (*WORDS, _INT8), None)
        if file.info(part).dtype in WORDS:
            check_tensor(file, part, WORDS, (-(-out * bits // 32), groups), "the scales")
            return streams.unpack(file.read(part).T, bits, out).T
        plain = file.read(part).astype(np.int16) + (1 << (bits - 1))
        if plain.size == 1:
            plain = plain.reshape(1, 1)
        else:
            check_tensor(file, part, (_INT8,), (out, groups), "the scales")
        return np.broadcast_to(plain.astype(np.uint8), (out, groups))

    def _read_unpacked(self, file: SafeTensors, name: str) -> QArray:
        shape = self._shape(file, name)
        if len(shape) < 2:
            raise FileError(f"{name!r} is {list(shape)}; a quantized weight has at least two axes")
        weight, scale = file.read(name), file.read(self._scale(file, name))
        zeros = None
        if weight.dtype == _INT8 and f"{name}_zero_point" in file:
            check_tensor(file, f"{name}_zero_point", (_INT8,), scale.shape, "the scales")
            zeros = file.read(f"{name}_zero_point")
            zeros = zeros if zeros.any() else None
        scale = scale.view(_E8M0) if scale.dtype == _BYTE else scale
        kind = None
        if scale.dtype == _E8M0 and scale.ndim == weight.ndim and scale.shape[-1] * 32 == weight.shape[-1]:
            kind = "mxfp8" if weight.dtype == _E4M3 else "mxfp8_e5m2"
        return block_weight(name, weight, scale, self.group(name).block, qtype=kind, zero_point=zeros)

    def _read_fp4(self, file: SafeTensors, name: str) -> QArray:
        out, size = self._shape(file, name)
        checked_shape(file, f"{name}_scale", (_E4M3, _BYTE, _E8M0), 2)
        packed, scale = file.read(f"{name}_packed"), file.read(f"{name}_scale")
        tile = 16 if scale.dtype == _E4M3 else 32
        check_tensor(file, f"{name}_scale", (scale.dtype,), (out, size // tile), "the codes")
        if tile == 32:
            return fp4_weight(packed, scale.view(_E8M0), "mxfp4")
        check_tensor(file, f"{name}_global_scale", FLOATS, (1,), "the scales")
        divisor = file.read(f"{name}_global_scale").astype(np.float32)
        if not (np.isfinite(divisor[0]) and divisor[0] > 0):
            raise FileError(f"{name}_global_scale is {divisor[0]}; scales cannot be divided by it")
        return fp4_weight(packed, scale, "nvfp4", outer=(np.float32(1) / divisor).reshape(1, 1))

    @classmethod
    def write(cls, name: str, q: QArray) -> dict[str, np.ndarray]:
        if q.ndim != 2:
            raise FileError(f"{name!r} is {list(q.shape)}; compressed-tensors holds matrices [out, in]")
        scale = np.asarray(q.scale)
        if q.qtype.name in _FP4_SCALES:
            return _write_fp4(name, q, scale.view(_FP4_SCALES[q.qtype.name]))
        if q.qtype.name in _FP8:
            codes = np.asarray(q.qvalue)[: q.shape[0], : q.shape[1]]
            return {name: codes, f"{name}_scale": scale.reshape(1) if scale.size == 1 else scale}
        if not isinstance(q.qtype, IntFormat):
            kinds = ", ".join(["int2 to int8", "uint2", "uint4", "uint8", *_FP8, *_FP4_SCALES])
            raise FileError(f"{name!r} is {q.qtype.name}; compressed-tensors is written for {kinds}")
        check_integers(name, q, range(2, 9))
        fields, zeros, scale = unsigned_codes(q)
        found = {
            f"{name}_packed": streams.pack(fields, q.qtype.bits, np.int32),
            f"{name}_scale": np.ascontiguousarray(scale),
            f"{name}_shape": np.asarray(q.shape, np.int64),
        }
        if zeros is not None:
            packed = streams.pack(np.ascontiguousarray(zeros.T), q.qtype.bits, np.int32)
            found[f"{name}_zero_point"] = np.ascontiguousarray(packed.T)
        return found

    @classmethod
    def config_for(cls, schemes: Mapping[str, Scheme | None]) -> dict[str, Any]:
        return make_config(schemes)


def _write_fp4(name: str, q: QArray, scale: np.ndarray) -> dict[str, np.ndarray]:
    rows, tile = Scheme.of(q).tile
    if rows != 1 or q.shape[1] % tile:
        raise FileError(f"{name!r} {list(q.shape)}: {q.qtype.name} is written in whole tiles of {tile} inputs")
    found = {f"{name}_packed": np.asarray(q.pack(axis=-1).qvalue), f"{name}_scale": scale}
    if q.qtype.name == "nvfp4":
        outer = np.float32(1) if q.outer_scale is None else np.asarray(q.outer_scale).astype(np.float32)
        found[f"{name}_global_scale"] = (np.float32(1) / outer).reshape(1)
    return found


def _rows(scale: np.ndarray, out: int) -> tuple[int, int]:
    """The shape [out, groups] of the scales of a packed weight, after broadcasting."""
    if scale.size == 1:
        return out, 1
    if scale.ndim != 2 or scale.shape[0] != out:
        raise FileError(f"scales of shape {list(scale.shape)} do not fit a weight with {out} outputs; is it damaged?")
    return out, scale.shape[1]
