"""Errors of weight files."""


class FileError(ValueError):
    """A weight file is invalid or unsupported; the message says which file, what is wrong, and what to try."""
