"""Models and how they are cut into pipeline stages; knows nothing of schedules or the engine."""

from stagewright.models.build import CuttableModel, build_stage
from stagewright.models.cache import KeyValueCache
from stagewright.models.chain import Chain, ChainStage
from stagewright.models.config import GPTConfig
from stagewright.models.cut import Cut, Part, cut_by_counts, cut_evenly, layers_of_stage
from stagewright.models.generation import Sampler
from stagewright.models.gpt import GPT, GPTStage, build_gpt, build_gpt_stage, token_loss
from stagewright.models.hugging_face import HuggingFaceModel, HuggingFaceStage, causal_lm_loss
from stagewright.models.initialise import TIED_WEIGHTS, derive_seed
from stagewright.models.layout import cut_by_layout, layout_of
from stagewright.models.llama import LlamaConfig, llama
from stagewright.models.partition import cut_by_costs, cut_by_parameters, min_max_sizes
from stagewright.models.profile import PartProfile, Profile, cut_by_profile
from stagewright.models.profiler import measure_profile
from stagewright.models.sequential import cut_sequential
from stagewright.models.unet import UNetConfig, unet

__all__ = [
    "GPT",
    "TIED_WEIGHTS",
    "Chain",
    "ChainStage",
    "Cut",
    "CuttableModel",
    "GPTConfig",
    "GPTStage",
    "HuggingFaceModel",
    "HuggingFaceStage",
    "KeyValueCache",
    "LlamaConfig",
    "Part",
    "PartProfile",
    "Profile",
    "Sampler",
    "UNetConfig",
    "build_gpt",
    "build_gpt_stage",
    "build_stage",
    "causal_lm_loss",
    "cut_by_costs",
    "cut_by_counts",
    "cut_by_layout",
    "cut_by_parameters",
    "cut_by_profile",
    "cut_evenly",
    "cut_sequential",
    "derive_seed",
    "layers_of_stage",
    "layout_of",
    "llama",
    "measure_profile",
    "min_max_sizes",
    "token_loss",
    "unet",
]
