"""Training of EAGLE drafters.

Source: Li et al. 2401.15077 (EAGLE), section 4.2; Li et al. 2503.01840 (EAGLE-3), section 3.2.
Shapes: B rows, T tokens, D hidden size of the target, H the drafter's, V_draft ids that it can propose, n tokens that
count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, DynamicCache

from ...generation.choice import argmax
from ...training.objective import Batch, Losses
from ..target import OutputHead, text_config
from .modeling import EagleModel

CHUNK = 256  # tokens whose logits are in memory at a time
STEP_ATTENTION = "hf_specdec_eagle_steps"


def objective(drafter: EagleModel, target: Any, **options: Any) -> EagleObjective | Eagle3Objective:
    """The objective of the drafter's version."""
    return (EagleObjective if drafter.config.version == 1 else Eagle3Objective)(drafter, target, **options)


class EagleObjective:
    """EAGLE-1: the state that comes next, and the distribution that the target's head makes of it.

    Smooth L1 between the drafter's state and the target's (mean over the dimensions) plus the cross-entropy of the
    drafter's distribution with the target's. The features that the drafter reads are blurred by uniform noise, so that
    it learns to go on from states that are not quite right, its own.

    Args:
        drafter ([`EagleModel`]): of version 1.
        target: the causal LM it belongs to.
        feature_weight, token_weight (`float`): of the two losses.
        noise (`float`): width of the noise in a text of 512 tokens, less in a longer one.

    Raises:
        ValueError: if the drafter is of another version, or fits another target.
    """

    def __init__(
        self,
        drafter: EagleModel,
        target: Any,
        feature_weight: float = 1.0,
        token_weight: float = 0.1,
        noise: float = 0.2,
    ) -> None:
        _check(drafter, target, 1)
        self.hidden_state_layers = drafter.layers_of(target)
        self.progress = 0.0
        self.feature_weight, self.token_weight, self.noise = feature_weight, token_weight, noise

    def __call__(self, drafter: EagleModel, target: Any, batch: Batch) -> Losses:
        hidden = batch.hidden_states[self.hidden_state_layers[0]].to(drafter.device, torch.float32)
        features, wanted = hidden[:, :-1], hidden[:, 1:]
        if drafter.training and self.noise:
            lengths = batch.attention_mask.sum(1).to(hidden.device)[:, None, None]
            features = features + (torch.rand_like(features) - 0.5) * self.noise * 512 / lengths
        positions = torch.arange(features.shape[1], device=hidden.device)[None]
        embeddings = drafter.embedding(target)(batch.input_ids[:, 1:])
        states = drafter(features.to(drafter.dtype), embeddings, positions)
        # The state at t + 1 is what the token at t + 2 comes from.
        counted = batch.is_response[:, 2:].to(states.device)
        states, wanted = states[:, :-1][counted], wanted[:, :-1][counted]
        labels = drafter.places(batch.input_ids[:, 2:][counted.to(batch.input_ids.device)]).to(states.device)
        num_counted = torch.tensor(float(len(labels)), device=states.device)
        target_head, head = _heads(drafter, target)
        targets = _target_probs(wanted, target_head, drafter.device)
        cross_entropy, num_right = _soft_cross_entropy(drafter, head, states, targets, labels)
        distance = F.smooth_l1_loss(states.float(), wanted, reduction="none").mean(-1).sum()
        loss = (self.feature_weight * distance + self.token_weight * cross_entropy) / num_counted.clamp(min=1)
        return Losses(loss, {"accept_1": (num_right, num_counted), "distance": (distance.detach(), num_counted)})


