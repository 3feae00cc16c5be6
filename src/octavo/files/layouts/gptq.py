"""GPTQ as AutoGPTQ and GPTQModel write it.

Eight 4-bit codes share an int32, the first in the lowest bits, along the inputs in `qweight` [in/8, out] and along the
outputs in `qzeros` [groups, out/8]; 2, 3 and 8 bits likewise, as one bit stream. `scales` are [groups, out], and
`value = (code - zero) * scale`. The format "gptq" stores `zero - 1` modulo `2**bits`, "gptq_v2" the zero itself.

`g_idx` [in] has the group of each input. With activation order (`desc_act`) groups are out of order, which a `QArray`
cannot represent: such a weight is read as a float array.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from octavo.files import bits as streams
from octavo.files.errors import FileError
from octavo.files.layouts.assembly import check_integers, unsigned_codes
from octavo.files.layouts.base import Layout, register_layout
from octavo.files.layouts.config import Scheme, choice, count, one_scheme, strings
from octavo.files.layouts.qweight import QweightLayout, part_name
from octavo.qarray import QArray

_BITS = (2, 3, 4, 8)


@register_layout
@dataclasses.dataclass(frozen=True)
class Gptq(QweightLayout):
    """The layout of AutoGPTQ."""

    method: ClassVar[str] = "gptq"
    part_suffixes: ClassVar[tuple[str, ...]] = (".qzeros", ".scales", ".g_idx")

    v2: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Layout":
        dynamic = config.get("dynamic") or {}
        if not isinstance(dynamic, dict) or not all(str(key).startswith("-:") for key in dynamic):
            raise FileError(
                "quantization_config of gptq has 'dynamic' with bits of some modules' own; Octavo reads one"
            )
        kinds = {"gptq": False, "gptq_v2": True}
        v2 = choice(config, "checkpoint_format", kinds, default="gptq")
        bits = choice(config, "bits", {n: n for n in _BITS})
        left = tuple(f"re:{key[2:]}" for key in dynamic)
        return cls(bits, count(config, "group_size"), v2, ignore=strings(config, "modules_to_not_convert") + left)

    def _code_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return columns, rows * 32 // self.bits

    def _codes(self, qweight: np.ndarray, qzeros: np.ndarray, out: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        codes, zeros = streams.unpack(qweight.T, self.bits, size), streams.unpack(qzeros, self.bits, out).T
        return codes, zeros if self.v2 else (zeros + np.uint8(1)) & np.uint8(2**self.bits - 1)

    @classmethod
    def write(cls, name: str, q: QArray) -> dict[str, np.ndarray]:
        check_integers(name, q, _BITS)
        bits = q.qtype.bits
        if q.shape[0] * bits % 32 or q.shape[1] * bits % 32:
            raise FileError(f"{name!r} {list(q.shape)}: gptq packs {bits} bits into 32; leave this weight in float")
        fields, zeros, scale = unsigned_codes(q)
        # Asymmetric weights are "gptq_v2": readers of the other format differ on what a zero point of 0 is.
        zeros = np.full(scale.shape, 2 ** (bits - 1) - 1, np.uint8) if zeros is None else zeros
        return {
            part_name(name, "qweight"): np.ascontiguousarray(streams.pack(fields, bits, np.int32).T),
            part_name(name, "qzeros"): streams.pack(np.ascontiguousarray(zeros.T), bits, np.int32),
            part_name(name, "scales"): np.ascontiguousarray(scale.T),
            part_name(name, "g_idx"): (np.arange(q.shape[1]) // q.tile_shape[1]).astype(np.int32),
        }

    @classmethod
    def config_for(cls, schemes: Mapping[str, Scheme | None]) -> dict[str, Any]:
        scheme, plain = one_scheme("gptq", schemes)
        return {
            "quant_method": "gptq",
            "bits": scheme.qtype.bits,
            "group_size": scheme.tile[1],
            "sym": not scheme.zero_point,
            "desc_act": False,
            "checkpoint_format": "gptq_v2" if scheme.zero_point else "gptq",
            "pack_dtype": "int32",
            "lm_head": "lm_head" not in plain,
            "modules_to_not_convert": plain,
        }
