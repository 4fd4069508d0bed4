"""EAGLE: a decoder layer that continues the target's hidden states (Li et al. 2401.15077, 2406.16858, 2503.01840)."""

from ...registry import register_method
from .candidates import Eagle
from .configuration import EagleConfig
from .modeling import EagleModel
from .objective import Eagle3Objective, EagleObjective, objective

register_method("eagle", Eagle, EagleModel, objective)

__all__ = ["Eagle", "Eagle3Objective", "EagleConfig", "EagleModel", "EagleObjective"]
