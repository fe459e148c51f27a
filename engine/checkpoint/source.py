"""Checkpoint, source: a checkpoint that is read from, each tensor once and each file only if it is needed."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from stagewright.engine.checkpoint.index import INDEX, Record, read_index, shard_name
from stagewright.engine.checkpoint.shards import Shard, unreadable
from stagewright.engine.checkpoint.values import decode
from stagewright.engine.checkpoint.whole import number_of, shape_of
from stagewright.engine.pipeline import Pipeline

T = TypeVar("T")


class Source:
    """A checkpoint.

    Args:
        folder: of the checkpoint.

    Raises:
        ValueError: it has no index that is whole.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = read_index(folder)
        self._shards: dict[int, Shard] = {}
        self._read: dict[str, Tensor] = {}
        try:
            self._shard_of = self.index.shard_of
            self._aliases: dict[str, str] = {}
            for record in self.records:
                self._aliases |= _checked_aliases(take(record, "aliases", dict))
            _check_shape(take(self.first, "shape", list), len(self.records))
        except ValueError as error:
            raise unreadable(folder / INDEX, error) from error

    @property
    def records(self) -> Sequence[Record]:
        """What each rank has written that is no tensor."""
        return self.index.records

    @property
    def first(self) -> Record:
        """The record of the first rank, for what all of them know alike."""
        return self.index.records[0]

    def own(self, pipe: Pipeline) -> Record:
        """The record of a rank; where the pipeline had another shape, that of the first one."""
        same = take(self.first, "shape", list) == shape_of(pipe)
        return self.index.records[number_of(pipe) if same else 0]

    def names(self, kind: str) -> set[str]:
        """The names in the model of which there is a tensor of some kind."""
        start = f"{kind}/"
        return {name.removeprefix(start) for name in self._shard_of if name.startswith(start)}

    def find(self, kind: str, name: str) -> Tensor | None:
        """A tensor by its kind and its name in the model, or the one with which that was one weight; None if there
        is none.

        Raises:
            ValueError: its file is missing or damaged.
        """
        for known in (name, self._aliases.get(name)):
            if f"{kind}/{known}" in self._shard_of:
                return self.tensor(f"{kind}/{known}")
        return None

    def tensor(self, name: str) -> Tensor:
        """A tensor.

        Raises:
            ValueError: there is none of this name, or its file is missing or damaged.
        """
        if name not in self._read:
            rank = self._shard_of.get(name)
            if rank is None:
                raise unreadable(self.folder / INDEX, f"there is no {name}")
            if rank not in self._shards:
                self._shards[rank] = Shard(self.folder / shard_name(rank), self.index.shards[rank])
            self._read[name] = self._shards[rank].read(name)
        return self._read[name]

    def by_name(self, of_ranks: Callable[[Record], Mapping[str, Any]]) -> dict[str, Any]:
        """What ranks have written by parameter, together, and under further names of the parameters too."""
        together: dict[str, Any] = {}
        for record in self.records:
            together |= of_ranks(record)
        return {name: together[first] for name, first in self._aliases.items() if first in together} | together

    def decode(self, value: Any) -> Any:
        """A value that was encoded."""
        return decode(value, self.tensor)


def take(record: Any, key: str, kind: type[T]) -> T:
    """What a record has under a key.

    Raises:
        ValueError: nothing, or something of another type.
    """
    value = record.get(key) if isinstance(record, dict) else None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{key} should be of type {kind.__name__}: got {value!s:.100}")
    return value


def _checked_aliases(aliases: dict[str, Any]) -> dict[str, str]:
    """Further names, each with the first name of the same parameter."""
    for name, first in aliases.items():
        if not isinstance(first, str):
            raise ValueError(f"{name} should be another name of a parameter: got {first!s:.100}")
    return aliases


def _check_shape(shape: list[Any], num_records: int) -> None:
    """Refuse a shape that is not that of the ranks that have written."""
    match shape:
        case [int(num_ranks), int(num_replicas)] if num_ranks * num_replicas == num_records and num_ranks > 0:
            return
    raise ValueError(f"{num_records} ranks are none of the shape {shape!s:.100}")
