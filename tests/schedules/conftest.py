"""Lets the tests here import the modules that stand beside them, such as ``interpreter``."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
