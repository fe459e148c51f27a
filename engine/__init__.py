"""The engine: runs a schedule's program for real, one executor a rank."""

from stagewright.engine.batch import PerMicrobatch
from stagewright.engine.checkpoint import (
    Checkpoints,
    full_state_dict,
    load_full_state_dict,
    read_part,
    read_state_dict,
    write_state_dict,
)
from stagewright.engine.errors import NotFiniteError, PeerError, RankError
from stagewright.engine.launch.context import RankContext, from_environment
from stagewright.engine.launch.environment import under_launcher, under_torchrun
from stagewright.engine.launch.local import launch_local
from stagewright.engine.mesh import make_mesh
from stagewright.engine.pipeline import Pipeline
from stagewright.engine.preemption import Preemption
from stagewright.engine.staleness import DiscrepancyCorrection, ErrorFeedback, LearningRateDiscount, WeightPrediction

__all__ = [
    "Checkpoints",
    "DiscrepancyCorrection",
    "ErrorFeedback",
    "LearningRateDiscount",
    "NotFiniteError",
    "PeerError",
    "PerMicrobatch",
    "Pipeline",
    "Preemption",
    "RankContext",
    "RankError",
    "WeightPrediction",
    "from_environment",
    "full_state_dict",
    "launch_local",
    "load_full_state_dict",
    "make_mesh",
    "read_part",
    "read_state_dict",
    "under_launcher",
    "under_torchrun",
    "write_state_dict",
]
