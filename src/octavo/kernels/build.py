"""`python -m octavo.kernels.build`: compile the CPU kernels by hand."""

import sys

from octavo.kernels.compiling import BuildError, build


def main() -> int:
    """Compile, and say where the library is or why there is none."""
    try:
        print(build())
    except BuildError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
