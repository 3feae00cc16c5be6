"""The configuration of a training run: its keys, the sources of their values, and its text forms."""

from octavo.train.config.load import Loaded, Sources, load
from octavo.train.config.schema import GROUPS, Config, keys
from octavo.train.config.values import ConfigError, Key, Problem

__all__ = ["GROUPS", "Config", "ConfigError", "Key", "Loaded", "Problem", "Sources", "keys", "load"]
