"""What is faster? Native kernels for CPUs, on plain arrays; `octavo.ops` decides when they run."""

from octavo.kernels.library import TARGETS, available, disabled, status, versions
from octavo.kernels.matvec import int_matvec, matvec, reference

__all__ = ["TARGETS", "available", "disabled", "int_matvec", "matvec", "reference", "status", "versions"]
