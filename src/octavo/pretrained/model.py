"""A pretrained model: its configuration, and its parameters by path, loaded on demand; the formats of its files."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo import _remote
from octavo._tree import flatten_paths, unflatten_paths
from octavo.data import Tokenizer
from octavo.frameworks import served
from octavo.models import ModelConfig, abstract_params, apply
from octavo.models.module_params import check_shapes, param_shapes
from octavo.qarray import QArray, is_qarray
from octavo.rules import QuantizationRule


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter that is loaded on demand.

    Args:
      shape: Its shape.
      dtype: The dtype of its values in float.
      load: Reads it, as a NumPy array or a QArray.
      stored: How the file stores it, such as "float16" or "Q4_0".
      load_codes: Reads it in the layout that CPU kernels multiply, within a rounding of float32 of what `load` gives;
        None for `load`.
    """

    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], np.ndarray | QArray]
    stored: str = ""
    load_codes: Callable[[], np.ndarray | QArray] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter in its float dtype."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def load_checked(self, name: str, *, codes: bool = False) -> np.ndarray | QArray:
        """The parameter, by `load_codes` if asked for, with a warning if it has values that are not finite."""
        value: Any = self.load_codes() if codes and self.load_codes is not None else self.load()
        floats = np.asarray(value.scale if isinstance(value, QArray) else value).astype(np.float32, copy=False)
        # A sum is much cheaper than a mask, and finite for finite weights.
        if not np.isfinite(np.sum(floats)) and (count := int(np.sum(~np.isfinite(floats)))):
            what = "scales" if isinstance(value, QArray) else "values"
            warnings.warn(f"{name} has {count} {what} that are not finite: outputs will be NaN", stacklevel=2)
        return value

    @property
    def T(self) -> "Leaf":  # noqa: N802
        """The transposed parameter."""
        return dataclasses.replace(self, shape=self.shape[::-1], load=lambda: self.load().T, load_codes=None)