class Eagle3Objective:
    """EAGLE-3: training-time test. The drafter goes on from its own states as it will when it drafts.

    The first step reads the target's features at all positions at once; step k reads, at each position, the state that
    step k - 1 left there, and the next token. It attends over the features up to its position and over its own k
    predecessors there. The loss of each step is the cross-entropy with the target's distribution over the ids that the
    drafter can propose, at the tokens that are among these; step k weighs `decay ** k`.

    Args:
        drafter ([`EagleModel`]): of version 3.
        target: the causal LM it belongs to.
        num_steps (`int`): how deep it practises.
        decay (`float`): weight of a step relative to the one before.

    Raises:
        ValueError: if the drafter is of another version, or fits another target.
    """

    def __init__(self, drafter: EagleModel, target: Any, num_steps: int = 7, decay: float = 0.8) -> None:
        _check(drafter, target, 3)
        if num_steps < 1:
            raise ValueError(f"`num_steps` is {num_steps}; expected at least 1.")
        self.features = drafter.layers_of(target)
        self.last = text_config(target).num_hidden_layers - 1
        self.hidden_state_layers = tuple(sorted({*self.features, self.last}))
        self.progress = 0.0
        self.num_steps, self.decay = num_steps, decay

    def __call__(self, drafter: EagleModel, target: Any, batch: Batch) -> Losses:
        num_tokens = batch.input_ids.shape[1]
        num_positions = num_tokens - 1  # each needs the token that follows
        states = drafter.fuse([batch.hidden_states[layer][:, :-1] for layer in self.features])
        embeddings = drafter.embedding(target)(batch.input_ids)
        device = states.device
        positions = torch.arange(num_positions, device=device)[None]
        causal = torch.ones(1, 1, num_positions, num_positions, dtype=torch.bool, device=device).tril()
        # Of every token that counts: the target's distribution, and its place among the ids that can be proposed.
        counted = batch.is_response.to(device)
        labels = drafter.places(batch.input_ids).to(device)
        is_known = counted & (labels >= 0)
        is_known[:, 0] = False  # nothing comes before it
        rows = is_known.new_zeros(is_known.shape, dtype=torch.long)
        rows[is_known] = torch.arange(int(is_known.sum()), device=device)
        before = batch.hidden_states[self.last].to(device)[:, :-1][is_known[:, 1:]]
        target_head, head = _heads(drafter, target)
        probs = _target_probs(before, target_head, device)

        cache = DynamicCache()
        loss, counts = states.new_zeros((), dtype=torch.float32), {}
        for step in range(self.num_steps):
            ahead = step + 2  # the state at t is what the token at t + ahead comes from
            if step and ahead >= num_tokens:  # the first always gives a loss, be it of no token
                counts[f"accept_{step + 1}"] = (loss.new_zeros(()),) * 2
                continue
            following = F.pad(embeddings[:, 1 + step :], (0, 0, 0, step))  # past the end nothing counts
            with _step_attention(drafter):
                states = drafter(states, following, positions + step, causal, cache)
            known = is_known[:, ahead:]
            wanted = rows[:, ahead:][known]
            targets = probs if len(wanted) == len(probs) else probs[wanted]  # most often all of them: no copy
            cross_entropy, num_right = _soft_cross_entropy(
                drafter, head, states[:, : known.shape[1]][known], targets, labels[:, ahead:][known]
            )
            loss = loss + self.decay**step * cross_entropy / known.sum().clamp(min=1)
            counts[f"accept_{step + 1}"] = (num_right, counted[:, ahead:].sum().float())
        return Losses(loss, counts)


