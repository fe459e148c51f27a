"""Checkpoint, index: what a checkpoint holds, and in which of its files; a JSON object that carries its own checksum.

    DIR/latest                          the name of the newest whole checkpoint
    DIR/step-20.save-2/index.json       this
    DIR/step-20.save-2/rank-0.safetensors, rank-1.safetensors, …        the tensors that each rank has written

Files are called by their numbers, never by what a file says: so none outside of the folder is ever opened.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias

from stagewright.engine.checkpoint.files import Written
from stagewright.engine.checkpoint.shards import unreadable

# What one rank knows and is no tensor of its own, as JSON.
Record: TypeAlias = Mapping[str, Any]

INDEX: Final = "index.json"
LATEST: Final = "latest"
MAX_STEPS: Final = 10**18
_FORMAT: Final = "stagewright checkpoint"
_VERSION: Final = 1
# What is around the contents of an index file; the checksum is that of their bytes.
_HEAD: Final = b'{"sha256": "%s", "content": '
_TAIL: Final = b"}"
_NO_SHA256: Final = b"0" * 64
_MAX_BYTES: Final = 1 << 30
_MAX_NAME: Final = 200
_FOLDER: Final = re.compile(r"step-(\d{1,18})\.save-(\d{1,18})", re.ASCII)


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds.

    Args:
        step: of the trainer.
        shards: what each rank has written.
        records: what else each rank knows.
        sha256: of what was read.
    """

    step: int
    shards: Sequence[Written]
    records: Sequence[Record]

    sha256: str = ""

    def check(self) -> None:
        """Refuse tensors of several ranks under one name.

        Raises:
            ValueError: there are some.
        """
        assert len(self.shard_of) == sum(len(record["tensors"]) for record in self.records)

    @cached_property
    def shard_of(self) -> Mapping[str, int]:
        """In which shard each tensor is.

        Raises:
            ValueError: in two of them.
        """
        shard_of: dict[str, int] = {}
        for rank, record in enumerate(self.records):
            for name in record["tensors"]:
                if shard_of.setdefault(name, rank) != rank:
                    raise ValueError(
                        f"ranks {shard_of[name]} and {rank} both have a tensor {name}: names in the whole model must "
                        "differ; see global_name"
                    )
        return shard_of

    def to_json(self) -> bytes:
        """The contents of an index file."""
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "step": self.step,
            "shards": [{"bytes": shard.num_bytes, "sha256": shard.sha256} for shard in self.shards],
            "ranks": list(self.records),
        }
        body = json.dumps(content, allow_nan=False).encode()
        return _HEAD % hashlib.sha256(body).hexdigest().encode() + body + _TAIL

    @classmethod
    def from_json(cls, data: bytes) -> "Index":
        """The index that a file has.

        Raises:
            ValueError: it has none, or not the one that was written.
        """
        head, body = data[: len(_HEAD % _NO_SHA256)], data[len(_HEAD % _NO_SHA256) : -len(_TAIL)]
        sha256 = hashlib.sha256(body).hexdigest()
        match json.loads(data.decode()):
            case {"sha256": str(), "content": {"format": "stagewright checkpoint", **content}}:
                if head != _HEAD % sha256.encode() or data[-len(_TAIL) :] != _TAIL:
                    raise ValueError(f"its contents have changed since they were written: their SHA-256 is {sha256}")
            case _:
                raise ValueError("this is no index of a checkpoint")
        if content.get("version") != _VERSION:
            raise ValueError(f"it has format {content.get('version')!s:.20}: this program knows format {_VERSION}")
        match content:
            case {"step": int(step), "shards": [*shards], "ranks": [*records]} if 0 < len(shards) == len(records):
                pass
            case _:
                raise ValueError("it says no step, or not what each rank has written")
        return cls(step, [_shard(value) for value in shards], [_record(value) for value in records], sha256)


def shard_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank}.safetensors"


def folder_name(step: int, save: int) -> str:
    """The folder of a checkpoint; ``save`` counts them."""
    return f"step-{step}.save-{save}"


def save_of(name: str) -> int | None:
    """The number of the save that made a folder; None for what is no checkpoint."""
    match = _FOLDER.fullmatch(name)
    return None if match is None else int(match[2])


def read_index(folder: Path) -> Index:
    """The index of a checkpoint.

    Raises:
        ValueError: it is missing, damaged or something else.
    """
    path = folder / INDEX
    try:
        return Index.from_json(_read(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, error) from error


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint in a folder; None where there is none yet.

    Raises:
        ValueError: ``latest`` names none.
    """
    path = folder / LATEST
    try:
        name = _read(path, _MAX_NAME).decode().strip()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if save_of(name) is None:
        raise unreadable(path, f"it names no checkpoint: got {name!r}")
    return folder / name


def find(folder: Path) -> Path | None:
    """The checkpoint that a folder is, or the newest one in it; None where there is none."""
    return folder if (folder / INDEX).exists() else newest(folder)


def _read(path: Path, max_bytes: int) -> bytes:
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return data


def _shard(value: Any) -> Written:
    match value:
        case {"bytes": int(num_bytes), "sha256": str(sha256)}:
            return Written(num_bytes, sha256)
        case _:
            raise ValueError(f"a shard has a size and a checksum: got {value!s:.100}")


def _record(value: Any) -> Record:
    tensors = value.get("tensors") if isinstance(value, dict) else None
    if not isinstance(tensors, list) or not all(isinstance(name, str) for name in tensors):
        raise ValueError("a rank has a list of the names of its tensors")
    record: Record = value
    return record