@dataclasses.dataclass(frozen=True)
class PretrainedModel:
    """A model whose parameters are loaded on demand: see `open_model`.

    Args:
      config: The architecture.
      leaves: The parameters by path.
      tokenizer: Its tokenizer, if it has one.
      rules: The rules that its matmuls run with where activations are quantized; empty for models in float, and where
        only weights are quantized.
      origin: The format and path of the file, its name, and further metadata.
      state: The ranges that training remembers, of rules with static ranges or delayed scaling.
    """

    config: ModelConfig
    leaves: Mapping[str, Leaf]
    tokenizer: Tokenizer | None = None
    rules: tuple[QuantizationRule, ...] = ()
    origin: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    state: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        try:
            wanted = param_shapes(abstract_params(self.config))
            check_shapes({path: tuple(leaf.shape) for path, leaf in self.leaves.items()}, wanted)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    @classmethod
    def from_params(cls, config: ModelConfig, params: Any, **fields: Any) -> "PretrainedModel":
        """A model of parameters in memory: a tree, or arrays and QArrays by path. `fields` are further arguments."""
        arrays = flatten_paths(params, is_qarray)
        leaves = {
            path: Leaf(tuple(x.shape), str(x.dtype), functools.partial(_host, x), storage_name(x))
            for path, x in arrays.items()
        }
        return cls(config, leaves, **fields)

    @property
    def name(self) -> str:
        """The name in its file, or that of the file."""
        return str(self.origin.get("name") or self.origin.get("path", "the model"))

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(math.prod(leaf.shape) for leaf in self.leaves.values())

    def params(self, dtype: str | None = None, *, codes: bool = False) -> dict[str, Any]:
        """Load all parameters, as a tree of arrays and QArrays.

        Args:
          dtype: The dtype of floats, by default the config's.
          codes: Whether quantized weights that no QArray has exactly are codes too, within a rounding of float32; by
            default they are floats.
        """
        dtype = dtype or self.config.weight_dtype
        load = functools.partial(Leaf.load_checked, codes=codes)
        return unflatten_paths({path: on_device(load(leaf, path), dtype) for path, leaf in self.leaves.items()})

    def function(self, fn: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """The model as a function of parameters and tokens, or `fn` in its place, with matmuls by the rules.

        QArrays are used directly as operands of matmuls; without rules, activations stay in float.
        """
        return served(functools.partial(apply, self.config) if fn is None else fn, self.rules, state=self.state)

    def describe(self) -> str:
        """One line about the model."""
        kinds = sorted({leaf.stored or leaf.dtype for leaf in self.leaves.values()})
        return f"{self.name}: {self.size / 1e6:.1f} million parameters, stored as {', '.join(kinds)}"


def _host(x: Any) -> np.ndarray | QArray:
    return x._map(np.asarray) if is_qarray(x) else np.asarray(x)


def to_float(value: np.ndarray | QArray, dtype: str | None = None) -> np.ndarray:
    """A parameter as floats; the values of a QArray as `dtype`, by default its own."""
    return np.asarray(value._map(jnp.asarray).dequantize(dtype) if isinstance(value, QArray) else value)


def on_device(value: np.ndarray | jax.Array | QArray, dtype: str) -> Any:
    """Transfer a parameter to the device, floats as `dtype`."""
    if isinstance(value, QArray):
        return value._map(jnp.asarray).astype(dtype)
    return jnp.asarray(value, jnp.dtype(dtype))


def storage_name(value: Any) -> str:
    """The format in which a parameter is stored, with its group size.

    >>> import octavo
    >>> storage_name(octavo.quantize(jnp.ones((64, 2)), "int4", tiled_axes={0: 32}))
    'int4 g32'
    """
    if not isinstance(value, QArray):
        return str(value.dtype)
    if value.qtype.tile is not None:
        return value.qtype.name
    groups = [tile for tile, size in zip(value.tile_shape, value.shape, strict=True) if 1 < tile < size]
    return f"{value.qtype.name} g{groups[0]}" if groups else value.qtype.name


@dataclasses.dataclass(frozen=True)
class ModelFormat:
    """A format of model files: `matches` looks at a path without reading much, `read` opens it."""

    name: str
    about: str
    matches: Callable[[Path], bool]
    read: Callable[[Path], PretrainedModel]


_formats: dict[str, ModelFormat] = {}


def register_format(model_format: ModelFormat) -> None:
    """Register a format of model files; the first that matches a path reads it."""
    if model_format.name in _formats:
        raise ValueError(f"a format of model files named {model_format.name!r} exists")
    _formats[model_format.name] = model_format


def model_formats() -> tuple[ModelFormat, ...]:
    """All formats, in the order in which they are tried."""
    return tuple(_formats.values())


def open_model(path: str | Path) -> PretrainedModel:
    """Open a model: its configuration and tokenizer are read, parameters are loaded on demand.

    Args:
      path: A model that `octavo quantize` wrote, a run of `octavo train` or one of its checkpoints, a Hugging Face
        directory (config.json and safetensors, also in the layouts of compressed-tensors, GPTQ, AWQ and block fp8), or
        a GGUF file. A URL of an object store, such as gs://bucket/runs/mine, is downloaded.

    >>> open_model("nowhere.gguf")
    Traceback (most recent call last):
    FileNotFoundError: there is no nowhere.gguf: give the path of a model...
    """
    path = _remote.pull(path).expanduser()
    known = "; ".join(found.about for found in model_formats())
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}: give the path of a model ({known})")
    for found in model_formats():
        if found.matches(path):
            return found.read(path)
    pickled = [*path.glob("*.bin"), *path.glob("*.pt*")] if path.is_dir() else [path]
    if any(file.suffix in (".bin", ".pt", ".pth") for file in pickled):
        raise ValueError(
            f"{path} holds {pickled[0].name}, a pickle, which may run code when it is loaded: save the model as "
            "safetensors (model.save_pretrained(..., safe_serialization=True))"
        )
    raise ValueError(f"{path} is not a model that Octavo can open, which are: {known}")
