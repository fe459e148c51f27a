"""Checkpoint: a training on disk, by layer and not by rank."""

from stagewright.engine.checkpoint.checkpoints import Checkpoints
from stagewright.engine.checkpoint.export import (
    full_state_dict,
    load_full_state_dict,
    read_part,
    read_state_dict,
    write_state_dict,
)

__all__ = [
    "Checkpoints",
    "full_state_dict",
    "load_full_state_dict",
    "read_part",
    "read_state_dict",
    "write_state_dict",
]
