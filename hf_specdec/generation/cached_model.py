"""A causal model with its ragged cache: what the target and a draft model have in common."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import Any

import torch
from transformers import PreTrainedModel

from .attention import explicit_mask, masked_attention, slot_limit, why_no_explicit_mask, why_not_own_mask
from .cache import CACHE_NAME, RaggedCache, WritePlan
from .tree import NO_TOKEN, CandidateTree


class CachedModel:
    """Runs a model over the next tokens of every row.

    Args:
        model ([`PreTrainedModel`]): a decoder-only causal model.
        capacity (`int`): slots of the cache to allocate at first.
        exit_stack (`ExitStack`): undoes at the end of the call whatever had to be switched for it.
        extra_inputs (`dict`, *optional*): further keywords for every forward pass.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        capacity: int,
        exit_stack: ExitStack,
        extra_inputs: dict[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.cache = RaggedCache(capacity)
        self.exit_stack = exit_stack
        self.extra_inputs = extra_inputs or {}
        self.lengths: list[int] = []  # cached tokens of each row
        self.position_shift: list[int] | None = None  # position of a token minus its slot, where they differ
        self.highest_id: int | None = None  # ids above it, which the model has no embedding for, are read as it
        self.last_positions: list[int] | None = None  # highest position that plain `generate` would use in each row
        parameters = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in parameters
        self.takes_logits_to_keep = "logits_to_keep" in parameters
        self.slot_limit = slot_limit(model)
        self.num_slots = 0  # that a text of full length takes, padding included
        self.needs_mask_reason = why_not_own_mask(model)
        self._is_masked = False

    def __call__(self, tokens: torch.LongTensor, tree: CandidateTree | None = None, **inputs: Any) -> Any:
        """One forward pass.

        Args:
            tokens (`torch.LongTensor` of shape `(B, T)`): next tokens of each row; `NO_TOKEN` fills rows up.
            tree ([`CandidateTree`], *optional*): how the tokens after the first hang together; `None`: a chain.

        Returns: the model's output. `self.lengths` is left as it was: the caller decides what to keep.
        Raises: `ValueError` if the model cannot be given the explicit mask that a batch or a tree needs.
        """
        plan = WritePlan(self.lengths, tokens.shape[1])
        self.cache.prepare(plan)
        is_chain = tree is None or tree.is_chain
        if self.needs_mask_reason or not (is_chain and plan.is_uniform):  # else the model's own mask says the same
            self.require_mask(is_chain)
            self.check_takes_positions()
            if not is_chain:
                self.check_slots(self.num_slots + tree.num_nodes)
            inputs["attention_mask"] = explicit_mask(self.model, plan, None if is_chain else tree, tokens.device)
        if self.takes_positions:
            inputs["position_ids"] = self._positions(plan, None if is_chain else tree, tokens.device)
        return self.model(
            input_ids=tokens.clamp(0, self.highest_id),
            use_cache=True,
            return_dict=True,
            **{CACHE_NAME: self.cache},
            **self.extra_inputs,
            **inputs,
        )

    def _positions(self, plan: WritePlan, tree: CandidateTree | None, device: torch.device) -> torch.LongTensor:
        starts = plan.starts
        if self.position_shift is not None:
            starts = [start + shift for start, shift in zip(starts, self.position_shift)]
        if tree is None and min(starts) == max(starts):
            return torch.arange(starts[0], starts[0] + plan.width, device=device)[None]
        depths = torch.arange(plan.width, device=device) if tree is None else tree.visibility()[0]
        positions = torch.tensor(starts, device=device)[:, None] + depths
        if self.last_positions is not None:  # drafts past a row's end are never emitted, and a table may end there
            positions = positions.minimum(torch.tensor(self.last_positions, device=device)[:, None])
        return positions

    def require_mask(self, is_chain: bool = True) -> None:
        """Raises `ValueError` if the model takes no explicit mask; switches its attention for this call if need be."""
        if self._is_masked:
            return
        if reason := why_no_explicit_mask(self.model):
            need, fix = ("A batch", "one row at a time") if is_chain else ("A draft tree", "with a chain drafter")
            if self.needs_mask_reason:
                need, fix = f"A model that {self.needs_mask_reason}", "without `assistant=`"
            raise ValueError(f"{need} needs an explicit attention mask, but {reason}. Generate {fix}.")
        self.exit_stack.enter_context(masked_attention(self.model))
        self._is_masked = True

    def check_takes_positions(self) -> None:
        """Raises `ValueError` if the model counts positions itself, which padding, batches and trees would spoil."""
        if not self.takes_positions:
            raise ValueError(
                f"{type(self.model).__name__} takes no position ids and counts padding and drafts as text. Generate "
                "one row at a time, without padding and with a chain drafter, or without `assistant=`."
            )

    def check_slots(self, num_slots: int) -> None:
        """Raises `ValueError` if the cache is so long that the model takes a token's place in it for its position."""
        if num_slots > self.slot_limit:
            raise ValueError(
                f"{type(self.model).__name__} scales attention by the length of the cache beyond {self.slot_limit} "
                "tokens, which padding, batches and draft trees would change, and this text may reach "
                f"{num_slots}. Generate one row at a time without padding and with a chain drafter, or fewer tokens, "
                "or without `assistant=`."
            )

    def catch_up(self, rows: list[list[int]], device: torch.device) -> torch.Tensor:
        """Feeds the tokens that the cache lacks (at least one a row); logits `(B, V)` after each row's last token."""
        new = [row[length:] for row, length in zip(rows, self.lengths)]
        width = max(map(len, new))
        tokens = torch.tensor([ids + [NO_TOKEN] * (width - len(ids)) for ids in new], device=device)
        last = [len(ids) - 1 for ids in new]
        kept = sorted(set(last))
        inputs = {}
        if self.takes_logits_to_keep:
            inputs["logits_to_keep"] = 1 if kept == [width - 1] else torch.tensor(kept, device=device)
        logits = self(tokens, **inputs).logits
        self.lengths = [len(row) for row in rows]
        if logits.shape[1] == len(kept):
            last = [kept.index(index) for index in last]
        if set(last) == {logits.shape[1] - 1}:
            return logits[:, -1]
        return logits[range(len(last)), last]

    def keep_rows(self, rows: list[int]) -> None:
        """Keeps only these rows of the batch."""
        self.cache.keep_rows(rows)
        self.lengths = [self.lengths[row] for row in rows]
        if self.position_shift is not None:
            self.position_shift = [self.position_shift[row] for row in rows]
        if self.last_positions is not None:
            self.last_positions = [self.last_positions[row] for row in rows]
