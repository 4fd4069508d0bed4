"""Medusa heads: small residual networks on the target's last hidden state, one for each position ahead.

Source: Cai et al. 2401.10774, section 2.1.1.
Shapes: B rows, T positions, D hidden size, H heads, V_draft ids that the heads can propose (all V by default).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..base import DrafterModel
from ..checkpoint import Checkpoint
from ..target import OutputHead
from .configuration import MedusaConfig


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b); with W = 0 and b = 0, as it starts, the identity."""

    def __init__(self, hidden_size: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, bias=bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + nn.functional.silu(self.linear(states))


class MedusaModel(DrafterModel):
    """The heads of one target.

    With their own output layers (as published Medusa heads have) they are large: V x D numbers a head. Sharing the
    target's (`has_own_output_heads=False`) leaves the blocks alone to be stored and trained.
    """

    config_class = MedusaConfig
    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(config.hidden_size, config.block_bias) for _ in range(config.num_layers)))
            for _ in range(config.num_heads)
        )
        num_ids = config.draft_vocab_size or config.vocab_size
        self.output_heads = None
        if config.has_own_output_heads:
            self.output_heads = nn.ModuleList(
                nn.Linear(config.hidden_size, num_ids, bias=False) for _ in range(config.num_heads)
            )
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # Called for modules with parameters of their own only, so never for a ResidualBlock.
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    @classmethod
    def for_target(cls, target: Any, draft_token_ids: torch.LongTensor | None = None, **fields: Any) -> MedusaModel:
        """Untrained heads: they repeat the target's own next-token guess.

        Args:
            draft_token_ids (`torch.LongTensor` of shape `(V_draft,)`, *optional*): the ids to propose; default all.
            fields: of [`MedusaConfig`], e.g. `num_heads`.

        Raises:
            ValueError: if `draft_token_ids` holds an id twice, or one that the target does not have.
        """
        model = cls._made(MedusaConfig.fields_of_target(target) | fields, draft_token_ids)
        if model.output_heads is not None:
            rows = OutputHead(target, model.token_ids).rows()
            for head in model.output_heads:
                head.weight.data.copy_(rows)
        return model.to(device=target.device, dtype=target.dtype)

    @classmethod
    def convert(cls, checkpoint: Checkpoint) -> MedusaModel | None:
        from .conversion import convert

        return convert(checkpoint)

    def logits(self, states: torch.Tensor, head: int, output_head: OutputHead) -> torch.Tensor:
        """Logits `(..., V_draft)` of one head for hidden states `(..., D)`."""
        states = self.heads[head](states)
        return output_head(states) if self.output_heads is None else self.output_heads[head](states)

    def forward(self, hidden_states: torch.Tensor, output_head: OutputHead) -> torch.Tensor:
        """Logits of all heads.

        Args:
            hidden_states (`torch.Tensor` of shape `(..., D)`): the target's, after its final norm.
            output_head ([`OutputHead`]): the target's, for `token_ids`; read only if the heads have none of their own.

        Returns: `torch.Tensor` of shape `(..., H, V_draft)`.
        """
        states = torch.stack([head(hidden_states) for head in self.heads], dim=-2)
        if self.output_heads is None:
            return output_head(states)
        return torch.stack([head(s) for head, s in zip(self.output_heads, states.unbind(-2))], dim=-2)
