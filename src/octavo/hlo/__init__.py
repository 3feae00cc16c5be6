"""Reading compiled programs: their cost, their collectives, and the dataflow of weights and gradients."""

from octavo.hlo.accelerators import ACCELERATORS, Accelerator, compile_for, compiler_missing, devices, get_accelerator
from octavo.hlo.collectives import Collective, Communication, read_communication
from octavo.hlo.cost import OpCost, ProgramCost, read_cost, read_cycles
from octavo.hlo.matmuls import CompiledMatmul, count_types, describe_quantized, read_matmuls
from octavo.hlo.partition import partitioned_hlo
from octavo.hlo.text import Module, parse

__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "Collective",
    "Communication",
    "CompiledMatmul",
    "Module",
    "OpCost",
    "ProgramCost",
    "compile_for",
    "compiler_missing",
    "count_types",
    "describe_quantized",
    "devices",
    "get_accelerator",
    "parse",
    "partitioned_hlo",
    "read_communication",
    "read_cost",
    "read_cycles",
    "read_matmuls",
]
