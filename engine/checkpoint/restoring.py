"""Checkpoint, restoring: from a checkpoint to the state of one rank, whatever ranks and stages there were when it was
written."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stagewright.engine.checkpoint.index import Record
from stagewright.engine.checkpoint.names import Names
from stagewright.engine.checkpoint.optimizer import restored_optimizer, restored_staleness
from stagewright.engine.checkpoint.random import restore_random_state, restored_random_state
from stagewright.engine.checkpoint.record import Stateful
from stagewright.engine.checkpoint.source import Source, take
from stagewright.engine.checkpoint.weights import listed, restored_masters, restored_training, restored_weights
from stagewright.engine.checkpoint.whole import shape_of
from stagewright.engine.errors import described
from stagewright.engine.pipeline import Pipeline


class Restoration:
    """What one rank takes from a checkpoint; all of it has been read and checked, and nothing has changed yet.

    Args:
        pipe, names: of this rank.
        source: the checkpoint.
        parts: what else goes on.

    Raises:
        ValueError: the checkpoint is of another model or training, or damaged.
    """

    def __init__(self, pipe: Pipeline, names: Names, source: Source, parts: Mapping[str, Stateful | None]) -> None:
        self._pipe, self._source, self._parts = pipe, source, parts
        try:
            self._state = restored_state(pipe, names, source)
            self._of_parts = restored_parts(parts, pipe, source)
            self._random = restored_random_state(pipe, source)
        except (ValueError, RecursionError) as error:
            raise self._refusal(error) from error

    def apply(self) -> None:
        """Let the training go on from there.

        Raises:
            ValueError: a part, or the optimizer, does not understand its state.
        """
        pipe = self._pipe
        try:
            pipe.load_state_dict(self._state)
            for name, state in self._of_parts.items():
                part = self._parts[name]
                assert part is not None, "only those that are there were restored"
                part.load_state_dict(state)
                if pipe.optimizer is not None and not is_same_cut(pipe, self._source):
                    adjust_scheduler(part, pipe.optimizer)
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            raise self._refusal(error) from error
        if self._random is not None:
            restore_random_state(pipe, self._random)

    def _refusal(self, error: Exception) -> ValueError:
        """What to raise: a ValueError that names the checkpoint."""
        folder = self._source.folder
        if isinstance(error, ValueError) and str(folder) in str(error):
            return error
        reason = str(error) if isinstance(error, ValueError) else described(error)
        return ValueError(f"{folder} cannot be loaded: {reason}")


def is_same_cut(pipe: Pipeline, source: Source) -> bool:
    """Whether this rank has the stages that it had."""
    own = source.own(pipe)
    return bool(own.get("shape") == shape_of(pipe) and own.get("stages") == list(pipe.modules))


def names_in_use(pipe: Pipeline, names: Names) -> set[str]:
    """The names of all that the stages of this rank hold."""
    return {names.of(stage, name) for stage, module in pipe.modules.items() for name in module.state_dict()}


def restored_state(pipe: Pipeline, names: Names, source: Source) -> dict[str, Any]:
    """What ``Pipeline.load_state_dict`` takes.

    Raises:
        ValueError: the checkpoint is of another model or training, or damaged.
    """
    now = pipe.state_dict()
    num_steps = take(source.first, "num_steps", int)
    if num_steps < 0:
        raise ValueError(f"no training has made {num_steps} steps")
    return {
        "stages": {stage: restored_weights(state, stage, names, source) for stage, state in now["stages"].items()},
        "masters": {
            stage: restored_masters(masters, stage, names, source) for stage, masters in now["masters"].items()
        },
        "training": restored_training(pipe, now["training"], names, source),
        "optimizer": restored_optimizer(pipe, now["optimizer"], names, source),
        "staleness": restored_staleness(pipe, names, source),
        "loss_scale": _loss_scale(source),
        "num_steps": num_steps,
    }


def check_all_used(used: set[str], source: Source) -> None:
    """Refuse a checkpoint of a larger model.

    Args:
        used: names of what the stages of all ranks hold.
        source: the checkpoint.
    """
    left = sorted(source.names("model") - used)
    if left:
        raise ValueError(
            f"{source.folder} cannot be loaded: the checkpoint is of another model: it has {listed(left)}, which no "
            "stage holds"
        )


def restored_parts(parts: Mapping[str, Stateful | None], pipe: Pipeline, source: Source) -> dict[str, dict[str, Any]]:
    """The state of each part: what this rank has written, or the first that has it."""
    records = [source.own(pipe), *source.records]
    return {name: restored_part(name, records, source) for name, part in parts.items() if part is not None}


def restored_part(name: str, records: Sequence[Record], source: Source) -> dict[str, Any]:
    """The state of a part, from the first record that has it.

    Raises:
        ValueError: none has.
    """
    for record in records:
        if name in (parts := take(record, "parts", dict)):
            state = source.decode(parts[name])
            if isinstance(state, dict):
                return state
            raise ValueError(f"the state of {name!r} is a dict: got a {type(state).__name__}")
    raise ValueError(f"the checkpoint has no part {name!r}: it was saved without one")


def adjust_scheduler(part: Any, optimizer: Optimizer) -> None:
    """Let a scheduler that was written for other parameter groups go on with those of this rank."""
    if isinstance(part, LRScheduler):
        if hasattr(part, "base_lrs") and all("initial_lr" in group for group in optimizer.param_groups):
            part.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        if hasattr(part, "_last_lr"):
            part._last_lr = [group["lr"] for group in optimizer.param_groups]
        for inner in getattr(part, "_schedulers", []):
            adjust_scheduler(inner, optimizer)


def _loss_scale(source: Source) -> tuple[float, int] | None:
    match source.decode(source.first.get("loss_scale")):
        case None:
            return None
        case (float(value), int(num_good_steps)) if math.isfinite(value) and value > 0 and num_good_steps >= 0:
            return value, num_good_steps
        case other:
            raise ValueError(f"a loss scale is a factor and a count: got {other!s:.100}")
