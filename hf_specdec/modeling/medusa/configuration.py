"""Configuration of Medusa heads."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict

from ..base import DrafterConfig


@strict
class MedusaConfig(DrafterConfig):
    """Medusa heads on a target's last hidden state (Cai et al. 2401.10774).

    Args:
        num_heads (`int`): heads; head i, from 0, guesses the token i + 2 positions after the one whose state it reads.
        num_layers (`int`): residual blocks of each head.
        block_bias (`bool`): whether the blocks' linear layers have a bias.
        has_own_output_heads (`bool`): each head has an output layer of its own; else all use the target's.

    Raises:
        ValueError: if a number is out of its range.
    """

    model_type = "hf_specdec_medusa"

    num_heads: int = 4
    num_layers: int = 1
    block_bias: bool = True
    has_own_output_heads: bool = False

    def validate_sizes(self) -> None:
        for name in ("num_heads", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; expected at least 1.")
