"""Import time: jax alone, octavo, Qwix and AQT, each in a fresh interpreter.

    python benchmarks/startup.py [--quick] [--json FILE]

Starts are interleaved; the fastest of each counts, minus that of an interpreter that imports nothing. CPU time is that
of all threads of the process, and hardly depends on other load.
"""

import os
import subprocess
import sys
import time

from timing import Results, Timing, arguments

PROGRAMS = {
    "nothing": "pass",
    "jax": "import jax",
    "jax.numpy, flax.linen": "import jax.numpy, flax.linen",
    "octavo": "from octavo import quantized, quantize_model",  # names are imported when they are used
    "octavo.cli": "import octavo.cli; octavo.cli.make_parser()",
    "qwix": "import qwix",
    "aqt": "import aqt.jax.v2.config",
}


def start(program: str) -> tuple[float, float]:
    """Wall and CPU seconds of an interpreter that runs a program."""
    before, begin = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, stderr=subprocess.DEVNULL)
    wall, after = time.perf_counter() - begin, os.times()
    return wall, after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    options = arguments(__doc__).parse_args()
    rounds = 3 if options.quick else 15
    results = Results("flax", "qwix", "aqtp", method=f"best of {rounds} interleaved starts", file=options.json)
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in PROGRAMS}
    for program in PROGRAMS.values():
        start(program)
    for _ in range(rounds):
        for name, program in PROGRAMS.items():
            runs[name].append(start(program))
    kinds = {name: [Timing.of(t) for t in zip(*found, strict=True)] for name, found in runs.items()}
    nothing = [t.seconds for t in kinds.pop("nothing")]
    rows = []
    for name, times in kinds.items():
        net = [t.seconds - base for t, base in zip(times, nothing, strict=True)]
        jax = [t.seconds - base for t, base in zip(kinds["jax"], nothing, strict=True)]
        cells = [cell for n, j in zip(net, jax, strict=True) for cell in (f"{n:.2f}", f"{n / j:.2f}")]
        rows.append([f"`{name}`", *cells, f"{max(t.spread for t in times):.0%}"])
    results.add("Importing", ["", "wall s", "of jax", "CPU s", "of jax", "spread"], rows)


if __name__ == "__main__":
    main()
