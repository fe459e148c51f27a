"""What a rank raises when it is not itself at fault."""


class PeerError(RuntimeError):
    """Another rank has failed, so this one cannot go on; the message names that rank and what it was doing."""
