"""Names of a decoder's parameters in the files of other programs."""

import re
from collections.abc import Mapping

from octavo._tree import flatten_paths
from octavo.models import ModelConfig, abstract_params

_LAYER = re.compile(r"decoder/layers_(\d+)/(.*)")


def file_names(config: ModelConfig, top: Mapping[str, str], layer: Mapping[str, str], form: str) -> dict[str, str]:
    """The name in a file of each parameter, by its path.

    Args:
      config: The model.
      top: Names of the parameters outside of layers, by path.
      layer: Names of the parameters of a layer, by path within it.
      form: How the number of a layer and a name within it make a name, such as `blk.{}.{}`.
    """
    if config.num_experts > 1:
        raise ValueError(
            "models with experts are not written to or read from such files: use Octavo's own format (--format octavo)"
        )
    names = {}
    for path in flatten_paths(abstract_params(config)):
        match = _LAYER.fullmatch(path)
        names[path] = form.format(match[1], layer[match[2]]) if match else top[path]
    return names


def is_transposed(path: str) -> bool:
    """Whether files hold a parameter as [out, in]: kernels here are [in, out]."""
    return path.endswith("/kernel")
