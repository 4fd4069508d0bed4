"""Draft-model speculation: a smaller causal language model guesses the next tokens one by one.

Source: Leviathan et al. 2211.17192; Chen et al. 2302.01318.
Shapes: B rows, K draft tokens, V vocabulary of the drafter.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import nn
from transformers import PreTrainedModel

from .cache import GROWTH_ROOM
from .cached_model import CachedModel
from .candidates import CandidateGenerator
from .checks import check_decoder_only
from .choice import argmax, target_ids, target_probs
from .retokenization import Retokenizer, same_tokenizer
from .run import Run, output_vocab_size
from .tree import NO_TOKEN, CandidateTree

VOCABULARY_PADDING = 512  # one tokenizer, embeddings padded to different multiples: Qwen2.5 has 151936 and 152064


class DraftModel(CandidateGenerator):
    """Drafts with a causal LM of the same tokenizer, or of another one if both tokenizers are given to `generate`.

    The drafter has a ragged cache of its own. The tokens accepted since the last round are read in the same pass that
    gives the first draft token, so K draft tokens cost K passes. Draft tokens are chosen with the shared noise of the
    target's own sampling; of the target's logits processors it applies the warpers that look at the scores alone.

    Args:
        model ([`PreTrainedModel`] or PEFT model): the drafter; neither it nor its configs are changed.
        num_draft_tokens (`int`, *optional*): K where `generate` is given none.

    Attributes:
        token_ids (`torch.LongTensor` of shape `(V,)`, *optional*): ids of the target that the drafter's logits stand
            for, on the target's device, where a subclass says so; `None`: the first V.

    Raises:
        ValueError: at `generate`, if vocabularies differ by more than padding and no tokenizers were given.
    """

    token_ids: torch.LongTensor | None = None

    def __init__(self, model: PreTrainedModel, num_draft_tokens: int = 5) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"`model` is a {type(model).__name__}; DraftModel takes a loaded causal language model. A Hub id or "
                'folder can be passed to `generate` itself: `assistant="user/name"`.'
            )
        self.model = model
        self.default_num_draft_tokens = num_draft_tokens

    def begin(self, run: Run) -> None:
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        check_decoder_only(model, "drafter")
        device = model.get_input_embeddings().weight.device
        self.device = run.device if device.type == "meta" else device  # offloaded weights
        longest = max(map(len, run.tokens))
        self.drafter = CachedModel(model, longest + min(run.max_new_tokens, GROWTH_ROOM) + 1, run.exit_stack)
        self.drafter.lengths = [0] * len(run.rows)
        self.drafter.highest_id = model.get_input_embeddings().weight.shape[0] - 1
        self.retokenizers = self._retokenizers(run, model)
        self.drafter_rows: list[tuple[int, list[int]]] = []  # ids of each row at the last round, and its draft

    def _retokenizers(self, run: Run, model: PreTrainedModel) -> list[Retokenizer] | None:
        if self.token_ids is not None:
            return None
        settings = run.settings
        sizes = run.vocab_size, output_vocab_size(model)
        tokenizers = settings.tokenizer, settings.assistant_tokenizer
        if None not in tokenizers:
            if same_tokenizer(*tokenizers):
                return None
            first = Retokenizer(*tokenizers)
            return [first, *(first.for_another_row() for _ in run.rows[1:])]
        if abs(sizes[0] - sizes[1]) >= VOCABULARY_PADDING:
            raise ValueError(
                f"the target {type(run.target).__name__} has a vocabulary of {sizes[0]} tokens, the drafter "
                f"{type(model).__name__} of {sizes[1]}: they have different tokenizers. Pass `tokenizer=` and "
                "`assistant_tokenizer=` to `generate` to draft across tokenizers, or take a drafter of the same family."
            )
        return None

    def max_draft_tokens(self, run: Run) -> int | None:
        return None if self.retokenizers else self._room(max(map(len, run.tokens)))

    def _room(self, num_tokens: int) -> float:
        """Draft tokens that the drafter's position table allows after a row of `num_tokens`."""
        config = self.drafter.model.config.get_text_config(decoder=True)
        return max(0, getattr(config, "max_position_embeddings", math.inf) - num_tokens + 1)

    def propose(self, run: Run, num_draft_tokens: int) -> CandidateTree | None:
        if self.retokenizers is not None:
            return self._propose_text(run, num_draft_tokens)
        threshold = run.settings.assistant_confidence_threshold
        tokens, probs = [], []
        is_confident = None
        logits = self.drafter.catch_up(run.tokens, self.device)
        for depth in range(num_draft_tokens):
            # Padding of the drafter's vocabulary has no meaning in the target's.
            logits = logits[:, : run.vocab_size].to(run.device)
            scores = run.processors.draft(logits, self.token_ids)
            index, prob = run.choice.draft(scores, run, depth, self.token_ids)
            token = target_ids(index, self.token_ids)
            tokens.append(token if is_confident is None else token.where(is_confident, NO_TOKEN))
            probs.append(prob)
            if threshold:
                is_sure = scores.softmax(-1).gather(-1, index[:, None])[:, 0] >= threshold
                is_confident = is_sure if is_confident is None else is_confident & is_sure
                if not is_confident.any():
                    break
            if depth + 1 < num_draft_tokens:
                logits = self._read(token)
        draft_probs = None
        if probs[0] is not None:
            draft_probs = target_probs(torch.stack(probs, dim=1), self.token_ids, run.vocab_size)
        return CandidateTree(torch.stack(tokens, dim=1), draft_probs=draft_probs)

    def _read(self, token: torch.LongTensor) -> torch.Tensor:
        """Reads one token a row, `(B,)`; logits `(B, V)` after it."""
        logits = self.drafter(token[:, None].to(self.device)).logits[:, -1]
        self.drafter.lengths = [length + 1 for length in self.drafter.lengths]
        return logits

    def _propose_text(self, run: Run, num_draft_tokens: int) -> CandidateTree | None:
        """Drafts in the drafter's tokens, greedily, and translates: guesses like any other, the target chooses."""
        rows = [retokenizer.to_drafter(tokens) for retokenizer, tokens in zip(self.retokenizers, run.tokens)]
        num_tokens = min(num_draft_tokens, self._room(max(map(len, rows))))
        if min(map(len, rows)) == 0 or num_tokens < 1:
            return None
        self.drafter.lengths = [self._num_known(place, row) for place, row in enumerate(rows)]
        drafts = [argmax(self.drafter.catch_up(rows, self.device))]
        while len(drafts) < num_tokens:
            drafts.append(argmax(self._read(drafts[-1])))
        drafts = torch.stack(drafts, dim=1).tolist()
        self.drafter_rows = [(len(row), draft) for row, draft in zip(rows, drafts)]
        translated = (r.to_target(*both)[:num_draft_tokens] for r, *both in zip(self.retokenizers, run.tokens, drafts))
        return CandidateTree.from_lists(list(translated), run.device)

    def _num_known(self, place: int, row: list[int]) -> int:
        """How many of a row's ids, from the start, the drafter has read already, the last one never counted."""
        if not self.drafter_rows:
            return 0
        (before, draft), unchanged = self.drafter_rows[place], self.retokenizers[place].num_unchanged
        if unchanged == before:
            # The last draft token was never read.
            agree = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(draft[:-1], row[before:]))
            unchanged += sum(1 for _ in agree)
        return min(unchanged, len(row) - 1)

    def update(self, run: Run) -> None:
        if self.retokenizers is None:
            # Of the tokens emitted, all but the last were drafts, so the drafter has read them.
            self.drafter.lengths = [
                min(length, len(tokens) - 1) for length, tokens in zip(self.drafter.lengths, run.tokens)
            ]

    def keep_rows(self, rows: torch.LongTensor) -> None:
        rows = rows.tolist()
        self.drafter.keep_rows(rows)
        if self.retokenizers is not None:
            self.retokenizers = [self.retokenizers[row] for row in rows]
            self.drafter_rows = [self.drafter_rows[row] for row in rows if self.drafter_rows]
