"""The `quantization_config` of compressed-tensors: groups of modules, each with the arguments of its weights."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo._names import unknown_name
from octavo.files.errors import FileError
from octavo.files.layouts.base import matches
from octavo.files.layouts.config import Scheme, choice, count, module_of, strings
from octavo.files.layouts.fp8 import parse_block

FORMATS = (
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)
_CLASSES = ("Linear", "Embedding")


@dataclasses.dataclass(frozen=True)
class Group:
    """A group of modules in the configuration, and how their weights are quantized."""

    targets: tuple[str, ...]
    bits: int
    integer: bool
    size: int | None
    block: tuple[int, int] | None

    @property
    def by_class(self) -> bool:
        """Whether the group targets a class of modules, such as Linear."""
        return any(target in _CLASSES for target in self.targets)

    def names(self, module: str) -> bool:
        """Whether the group targets a module by name."""
        return any(target not in _CLASSES and matches(target, module) for target in self.targets)

    def integer_bits(self, name: str) -> int:
        """The bits of integers that are packed into words."""
        if not self.integer or self.bits < 2:
            kind = "int" if self.integer else "float"
            raise FileError(f"{name!r} is packed into int32 words as {kind}{self.bits}; Octavo reads int2 to int8")
        return self.bits

    def group_size(self, name: str) -> int:
        """The inputs that share a scale, of a weight that has several scales per output."""
        if self.size is None or self.size < 1:
            raise FileError(f"{name!r} has several scales per output, but the configuration gives no group_size")
        return self.size


def parse_groups(config: Mapping[str, Any]) -> tuple[Group, ...]:
    """The groups of a configuration whose weights are quantized."""
    _known(config.get("format"))
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise FileError(f"quantization_config has the sparsity {sparsity['format']!r}; Octavo reads dense weights only")
    table = config.get("config_groups")
    if not isinstance(table, dict) or not table:
        raise FileError("quantization_config of compressed-tensors has no config_groups; is it complete?")
    groups = []
    for name, group in table.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        _known(group.get("format"))
        kinds = {"int": True, "float": False}
        bits = choice(weights, "num_bits", {n: n for n in range(1, 9)})
        size = None if weights.get("group_size") is None else count(weights, "group_size")
        targets = strings(group, "targets")
        if not targets:
            raise FileError(f"quantization_config has the group {name!r} without targets; is it complete?")
        block = parse_block(weights, "block_structure")
        block = (1, size) if block is None and size is not None and size > 0 else block
        groups.append(Group(targets, bits, choice(weights, "type", kinds, default="int"), size, block))
    return tuple(groups)


def _known(fmt: Any) -> None:
    if fmt is not None and fmt not in FORMATS:
        raise FileError(f"compressed-tensors format {fmt!r} is not read; {unknown_name(str(fmt), list(FORMATS))}")


def format_name(scheme: Scheme) -> str:
    """The compressed-tensors format in which a scheme is written."""
    if scheme.format in ("nvfp4", "mxfp4"):
        return f"{scheme.format}-pack-quantized"
    return "float-quantized" if scheme.format.startswith("float8") else "pack-quantized"


def make_config(schemes: Mapping[str, Scheme | None]) -> dict[str, Any]:
    """The configuration for weights of these schemes: one group for each scheme, by name if there are several."""
    found: dict[str, dict[str, Any]] = {}
    for name, scheme in schemes.items():
        if scheme is not None:
            rest = {"input_activations": None, "output_activations": None, "format": format_name(scheme)}
            group = {"targets": [], "weights": _weights(scheme), **rest}
            found.setdefault(repr(group), group)["targets"].append(module_of(name))
    groups = list(found.values())
    if not groups:
        raise FileError(f"none of {len(schemes)} weights is quantized; write a float model without a layout")
    if len(groups) == 1:
        groups[0]["targets"] = ["Linear"]
    formats = {group["format"] for group in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": [module_of(name) for name, scheme in schemes.items() if scheme is None],
        "kv_cache_scheme": None,
    }


def _weights(scheme: Scheme) -> dict[str, Any]:
    rows, columns = scheme.tile
    fmt = format_name(scheme)
    size = block = None
    if rows > 1:
        strategy, block = "block", [rows, columns]
    elif columns > 0:
        strategy, size = "tensor_group" if scheme.format == "nvfp4" else "group", columns
    else:
        strategy = "channel" if rows == 1 or fmt == "pack-quantized" else "tensor"
    args = {
        "num_bits": scheme.qtype.bits,
        "type": "int" if fmt == "pack-quantized" else "float",
        "symmetric": not scheme.zero_point,
        "strategy": strategy,
        "group_size": size,
        "block_structure": block,
        "dynamic": False,
        "actorder": None,
    }
    scales = {"nvfp4": "torch.float8_e4m3fn", "mxfp4": "torch.uint8"}
    return args | {"scale_dtype": scales[scheme.format]} if scheme.format in scales else args
