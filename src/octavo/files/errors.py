"""What may be wrong with a file of weights."""


class FileError(ValueError):
    """A file of weights cannot be used; the text says which file, what is wrong with it, and what to try."""
