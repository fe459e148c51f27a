"""The GPT that the demo trains, and how it is cut into pipeline stages; knows nothing of schedules or the engine."""

from stagewright.models.cache import KeyValueCache
from stagewright.models.config import GPTConfig
from stagewright.models.cut import layers_of_stage
from stagewright.models.generation import Sampler
from stagewright.models.gpt import GPTStage, build_gpt, build_gpt_stage, token_loss
from stagewright.models.initialise import TIED_WEIGHTS, derive_seed

__all__ = [
    "TIED_WEIGHTS",
    "GPTConfig",
    "GPTStage",
    "KeyValueCache",
    "Sampler",
    "build_gpt",
    "build_gpt_stage",
    "derive_seed",
    "layers_of_stage",
    "token_loss",
]
