"""NNX models as functions of their parameters."""

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from octavo.frameworks.params import WithAux, is_stored
from octavo.qarray import QArray, Quantizer


def as_function(model: Any) -> tuple[Callable[..., Any], Any]:
    """A function of parameters and inputs that calls the model, and the parameters as nested dictionaries."""
    graph, params, others = nnx.split(model, nnx.Param, ...)

    def call(params: Any, *args: Any, **kwargs: Any) -> Any:
        return nnx.merge(graph, nnx.State(params), others, copy=True)(*args, **kwargs)

    return call, nnx.to_pure_dict(params)


def quantizers_of(model: Any) -> dict[str, Quantizer]:
    """The quantizer of each parameter of a model that `quantize_model` made with a `PtqProvider`."""
    return {name: variable.get_raw_value().how for name, variable in _stored(model)}


def put(model: Any, codes: Mapping[str, QArray]) -> Any:
    """The model with these codes of its quantized parameters."""
    for name, variable in _stored(model):
        variable.set_raw_value(WithAux(codes[name], variable.get_raw_value().how))
    return model


def _stored(model: Any) -> list[tuple[str, Any]]:
    return [
        ("/".join(map(str, path)), node)
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Variable) and is_stored(node.get_raw_value())
    ]
