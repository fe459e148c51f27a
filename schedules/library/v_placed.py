"""What ZB-V, V-Half and V-Min have in common: two stages a rank, laid out in a V, and a bound on the stash."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from stagewright.schedules.library.lanes import Pipeline, pipeline_of
from stagewright.schedules.library.portfolio import ListScheduled
from stagewright.schedules.placement import Placement, waves


@dataclass(frozen=True)
class VPlaced(ListScheduled, ABC):
    """Rank r owns stage r and stage 2P - 1 - r, and stashes a bounded number of microbatches of them."""

    @property
    def placement(self) -> Placement:
        """Down the ranks and up again."""
        return waves(self.num_ranks)

    @property
    def num_stages(self) -> int:
        """Two stages a rank."""
        return 2 * self.num_ranks

    @property
    @abstractmethod
    def num_stashed(self) -> int:
        """The most microbatches that a rank may stash; each counts half on either of its stages."""

    @property
    def pipeline(self) -> Pipeline:
        """A V of stages; a stash entry lasts until W."""
        capacities = (2 * self.num_stashed,) * self.num_ranks
        return pipeline_of(self.placement.routes[0], self.num_microbatches, self.costs, capacities)
