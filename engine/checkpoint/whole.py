"""Checkpoint, whole: all ranks of a training, of every replica of its pipeline, and what they tell each other."""

import json
from typing import Any

from stagewright.engine.errors import PeerError
from stagewright.engine.pipeline import Pipeline
from stagewright.engine.transport.group import gather_bytes


def shape_of(pipe: Pipeline) -> list[int]:
    """Ranks of the pipeline, and its replicas."""
    return [pipe._assembly.transport.num_ranks, pipe.num_replicas]


def number_of(pipe: Pipeline) -> int:
    """The number of this rank among those of all replicas, one replica's after the other's."""
    num_ranks, _ = shape_of(pipe)
    return pipe.replica * num_ranks + pipe.rank


def tell_all(pipe: Pipeline, own: Any) -> list[Any]:
    """What every rank knows, as JSON, in the order of their numbers; every rank calls this alike."""
    of_pipeline = [json.loads(data) for data in pipe._assembly.transport.gather(json.dumps(own).encode())]
    if pipe.num_replicas == 1:
        return of_pipeline
    of_replicas = gather_bytes(pipe._group, json.dumps(of_pipeline).encode())
    return [of_rank for data in of_replicas for of_rank in json.loads(data)]


class Agreement:
    """Context of something that all ranks do, each for itself: it has failed on all where it has on one.

    After it ``of_ranks`` has what each rank has set ``own`` to.

    Args:
        pipe: of this rank.
        purpose: what they do, for the message.

    Raises:
        PeerError: another rank has failed; that rank raises its own error.
    """

    def __init__(self, pipe: Pipeline, purpose: str) -> None:
        self._pipe = pipe
        self._purpose = purpose
        self.own: Any = None
        self.of_ranks: list[Any] = []

    def __enter__(self) -> "Agreement":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, OSError | ValueError):
            return  # the rank is about to end, and whoever watches over it tells the others
        answers = tell_all(self._pipe, {"own": self.own, "error": None if error is None else str(error)})
        self.of_ranks = [answer["own"] for answer in answers]
        for number, answer in enumerate(answers):
            if answer["error"] is not None and error is None:
                raise PeerError(f"rank {number} cannot {self._purpose}: {answer['error']}")
