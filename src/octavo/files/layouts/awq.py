"""AWQ as AutoAWQ writes it, in its "gemm" version.

Eight 4-bit codes of neighbouring outputs share an int32, in `qweight` [in, out/8] and `qzeros` [groups, out/8], the
lowest first those of outputs 0, 2, 4, 6, 1, 3, 5, 7. `scales` are [groups, out]; `value = (field - zero) * scale`.
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

_ORDER = np.asarray([0, 2, 4, 6, 1, 3, 5, 7])
_PLACE = np.argsort(_ORDER)


@register_layout
@dataclasses.dataclass(frozen=True)
class Awq(QweightLayout):
    """The layout of AutoAWQ."""

    method: ClassVar[str] = "awq"
    part_suffixes: ClassVar[tuple[str, ...]] = (".qzeros", ".scales")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Layout":
        lowered = {key: value.lower() if isinstance(value, str) else value for key, value in config.items()}
        choice(lowered, "version", {"gemm": True}, default="gemm")
        # AutoAWQ's own quant_config.json has other names for the same.
        lowered = {"bits": lowered.get("w_bit"), "group_size": lowered.get("q_group_size")} | lowered
        choice(lowered, "bits", {4: 4})
        return cls(4, count(lowered, "group_size"), ignore=strings(config, "modules_to_not_convert"))

    def _code_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return 8 * columns, rows

    def _codes(self, qweight: np.ndarray, qzeros: np.ndarray, out: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        return np.ascontiguousarray(_unpack(qweight).T), _unpack(qzeros).T

    @classmethod
    def write(cls, name: str, q: QArray) -> dict[str, np.ndarray]:
        check_integers(name, q, (4,))
        if q.shape[0] % 8:
            raise FileError(f"{name!r} {list(q.shape)}: awq packs outputs in eights; leave this weight in float")
        fields, zeros, scale = unsigned_codes(q)
        zeros = np.full(scale.shape, 8, np.uint8) if zeros is None else zeros
        return {
            part_name(name, "qweight"): _pack(fields.T),
            part_name(name, "qzeros"): _pack(zeros.T),
            part_name(name, "scales"): np.ascontiguousarray(scale.T),
        }

    @classmethod
    def config_for(cls, schemes: Mapping[str, Scheme | None]) -> dict[str, Any]:
        scheme, plain = one_scheme("awq", schemes)
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": scheme.tile[1],
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": plain,
        }


def _unpack(words: np.ndarray) -> np.ndarray:
    fields = streams.unpack(words, 4, 8 * words.shape[1])
    return fields.reshape(*words.shape, 8)[..., _PLACE].reshape(fields.shape)


def _pack(fields: np.ndarray) -> np.ndarray:
    eights = np.ascontiguousarray(fields).reshape(fields.shape[0], -1, 8)[..., _ORDER]
    return streams.pack(eights.reshape(fields.shape), 4, np.int32)
