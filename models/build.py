"""Building one stage of a model, and nothing of the others."""

from typing import Protocol

import torch
from torch import nn

from stagewright.models.checks import shown
from stagewright.models.cut import Cut, Part, check_whole


class CuttableModel(Protocol):
    """A model as a chain of parts, any run of which can be built by itself.

    The same seed gives a part the same parameters in whatever run it is built, so every cut is the same model.
    """

    @property
    def parts(self) -> tuple[Part, ...]:
        """What the model is made of, from the input on."""

    def build(
        self, parts: range, *, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> nn.Module:
        """The module that computes some parts, one after the other; no memory is taken for any other part.

        `dtype` is that of the parameters, the model's own where left out.
        """

    def num_parameters(self) -> tuple[int, ...]:
        """How many parameters each part has. A weight that parts share counts for each, as on stages of their own."""


def build_stage(
    model: CuttableModel,
    cut: Cut,
    stage: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Build one stage of a model with its initial parameters.

    `partial(build_stage, model, cut)` is what a `Pipeline` builds its stages with. Raises `ValueError` for a cut of
    another model or into more stages than it has layers, a stage that does not exist, or a dtype without fractions.
    """
    check_cut(model, cut)
    return model.build(cut.parts_of_stage(stage), seed=seed, device=device, dtype=dtype)


def check_cut(model: CuttableModel, cut: Cut) -> None:
    """Raise `ValueError` for the cut of another model, or into more stages than it has layers."""
    check_model(model)
    check_whole(model.parts, cut)


def check_model(model: CuttableModel) -> None:
    """Raise `TypeError` for what cannot be cut."""
    if not all(hasattr(model, name) for name in ("parts", "build", "num_parameters")):
        raise TypeError(
            f"a model that can be cut has parts, build and num_parameters: got {shown(model)}; pass GPT(config), "
            "llama(config), cut_sequential(build) or the like"
        )


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raise `ValueError` for a dtype without fractions."""
    if not isinstance(dtype, torch.dtype | None):
        raise TypeError(f"a dtype is one of torch's: got {shown(dtype)}; use torch.float32 or torch.bfloat16")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"parameters need a floating-point dtype: got {dtype}; use torch.float32 or torch.bfloat16")


def move(module: nn.Module, device: torch.device | str, dtype: torch.dtype | None) -> nn.Module:
    """Bring a module to its device, and what training changes of it to its dtype.

    Buffers that no state dict has, such as a rotation's frequencies, are constants: they keep their precision.
    """
    constants = [
        (owner, name, owner._buffers[name])
        for owner in module.modules()
        for name in owner._non_persistent_buffers_set
        if owner._buffers.get(name) is not None
    ]
    module.to(device=device, dtype=dtype)
    for owner, name, buffer in constants:
        assert buffer is not None
        owner._buffers[name] = buffer.to(device)
    return module


def count_parameters(module: nn.Module) -> int:
    """How many numbers the parameters of a module have."""
    return sum(parameter.numel() for parameter in module.parameters())
