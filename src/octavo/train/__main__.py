"""`python -m octavo.train`."""

import sys

from octavo.cli.train import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
