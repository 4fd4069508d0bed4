"""Draft-model speculation: a smaller causal language model guesses the next tokens one by one.

Source: Leviathan et al. 2211.17192; Chen et al. 2302.01318.
Shapes: B rows, K draft tokens, V vocabulary of the drafter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from .cache import GROWTH_ROOM
from .cached_model import CachedModel
from .candidates import CandidateGenerator
from .checks import check_decoder_only
from .retokenization import Retokenizer, same_tokenizer
from .tree import NO_TOKEN, CandidateTree

if TYPE_CHECKING:
    from .run import Run

VOCABULARY_PADDING = 512  # one tokenizer, embeddings padded to different multiples: Qwen2.5 has 151936 and 152064


class DraftModel(CandidateGenerator):
    """Drafts with a causal LM of the same tokenizer, or of another one if both tokenizers are given to `generate`.

    The drafter has a ragged cache of its own. The tokens accepted since the last round are read in the same pass that
    gives the first draft token, so K draft tokens cost K passes. Draft tokens are chosen with the shared noise of the
    target's own sampling; of the target's logits processors it applies the warpers that look at the scores alone.

    Args:
        model ([`PreTrainedModel`] or PEFT model): the drafter; neither it nor its configs are changed.
        num_draft_tokens (`int`, *optional*): K where `generate` is given none.

    Raises:
        ValueError: at `generate`, if vocabularies differ by more than padding and no tokenizers were given.
    """

    def __init__(self, model: PreTrainedModel, num_draft_tokens: int = 5) -> None:
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
        self.retokenizers = self._retokenizers(run, model)

    def _retokenizers(self, run: Run, model: PreTrainedModel) -> list[Retokenizer] | None:
        settings = run.settings
        sizes = [m.config.get_text_config(decoder=True).vocab_size for m in (run.target, model)]
        tokenizers = settings.tokenizer, settings.assistant_tokenizer
        if None not in tokenizers:
            return None if same_tokenizer(*tokenizers) else [Retokenizer(*tokenizers) for _ in run.rows]
        if abs(sizes[0] - sizes[1]) >= VOCABULARY_PADDING:
            raise ValueError(
                f"the target {type(run.target).__name__} has a vocabulary of {sizes[0]} tokens, the drafter "
                f"{type(model).__name__} of {sizes[1]}: they have different tokenizers. Pass `tokenizer=` and "
                "`assistant_tokenizer=` to `generate` to draft across tokenizers, or take a drafter of the same family."
            )
        return None

    def max_draft_tokens(self, run: Run) -> int | None:
        table = getattr(self.drafter.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        longest = max(self.drafter.lengths if self.retokenizers else map(len, run.tokens))
        return None if table is None else max(0, table - longest + 1)

    def propose(self, run: Run, num_draft_tokens: int) -> CandidateTree | None:
        if self.retokenizers is not None:
            return self._propose_text(run, num_draft_tokens)
        vocab_size = run.target.config.get_text_config(decoder=True).vocab_size
        threshold = run.settings.assistant_confidence_threshold
        tokens, probs = [], []
        is_confident = None
        logits = self.drafter.catch_up(run.tokens, self.device)
        for depth in range(num_draft_tokens):
            # Padding of the drafter's vocabulary has no meaning in the target's.
            scores = run.processors.draft(logits[:, :vocab_size].to(run.device))
            token, prob = run.choice.draft(scores, run, depth)
            tokens.append(token if is_confident is None else token.where(is_confident, NO_TOKEN))
            probs.append(prob)
            if threshold:
                is_sure = scores.softmax(-1).gather(-1, token[:, None])[:, 0] >= threshold
                is_confident = is_sure if is_confident is None else is_confident & is_sure
                if not is_confident.any():
                    break
            if depth + 1 < num_draft_tokens:
                logits = self._read(token)
        draft_probs = None if probs[0] is None else torch.stack(probs, dim=1)
        return CandidateTree(torch.stack(tokens, dim=1), draft_probs=draft_probs)

    def _read(self, token: torch.LongTensor) -> torch.Tensor:
        """Reads one token a row, `(B,)`; logits `(B, V)` after it."""
        logits = self.drafter(token[:, None].to(self.device)).logits[:, -1]
        self.drafter.lengths = [length + 1 for length in self.drafter.lengths]
        return logits

    def _propose_text(self, run: Run, num_draft_tokens: int) -> CandidateTree:
        """Drafts in the drafter's tokens, greedily, and translates: guesses like any other, the target chooses."""
        raise NotImplementedError

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
