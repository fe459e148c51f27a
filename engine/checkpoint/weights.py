"""Checkpoint, weights: those of one rank's stages, in all their versions, from what other ranks may have written."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stagewright.engine.checkpoint.names import Names
from stagewright.engine.checkpoint.source import Source, take
from stagewright.engine.checkpoint.spread import spread_as
from stagewright.engine.pipeline import Pipeline


def restored_weights(now: Mapping[str, Any], stage: int, names: Names, source: Source) -> dict[str, Any]:
    values = source.by_name(lambda record: take(record, "values", dict))
    state = {}
    for name, current in now.items():
        known = names.of(stage, name)
        if not isinstance(current, Tensor):
            if known not in values:
                raise ValueError(f"the checkpoint is of another model: it has no {known}")
            state[name] = source.decode(values[known])
            continue
        found = source.find("model", known)
        if found is None:
            raise ValueError(
                f"the checkpoint is of another model, or of one that was cut elsewhere: it has no {known}, but "
                f"{listed(sorted(source.names('model')))}; names in the whole model come from global_name"
            )
        check_like(known, found, current)
        state[name] = spread_as(current, found)
    aliases = names.aliases(stage)
    for alias, first in aliases.items():
        one, other = source.find("model", alias), source.find("model", first)
        if one is not None and other is not None and one is not other and not torch.equal(one, other):
            raise ValueError(f"{alias} and {first} are one weight here, but two in the checkpoint")
    return state


def restored_masters(now: Mapping[str, Tensor], stage: int, names: Names, source: Source) -> dict[str, Tensor]:
    """The masters of a stage; none where none were kept: then they are made of the weights."""
    if not now and source.names("master"):
        raise ValueError(
            "the checkpoint has fp32 copies of the weights, which this training does not keep: give master_weights=True"
        )
    found = {name: source.find("master", names.of(stage, name)) for name in now}
    masters = {name: master for name, master in found.items() if master is not None}
    if masters and len(masters) < len(now):
        raise ValueError(f"stage {stage} keeps fp32 copies of {sorted(now)}: the checkpoint has {sorted(masters)}")
    for name, master in masters.items():
        check_like(name, master, now[name])
    return {name: spread_as(now[name], master) for name, master in masters.items()}


def restored_training(pipe: Pipeline, now: Mapping[str, Any], names: Names, source: Source) -> dict[str, Any]:
    """Where an asynchronous schedule goes on; nothing if it was another one, of which the newest weights count."""
    saved = [training for record in source.records if (training := take(record, "training", dict))]
    if not now or not saved or saved[0].get("schedule") != now["schedule"]:
        return {}
    numbers: dict[str, Any] = {}
    for training in saved:
        numbers = take(training, "versions", dict) | numbers
    # Where stages were cut elsewhere, all of them kept the same versions: else the rule would have been another one.
    common = next((take(numbers, stage, list) for stage in numbers), [])
    older = {
        stage: {
            number: _version(number, weights.trained, stage, names, source)
            for number in (take(numbers, str(stage), list) if str(stage) in numbers else common)
        }
        for stage, weights in pipe._assembly.weights.items()
    }
    num_batches = take(saved[0], "num_batches", int)
    if num_batches < 0:
        raise ValueError(f"no training has had {num_batches} batches")
    return {"schedule": now["schedule"], "num_batches": num_batches, "older_versions": older}


def _version(
    number: Any, trained: Mapping[str, Tensor], stage: int, names: Names, source: Source
) -> Mapping[str, Tensor]:
    """The weights of a stage in an older version."""
    if type(number) is not int or number < 0:
        raise ValueError(f"versions are numbered from 0: got {number!s:.100}")
    values = {}
    for name, parameter in trained.items():
        known = names.of(stage, name)
        found = source.find(f"version-{number}", known)
        if found is None:
            raise ValueError(f"the checkpoint has no version {number} of {known}")
        if found.shape != parameter.shape:
            raise ValueError(f"version {number} of {known} is {describe(found)}: it should be {describe(parameter)}")
        values[name] = spread_as(parameter, found)
    return values


def check_like(name: str, found: Tensor, now: Tensor) -> None:
    """Refuse a tensor in the place of one of another shape or type."""
    if (found.dtype, found.shape) != (now.dtype, now.shape):
        raise ValueError(
            f"the checkpoint is of another model: {name} is {describe(found)} there and {describe(now)} here; weights "
            "alone can be moved to another type by full_state_dict and load_full_state_dict"
        )


def describe(tensor: Tensor) -> str:
    """Type and shape, such as float32[2, 3]."""
    return f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch.")


def listed(names: Sequence[str]) -> str:
    """Some names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
