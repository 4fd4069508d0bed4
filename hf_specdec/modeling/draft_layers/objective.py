"""Training of draft layers, or of any small causal LM: to say what the target says.

Source: Hinton et al. 1503.02531; for speculative decoding Zhou et al. 2310.08461 (DistillSpec).
Shapes: B rows, T tokens, D hidden size, V_draft ids that the drafter can propose, n response tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ...generation.draft_model import VOCABULARY_PADDING
from ...training.objective import Batch, Losses
from ..target import OutputHead, hidden_states, text_config
from .modeling import DraftLayersModel

KINDS = ("distill", "text")
CHUNK = 1024  # tokens whose logits are in memory at a time


class DraftLayersObjective:
    """KL(target || drafter) at every response token, over the ids the drafter can propose; or plain cross-entropy.

    The target's logits come from its last hidden states. Those of 1024 tokens at a time are in memory, and they are
    computed anew for the backward pass.

    Metrics: `accept_1`, the share of response tokens for which the drafter's best guess is the best of the ids it can
    propose in the eyes of the target; `in_vocabulary`, the share of response tokens that it can propose at all, if it
    cannot propose all.

    Args:
        drafter ([`DraftLayersModel`] or [`PreTrainedModel`]): the layers, or a causal LM with the target's tokenizer.
        target: the causal LM that is imitated.
        kind (`str`): "distill", or "text": cross-entropy with the text, where its token can be proposed.
        temperature (`float`): of both softmaxes of the KL, whose gradients keep their size.

    Raises:
        ValueError: if an argument is out of its range, or the drafter fits another target.
    """

    def __init__(self, drafter: Any, target: Any, kind: str = "distill", temperature: float = 1.0) -> None:
        if kind not in KINDS:
            raise ValueError(f"`kind` is {kind!r}; expected one of {', '.join(map(repr, KINDS))}.")
        if not temperature > 0:
            raise ValueError(f"`temperature` is {temperature}; expected a number above 0, 1 for the target's own.")
        self.hidden_state_layers = (text_config(target).num_hidden_layers - 1,)
        self.kind, self.temperature = kind, temperature
        if isinstance(drafter, DraftLayersModel):
            drafter.check_target(target)
            return
        sizes = [text_config(model).vocab_size for model in (target, drafter)]
        if abs(sizes[0] - sizes[1]) >= VOCABULARY_PADDING:
            raise ValueError(
                f"`drafter` has a vocabulary of {sizes[1]} tokens, the target of {sizes[0]}: they have different "
                "tokenizers. Take a drafter of the same family."
            )

    def __call__(self, drafter: Any, target: Any, batch: Batch) -> Losses:
        if isinstance(drafter, DraftLayersModel):
            heads = (OutputHead(target, drafter.token_ids),) * 2
            states = drafter(target, batch.input_ids, batch.attention_mask)
        else:
            heads = OutputHead(target), OutputHead(drafter)
            last = text_config(drafter).num_hidden_layers - 1
            states = hidden_states(drafter, batch.input_ids, batch.attention_mask, (last,))[last]
        counted = batch.is_response[:, 1:]  # every token is guessed from the state before it
        tokens = batch.input_ids[:, 1:][counted]
        states = states[:, :-1][counted.to(states.device)]
        target_states = batch.hidden_states[self.hidden_state_layers[0]].detach()[:, :-1]
        target_states = target_states[counted.to(target_states.device)].to(states.device)
        labels = tokens.to(states.device)
        is_reduced = isinstance(drafter, DraftLayersModel) and drafter.token_ids is not None
        if is_reduced:
            labels = drafter.places(labels)
        sums = [
            checkpoint(self._sums, *parts, *heads, use_reentrant=False)
            for parts in zip(states.split(CHUNK), target_states.split(CHUNK), labels.split(CHUNK))
        ]
        loss, num_agreed = (sum(parts) for parts in zip(*sums))
        num_tokens = torch.tensor(float(len(tokens)), device=states.device)
        num_known = (labels >= 0).sum().float()
        counts = {"accept_1": (num_agreed, num_tokens)}
        if is_reduced:
            counts["in_vocabulary"] = (num_known, num_tokens)
        return Losses(loss / (num_tokens if self.kind == "distill" else num_known).clamp(min=1), counts)

    def _sums(
        self,
        states: torch.Tensor,
        target_states: torch.Tensor,
        labels: torch.LongTensor,
        target_head: OutputHead,
        draft_head: OutputHead,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Over some tokens, the sum of the losses, and how often the drafter's best guess is the target's."""
        with torch.no_grad():
            target_logits = target_head(target_states).float().to(states.device)
        logits = draft_head(states).float().to(states.device)
        num_ids = min(logits.shape[-1], target_logits.shape[-1])  # beyond lies padding of one of the two
        logits, target_logits = logits[..., :num_ids], target_logits[..., :num_ids]
        num_agreed = (logits.detach().argmax(-1) == target_logits.argmax(-1)).sum().float()
        if self.kind == "text":
            return F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum"), num_agreed
        log_probs, target_log_probs = (
            (scores / self.temperature).log_softmax(-1) for scores in (logits, target_logits)
        )
        divergence = F.kl_div(log_probs, target_log_probs, log_target=True, reduction="sum")
        return divergence * self.temperature**2, num_agreed
