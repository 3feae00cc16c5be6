"""Reading compiled programs: their collectives, and the dataflow of weights and gradients."""

from octavo.hlo.collectives import Collective, Communication, read_communication
from octavo.hlo.partition import partitioned_hlo
from octavo.hlo.text import Module, parse

__all__ = ["Collective", "Communication", "Module", "parse", "partitioned_hlo", "read_communication"]
