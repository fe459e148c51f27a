"""Messages: what the ranks say to each other over the control channel."""

import json
from enum import IntEnum

from stagewright.engine.control.progress import Place
from stagewright.engine.control.silence import Answer


class Kind(IntEnum):
    """What a message is."""

    NEWS = 1
    LEAVE = 2
    DRAIN = 3
    ASK = 4
    ANSWER = 5
    SEEN = 6


def to_text(place: Place, awaited: int | None = None, idle_seconds: float = 0.0, number: str = "") -> str:
    """Where a rank is, whom it waits for, and for how long nothing has changed; ``number`` is that of a question."""
    return json.dumps([place.step, place.instruction, awaited, idle_seconds, number])


def from_text(text: str) -> tuple[Answer, str]:
    """The same, read; ValueError where it is none."""
    match json.loads(text):
        case [int() as step, str() as instruction, int() | None as awaited, float() as idle_seconds, str() as number]:
            return Answer(Place(step, instruction), awaited, idle_seconds), number
    raise ValueError("this is no answer")
