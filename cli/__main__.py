"""`python -m stagewright.cli`, which is also how torchrun starts it."""

import sys

from stagewright.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
