"""Random cases against independent references, for as long as you like.

    python -m tests.fuzz [products programs ...] [--seconds 60] [--seed 0]
    python -m tests.fuzz kills --cases 20

Exits with 1 at the first defect, and prints the command that repeats it.
"""

import argparse
import json
import math
import os
import sys
import time

import jax

from tests.fuzz import FUZZERS
from tests.fuzz.runner import failure, fuzz


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"which of {', '.join(FUZZERS)}; all by default")
    parser.add_argument("--seconds", type=float, default=60, help="the time for each")
    parser.add_argument("--cases", type=int, help="the number of cases for each, however long they take")
    parser.add_argument("--seed", type=int, default=None, help="the current time by default")
    parser.add_argument("--case", type=json.loads, help="repeat one case")
    args = parser.parse_args()
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 8)
    if unknown := set(args.names) - set(FUZZERS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(FUZZERS)}")
    names = args.names or list(FUZZERS)
    if args.case is not None:
        error = failure(FUZZERS[names[0]], args.case)
        if isinstance(error, Exception):
            raise error
        print(f"no defect: {error}")
        return 0
    seed = int(time.time()) if args.seed is None else args.seed
    defects = 0
    for name in names:
        counts, found = fuzz(FUZZERS[name], math.inf if args.cases else args.seconds, seed, most=args.cases)
        kinds = ", ".join(f"{label} {n:,}" for label, n in sorted(counts.items()))
        print(f"{name}: seed {seed}, {counts.total():,} cases without a defect ({kinds})", flush=True)
        if found is not None:
            defects += 1
            print(f"{name}: defect\n{found}", flush=True)
    return int(defects > 0)


if __name__ == "__main__":
    sys.exit(main())
