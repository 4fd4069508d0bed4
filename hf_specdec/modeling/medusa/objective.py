"""Training of Medusa heads: each learns the token that many positions ahead.

Source: Cai et al. 2401.10774, sections 2.2.1 (Medusa-1) and 2.2.2 (Medusa-2).
Shapes: B rows, T tokens, D hidden size, n tokens that count.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ...training.objective import Batch, Losses
from ..target import OutputHead, hidden_states, text_config
from .modeling import MedusaModel


class MedusaObjective:
    """Cross-entropy of every head with the text, weighted `decay ** (i + 1)` for head i.

    The logits of one head at a time are in memory: they are computed anew for the backward pass.

    Joint training (Medusa-2) adds the target's own loss, and weights the heads' by `head_weight`, which they reach
    along a sine within the first `head_warmup` of the run, so that untrained heads do not pull at the target. The
    target's own loss is the divergence from what it was without its adapter; without an adapter, the cross-entropy.

    Args:
        drafter ([`MedusaModel`]): the heads.
        target: the causal LM they belong to.
        decay (`float`): weight of a head relative to the one before.
        is_joint (`bool`): the target is trained too.
        head_weight (`float`): of the heads' losses in joint training; 0.2 and 0.01 are in use.
        head_warmup (`float`): share of the run, 0 to 1.
    """

    def __init__(
        self,
        drafter: MedusaModel,
        target: Any,
        decay: float = 0.8,
        is_joint: bool = False,
        head_weight: float = 0.2,
        head_warmup: float = 0.2,
    ) -> None:
        self.is_joint, self.head_weight, self.head_warmup = is_joint, head_weight, head_warmup
        self.progress = 0.0  # share of the run that is done, set by the trainer
        self.hidden_state_layers = (text_config(target).num_hidden_layers - 1,)
        self.decay = decay

    def __call__(self, drafter: MedusaModel, target: Any, batch: Batch) -> Losses:
        hidden = batch.hidden_states[self.hidden_state_layers[0]]
        output_head = OutputHead(target, drafter.token_ids)
        loss = hidden.new_zeros((), dtype=torch.float32)
        counts = {}
        for head in range(drafter.config.num_heads):
            ahead = head + 2
            labels, counted = batch.input_ids[:, ahead:], batch.is_response[:, ahead:]
            states, labels = hidden[:, :-ahead][counted], labels[counted]
            num_counted = torch.tensor(float(len(labels)), device=labels.device)
            labels = drafter.places(labels)
            states, labels = states[labels >= 0], labels[labels >= 0]
            sums = checkpoint(_cross_entropy, drafter, states, labels, head, output_head, use_reentrant=False)
            loss = loss + self.decay ** (head + 1) * sums[0] / max(len(labels), 1)
            counts[f"accept_{head + 1}"] = (sums[1], num_counted)
        if self.is_joint:
            warmth = min(1.0, self.progress / self.head_warmup) if self.head_warmup else 1.0
            own = _target_loss(target, batch, hidden)
            counts["target_loss"] = (own.detach(), torch.ones_like(own))
            loss = own + self.head_weight * math.sin(math.pi / 2 * warmth) * loss
        return Losses(loss, counts)


def _target_loss(target: Any, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
    """How far the target, as it is now, is from itself without its adapter; else from the text."""
    counted = batch.is_response[:, 1:]
    log_probs = OutputHead(target)(hidden[:, :-1][counted]).float().log_softmax(-1)
    if not hasattr(target, "disable_adapter"):
        return F.nll_loss(log_probs, batch.input_ids[:, 1:][counted])
    layer = text_config(target).num_hidden_layers - 1
    with torch.no_grad(), target.disable_adapter():
        before = hidden_states(target, batch.input_ids, batch.attention_mask, (layer,))[layer]
        before = OutputHead(target)(before[:, :-1][counted]).float().log_softmax(-1)
    return F.kl_div(log_probs, before, reduction="batchmean", log_target=True)


def _cross_entropy(
    drafter: MedusaModel, states: torch.Tensor, labels: torch.LongTensor, head: int, output_head: OutputHead
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the cross-entropies `(n,)` of one head, and how often its best guess is right."""
    logits = drafter.logits(states.to(drafter.dtype), head, output_head).float()
    return F.cross_entropy(logits, labels, reduction="sum"), (logits.detach().argmax(-1) == labels).sum().float()
