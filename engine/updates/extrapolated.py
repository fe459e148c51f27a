"""Extrapolated: versions of a stage's weights that lie ahead of what is trained, to where that is moving."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from stagewright.engine.updates.treatments import Treatment
from stagewright.engine.updates.versions import VersionedWeights
from stagewright.engine.updates.weights import like


class ExtrapolatedWeights(VersionedWeights):
    """Versions moved ahead for those who train with them; what is trained lies apart from all versions.

    Evaluation and checkpoints see what is trained.

    Args:
        module, num_versions, master: as for ``VersionedWeights``.
        extrapolation: how far to move each new version.
    """

    def __init__(self, module: nn.Module, num_versions: int, extrapolation: Treatment, *, master: bool = False) -> None:
        self._extrapolation = extrapolation
        self._exact: dict[str, nn.Parameter] = {}  # the newest weights, unmoved, as the module computes with them
        super().__init__(module, num_versions, master=master)
        for name, parameter in self._of(0).parameters.items():
            self._exact[name] = like(parameter, parameter.detach().clone())
            if not self._has_masters[name]:
                self.trained[name] = self._exact[name]
        self.use(None)

    def begin_update(self, version: int) -> None:
        """The optimizer works in place."""
        self.newest = version

    def publish(self) -> None:
        """Round the masters, and write where the weights are moving to into the newest version."""
        super().publish()
        with torch.no_grad():
            for name, parameter in self._of(self.newest).parameters.items():
                trained = self.trained[name]
                ahead = self._extrapolation.ahead(trained)
                parameter.copy_(trained if ahead is None else trained + ahead)

    def renumber(self, newest: int, older: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Go on from here; the newest version is made anew."""
        super().renumber(newest, older)
        self.publish()

    @property
    def masters(self) -> Mapping[str, tuple[nn.Parameter, nn.Parameter]]:
        """By name, what the module computes with where nothing is moved, and what the optimizer trains in its place."""
        return {name: (self._exact[name], self.trained[name]) for name, has in self._has_masters.items() if has}

    def _parameters_of(self, version: int | None) -> Mapping[str, nn.Parameter]:
        return self._exact if version is None and self._exact else super()._parameters_of(version)
