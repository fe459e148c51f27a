"""Checkpoint, optimizer: its state for the parameters of one rank, from what other ranks may have written."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stagewright.engine.checkpoint.index import Record
from stagewright.engine.checkpoint.names import Names
from stagewright.engine.checkpoint.record import names_of_parameters, parameters_of
from stagewright.engine.checkpoint.source import Source, take
from stagewright.engine.checkpoint.spread import spread_as
from stagewright.engine.pipeline import Pipeline


def restored_optimizer(
    pipe: Pipeline, now: Mapping[str, Any] | None, names: Names, source: Source
) -> dict[str, Any] | None:
    """The state that this rank's optimizer loads.

    Args:
        now: its state as it is.

    Raises:
        ValueError: it was another optimizer, or parameters of one group were in groups with other settings.
    """
    if now is None:
        return None
    saved = [record["optimizer"] for record in source.records if record.get("optimizer") is not None]
    kinds = {take(optimizer, "kind", str) for optimizer in saved}
    own_kind = type(pipe.optimizer).__name__
    if kinds - {own_kind}:
        raise ValueError(
            f"the checkpoint is of a training with {', '.join(sorted(kinds))}: this is one with {own_kind}"
        )
    numbered = names_of_parameters(pipe, names)
    parameters = parameters_of(pipe)
    states = source.by_name(_states)
    settings = _Settings(source)
    state: dict[int, Any] = {}
    for number, name in enumerate(numbered):
        if name in states:
            # copied, for two copies of one weight would otherwise share what is remembered of it
            state[number] = copy.deepcopy(source.decode(states[name]))
            if not isinstance(state[number], dict):
                raise ValueError(f"what an optimizer remembers of {name} is a dict: got {type(state[number]).__name__}")
            state[number] = {key: _spread(value, parameters[number]) for key, value in state[number].items()}
    groups = []
    for group in now["param_groups"]:
        restored = settings.of([numbered[number] for number in group["params"]])
        groups.append({**group, **restored, "params": group["params"]})
    own = source.own(pipe).get("optimizer") or (saved[0] if saved else {"rest": {"dict": []}})
    rest = source.decode(own.get("rest"))
    if not isinstance(rest, dict):
        raise ValueError(f"the rest of an optimizer's state is a dict: got {type(rest).__name__}")
    return {**now, **rest, "state": state, "param_groups": groups}


def restored_staleness(pipe: Pipeline, names: Names, source: Source) -> list[tuple[str, dict[str, Any]]]:
    """What the remedies against staleness go on with."""
    number_of_name = {name: number for number, name in enumerate(names_of_parameters(pipe, names))}
    restored = []
    for index, treatment in enumerate(take(source.own(pipe), "staleness", list)):
        kind = take(treatment, "kind", str)
        state: dict[str, Any] = {key: source.decode(value) for key, value in take(treatment, "other", dict).items()}
        for key in take(treatment, "named", dict):
            tensors = source.by_name(_Remembered(index, kind, key))
            state[key] = {
                number_of_name[name]: source.decode(value) for name, value in tensors.items() if name in number_of_name
            }
        restored.append((kind, state))
    return restored


def _spread(value: Any, parameter: Tensor) -> Any:
    """What is remembered of a parameter element by element lies where these do."""
    return spread_as(parameter, value) if isinstance(value, Tensor) and value.shape == parameter.shape else value


class _Settings:
    """The settings of the groups in which parameters were."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._group_of = source.by_name(_groups)
        self._decoded: dict[int, dict[str, Any]] = {}

    def of(self, names: list[str]) -> dict[str, Any]:
        """Those of some parameters together; none where nothing is known of them."""
        found = [self._decode(self._group_of[name]) for name in names if name in self._group_of]
        for settings in found:
            if settings is not found[0] and not is_same(settings, found[0]):
                raise ValueError(
                    f"parameters that are in one group of the optimizer here, {names[0]} and others, were in groups "
                    "with different settings: group them as they were"
                )
        return found[0] if found else {}

    def _decode(self, group: Any) -> dict[str, Any]:
        if id(group) not in self._decoded:
            settings = self._source.decode(take(group, "settings", dict))
            if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
                raise ValueError("the settings of a group are a dict")
            self._decoded[id(group)] = {key: value for key, value in settings.items() if key != "params"}
        return self._decoded[id(group)]


class _Remembered:
    """What a remedy has written by parameter under a key."""

    def __init__(self, index: int, kind: str, key: str) -> None:
        self._index, self._kind, self._key = index, kind, key

    def __call__(self, record: Record) -> Mapping[str, Any]:
        treatments = take(record, "staleness", list)
        if self._index >= len(treatments) or take(treatments[self._index], "kind", str) != self._kind:
            return {}
        named = take(treatments[self._index], "named", dict)
        return take(named, self._key, dict) if self._key in named else {}


def _states(record: Record) -> Mapping[str, Any]:
    return {} if record.get("optimizer") is None else take(record["optimizer"], "state", dict)


def _groups(record: Record) -> Mapping[str, Any]:
    groups = [] if record.get("optimizer") is None else take(record["optimizer"], "groups", list)
    return {str(name): group for group in groups for name in take(group, "parameters", list)}


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal, tensors in them too."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(is_same, one, other))
    return type(one) is type(other) and bool(one == other or (one != one and other != other))
