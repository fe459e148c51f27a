"""The engine: runs a schedule's program for real, one executor a rank."""

from stagewright.engine.batch import PerMicrobatch
from stagewright.engine.context import RankContext, from_environment, under_torchrun
from stagewright.engine.errors import PeerError, RankError
from stagewright.engine.launch import launch_local
from stagewright.engine.pipeline import Pipeline
from stagewright.engine.staleness import DiscrepancyCorrection, ErrorFeedback, LearningRateDiscount, WeightPrediction

__all__ = [
    "DiscrepancyCorrection",
    "ErrorFeedback",
    "LearningRateDiscount",
    "PeerError",
    "PerMicrobatch",
    "Pipeline",
    "RankContext",
    "RankError",
    "WeightPrediction",
    "from_environment",
    "launch_local",
    "under_torchrun",
]
