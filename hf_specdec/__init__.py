"""Lossless speculative decoding for Hugging Face transformers: `model.generate(..., assistant=...)`.

Importing the package adds the keyword `assistant` to `generate`.
"""

from .generation import theory
from .generation.candidates import CandidateGenerator
from .generation.choice import TypicalAcceptance
from .generation.draft_model import DraftModel
from .generation.generate import speculative_decoding
from .generation.prompt_lookup import PromptLookup
from .generation.record import SpeculativeOutput
from .generation.run import Run
from .generation.statistics import SpeculationStatistics
from .generation.tree import CandidateTree
from .keyword import install_keyword
from .modeling.auto import AutoDrafter
from .modeling.draft_layers import DraftLayersConfig, DraftLayersModel
from .modeling.eagle import Eagle, EagleConfig, EagleModel
from .modeling.medusa import Medusa, MedusaConfig, MedusaModel
from .registry import register_method

__version__ = "0.1.0"

__all__ = [
    "AutoDrafter",
    "CandidateGenerator",
    "CandidateTree",
    "DraftLayersConfig",
    "DraftLayersModel",
    "DraftModel",
    "Eagle",
    "EagleConfig",
    "EagleModel",
    "Medusa",
    "MedusaConfig",
    "MedusaModel",
    "PromptLookup",
    "Run",
    "SpeculationStatistics",
    "SpeculativeOutput",
    "TypicalAcceptance",
    "register_method",
    "speculative_decoding",
    "theory",
]

register_method("prompt_lookup", PromptLookup)
install_keyword()
