"""What did the compiler make of it? Reading the text of HLO programs."""

from octavo.hlo.collectives import Collective, Traffic, partitioned_hlo, read_traffic
from octavo.hlo.text import read

__all__ = ["Collective", "Traffic", "partitioned_hlo", "read", "read_traffic"]
