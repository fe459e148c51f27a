"""What a rank, or the launcher of ranks, raises when it is not itself at fault."""


class PeerError(RuntimeError):
    """Another rank has failed, so this one cannot go on; the message names that rank and what it was doing."""


class RankError(RuntimeError):
    """A rank has died without raising anything, or has raised what could not be brought here as it was."""
