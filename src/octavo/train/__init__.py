"""Training: a configuration, a trainer, and runs with checkpoints, metrics and reports.

`Config` and `ConfigError` are light; `Trainer` and `train` are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.train.config import Config, ConfigError, load
    from octavo.train.run import Outcome, train
    from octavo.train.trainer import Trainer

__all__ = ["Config", "ConfigError", "Outcome", "Trainer", "load", "train"]

_MODULES = {"Config": "config", "ConfigError": "config", "load": "config", "Outcome": "run", "train": "run"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'octavo.train' has no attribute {name!r}")
    return getattr(importlib.import_module(f"octavo.train.{_MODULES.get(name, 'trainer')}"), name)
