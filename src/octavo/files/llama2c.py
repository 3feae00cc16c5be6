"""The files of llama2.c: `model.bin`, float32 weights behind a header of 28 or 256 bytes, and `tokenizer.bin`."""

import dataclasses
import difflib
import heapq
import math
import os
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from octavo.files.errors import FileError
from octavo.files.regular import RegularFile

_MAGIC = 0x616B3432  # "ak42"; files of version 0 have none
_LIMIT = 1 << 31


@dataclasses.dataclass(frozen=True)
class Llama2cConfig:
    """The header of a model.bin. `shared` says whether the embedding is the output layer too."""

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int
    shared: bool
    version: int = 0

    def __post_init__(self):
        for field in dataclasses.fields(self)[:7]:
            value = getattr(self, field.name)
            if not 0 < value < _LIMIT:
                raise FileError(f"{field.name} is {value}")
        if self.dim % self.n_heads or self.dim // self.n_heads % 2:
            raise FileError(f"dim {self.dim} is not {self.n_heads} heads of an even size")
        if self.n_heads % self.n_kv_heads:
            raise FileError(f"n_heads {self.n_heads} is no multiple of n_kv_heads {self.n_kv_heads}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


class Info(NamedTuple):
    """A tensor of a model.bin, always float32."""

    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return 4 * math.prod(self.shape)


class Llama2c:
    """A model.bin of llama2.c in float32 (versions 0 and 1), open for reading.

    Tensors have the names of Meta's checkpoints: `tok_embeddings.weight`, `layers.0.attention.wq.weight`,
    `layers.0.feed_forward.w1.weight`, `norm.weight`, and `output.weight` unless it is shared. Weights are [out, in],
    and rotary positions turn neighbouring pairs of values (x_0, x_1), (x_2, x_3) and so on.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._file = RegularFile(path)
        self.path = self._file.path
        try:
            self.config, start = _read_header(self._file)
            self._tensors = _places(self.config, start, self._file)
        except BaseException:
            self._file.close()
            raise

    def names(self) -> list[str]:
        """The tensors, layer by layer."""
        return list(self._tensors)

    def info(self, name: str) -> Info:
        try:
            return self._tensors[name]
        except KeyError:
            near = difflib.get_close_matches(name, self._tensors, n=3, cutoff=0.4)
            hint = f"did you mean {', '.join(map(repr, near))}?" if near else f"there are {len(self._tensors)} others"
            raise FileError(f"{self.path}: has no tensor {name!r}; {hint}") from None

    def read(self, name: str) -> np.ndarray:
        """A tensor, float32."""
        info = self.info(name)
        return np.frombuffer(self._file.read(info.offset, info.nbytes, name), "<f4").reshape(info.shape)

    def close(self) -> None:
        self._file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_header(file: RegularFile) -> tuple[Llama2cConfig, int]:
    first = bytes(file.read(0, 28, "the header"))
    try:
        if struct.unpack_from("<I", first)[0] != _MAGIC:
            dim, hidden, layers, heads, kv_heads, vocab, length = struct.unpack("<7i", first)
            # A negative vocabulary is how version 0 says that the output layer follows at the end.
            return Llama2cConfig(dim, hidden, layers, heads, kv_heads, abs(vocab), length, shared=vocab > 0), 28
        (version,) = struct.unpack_from("<i", first, 4)
        if version != 1:
            raise FileError(f"is of version {version}; known are 0 and 1, in float32: export it with --version 1")
        *sizes, shared = struct.unpack("<7iB", file.read(8, 29, "the header"))
        return Llama2cConfig(*sizes, shared=bool(shared), version=1), 256
    except FileError as error:
        raise FileError(f"{file.path}: is no model.bin of llama2.c: {error}") from None


def _places(config: Llama2cConfig, start: int, file: RegularFile) -> dict[str, Info]:
    # Before a list is made of layers that a hostile header counts, the sizes have to agree.
    places: dict[str, Info] = {}
    needed = start + 4 * sum(math.prod(shape) * len(names) for names, shape in _order(config, layers=0))
    per_layer = 4 * (sum(math.prod(s) * len(n) for n, s in _order(config, layers=1)) - (needed - start) // 4)
    needed += per_layer * config.n_layers
    if needed != file.size:
        raise FileError(
            f"{file.path}: is no whole model.bin of llama2.c: {config} needs {needed} bytes, the file has {file.size}"
        )
    for names, shape in _order(config, config.n_layers):
        for name in names:
            places[name] = Info(shape, start)
            start += places[name].nbytes
    known = [name for name in places if not name.startswith("freqs_")]
    known.sort(key=lambda name: (name.startswith(("norm", "output")), _layer(name)))
    return {name: places[name] for name in known}


def _layer(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("layers.") else -1


def _order(config: Llama2cConfig, layers: int) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    """The tensors in the order of the file: names of equal shape that follow each other."""
    c, kv = config, config.head_dim * config.n_kv_heads

    def each(part: str, *shape: int) -> tuple[list[str], tuple[int, ...]]:
        return [f"layers.{i}.{part}.weight" for i in range(layers)], shape

    embedding = (["tok_embeddings.weight"], (c.vocab_size, c.dim))
    attention = [
        each("attention.wq", c.dim, c.dim),
        each("attention.wk", kv, c.dim),
        each("attention.wv", kv, c.dim),
        each("attention.wo", c.dim, c.dim),
    ]
    mlp = [
        each("feed_forward.w1", c.hidden_dim, c.dim),
        each("feed_forward.w2", c.dim, c.hidden_dim),
        each("feed_forward.w3", c.hidden_dim, c.dim),
    ]
    norms = [each("attention_norm", c.dim), each("ffn_norm", c.dim)]
    if c.version == 0:
        yield embedding
        yield norms[0]
        yield from attention
        yield norms[1]
        yield from mlp
        yield ["norm.weight"], (c.dim,)
        yield ["freqs_cos", "freqs_sin"], (c.seq_len, c.head_dim // 2)  # not used: computed anew everywhere
    else:
        yield from norms
        yield ["norm.weight"], (c.dim,)
        yield embedding
        yield from attention
        yield from mlp
    if not c.shared:
        yield ["output.weight"], (c.vocab_size, c.dim)


class Llama2cTokenizer:
    """A tokenizer.bin of llama2.c: SentencePiece's BPE with bytes as the last resort.

    Ids 0 to 2 are unknown, bos and eos, 3 to 258 the bytes. The file spells those bytes as text, so every ASCII piece
    is in it twice; text is made of the pieces from 259 on, and of bytes where there is none.

    >>> Llama2cTokenizer([(" ", -1.0), ("a", -2.0), (" a", -0.5)]).encode("a a!")
    [1, 261, 261, 36]
    """

    bos_id = 1
    eos_id = 2
    eos_ids = (1, 2)  # in its training text bos parts the stories, and llama2.c itself stops there
    _FIRST = 259

    def __init__(self, pieces: Sequence[tuple[str | bytes, float]]):
        """Pieces from id 259 on, each with its score: of two merges the one with the higher score comes first."""
        self._pieces = [piece.encode() if isinstance(piece, str) else piece for piece, _ in pieces]
        self._scores = [float(score) for _, score in pieces]
        self._ids = {piece: self._FIRST + i for i, piece in enumerate(self._pieces)}

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Llama2cTokenizer":
        """Read a tokenizer.bin."""
        with RegularFile(path) as file:
            if file.size > 1 << 28:
                raise FileError(f"{file.path}: is no tokenizer.bin: {file.size} bytes is too large")
            data = bytes(file.read(0, file.size, "the tokenizer"))
        return cls.from_bytes(data, str(path))

    @classmethod
    def from_bytes(cls, data: bytes, path: str = "tokenizer.bin") -> "Llama2cTokenizer":
        """The tokenizer of a file's contents; `path` is what messages call it."""
        if len(data) < 4:
            raise FileError(f"{path}: is no tokenizer.bin: it has {len(data)} bytes")
        (longest,) = struct.unpack_from("<I", data)
        pieces, at = [], 4
        while at < len(data):
            if at + 8 > len(data):
                raise FileError(f"{path}: is truncated in piece {len(pieces)}")
            score, length = struct.unpack_from("<fi", data, at)
            at += 8
            if not 0 <= length <= min(longest, len(data) - at) or math.isnan(score):
                raise FileError(f"{path}: piece {len(pieces)} has {length} bytes and score {score}, which cannot be")
            pieces.append((data[at : at + length], score))
            at += length
        if len(pieces) < cls._FIRST:
            raise FileError(f"{path}: has {len(pieces)} pieces; the bytes alone are {cls._FIRST}")
        return cls(pieces[cls._FIRST :])

    @property
    def vocab_size(self) -> int:
        return self._FIRST + len(self._pieces)

    def pieces(self) -> list[tuple[bytes, float]]:
        """The pieces from id 259 on, each with its score."""
        return list(zip(self._pieces, self._scores, strict=True))

    def encode(self, text: str, *, bos: bool = True, eos: bool = False) -> list[int]:
        """Ids of a text, with a space before it as SentencePiece has it."""
        ids: list[int] = []
        for character in (" " + text) if text else "":
            data = character.encode("utf-8", "replace")
            ids += [self._ids[data]] if data in self._ids else [3 + byte for byte in data]
        return [self.bos_id] * bos + self._merge(ids) + [self.eos_id] * eos

    def _merge(self, ids: list[int]) -> list[int]:
        """Join neighbours, the best score first and the leftmost of equals, until no two make a piece."""
        left = list(range(-1, len(ids) - 1))
        right = [*range(1, len(ids)), -1]
        queue: list[tuple[float, int, int, int, int]] = []

        def offer(a: int, b: int) -> None:
            if a >= 0 and b >= 0 and min(ids[a], ids[b]) >= self._FIRST:
                joined = self._ids.get(self._pieces[ids[a] - self._FIRST] + self._pieces[ids[b] - self._FIRST])
                if joined is not None:
                    heapq.heappush(queue, (-self._scores[joined - self._FIRST], a, b, ids[a], ids[b]))

        for a in range(len(ids) - 1):
            offer(a, a + 1)
        while queue:
            _, a, b, was_a, was_b = heapq.heappop(queue)
            if (ids[a], ids[b], right[a]) != (was_a, was_b, b):
                continue  # one of them has been joined to another meanwhile
            ids[a] = self._ids[self._pieces[was_a - self._FIRST] + self._pieces[was_b - self._FIRST]]
            ids[b] = -1
            right[a] = right[b]
            if right[a] >= 0:
                left[right[a]] = a
            offer(left[a], a)
            offer(a, right[a])
        return [i for i in ids if i >= 0]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bos and eos are left out, and so is the space that `encode` put before the text."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of ids, which may end in the middle of a character."""
        parts: list[bytes] = []
        start = True
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"id {i} is not among the {self.vocab_size} of the tokenizer")
            if i < 3:
                start = start or i == self.bos_id
                continue
            piece = bytes([i - 3]) if i < self._FIRST else self._pieces[i - self._FIRST]
            parts.append(piece.removeprefix(b" ") if start else piece)
            start = False
        return b"".join(parts)
