"""The optimizers that a flag can choose; each takes one learning rate, the same for all parameters."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

WEIGHT_DECAY: Final = 0.1
# Muon is for the maps between hidden activations; these turn tokens into activations, and back.
ENDS: Final = ("embedding.", "head.")


def make_optimizer(name: str, lr: float, named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Make one of `OPTIMIZERS` for (name, parameter) pairs."""
    match name:
        case "adamw":
            return adamw(named, lr)
        case "muon":
            return MuonWithAdamW(named, lr)
        case "sgd":
            return torch.optim.SGD(named, lr=lr, momentum=0.9)
        case _:
            raise AssertionError(f"the parser lets no other optimizer through: {name}")


def adamw(named: Iterable[tuple[str, nn.Parameter]], lr: float) -> AdamW:
    """AdamW as GPTs are trained with it."""
    return AdamW(named, lr=lr, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)


class MuonWithAdamW(Optimizer):
    """Muon for the matrices of the layers, AdamW for embeddings, head, norms and biases (Jordan et al. 2024).

    Muon's updates are scaled to the size of AdamW's (Liu et al. 2025, "Muon is scalable", section 2.2), so that one
    learning rate serves both. The parts share their state and parameter groups with the whole: learning-rate
    schedulers and checkpoints need not know that there are two.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], lr: float) -> None:
        pairs = list(named)
        matrices = [pair for pair in pairs if pair[1].ndim == 2 and not pair[0].startswith(ENDS)]
        others = [pair for pair in pairs if pair[1].ndim != 2 or pair[0].startswith(ENDS)]
        self._parts: Sequence[Optimizer] = []
        if matrices:
            self._parts = [Muon(matrices, lr=lr, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")]
        if others:
            self._parts = [*self._parts, adamw(others, lr)]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # the engine has no closures to call
        """Update all parameters."""
        for part in self._parts:
            part.step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Let the parts work on the groups and the state of the whole."""
        start = 0
        for part in self._parts:
            end = start + len(part.param_groups)
            part.param_groups = self.param_groups[start:end]
            part.state = self.state
            start = end
