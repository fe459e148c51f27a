"""A model whose parts are called one after the other, each with what the one before it returned."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from stagewright.models.build import check_dtype, count_parameters, move
from stagewright.models.cut import Part
from stagewright.models.initialise import reset_by_name
from stagewright.models.meta import check_real, materialise


class ChainStage(nn.Module):
    """Some parts of a chain, called in order, under the names that they have in the whole model."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.names = tuple(parts)
        for name, part in parts.items():
            put(self, name, part)

    def global_name(self, name: str) -> str:
        """What a parameter of this stage is called in the whole model: the same."""
        return name

    def forward(self, value: object) -> object:
        """What crosses from part to part, and so from stage to stage, is the parts' own affair."""
        for name in self.names:
            value = self.get_submodule(name)(value)
        return value


@dataclass(frozen=True)
class Chain:
    """A model as modules by name, called one after the other; a `CuttableModel`.

    Args:
        parts: name and kind of each module.
        build_all: makes all modules, by name; called under `torch.device("meta")`, where they take no memory.
        initialise: fills a stage's parameters and buffers: stage, seed, names of the modules that have none yet.
    """

    parts: tuple[Part, ...]
    build_all: Callable[[], Mapping[str, nn.Module]]
    initialise: Callable[[nn.Module, int, list[str]], None] = reset_by_name

    def build(
        self, parts: range, *, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> ChainStage:
        """Build some parts; those that `build_all` had not made on the meta device are taken as they are."""
        check_dtype(dtype)
        names = [part.name for part in self.parts[parts.start : parts.stop]]
        with torch.device("meta"):
            modules = self.build_all()
        stage = ChainStage({name: modules[name] for name in names})
        if torch.device(device).type != "meta":
            self.initialise(stage, seed, materialise(stage))
            check_real(stage)
        move(stage, device, dtype)
        return stage

    def num_parameters(self) -> tuple[int, ...]:
        """How many parameters each part has."""
        with torch.device("meta"):
            modules = self.build_all()
        return tuple(count_parameters(modules[part.name]) for part in self.parts)


def put(root: nn.Module, name: str, module: nn.Module) -> None:
    """Make a module the one called `layers.7` of another, with a container called `layers` where there is none."""
    *path, last = name.split(".")
    for step in path:
        if step not in root._modules:
            root.add_module(step, nn.Module())
        root = root.get_submodule(step)
    root.add_module(last, module)
