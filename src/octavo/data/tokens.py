"""Files of tokens that were made before: written by `write_tokens`, read through memory maps.

A file is a one-dimensional `.npy`, or a `.bin` of bare little-endian integers. Beside it, `<file>.json` says what the
ids are. Without one, a `.npy` is read as a single document.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo.data.corpus import Corpus, smallest_dtype
from octavo.data.dataset import Layout
from octavo.data.files import HELD_OUT
from octavo.data.rows import as_numbers
from octavo.data.tokenizer import make_tokenizer, tokenizers

_DTYPES = ("uint8", "uint16", "uint32")
_NO_EOS = -1
_SCAN = 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokensHeader:
    """What the ids of a token file are: their vocabulary, which one ends a document, which one is read before it.

    `tokenizer` is a `tokenizer_type` for showing them as text, with the `tokenizer_path` of the run; may be empty.
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
    path: str | Path,
    ids: Sequence[int] | np.ndarray,
    *,
    vocab_size: int = 0,
    eos: int | None = None,
    bos: int | None = None,
    tokenizer: str = "",
) -> TokensHeader:
    """Write ids as a `.npy` or a `.bin`, and beside it a `.json` that says what they are.

    `eos` ends each document; put it before the first one too if that one's first token should be predicted.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tokens(f"{folder}/train.bin", [9, 1, 2, 9, 3, 9], eos=9).vocab_size
    10
    """
    path = Path(path)
    array = np.asarray(ids)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"token ids are one-dimensional integers, got {array.dtype} of shape {array.shape}")
    if array.size < 2:
        raise ValueError(f"a token file has two tokens or more, got {array.size}")
    low, high = int(array.min()), int(array.max())
    size = vocab_size or high + 1
    if low < 0 or high >= size:
        raise ValueError(f"token ids are from 0 to below vocab_size={size}, got {low} to {high}")
    dtype = smallest_dtype(size).newbyteorder("<")
    array = array.astype(dtype)
    digest = hashlib.sha256(array.tobytes()).hexdigest()
    header = TokensHeader(
        tokens=array.size, dtype=dtype.name, vocab_size=size, eos=eos, bos=bos, tokenizer=tokenizer, sha256=digest
    )
    _suffix(path)
    with open(f"{path}.partial", "wb") as file:
        if path.suffix == ".npy":
            np.save(file, array, allow_pickle=False)
        else:
            array.tofile(file)
    os.replace(f"{path}.partial", path)
    Path(f"{path}.json").write_text(json.dumps(dataclasses.asdict(header), indent=2) + "\n")
    return header


def read_tokens(path: str | Path) -> tuple[np.ndarray, TokensHeader]:
    """The ids of a token file, mapped from disk, and what they are."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file; token files are .npy or .bin, written by octavo.data.write_tokens")
    _suffix(path)
    header = _header(path)
    if path.suffix == ".npy":
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"{path} holds {ids.dtype} of shape {ids.shape}; tokens are one-dimensional integers")
    elif header is None:
        raise FileNotFoundError(
            f"{path}.json is missing: it says what the bytes of {path.name} are; "
            'write the tokens with octavo.data.write_tokens, or it by hand: {"tokens": …, "dtype": "uint16", '
            '"vocab_size": …, "eos": …}'
        )
    else:
        width = np.dtype(header.dtype).itemsize
        if path.stat().st_size != header.tokens * width:
            raise ValueError(
                f"{path} has {path.stat().st_size} bytes; {header.tokens} tokens of {header.dtype}, as its .json says, "
                f"have {header.tokens * width}"
            )
        ids = np.memmap(path, np.dtype(header.dtype).newbyteorder("<"), mode="r", shape=(header.tokens,))
    if header is not None and header.tokens != ids.size:
        raise ValueError(f"{path} has {ids.size} tokens, its .json says {header.tokens}")
    return ids, header or TokensHeader(tokens=ids.size, dtype="uint32", vocab_size=_largest(ids) + 1)


def make_tokens(config: Any, split: str, layout: Layout) -> Corpus:
    """The tokens at `dataset_path`; for evaluation those at `eval_dataset_path`, or the last twentieth of all."""
    if not getattr(config, "dataset_path", ""):
        raise ValueError("dataset_type=tokens needs dataset_path: a .npy or .bin written by octavo.data.write_tokens")
    elsewhere = getattr(config, "eval_dataset_path", "")
    path = elsewhere if split == "eval" and elsewhere else config.dataset_path
    ids, header = read_tokens(path)
    if not elsewhere:
        place = ids.size - max(2, int(ids.size * HELD_OUT))
        ids = ids[:place] if split == "train" else ids[place:]
    eos = _NO_EOS if header.eos is None else header.eos
    decode = as_numbers
    if header.tokenizer:
        settings = _Named(header.tokenizer, getattr(config, "tokenizer_path", ""))
        decode = make_tokenizer(settings, tuple).decode
    details = {
        "name": "tokens",
        "split": split,
        "path": str(path),
        "sha256": header.sha256,
        "tokens": ids.size - 1,
        "tokenizer": header.tokenizer,
    }
    return Corpus(
        ids,
        layout,
        eos=eos,
        bos=eos if header.bos is None else header.bos,
        vocab_size=layout.vocabulary(header.vocab_size, str(path)),
        decode=decode,
        details=details,
    )


@dataclasses.dataclass(frozen=True)
class _Named:
    tokenizer_type: str
    tokenizer_path: str


def _suffix(path: Path) -> None:
    if path.suffix not in (".npy", ".bin"):
        raise ValueError(f"{path}: token files end in .npy or .bin")


def _header(path: Path) -> TokensHeader | None:
    file = Path(f"{path}.json")
    if not file.is_file():
        return None
    try:
        return TokensHeader(**json.loads(file.read_text()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} does not describe a token file: {error}") from None


def _largest(ids: np.ndarray) -> int:
    """The largest id, without the whole file in memory."""
    return max((int(ids[i : i + _SCAN].max()) for i in range(0, ids.size, _SCAN)), default=0)
