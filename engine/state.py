"""State: what one rank must keep to go on later from where it is."""

from collections.abc import Mapping
from typing import Any

from stagewright.engine.assembly import Assembly
from stagewright.engine.training import Training
from stagewright.engine.updates.weights import load_masters


def state_of(assembly: Assembly, training: Training, num_steps: int) -> dict[str, Any]:
    """Weights by stage, with their masters, the optimizer's state, the loss scale, and how many steps were made.

    Nothing may be in flight.
    """
    masters = {}
    for stage, weights in assembly.weights.items():
        weights.use(None)
        weights.publish()
        masters[stage] = {name: master.detach() for name, (_, master) in weights.masters.items()}
    return {
        "stages": {index: stage.module.state_dict() for index, stage in assembly.stages.items()},
        "masters": masters,
        "training": training.state_dict(),
        "num_steps": num_steps,
        **assembly.updater.state_dict(),
    }


def load_state(assembly: Assembly, training: Training, state: Mapping[str, Any], num_steps: int) -> int:
    """Go on from a state, in the place of the steps made so far; returns how many were made by then.

    Raises:
        ValueError: it belongs to other stages, or to other masters.
    """
    if set(state["stages"]) != set(assembly.stages):
        raise ValueError(f"this rank owns the stages {list(assembly.stages)}: the state has {sorted(state['stages'])}")
    training.settle(num_steps)
    for stage, weights in state["stages"].items():
        assembly.weights[stage].use(None)
        assembly.stages[stage].module.load_state_dict(weights)
        load_masters(assembly.weights[stage], state.get("masters", {}).get(stage, {}), stage)
    assembly.updater.load_state_dict(state)
    training.load_state_dict(state.get("training", {}))
    made: int = state["num_steps"]
    return made
