"""Medusa: extra heads on the target's last hidden state (Cai et al. 2401.10774)."""

from ...registry import register_method
from .candidates import Medusa
from .configuration import MedusaConfig
from .modeling import MedusaModel
from .objective import MedusaObjective

register_method("medusa", Medusa, MedusaModel, MedusaObjective)

__all__ = ["Medusa", "MedusaConfig", "MedusaModel", "MedusaObjective"]
