"""Checkpoint, random: the state of the random generators of one rank."""

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stagewright.engine.checkpoint.source import Source
from stagewright.engine.checkpoint.weights import describe
from stagewright.engine.checkpoint.whole import number_of
from stagewright.engine.pipeline import Pipeline


def random_state(pipe: Pipeline) -> dict[str, Any]:
    """The generators of this rank: torch's, Python's, and that of its GPU if it has one."""
    device = pipe._assembly.transport.device
    with pipe._assembly.transport.baton:
        return {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        }


def restored_random_state(pipe: Pipeline, source: Source) -> dict[str, Any] | None:
    """The state of this rank's generators; None for a rank that there was not, or that was on another device.

    Raises:
        ValueError: no generators have such a state.
    """
    if number_of(pipe) >= len(source.records):
        return None
    state = source.decode(source.records[number_of(pipe)].get("random"))
    for name, now in random_state(pipe).items():
        found = state.get(name) if isinstance(state, dict) else None
        if isinstance(now, Tensor) and isinstance(found, Tensor):
            if (found.dtype, found.shape) != (now.dtype, now.shape):
                raise ValueError(f"the state of a generator is {describe(now)}: got {describe(found)}")
        elif isinstance(now, Tensor) and not (name == "cuda" and found is None):
            raise ValueError(f"the state of the random generator {name!r} is missing")
    try:
        random.Random().setstate(state["python"])
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"Python's random generator has no such state ({error})") from error
    return dict(state)


def restore_random_state(pipe: Pipeline, state: Mapping[str, Any]) -> None:
    """Let this rank's generators go on from a state."""
    device = pipe._assembly.transport.device
    with pipe._assembly.transport.baton:
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        if device.type == "cuda" and state.get("cuda") is not None:
            torch.cuda.set_rng_state(state["cuda"], device)
