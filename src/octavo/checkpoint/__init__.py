"""Training state on disk: whole or not there, bit for bit, readable with Orbax."""

from octavo.checkpoint.checkpoints import Checkpoints
from octavo.checkpoint.errors import CheckpointError, CheckpointWarning
from octavo.checkpoint.reading import Restored, load, structure

__all__ = ["CheckpointError", "CheckpointWarning", "Checkpoints", "Restored", "load", "structure"]
