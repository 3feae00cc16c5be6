"""Checkpoints of a training state: atomic, bit-exact, verified by checksums, readable with Orbax."""

from octavo.checkpoint.errors import CheckpointError, CheckpointWarning, PeerLostError
from octavo.checkpoint.manager import CheckpointManager
from octavo.checkpoint.restore import Restored, load, load_abstract

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "CheckpointWarning",
    "PeerLostError",
    "Restored",
    "load",
    "load_abstract",
]
