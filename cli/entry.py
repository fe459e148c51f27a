"""Entry: starts the command, so that Ctrl-C ends it with one line, also while it is being loaded."""

import signal
import sys

EXIT_INTERRUPTED = 130


def run() -> int:
    """Load and run the command; what is imported here takes long enough to be interrupted."""
    try:
        from stagewright.cli.main import main

        code = main()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        code = EXIT_INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left is Python's own tidying up
    return code
