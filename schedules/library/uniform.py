"""Uniform: the four durations that the closed forms of the literature speak of."""

from dataclasses import dataclass

from stagewright.schedules.costs import Costs
from stagewright.schedules.formula import Formula
from stagewright.schedules.schedule import Schedule


@dataclass(frozen=True)
class Uniform:
    """What every stage takes for one microbatch, in any one unit."""

    forward: float
    input_gradient: float
    weight_gradient: float
    backward: float

    @property
    def equal(self) -> bool:
        """Whether F = I = W."""
        return self.forward == self.input_gradient == self.weight_gradient


def uniform(costs: Costs, num_stages: int) -> Uniform:
    """The durations of the slowest stage, as if all stages were like it."""
    stages = costs.of_stages(num_stages)
    return Uniform(max(stages.forward), max(stages.input_gradient), max(stages.weight_gradient), max(stages.backward))


def flush_formula(schedule: Schedule, costs: Costs) -> Formula:
    """The bubble of a pipeline that fills, and drains, once a batch, one stage a rank."""
    stage = uniform(costs, schedule.num_stages)
    work = stage.forward + stage.backward
    return Formula("(P-1)(F+B)", (schedule.num_ranks - 1) * work, schedule.num_microbatches * work)
