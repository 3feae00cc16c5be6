"""What may go wrong with a checkpoint."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the text says which, why, and what to try."""


class CheckpointWarning(UserWarning):
    """A checkpoint is passed over, or something around it is not as it should be."""


class DamagedError(CheckpointError):
    """A checkpoint is not whole: a file of it is missing, truncated or changed."""
