"""Kernels for accelerators, in Pallas, on plain arrays; `octavo.ops` decides when they run.

They are imported when first asked for: Pallas takes a while, and most programs never meet it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.kernels.pallas.blocks import FLOAT8, type_refusal
    from octavo.kernels.pallas.fused import matmul_refusal, quantized_matmul
    from octavo.kernels.pallas.gpu import gpu_gmm, gpu_tgmm
    from octavo.kernels.pallas.grouped import gmm, gmm_refusal
    from octavo.kernels.pallas.tiles import Problem, Tiling, choose, tiled
    from octavo.kernels.pallas.transposed import tgmm, tgmm_refusal

FUSED = "octavo_matmul"
NAMES = ("octavo_gmm", "octavo_tgmm", FUSED)
"""How the kernels are called in a program."""

_HOMES = {
    "blocks": ("FLOAT8", "type_refusal"),
    "fused": ("matmul_refusal", "quantized_matmul"),
    "gpu": ("gpu_gmm", "gpu_tgmm"),
    "grouped": ("gmm", "gmm_refusal"),
    "tiles": ("Problem", "Tiling", "choose", "tiled"),
    "transposed": ("tgmm", "tgmm_refusal"),
}

__all__ = [
    "FLOAT8",
    "FUSED",
    "NAMES",
    "Problem",
    "Tiling",
    "choose",
    "gmm",
    "gmm_refusal",
    "gpu_gmm",
    "gpu_tgmm",
    "matmul_refusal",
    "quantized_matmul",
    "tgmm",
    "tgmm_refusal",
    "tiled",
    "type_refusal",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
