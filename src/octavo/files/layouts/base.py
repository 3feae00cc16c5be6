"""The interface of layouts, and their registry by `quant_method`."""

import abc
import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from octavo._names import unknown_name
from octavo.files.errors import FileError
from octavo.files.layouts.config import Scheme
from octavo.files.safetensors import Info, SafeTensors
from octavo.qarray import QArray


@dataclasses.dataclass(frozen=True)
class WeightInfo(Info):
    """A weight of the float model: the dtype of its values, its shape, and the bytes of all its tensors in the file.

    `quantized` says whether the file has codes for it, read as a `QArray` except where the layout documents otherwise.
    """

    quantized: bool = False


@dataclasses.dataclass(frozen=True)
class Layout(abc.ABC):
    """A layout of quantized weights in named tensors.

    Attributes:
      method: The `quant_method` in the configuration.
      code_suffixes: Suffixes of the tensors with a weight's codes, and the suffix of the weight that each replaces.
      part_suffixes: Suffixes of other tensors of a weight, such as its scales.
      ignored_suffixes: Suffixes of tensors that belong to no weight, such as scales of activations.
      ignore: Modules that the configuration leaves in float.
    """

    method: ClassVar[str]
    code_suffixes: ClassVar[Mapping[str, str]]
    part_suffixes: ClassVar[tuple[str, ...]]
    ignored_suffixes: ClassVar[tuple[str, ...]] = ()

    ignore: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)

    @classmethod
    @abc.abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Layout":
        """The layout that a `quantization_config` describes."""

    @abc.abstractmethod
    def is_quantized(self, file: SafeTensors, name: str) -> bool:
        """Whether the file has codes for a weight."""

    @abc.abstractmethod
    def _shape(self, file: SafeTensors, name: str) -> tuple[int, ...]: ...

    @abc.abstractmethod
    def _scale(self, file: SafeTensors, name: str) -> str:
        """The name of the tensor that has the scales of a weight."""

    @abc.abstractmethod
    def _read(self, file: SafeTensors, name: str) -> QArray | np.ndarray: ...

    def names(self, tensors: Iterable[str]) -> list[str]:
        """The names of the weights in the float model, in the order of their tensors.

        >>> from octavo.files.layouts import layout_of
        >>> layout = layout_of({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"})
        >>> layout.names(["up_proj.qweight", "up_proj.qzeros", "up_proj.scales", "norm.weight"])
        ['up_proj.weight', 'norm.weight']
        """
        tensors = list(tensors)
        there = set(tensors)
        found = {}
        for name in tensors:
            if weight := self._weight_of(name):
                found[weight] = True
            elif not self._belongs(name, there):
                found[name] = True
        return list(found)

    def _weight_of(self, name: str) -> str | None:
        for main, ending in self.code_suffixes.items():
            if name.endswith(main):
                return name.removesuffix(main) + ending
        return None

    def _belongs(self, name: str, there: set[str]) -> bool:
        if name.endswith(self.ignored_suffixes):
            return True
        bases = [name.removesuffix(part) for part in self.part_suffixes if name.endswith(part)]
        endings = {*self.code_suffixes, *self.code_suffixes.values()}
        return any(base + ending in there for base in bases for ending in endings)

    def info(self, file: SafeTensors, name: str) -> WeightInfo:
        """The shape and dtype of a weight, without reading it."""
        if not self.is_quantized(file, name):
            plain = file.info(name)
            return WeightInfo(plain.dtype, plain.shape, plain.nbytes)
        shape = self._shape(file, name)
        ending = next(e for e in self.code_suffixes.values() if name.endswith(e))
        base = name.removesuffix(ending)
        parts = {base + part for part in (*self.code_suffixes, *self.code_suffixes.values(), *self.part_suffixes)}
        total = sum(file.info(part).nbytes for part in parts if part in file)
        return WeightInfo(values_dtype(file.info(self._scale(file, name)).dtype), shape, total, True)

    def read(self, file: SafeTensors, name: str) -> QArray | np.ndarray:
        """A weight of shape [out, in]: its codes and scales, exactly, or the array if it is not quantized."""
        return self._read(file, name) if self.is_quantized(file, name) else file.read(name)

    def ignores(self, module: str) -> bool:
        """Whether the configuration leaves a module in float: by its name, a parent's name, or a `re:` pattern."""
        return any(matches(pattern, module) for pattern in self.ignore)

    # Writing is optional.

    @classmethod
    def write(cls, name: str, q: QArray) -> dict[str, np.ndarray]:
        """The tensors of a weight of shape [out, in]."""
        raise FileError(f"{name!r}: the layout {cls.method!r} is only read; write {_writable()}")

    @classmethod
    def config_for(cls, schemes: Mapping[str, Scheme | None]) -> dict[str, Any]:
        """The `quantization_config` for weights written by these schemes, None for those left in float."""
        raise FileError(f"the layout {cls.method!r} is only read; write {_writable()}")


def values_dtype(scale: np.dtype) -> np.dtype:
    """The dtype of values with scales of a dtype: the same, or float32 if that has fewer than two bytes."""
    return scale if scale.itemsize >= 2 else np.dtype(np.float32)


def matches(pattern: str, module: str) -> bool:
    """Whether a pattern of a configuration matches a module or one of its parents."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error as error:
            raise FileError(f"quantization_config has the invalid pattern {pattern!r}: {error}") from None
    return module == pattern or module.startswith(f"{pattern}.") or module.endswith(f".{pattern}")


_layouts: dict[str, type[Layout]] = {}


def register_layout(kind: type[Layout]) -> type[Layout]:
    """Register a layout by its `method`."""
    _layouts[kind.method] = kind
    return kind


def get_layout(method: str) -> type[Layout]:
    """The layout of a `quant_method`.

    >>> from octavo.files import layouts
    >>> layouts.get_layout("gptq").__name__
    'Gptq'
    """
    if method not in _layouts:
        raise FileError(f"quant_method {method!r} is not one Octavo reads; {unknown_name(method, list(_layouts))}")
    return _layouts[method]


def layout_of(quantization_config: Mapping[str, Any]) -> Layout:
    """The layout that the `quantization_config` of a `config.json` describes."""
    method = quantization_config.get("quant_method")
    if not isinstance(method, str):
        raise FileError(f"quantization_config has no quant_method; known: {', '.join(sorted(_layouts))}")
    return get_layout(method.lower()).from_config(quantization_config)


def _writable() -> str:
    return " or ".join(sorted(name for name, kind in _layouts.items() if "write" in vars(kind)))
