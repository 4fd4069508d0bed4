"""Chains from draft layers: a draft model that shares the ends of the target."""

from __future__ import annotations

from ...generation.draft_model import DraftModel
from ...generation.run import Run
from .modeling import DraftLayersModel


class DraftLayers(DraftModel):
    """Drafts with a few layers of its own between the target's embedding and output head, as a draft model does.

    Args:
        layers ([`DraftLayersModel`]): the layers.
        num_draft_tokens (`int`): K where `generate` is given none; so few layers are seldom right for long.

    Raises:
        ValueError: at `generate`, if the layers were made for another target.
    """

    def __init__(self, layers: DraftLayersModel, num_draft_tokens: int = 2) -> None:
        super().__init__(layers, num_draft_tokens)
        self.layers = layers

    def begin(self, run: Run) -> None:
        self.model = self.layers.causal_lm(run.target)
        ids = self.layers.token_ids
        self.token_ids = None if ids is None else ids.to(run.device)
        super().begin(run)
        self.device = self.layers.device  # where the layers want positions and masks; the embedding may lie elsewhere
