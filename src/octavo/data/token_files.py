"""Token files, written by `write_tokens` and read through memory maps.

A file is a one-dimensional `.npy`, or a `.bin` of little-endian integers without a header. `<file>.json` describes the
ids. Without it, a `.npy` is read as a single document.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from octavo._io import atomic_file, atomic_write
from octavo.data.corpus import Corpus
from octavo.data.dataset import BatchConfig
from octavo.data.text import HELD_OUT
from octavo.data.tokenizer import make_tokenizer, tokenizers

_DTYPES = ("uint8", "uint16", "uint32")
_NO_EOS = -1
_CHUNK = 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokensHeader:
    """The description of a token file.

    Args:
      tokens: The number of tokens.
      dtype: The dtype of the ids on disk: uint8, uint16 or uint32.
      vocab_size: The size of the vocabulary.
      eos: The id that ends a document, if any.
      bos: The id that is the input before a document; `eos` if None.
      tokenizer: A `tokenizer_type` to decode ids with, together with the run's `tokenizer_path`; may be empty.
      sha256: The hash of the ids.
    """

    tokens: int
    dtype: str
    vocab_size: int
    eos: int | None = None
    bos: int | None = None
    tokenizer: str = ""
    sha256: str = ""

    def __post_init__(self):
        if self.dtype not in _DTYPES:
            raise ValueError(f"the dtype of token files is one of {', '.join(_DTYPES)}, got {self.dtype!r}")
        for name in ("eos", "bos"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < self.vocab_size:
                raise ValueError(f"{name}={value} is no id below vocab_size={self.vocab_size}")
        if self.tokenizer and self.tokenizer not in tokenizers():
            raise ValueError(f"unknown tokenizer {self.tokenizer!r}. Known: {', '.join(tokenizers())}")


def write_tokens(
    path: str | Path, ids: Sequence[int] | np.ndarray, *, vocab_size: int = 0, **fields: Any
) -> TokensHeader:
    """Write ids as a `.npy` or `.bin` file, and their description as `<file>.json`.

    Args:
      path: The file to write.
      ids: The ids of all documents, with `eos` after each; also before the first one, if its first token is a target.
      vocab_size: The size of the vocabulary; one more than the largest id by default.
      **fields: `eos`, `bos` and `tokenizer` of the `TokensHeader`.

    Returns:
      The description that was written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tokens(f"{folder}/train.bin", [9, 1, 2, 9, 3, 9], eos=9).vocab_size
    10
    """
    path = _check_suffix(Path(path))
    array = np.asarray(ids)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"token ids are one-dimensional integers, got {array.dtype} of shape {array.shape}")
    if array.size < 2:
        raise ValueError(f"a token file has two tokens or more, got {array.size}")
    low, high = int(array.min()), int(array.max())
    size = vocab_size or high + 1
    if low < 0 or high >= size:
        raise ValueError(f"token ids are from 0 to below vocab_size={size}, got {low} to {high}")
    dtype = np.min_scalar_type(size - 1).newbyteorder("<")
    array = array.astype(dtype)
    digest = hashlib.sha256(array.tobytes()).hexdigest()
    header = TokensHeader(tokens=array.size, dtype=dtype.name, vocab_size=size, sha256=digest, **fields)
    with atomic_file(path) as file:
        if path.suffix == ".npy":
            np.save(file, array, allow_pickle=False)
        else:
            array.tofile(file)
    atomic_write(f"{path}.json", json.dumps(dataclasses.asdict(header), indent=2) + "\n")
    return header


def read_tokens(path: str | Path) -> tuple[np.ndarray, TokensHeader]:
    """The ids of a token file, mapped from disk, and their description."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file; token files are .npy or .bin, written by octavo.data.write_tokens")
    header = _read_header(_check_suffix(path))
    if path.suffix == ".npy":
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"{path} holds {ids.dtype} of shape {ids.shape}; tokens are one-dimensional integers")
    elif header is None:
        raise FileNotFoundError(
            f"{path}.json is missing: it describes the bytes of {path.name}; "
            'write the tokens with octavo.data.write_tokens, or it by hand: {"tokens": …, "dtype": "uint16", '
            '"vocab_size": …, "eos": …}'
        )
    else:
        size, expected = path.stat().st_size, header.tokens * np.dtype(header.dtype).itemsize
        if size != expected:
            raise ValueError(
                f"{path} has {size} bytes; {header.tokens} tokens of {header.dtype}, as its .json says, have {expected}"
            )
        ids = np.memmap(path, np.dtype(header.dtype).newbyteorder("<"), mode="r", shape=(header.tokens,))
    if header is not None and header.tokens != ids.size:
        raise ValueError(f"{path} has {ids.size} tokens, its .json says {header.tokens}")
    return ids, header or TokensHeader(tokens=ids.size, dtype="uint32", vocab_size=_largest(ids) + 1)


def make_tokens(config: Any, split: str, batch_config: BatchConfig) -> Corpus:
    """The tokens at `dataset_path`; for evaluation those at `eval_dataset_path`, or the last twentieth of all."""
    if not getattr(config, "dataset_path", ""):
        raise ValueError("dataset_type=tokens needs dataset_path: a .npy or .bin written by octavo.data.write_tokens")
    eval_path = getattr(config, "eval_dataset_path", "")
    path = eval_path if split == "eval" and eval_path else config.dataset_path
    ids, header = read_tokens(path)
    if not eval_path:
        boundary = ids.size - max(2, int(ids.size * HELD_OUT))
        ids = ids[:boundary] if split == "train" else ids[boundary:]
    eos = _NO_EOS if header.eos is None else header.eos
    named = SimpleNamespace(tokenizer_type=header.tokenizer, tokenizer_path=getattr(config, "tokenizer_path", ""))
    tokenizer = make_tokenizer(named, tuple) if header.tokenizer else None
    details = {
        "name": "tokens",
        "split": split,
        "path": str(path),
        "sha256": header.sha256,
        "tokens": ids.size - 1,
        "tokenizer": header.tokenizer,
    }
    vocab_size = batch_config.resolve_vocab_size(header.vocab_size, str(path))
    bos = eos if header.bos is None else header.bos
    return Corpus(ids, batch_config, eos=eos, bos=bos, vocab_size=vocab_size, tokenizer=tokenizer, details=details)


def _check_suffix(path: Path) -> Path:
    if path.suffix not in (".npy", ".bin"):
        raise ValueError(f"{path}: token files end in .npy or .bin")
    return path


def _read_header(path: Path) -> TokensHeader | None:
    file = Path(f"{path}.json")
    if not file.is_file():
        return None
    try:
        return TokensHeader(**json.loads(file.read_text()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} does not describe a token file: {error}") from None


def _largest(ids: np.ndarray) -> int:
    """The largest id, without reading the whole file into memory."""
    return max((int(ids[i : i + _CHUNK].max()) for i in range(0, ids.size, _CHUNK)), default=0)
