"""Errors and warnings about checkpoints."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the text says which, why, and what to try."""


class CheckpointWarning(UserWarning):
    """A checkpoint is skipped, or part of it is not used."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, truncated or changed."""


class PeerLostError(CheckpointError):
    """Another process of the run ended, or cannot be reached, while all of them save or restore."""
