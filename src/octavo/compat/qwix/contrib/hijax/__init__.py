"""`qwix.contrib.hijax` is an experiment with a new kind of JAX type; its names are not offered."""

from typing import Any

_REASON = (
    "octavo.compat.qwix.contrib.hijax has no {}: Qwix's hijax types are an experiment of which the release holds "
    "helpers only. octavo.QArray is a pytree, and octavo.dot_general with a config has gradients"
)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(_REASON.format(name))
