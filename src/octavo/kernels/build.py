"""`python -m octavo.kernels.build`: compile the CPU kernels by hand."""

import sys

from octavo.kernels.compiling import BuildError, build


def main() -> int:
    """Compile the library and print its path, or the reason it could not be built."""
    try:
        print(build())
    except BuildError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
