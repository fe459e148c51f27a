"""Evaluation: forwards alone, in evaluation mode, in any number of microbatches."""

from stagewright.engine.assembly import Assembly
from stagewright.engine.executor import Executor
from stagewright.engine.run import Run
from stagewright.schedules import Placement
from stagewright.schedules.sharding import insert_sharding
from stagewright.schedules.variants import forward_only


class Evaluation:
    """Runs batches forward through all stages, and leaves everything as it was.

    Args:
        placement: of the stages.
        assembly: the parts of this rank.
    """

    def __init__(self, placement: Placement, assembly: Assembly) -> None:
        self._placement = placement
        self._assembly = assembly
        # By the number of microbatches.
        self.executors: dict[int, Executor] = {}

    def run(self, run: Run) -> None:
        """Run one batch; every module is in the mode that it had before, afterwards."""
        num_microbatches = len(run.keywords)
        executor = self.executors.get(num_microbatches)
        if executor is None:
            program = forward_only(self._placement, num_microbatches)
            program = insert_sharding(program, self._assembly.sharded_stages)
            executor = self.executors[num_microbatches] = Executor(program, self._assembly)
        roots = [stage.module for stage in self._assembly.stages.values()]
        modes = [(module, module.training) for root in roots for module in root.modules()]
        try:
            for module, _ in modes:
                module.training = False
            executor.run(run)
        finally:
            for module, mode in modes:
                module.training = mode
