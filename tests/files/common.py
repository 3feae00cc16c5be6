"""Helpers of the tests of files."""

import functools
import json
from pathlib import Path

import jax
import numpy as np

from octavo.files import FileError, Info, SafeTensors

GOLDEN = Path(__file__).parent / "golden"


def raw(header, data=b""):
    """The bytes of a safetensors file with this header, a table or text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def golden(name):
    """An open file of the other implementations, and its configuration."""
    file = SafeTensors(GOLDEN / f"{name}.safetensors")
    return file, json.loads(file.metadata["quantization_config"])


@functools.partial(jax.jit, static_argnames="dtype")
def dequantized(q, dtype=None):
    """The values of a QArray, in one program: eager calls compile each primitive."""
    return q.dequantize(dtype)


class Tensors:
    """Named arrays in memory, as a file has them."""

    def __init__(self, tensors):
        self.tensors = tensors

    def names(self):
        return list(self.tensors)

    def __contains__(self, name):
        return name in self.tensors

    def info(self, name):
        if name not in self.tensors:
            raise FileError(f"no tensor {name!r}")
        return Info.of(self.tensors[name])

    def read(self, name):
        return np.array(self.tensors[name])
