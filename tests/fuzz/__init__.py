"""Fuzzers: random cases against independent references (`make fuzz`)."""

from tests.fuzz.checkpoints import CHECKPOINTS
from tests.fuzz.configs import CONFIGS
from tests.fuzz.kills import KILLED
from tests.fuzz.products import PRODUCTS
from tests.fuzz.programs import PROGRAMS
from tests.fuzz.quantizers import QUANTIZERS
from tests.fuzz.requests import REQUESTS

FUZZERS = {fuzzer.name: fuzzer for fuzzer in (QUANTIZERS, PRODUCTS, PROGRAMS, CONFIGS, CHECKPOINTS, REQUESTS, KILLED)}
