"""Silence: who keeps a pipeline waiting, from what each rank says of itself.

Ranks that wait form chains: this one waits for that one, which waits for a third. A rank that does not answer is at
fault, else the one that every chain ends at; ranks in between are innocent, however long they have waited.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stagewright.engine.control.progress import REPLICAS, Place

# So many seconds longer for another replica: if that one is at fault, it says so meanwhile.
_PATIENCE_WITH_REPLICAS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank says of itself.

    Args:
        place: where it is.
        awaited: the rank that it waits for; REPLICAS for ranks of other replicas; None where it computes.
        idle_seconds: for how long nothing has changed there.
    """

    place: Place
    awaited: int | None
    idle_seconds: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who is at fault.

    Args:
        ranks: they.
        reason: why, in words.
    """

    ranks: tuple[int, ...]
    reason: str


def judge(
    waiting: int,
    answers: Mapping[int, Answer],
    silent: Mapping[int, Place],
    timeout: float,
    names: Mapping[int, str],
) -> Verdict | None:
    """Find who keeps a rank waiting; nobody, where all goes on, if only slowly.

    Args:
        waiting: the rank that has waited for too long.
        answers: of all ranks that have answered, that one too.
        silent: where those were last that have not.
        timeout: a rank that has stood still for so many seconds is at fault.
        names: of all ranks.
    """
    if silent:
        told = [f"{names[rank]} does not answer; {silent[rank].last}" for rank in sorted(silent)]
        return Verdict(tuple(sorted(silent)), "; ".join(told))
    chain = [waiting]
    while (awaited := answers[chain[-1]].awaited) is not None and awaited in answers:
        if awaited in chain:
            return _deadlock(chain[chain.index(awaited) :], answers, timeout, names)
        chain.append(awaited)
    last = chain[-1]
    answer = answers[last]
    if answer.idle_seconds < timeout:
        return None
    if answer.awaited is None:
        reason = f"{names[last]} does not go on; for {answer.idle_seconds:.0f} s it has been {answer.place}"
        return Verdict((last,), reason)
    if answer.awaited == REPLICAS and answer.idle_seconds > timeout + _PATIENCE_WITH_REPLICAS:
        return Verdict((), f"{names[last]} waits for another replica {answer.place}")
    return None


def _deadlock(
    circle: Sequence[int], answers: Mapping[int, Answer], timeout: float, names: Mapping[int, str]
) -> Verdict | None:
    """Ranks that wait for each other have been called in different ways; each says where it is."""
    if any(answers[rank].idle_seconds < timeout for rank in circle):
        return None  # answers of different moments only look like it
    places = ", ".join(f"{names[rank]} {answers[rank].place}" for rank in sorted(circle))
    reason = f"ranks wait for each other: {places}; all make the same calls, in one order"
    return Verdict(tuple(sorted(circle)), reason)
