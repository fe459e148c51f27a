"""Readers of checkpoints as functions of bytes: of an index, of a shard, of ``latest``."""

import atexit
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from checkpointing import Loader, Shape, make_pipeline, make_tokens

from stagewright.engine import Checkpoints, read_part, read_state_dict
from stagewright.engine.checkpoint.index import newest, read_index
from stagewright.engine.checkpoint.shards import shard_of_bytes
from stagewright.engine.launch.context import context_of, default_transport

SHAPE = Shape("2bw", 1, 1, model={"num_layers": 1, "hidden_size": 2}, pipeline={"loss_scale": "dynamic"})


class Victim:
    """A training that has saved, and loads what has become of it."""

    def __init__(self) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="stagewright-victim-")
        self.folder = Path(self._home.name)
        self.pipe = make_pipeline(context_of(default_transport()), SHAPE)
        for step in range(2):
            self.pipe.train_step(*make_tokens(step))
        self._checkpoints().save()
        [self.saved] = self.folder.glob("step-2.save-1")
        self.index = (self.saved / "index.json").read_bytes()
        self.content = json.dumps(json.loads(self.index)["content"]).encode()
        self.shard = (self.saved / "rank-0.safetensors").read_bytes()

    def close(self) -> None:
        """Leave nothing behind."""
        self.pipe.close()
        self._home.cleanup()

    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.folder, self.pipe, parts={"loader": Loader()})

    def read_index(self, content: bytes) -> None:
        """An index with this content, under a right checksum."""
        sha256 = hashlib.sha256(content).hexdigest().encode()
        (self.saved / "index.json").write_bytes(b'{"sha256": "%s", "content": %s}' % (sha256, content))
        read_index(self.saved)
        read_part(self.folder, "loader")
        read_state_dict(self.folder)
        self._checkpoints().load()

    def read_raw_index(self, data: bytes) -> None:
        """An index file of these very bytes."""
        (self.saved / "index.json").write_bytes(data)
        read_index(self.saved)

    def read_shard(self, data: bytes) -> None:
        """A safetensors file of these bytes, and what a rank sends as one."""
        path = self.folder / "weights.safetensors"
        path.write_bytes(data)
        read_state_dict(path)
        shard_of_bytes(data)

    def read_latest(self, data: bytes) -> None:
        """A file that names the newest checkpoint."""
        (self.folder / "latest").write_bytes(data)
        newest(self.folder)


@cache
def victim() -> Victim:
    """The one that all tests share."""
    one = Victim()
    atexit.register(one.close)
    return one


def checkpoint_readers() -> Mapping[str, tuple[Callable[[bytes], Any], Sequence[bytes], bool]]:
    """By name: how to read, what can be read, and whether that is JSON."""
    one = victim()
    return {
        "index": (one.read_index, [one.content], True),
        "index-file": (one.read_raw_index, [one.index], False),
        "shard": (one.read_shard, [one.shard], False),
        "latest": (one.read_latest, [b"step-2.save-1\n"], False),
    }
