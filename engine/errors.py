"""What a rank, or the launcher of ranks, raises when it is not itself at fault."""


class PeerError(RuntimeError):
    """Another rank has failed, so this one cannot go on; the message names that rank and what it was doing."""


class NotFiniteError(FloatingPointError):
    """The loss of a microbatch is NaN or infinite; every rank raises this, and has left its weights as they were."""


class RankError(RuntimeError):
    """A rank has died without raising anything, or has raised what could not be brought here as it was."""


def described(error: BaseException) -> str:
    """An error in words, as Python shows it, also where its own text fails."""
    try:
        text = str(error)
    except Exception as another:
        text = f"<its message cannot be made: {type(another).__name__}>"
    return f"{type(error).__name__}: {text}"


def returned(rank: int, num_batches: int = 0, replica: str = "") -> str:
    """What a rank is told that waits for one whose function has returned, after so many batches."""
    ended = f"data ended on rank {rank}{replica} after batch {num_batches}: " if num_batches else ""
    return f"{ended}rank {rank}{replica} has returned while another rank still waits for what it sends"
