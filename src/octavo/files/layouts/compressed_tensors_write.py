"""Writing the tensors of compressed-tensors."""

import ml_dtypes
import numpy as np

from octavo.files import bits as streams
from octavo.files.errors import FileError
from octavo.files.layouts.assembly import check_integers, unsigned_codes
from octavo.files.layouts.compressed_tensors_config import format_name
from octavo.files.layouts.scheme import Scheme
from octavo.files.safetensors import Info
from octavo.numerics import IntFormat
from octavo.qarray import QArray

_BITS = tuple(range(2, 9))
_FLOATS = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
_FOURS = {"nvfp4": ml_dtypes.float8_e4m3fn, "mxfp4": np.uint8}


def tensor_infos(name: str, shape: tuple[int, ...], scheme: Scheme) -> dict[str, Info]:
    """The dtypes and shapes of the tensors that `to_tensors` returns."""
    if len(shape) != 2:
        raise FileError(f"{name!r} is {list(shape)}; compressed-tensors holds matrices [out, in]")
    (out, size), (rows, columns) = shape, scheme.counts(shape)
    bits = scheme.qtype.bits
    if scheme.format in _FOURS:
        if size % (tile := scheme.tile[1]) or scheme.tile[0] != 1:
            raise FileError(f"{name!r} {list(shape)}: {scheme.format} is written in whole tiles of {tile} inputs")
        infos = {
            f"{name}_packed": Info.make(np.uint8, (out, size // 2)),
            f"{name}_scale": Info.make(_FOURS[scheme.format], (out, columns)),
        }
        whole = {f"{name}_global_scale": Info.make(np.float32, (1,))}
        return infos | (whole if scheme.format == "nvfp4" else {})
    if scheme.format in _FLOATS:
        scales = (1,) if (rows, columns) == (1, 1) else (rows, columns)
        return {name: Info.make(_FLOATS[scheme.format], shape), f"{name}_scale": Info.make(scheme.scale_dtype, scales)}
    if not isinstance(scheme.qtype, IntFormat):
        kinds = ", ".join(["int2 to int8", "uint2", "uint4", "uint8", *_FLOATS, *_FOURS])
        raise FileError(f"{name!r} is {scheme.format}; compressed-tensors is written for {kinds}")
    check_integers(name, shape, scheme, _BITS)
    infos = {
        f"{name}_packed": Info.make(np.int32, (out, -(-size * bits // 32))),
        f"{name}_scale": Info.make(scheme.scale_dtype, (out, columns)),
        f"{name}_shape": Info.make(np.int64, (2,)),
    }
    zeros = {f"{name}_zero_point": Info.make(np.int32, (-(-out * bits // 32), columns))}
    return infos | (zeros if scheme.zero_point else {})


def to_tensors(name: str, q: QArray) -> dict[str, np.ndarray]:
    """The tensors of a weight [out, in], with its codes and scales."""
    scheme = Scheme.of(q)
    infos = tensor_infos(name, q.shape, scheme)
    scale = np.asarray(q.scale)
    fmt = format_name(scheme)
    if fmt == "pack-quantized":
        fields, zeros, scale = unsigned_codes(q)
        bits = q.qtype.bits
        found = {
            f"{name}_packed": streams.pack(fields, bits, np.int32),
            f"{name}_scale": np.ascontiguousarray(scale),
            f"{name}_shape": np.asarray(q.shape, np.int64),
        }
        if zeros is not None:
            packed = streams.pack(np.ascontiguousarray(zeros.T), bits, np.int32)
            found[f"{name}_zero_point"] = np.ascontiguousarray(packed.T)
        return found
    if fmt == "float-quantized":
        codes = np.asarray(q.qvalue)[: q.shape[0], : q.shape[1]]
        return {name: codes, f"{name}_scale": scale.reshape(infos[f"{name}_scale"].shape)}
    found = {
        f"{name}_packed": np.asarray(q.pack(axis=-1).qvalue),
        f"{name}_scale": scale.view(infos[f"{name}_scale"].dtype),
    }
    if scheme.format == "nvfp4":
        outer = np.float32(1) if q.outer_scale is None else np.asarray(q.outer_scale).astype(np.float32)
        found[f"{name}_global_scale"] = (np.float32(1) / outer).reshape(1)
    return found
