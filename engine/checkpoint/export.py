"""Checkpoint, export: the weights of a whole model as a plain state dict, from and to pipelines, folders and files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from stagewright.engine.checkpoint.files import Files
from stagewright.engine.checkpoint.index import find
from stagewright.engine.checkpoint.names import GlobalName, Names
from stagewright.engine.checkpoint.record import first_copies
from stagewright.engine.checkpoint.restoring import restored_part
from stagewright.engine.checkpoint.shards import Shard, parts_of, shard_of_bytes, unreadable
from stagewright.engine.checkpoint.source import Source
from stagewright.engine.checkpoint.spread import gathered, spread_as
from stagewright.engine.checkpoint.weights import listed
from stagewright.engine.pipeline import Pipeline
from stagewright.engine.transport.contract import Session


def full_state_dict(pipe: Pipeline, global_name: GlobalName | None = None) -> dict[str, Tensor]:
    """The parameters and buffers of the whole model on the CPU, as the model without stages would give them.

    Every rank calls this alike. The weights travel to rank 0, which must have room for them; where it has not,
    ``read_state_dict`` reads a checkpoint on a machine that has.

    Args:
        pipe: the pipeline; it is flushed.
        global_name: as for ``Checkpoints``.

    Returns:
        On rank 0, that of each replica, by name in the whole model; nothing elsewhere.

    Raises:
        ValueError: a stage keeps something else than plain tensors, or names are not unique.
    """
    names = Names(pipe.modules, global_name)
    stages = gathered(pipe.state_dict()["stages"])
    own = {
        names.of(stage, name): value
        for stage in sorted(first_copies(pipe))
        for name, value in stages[stage].items()
        if isinstance(value, Tensor)
    }
    of_ranks = pipe._assembly.transport.gather(json.dumps(list(own)).encode())
    order = [name for data in of_ranks for name in json.loads(data)]
    if len(set(order)) < len(order):
        twice = sorted({name for name in order if order.count(name) > 1})
        raise ValueError(f"ranks both have {listed(twice)}: give global_name=… names that differ in the whole model")
    assembly = pipe._assembly
    assembly.transport.begin(Session(fixed_shapes=False))
    ranks = range(assembly.transport.num_ranks)
    arrived = assembly.agreement.spread(b"".join(parts_of(own)), ranks, [0])
    assembly.transport.end()
    return {name: value for data in arrived for name, value in shard_of_bytes(data).items()}


def load_full_state_dict(pipe: Pipeline, state: Mapping[str, Tensor], global_name: GlobalName | None = None) -> None:
    """Let the stages take their weights from the state dict of a whole model; the optimizer's state stays as it is.

    Every rank calls this alike. Types may be others than those of the stages, shapes may not.

    Args:
        pipe: the pipeline; it is flushed.
        state: by name in the whole model; what only other ranks need may be left out.
        global_name: as for ``Checkpoints``.

    Raises:
        ValueError: something is missing, or of another shape.
    """
    names = Names(pipe.modules, global_name)
    now = pipe.state_dict()
    stages = {}
    for stage, weights in now["stages"].items():
        known = {name: names.of(stage, name) for name in weights}
        missing = sorted(set(known.values()) - set(state))
        if missing:
            raise ValueError(f"the state dict lacks {listed(missing)}, which stage {stage} holds")
        for name, value in weights.items():
            found = state[known[name]]
            if isinstance(value, Tensor) and found.shape != value.shape:
                raise ValueError(f"{known[name]} is {list(found.shape)} in the state dict: it is {list(value.shape)}")
        stages[stage] = {name: _placed(value, state[known[name]]) for name, value in weights.items()}
    pipe.load_state_dict({**now, "stages": stages, "masters": {}, "training": {}})


def _placed(now: Any, found: Any) -> Any:
    """A weight where it belongs, if it is one."""
    return spread_as(now, found) if isinstance(now, Tensor) and isinstance(found, Tensor) else found


def read_state_dict(path: Path | str) -> dict[str, Tensor]:
    """The weights of the whole model in a checkpoint, or the tensors of a safetensors file; no ranks are needed.

    Args:
        path: a checkpoint, a folder with checkpoints, of which the newest is taken, or a file.

    Raises:
        ValueError: it is none of these, or damaged.
    """
    path = Path(path)
    if path.is_file():
        shard = Shard(path)
        return {name: shard.read(name) for name in shard.entries}
    folder = find(path)
    if folder is None:
        raise ValueError(f"there is no checkpoint in {path}")
    source = Source(folder)
    return {name: source.tensor(f"model/{name}") for name in sorted(source.names("model"))}


def write_state_dict(path: Path | str, state: Mapping[str, Tensor]) -> None:
    """Write tensors to a safetensors file, at one stroke.

    Raises:
        ValueError: one is of a kind that the format does not have.
    """
    path = Path(path)
    files = Files()
    unfinished = path.with_name(f".{path.name}.new")
    files.write(unfinished, parts_of(state))
    files.rename(unfinished, path)
    files.sync_folder(path.parent)


def read_part(path: Path | str, name: str) -> dict[str, Any] | None:
    """The state of a part, as the first rank that has it has saved it; no ranks are needed.

    Args:
        path: a checkpoint, or a folder with checkpoints, of which the newest is taken.
        name: of the part.

    Returns:
        None where nothing was saved in the folder yet.

    Raises:
        ValueError: the checkpoint has no such part, or is damaged.
    """
    folder = find(Path(path))
    if folder is None:
        return None
    source = Source(folder)
    try:
        return restored_part(name, source.records, source)
    except (ValueError, RecursionError) as error:
        raise unreadable(folder, error) from error
