"""`python -m revzoo` is the command `revzoo`."""

import sys

from zoo_cli import run

if __name__ == "__main__":
    sys.exit(run())
