"""Lets the tests here, and the processes they start, import the modules that stand beside them, such as ``plain``."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
