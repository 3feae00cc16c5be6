"""Loading the compiled library, and the instruction sets it supports on this processor."""

import ctypes
import dataclasses
import functools

import jax

from octavo.kernels import compiling

FLOAT_TARGET, INT_TARGET, LAYER_TARGET = "octavo_float_matvec", "octavo_int_matvec", "octavo_decode_layer"
ZEROS_TARGET, QUANTIZE_TARGET, TILED_TARGET = "octavo_zeros", "octavo_quantize", "octavo_tiled_matmul"
DEQUANTIZE_TARGET, NOISE_TARGET = "octavo_dequantize", "octavo_noise"
_TARGETS = (
    *(FLOAT_TARGET, INT_TARGET, LAYER_TARGET, ZEROS_TARGET),
    *(QUANTIZE_TARGET, DEQUANTIZE_TARGET, NOISE_TARGET, TILED_TARGET),
)

# Part of jit's cache key, since programs traced with and without kernels differ.
_allowed = jax.make_user_context(default_value=True)


@dataclasses.dataclass(frozen=True)
class Library:
    """The kernel versions (instruction sets) for this processor, slowest first; or the reason there are none."""

    versions: tuple[str, ...] = ()
    problem: str = ""


@functools.cache
def load() -> Library:
    """Load the library and register its custom calls, once per process."""
    path = compiling.library()
    if not path.exists():
        return Library(problem=f"not built: {compiling.HINT}")
    try:
        found = ctypes.CDLL(str(path))
        for target in _TARGETS:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(found, target)), platform="cpu")
        found.octavo_versions.restype = ctypes.c_char_p
        return Library(tuple(found.octavo_versions().decode().split()))
    except (OSError, AttributeError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Library(problem=f"built but not usable ({reason}): {compiling.HINT}")


def allowed() -> bool:
    """Whether the CPU kernels are not disabled by `disabled`."""
    return bool(_allowed.value)


def available() -> bool:
    """Whether the CPU kernels are built, and not disabled by `disabled`."""
    return allowed() and bool(load().versions)


def require() -> None:
    """Load the library; raises with the reason if the kernels cannot be called."""
    if load().problem:
        raise RuntimeError(f"CPU kernels are {load().problem}")


def versions() -> tuple[str, ...]:
    """The instruction sets for which this processor has kernels, slowest first; empty without a library."""
    return load().versions


def status() -> str:
    """One sentence on whether the CPU kernels are available, and their instruction set.

    >>> import octavo.kernels
    >>> octavo.kernels.available() == status().startswith("CPU kernels in ")
    True
    """
    found = load()
    if not found.versions:
        return f"CPU kernels are {found.problem}"
    if not _allowed.value:
        return "CPU kernels are switched off here by octavo.kernels.disabled()"
    return f"CPU kernels in {found.versions[-1].upper().replace('_', '-')}"


def disabled():
    """A context manager in which functions are traced without the CPU kernels: XLA's code runs instead.

    >>> import octavo.kernels
    >>> with disabled():
    ...     octavo.kernels.available()
    False
    """
    return _allowed(False)
