"""Console: where a run shows itself, for as long as somebody reads."""

import os
import sys

from rich.console import Console


class PatientConsole(Console):
    """Goes on without a word where its reader has had enough, as `head` has: a run is more than what it shows."""

    def on_broken_pipe(self) -> None:
        """Let whatever is still written go nowhere."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
