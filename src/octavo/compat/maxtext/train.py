"""MaxText's command, `python -m octavo.compat.maxtext.train base.yml key=value ...`, run by Octavo's trainer.

A path of MaxText's own base.yml that is no file here stands for Octavo's defaults.
"""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def arguments(argv: Sequence[str]) -> list[str]:
    """The arguments without MaxText's base.yml, unless there is such a file.

    >>> arguments(["src/maxtext/configs/base.yml", "quantization=int8"])
    ['quantization=int8']
    """
    first = argv[:1]
    is_default = bool(first) and Path(first[0]).name == "base.yml" and not Path(first[0]).is_file()
    return list(argv[1:] if is_default else argv)


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.argv[1:] = arguments(given)
    if len(sys.argv) - 1 < len(given):
        print(f"{given[0]} is MaxText's: Octavo's defaults in its place", file=sys.stderr)
    runpy.run_module("octavo.train", run_name="__main__", alter_sys=True)
