"""Collectives in low precision: weight all-gather, gradient reduction, expert parallelism."""

from octavo.distributed.collectives import quantized_psum, quantized_psum_scatter
from octavo.distributed.expert_parallel import ExpertParallel, combine, dispatch, route
from octavo.distributed.expert_sharding import ExpertSharding
from octavo.distributed.grad_reduce import GradReduce, is_error_feedback
from octavo.distributed.weight_gather import WeightGather, weight_gather

__all__ = [
    "ExpertParallel",
    "ExpertSharding",
    "GradReduce",
    "WeightGather",
    "combine",
    "dispatch",
    "is_error_feedback",
    "quantized_psum",
    "quantized_psum_scatter",
    "route",
    "weight_gather",
]
