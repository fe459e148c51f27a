"""`python -m stagewright.cli`, which is also how torchrun starts it."""

import sys

from stagewright.cli.entry import run

if __name__ == "__main__":
    sys.exit(run())
