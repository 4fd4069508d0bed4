"""What a training step is given and what it must give back; each method's room has its own objective."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


@dataclass
class Batch:
    """Padded examples.

    Attributes:
        input_ids (`torch.LongTensor` of shape `(B, T)`): ids, padded on the right.
        attention_mask (`torch.LongTensor` of shape `(B, T)`): 1 for a token, 0 for padding.
        is_response (`torch.BoolTensor` of shape `(B, T)`): True for the target's own words, which drafters must guess.
        hidden_states (`dict[int, torch.Tensor]`): for each layer that the objective asked for, `(B, T, D)`.
    """

    input_ids: torch.LongTensor
    attention_mask: torch.LongTensor
    is_response: torch.BoolTensor
    hidden_states: dict[int, torch.Tensor]


@dataclass
class Losses:
    """Result of an objective.

    Attributes:
        loss (`torch.Tensor`): scalar, a mean over the tokens that count.
        counts (`dict[str, tuple[torch.Tensor, torch.Tensor]]`): for each metric a sum and what to divide it by, so that
            means over several batches are exact.
    """

    loss: torch.Tensor
    counts: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class Objective(Protocol):
    """Made as `objective(drafter, target, **options)`; one for a training run.

    Attributes:
        hidden_state_layers: which layers' outputs of the target a batch must hold.
        progress: share of the run that is done, 0 to 1; the trainer sets it before every step.
    """

    hidden_state_layers: tuple[int, ...]
    progress: float

    def __call__(self, drafter: Any, target: Any, batch: Batch) -> Losses: ...
