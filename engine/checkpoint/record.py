"""Checkpoint, record: what one rank of a pipeline contributes to a checkpoint, under names of the whole model.

    model/NAME                  a parameter or buffer as the stage computes with it
    master/NAME                 the fp32 copy that the optimizer trains in its place
    version-3/NAME              the same as of weight version 3, where a schedule still reads it
    optimizer/NAME/exp_avg      what the optimizer remembers of a parameter

Of a stage that several ranks hold, the first one writes these. What belongs to a rank, such as the state of its random
generators, is called ``rank-2/…``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from stagewright.engine.checkpoint.names import Names
from stagewright.engine.checkpoint.random import random_state
from stagewright.engine.checkpoint.spread import gathered, writes
from stagewright.engine.checkpoint.values import encode
from stagewright.engine.checkpoint.whole import number_of, shape_of
from stagewright.engine.pipeline import Pipeline


class Stateful(Protocol):
    """What a trainer has beside the pipeline that must go on where it was: a scheduler, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """What must be kept."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Go on from it."""
        ...


@dataclass
class Share:
    """What one rank contributes.

    Args:
        tensors: for its shard, by name.
        record: all else, as JSON.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> "Share":
        """The same, apart from what is trained: what changes from now on is not seen."""
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.tensors.items()}
        return Share(copies, self.record)


def share_of(pipe: Pipeline, names: Names, parts: Mapping[str, Stateful | None]) -> Share:
    """What this rank contributes now; tensors are the very ones that are trained.

    Raises:
        ValueError: something cannot be kept.
    """
    share = Share()
    state = gathered(pipe.state_dict(), keeps=writes(pipe) and pipe.replica == 0)
    own = f"rank-{number_of(pipe)}"
    written = written_stages(pipe)
    values = _add_weights(share, state, names, written)
    share.record |= {
        "shape": shape_of(pipe),
        "num_steps": pipe.num_steps,
        "stages": list(pipe.modules),
        "aliases": {name: first for stage in pipe.modules for name, first in names.aliases(stage).items()},
        "values": values,
        "training": _training(share, state["training"], names, written),
        "optimizer": _optimizer(share, pipe, state["optimizer"], names),
        "staleness": _staleness(share, pipe, state["staleness"], names),
        "loss_scale": encode(state["loss_scale"], "loss scale", share.tensors),
        "random": encode(random_state(pipe), f"{own}/random", share.tensors),
        "parts": {
            name: encode(part.state_dict(), f"{own}/{name}", share.tensors)
            for name, part in parts.items()
            if part is not None
        },
    }
    share.record["tensors"] = list(share.tensors)
    return share


def written_stages(pipe: Pipeline) -> set[int]:
    """The stages that this rank writes: those of which it has the first copy, in the first replica."""
    return first_copies(pipe) if pipe.replica == 0 and writes(pipe) else set()


def first_copies(pipe: Pipeline) -> set[int]:
    """The stages of which this rank has the first copy, in its replica."""
    placement = pipe.program.placement
    return {stage for stage in pipe.modules if placement.replicas_of(stage)[0] == pipe.rank}


def names_of_parameters(pipe: Pipeline, names: Names) -> list[str]:
    """The names of what the optimizer trains, in the order in which it numbers them.

    Raises:
        ValueError: it trains something else.
    """
    known = {
        parameter: names.of(stage, name)
        for stage, weights in pipe._assembly.weights.items()
        for name, parameter in weights.trained.items()
    }
    parameters = parameters_of(pipe)
    if not all(parameter in known for parameter in parameters):
        raise ValueError("the optimizer trains parameters that are none of the stages': a checkpoint has no names")
    return [known[parameter] for parameter in parameters]


def parameters_of(pipe: Pipeline) -> list[nn.Parameter]:
    """What the optimizer trains, in the order in which it numbers them."""
    groups = pipe.optimizer.param_groups if pipe.optimizer is not None else []
    return [parameter for group in groups for parameter in group["params"]]


def written_parameters(pipe: Pipeline, names: Names) -> set[str]:
    """The names of the trained parameters that this rank writes."""
    return {names.of(stage, name) for stage in written_stages(pipe) for name in pipe._assembly.weights[stage].trained}


def _add_weights(share: Share, state: Mapping[str, Any], names: Names, written: set[int]) -> dict[str, Any]:
    """Add weights and masters; what a module keeps that is no tensor comes back as JSON."""
    values = {}
    for stage in sorted(written):
        for name, value in state["stages"][stage].items():
            known = names.of(stage, name)
            encoded = encode(value, f"model/{known}", share.tensors)
            if not isinstance(value, Tensor):
                values[known] = encoded
        for name, master in state["masters"][stage].items():
            encode(master, f"master/{names.of(stage, name)}", share.tensors)
    return values


def _training(share: Share, state: Mapping[str, Any], names: Names, written: set[int]) -> dict[str, Any]:
    """How far an asynchronous schedule has come, and the versions of its stages that it still reads."""
    if not state:
        return {}
    for stage in sorted(written):
        for version, values in state["older_versions"][stage].items():
            for name, value in values.items():
                encode(value, f"version-{version}/{names.of(stage, name)}", share.tensors)
    versions = {str(stage): list(older) for stage, older in state["older_versions"].items()}
    return {"schedule": state["schedule"], "num_batches": state["num_batches"], "versions": versions}


def _optimizer(share: Share, pipe: Pipeline, state: Mapping[str, Any] | None, names: Names) -> dict[str, Any] | None:
    """The settings of each group, and what is remembered of each parameter."""
    if state is None:
        return None
    numbered = names_of_parameters(pipe, names)
    written = written_parameters(pipe, names)
    own = f"rank-{number_of(pipe)}/optimizer"
    groups = []
    for index, group in enumerate(state["param_groups"]):
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        encoded = encode(settings, f"{own}/{index}", share.tensors)
        groups.append({"settings": encoded, "parameters": [numbered[number] for number in group["params"]]})
    return {
        "kind": type(pipe.optimizer).__name__,
        "groups": groups,
        "state": {
            numbered[number]: encode(remembered, f"optimizer/{numbered[number]}", share.tensors)
            for number, remembered in state["state"].items()
            if numbered[number] in written
        },
        "rest": encode(
            {key: value for key, value in state.items() if key not in ("param_groups", "state")}, own, share.tensors
        ),
    }


def _staleness(share: Share, pipe: Pipeline, states: list[Any], names: Names) -> list[dict[str, Any]]:
    """What each remedy remembers, by parameter or otherwise."""
    numbered = names_of_parameters(pipe, names)
    written = written_parameters(pipe, names)
    records = []
    for index, (kind, state) in enumerate(states):
        record: dict[str, Any] = {"kind": kind, "named": {}, "other": {}}
        for key, value in state.items():
            place = f"staleness-{index}/{key}"
            if isinstance(value, dict):
                record["named"][key] = {
                    numbered[number]: encode(tensor, f"{place}/{numbered[number]}", share.tensors)
                    for number, tensor in value.items()
                    if numbered[number] in written
                }
            else:
                record["other"][key] = encode(value, f"rank-{number_of(pipe)}/{place}", share.tensors)
        records.append(record)
    return records
