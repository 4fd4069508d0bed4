"""Draft layers: a few decoder layers between the target's embedding and its output head, distilled from the target."""

from ...registry import register_method
from .candidates import DraftLayers
from .configuration import DraftLayersConfig
from .modeling import DraftLayersModel
from .objective import DraftLayersObjective

register_method("draft_layers", DraftLayers, DraftLayersModel, DraftLayersObjective)

__all__ = ["DraftLayers", "DraftLayersConfig", "DraftLayersModel", "DraftLayersObjective"]