def step_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.BoolTensor,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of step k in training-time test, in the form that transformers' decoder layers call.

    A position sees the keys of step 0 up to itself and of the steps after that those at its own place: T + k keys
    instead of the (k + 1) T that a mask over all of them would have to rule out.

    Args:
        query (`torch.Tensor` of shape `(B, heads, T, d)`): of step k.
        key, value (`torch.Tensor` of shape `(B, heads of keys, (k + 1) T, d)`): of the steps 0 to k.
        attention_mask (`torch.BoolTensor` of shape `(1, 1, T, T)`): of step 0.

    Returns: `torch.Tensor` of shape `(B, T, heads, d)`, and None.
    """
    num_positions = query.shape[2]
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
    keys, own_keys = key[:, :, :num_positions], key[:, :, num_positions:].unflatten(2, (-1, num_positions))
    values, own_values = value[:, :, :num_positions], value[:, :, num_positions:].unflatten(2, (-1, num_positions))
    scores = (query @ keys.transpose(2, 3)).masked_fill(~attention_mask, -torch.inf)
    own_scores = torch.einsum("bhtd,bhktd->bhtk", query, own_keys)
    weights = (torch.cat([scores, own_scores], dim=-1) * scaling).softmax(-1, dtype=torch.float32).to(query.dtype)
    states = weights[..., :num_positions] @ values
    states = states + torch.einsum("bhtk,bhktd->bhtd", weights[..., num_positions:], own_values)
    return states.transpose(1, 2), None


AttentionInterface.register(STEP_ATTENTION, step_attention)


@contextmanager
def _step_attention(drafter: EagleModel) -> Iterator[None]:
    config = drafter.body.config
    before = config._attn_implementation
    config._attn_implementation_internal = STEP_ATTENTION
    try:
        yield
    finally:
        config._attn_implementation_internal = before


def _check(drafter: EagleModel, target: Any, version: int) -> None:
    if drafter.config.version != version:
        raise ValueError(
            f"the drafter is of version {drafter.config.version}, but this objective is for version {version}; make it "
            f"with `EagleModel.for_target(target, version={version})`, or take the other objective."
        )
    drafter.check_target(target)


def _heads(drafter: EagleModel, target: Any) -> tuple[OutputHead, nn.Module | OutputHead]:
    """The target's output head for the ids that can be proposed, and the drafter's: the same one if it is shared."""
    head = drafter.output_head(target)
    return head if isinstance(head, OutputHead) else OutputHead(target, drafter.token_ids), head


@torch.no_grad()
def _target_probs(states: torch.Tensor, target_head: OutputHead, device: torch.device) -> torch.Tensor:
    """The target's distribution `(n, V_draft)` after its last states `(n, D)`, over the ids that can be proposed."""
    return target_head(states).to(device, torch.float32).softmax(-1)


def _soft_cross_entropy(
    drafter: EagleModel, head: Any, states: torch.Tensor, probs: torch.Tensor, labels: torch.LongTensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Over n tokens the sum of the cross-entropies with the target, and how often the best guess is the token.

    Args:
        states (`torch.Tensor` of shape `(n, H)`): of the drafter.
        probs (`torch.FloatTensor` of shape `(n, V_draft)`): the target's distributions.
        labels (`torch.LongTensor` of shape `(n,)`): the tokens' places among the ids that can be proposed.
    """

    def of_chunk(states: torch.Tensor, probs: torch.Tensor, labels: torch.LongTensor) -> tuple[torch.Tensor, ...]:
        logits = drafter.logits(states, head).float().to(states.device)
        cross_entropy = logits.logsumexp(-1).sum() - (probs * logits).sum()
        return cross_entropy, (argmax(logits.detach()) == labels).sum().float()

    owners = [head] if isinstance(head, nn.Module) else []
    owners += [] if drafter.config.norm_output else [drafter.norm]  # else it has been applied before
    weights = [weight for part in owners for weight in part.parameters() if weight.requires_grad]
    return _ChunkedSum.apply(of_chunk, states, probs, labels, *weights)


class _ChunkedSum(torch.autograd.Function):
    """Sums a loss over chunks of the tokens, and its gradients in the same go: the logits of one chunk at a time are in
    memory, and none is computed twice."""

    @staticmethod
    def forward(ctx: Any, of_chunk: Any, states: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        probs, labels, *weights = rest
        has_grad = ctx.needs_input_grad[1]
        loss = num_right = states.new_zeros((), dtype=torch.float32)
        sums = [torch.zeros_like(weight) for weight in weights]
        pieces = []
        for chunk in zip(*(part.split(CHUNK) for part in (states, probs, labels))):
            with torch.set_grad_enabled(has_grad):
                leaf = chunk[0].detach().requires_grad_(has_grad)
                part, right = of_chunk(leaf, *chunk[1:])
                grads = torch.autograd.grad(part, [leaf, *weights]) if has_grad else [None]
            pieces.append(grads[0])
            for total, grad in zip(sums, grads[1:]):
                total += grad
            loss, num_right = loss + part.detach(), num_right + right
        if has_grad:
            ctx.save_for_backward(torch.cat(pieces) if pieces else torch.zeros_like(states), *sums)
        ctx.mark_non_differentiable(num_right)
        return loss, num_right

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, *weights = (saved * grad.to(saved.dtype) for saved in ctx.saved_tensors)
        return None, states, None, None, *weights
