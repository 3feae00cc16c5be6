"""NNX models as functions of their parameters."""

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from octavo.frameworks.nnx_state import map_attributes, stored_parameter, stored_paths
from octavo.frameworks.params import WithAux
from octavo.qarray import QArray, Quantizer


def as_function(model: Any) -> tuple[Callable[..., Any], Any]:
    """A function of parameters and inputs that calls the model, and the parameters as nested dictionaries."""
    graph, params, others = nnx.split(model, nnx.Param, ...)

    def call(params: Any, *args: Any, **kwargs: Any) -> Any:
        return nnx.merge(graph, nnx.State(params), others, copy=True)(*args, **kwargs)

    return call, nnx.to_pure_dict(params)


def quantizers_of(model: Any) -> dict[str, Quantizer]:
    """The quantizer of each parameter of a model that `quantize_model` made with a `PtqProvider`."""
    return {_name(path): stored.how for path, stored in stored_paths(model).items()}


def put(model: Any, codes: Mapping[str, QArray]) -> Any:
    """The model with these codes of its quantized parameters."""
    new = {
        id(stored): stored_parameter(codes[_name(path)], stored.how, stored.array.qvalue)
        for path, stored in stored_paths(model).items()
    }
    map_attributes(model, lambda x: new.get(id(x), x) if isinstance(x, WithAux) else x)
    return model


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))
