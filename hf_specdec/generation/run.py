"""The state of one call of `generate`: its rows, what they emitted, when they stop."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.utils import logging

from .choice import Choice, Greedy, Rejection, SharedNoise, TypicalAcceptance
from .processors import Processors
from .settings import Settings
from .statistics import SpeculationStatistics, Stopwatch

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

    from .candidates import CandidateGenerator
    from .schedule import DraftLength
    from .target import Target
    from .verification import Verdict

logger = logging.get_logger(__name__)

ROWWISE_CRITERIA = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria, StopStringCriteria)


@dataclass
class Row:
    """One sequence of the batch."""

    index: int  # in the whole batch
    tokens: list[int]  # prompt without padding, then what was emitted
    num_emitted: int = 0
    finished_at: int | None = None  # value of num_emitted when a stopping criterion first said so
    drafted_mask: list[bool] = field(default_factory=list)


class Run:
    """State of one call, read by candidate generators and written by the loop.

    Attributes:
        target ([`PreTrainedModel`]): the model whose `generate` was called.
        device (`torch.device`): where ids, trees and choices live.
        rows (`list[Row]`): the rows still in the batch, in order; `tokens` and `num_emitted` are short for theirs.
        sequences (`torch.LongTensor` of shape `(B_all, L)`): `generate`'s ids, padding included.
        num_columns (`int`): width of the prompt in `sequences`.
        hidden_states (`dict[int, torch.Tensor]`): for each layer in the generator's `hidden_state_layers`, its output
            `(B, T, D)` at the tokens that the last pass read and kept (the last one is not the newest token: that has
            not been read yet); row b's first `num_new[b]` positions are valid.
        choice: greedy, shared noise or rejection; ranks a drafter's logits.
        processors: `processors.draft(logits)` gives a drafter's scores.
        settings: what the user asked of the drafter.
        vocab_size (`int`): number of the target's logits.
        max_new_tokens (`int`): the most tokens a row may emit.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        input_ids: torch.LongTensor,
        prompts: list[list[int]],
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        settings: Settings,
        exit_stack: ExitStack,
    ) -> None:
        self.target = target
        self.exit_stack = exit_stack
        self.vocab_size = output_vocab_size(target)
        self.device = input_ids.device
        self.settings = settings
        self.stopping_criteria = stopping_criteria
        self.processors = Processors(logits_processor)
        self.num_rows, self.num_columns = input_ids.shape
        self.max_new_tokens = stopping_criteria.max_length - self.num_columns
        self.generator: CandidateGenerator
        self.all_rows = [Row(index, prompt) for index, prompt in enumerate(prompts)]
        self.rows = list(self.all_rows)
        self.hidden_states: dict[int, torch.Tensor] = {}
        self.num_new: list[int] = []

        pad = generation_config._pad_token_tensor
        self.sequences = input_ids.new_full(
            (self.num_rows, stopping_criteria.max_length), 0 if pad is None else int(pad), dtype=torch.long
        )
        self.sequences[:, : self.num_columns] = input_ids

        self.eos_token_ids = {
            int(token) for c in stopping_criteria if type(c) is EosTokenCriteria for token in c.eos_token_id
        }
        # As in plain `generate`: without an EOS criterion a stopped row goes on until all have stopped.
        self.pads_finished = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        # A user's own object must see the whole batch step by step, so all rows move at the pace of the slowest.
        self.has_own_criteria = not all(type(criterion) in ROWWISE_CRITERIA for criterion in stopping_criteria)
        self.is_lockstep = self.processors.is_stateful or self.has_own_criteria
        self.choice = self._choice(generation_config.do_sample)
        self.is_plain_argmax = type(self.choice) is Greedy and not logits_processor
        self.statistics = SpeculationStatistics(drafted_mask=[row.drafted_mask for row in self.all_rows])
        self.stopwatch = Stopwatch(self.device)
        self.num_streamed = 0
        self.keeps_cache = False
        self.scores: tuple[torch.Tensor, ...] | None = None  # by step, for a user's criteria that look at them

    def _choice(self, do_sample: bool) -> Choice:
        rule, acceptance = self.settings.assistant_sampling, self.settings.assistant_acceptance
        if acceptance != "exact":
            if not do_sample or rule != "shared_noise":
                raise ValueError(
                    f"`assistant_acceptance` is {acceptance!r}, which is a rule for sampling of its own; pass "
                    "`do_sample=True`, and no `assistant_sampling`."
                )
            logger.warning_once(
                "Typical acceptance is not lossless: the text is not the target's own, nor from its distribution."
            )
            return TypicalAcceptance() if acceptance == "typical" else acceptance
        if not do_sample:
            return Greedy()
        return SharedNoise(self.num_rows, self.device, self.vocab_size) if rule == "shared_noise" else Rejection()

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens of each row in the batch on the host: prompt without padding, then what was emitted."""
        return [row.tokens for row in self.rows]

    @property
    def num_emitted(self) -> list[int]:
        return [row.num_emitted for row in self.rows]

    @property
    def num_wanted(self) -> int:
        """The most tokens that a row in the batch may still emit."""
        return max(self.max_new_tokens - row.num_emitted for row in self.rows)

    def min_chance(self, on_cpu: float) -> float:
        """Chance below which a draft token is not worth its place: what the user said, else `on_cpu` on a CPU, where
        every token of a pass costs, and nothing elsewhere."""
        asked = self.settings.assistant_confidence_threshold
        return asked if asked is not None else on_cpu if self.device.type == "cpu" else 0.0

    def is_live(self, row: Row) -> bool:
        """Whether the row still emits tokens."""
        return row.finished_at is None or (not self.pads_finished and row.num_emitted < self.max_new_tokens)

    @property
    def num_steps(self) -> int:
        """Steps that plain `generate` makes for this text, once it is complete."""
        return max(row.finished_at for row in self.all_rows)

    @property
    def is_over(self) -> bool:
        if any(row.finished_at is None for row in self.all_rows):
            return False
        num_steps = self.num_steps  # once, not once a row
        return self.pads_finished or all(row.num_emitted >= num_steps for row in self.all_rows)

    def ids_until(self, num_emitted: int) -> torch.LongTensor:
        """`generate`'s ids `(B_all, prompt + num_emitted)` for a user's own objects; contiguous, as there."""
        return self.sequences[:, : self.num_columns + num_emitted].contiguous()

    def emit(self, rows: list[Row], tokens: list[int], drafted: list[bool]) -> None:
        """Appends one token to each of these rows (all live) and asks the stopping criteria."""
        for row, token, is_drafted in zip(rows, tokens, drafted):
            self.sequences[row.index, self.num_columns + row.num_emitted] = token
            row.tokens.append(token)
            row.num_emitted += 1
            row.drafted_mask.append(is_drafted)
        if self.is_lockstep:
            ids = self.ids_until(rows[0].num_emitted)
            done = self.stopping_criteria(ids, self.scores).tolist()
            is_done = [done[row.index] for row in rows]
        else:
            is_done = [self._is_done(row, token) for row, token in zip(rows, tokens)]
        for row, stop in zip(rows, is_done):
            if stop and row.finished_at is None:
                row.finished_at = row.num_emitted

    def _is_done(self, row: Row, token: int) -> bool:
        """The library's own criteria for one row, on the host."""
        if token in self.eos_token_ids or row.num_emitted >= self.max_new_tokens:
            return True
        for criterion in self.stopping_criteria:
            if type(criterion) is MaxTimeCriteria:
                if time.time() - criterion.initial_timestamp > criterion.max_time:
                    return True
            elif type(criterion) is StopStringCriteria:
                ids = self.sequences[row.index, None, : self.num_columns + row.num_emitted]
                if criterion(ids, None).item():
                    return True
        return False

    def note(self, verdict: Verdict, length: DraftLength, num_block: int) -> None:
        """Counts one verification and lets the draft length learn from it."""
        statistics = self.statistics
        statistics.num_target_passes += 1
        statistics.num_row_passes += len(verdict.num_drafted)
        for counts in zip(verdict.num_drafted, verdict.num_accepted):
            statistics.count(*counts)
        self.stopwatch.collect()
        if statistics.num_target_passes > 1:
            length.record(
                verdict.num_drafted,
                verdict.num_accepted,
                width=num_block,
                target_seconds=self.stopwatch.last.get("target", 0.0),
                drafter_seconds=self.stopwatch.last.get("drafter", 0.0),
            )

    def stream(self, streamer: BaseStreamer | None) -> None:
        """Gives the streamer the steps that all rows have reached, as one block `(B_all, steps)`."""
        if streamer is None:
            return
        reached = self.num_steps if self.is_over else min(row.num_emitted for row in self.all_rows if self.is_live(row))
        if reached > self.num_streamed:
            start = self.num_columns + self.num_streamed
            streamer.put(self.sequences[:, start : self.num_columns + reached].cpu())
            self.num_streamed = reached

    def drop_finished(self, target: Target) -> None:
        """Finished rows leave the batch, unless the caller gets the cache back, which then needs them."""
        places = [place for place, row in enumerate(self.rows) if self.is_live(row)]
        if len(places) == len(self.rows) or self.keeps_cache:
            return
        self.rows = [self.rows[place] for place in places]
        self.num_new = [self.num_new[place] for place in places if self.num_new]
        self.hidden_states = {layer: states[places] for layer, states in self.hidden_states.items()}
        target.keep_rows(places)
        self.generator.keep_rows(torch.tensor(places, device=self.device))

    def finish_statistics(self, total_seconds: float) -> None:
        self.stopwatch.collect(wait=True)
        statistics = self.statistics
        num_steps = self.num_steps
        for row in self.all_rows:  # rows may have run past the last step of the batch
            del row.drafted_mask[num_steps:]
        statistics.num_emitted = sum(len(row.drafted_mask) for row in self.all_rows)
        statistics.target_seconds = self.stopwatch.seconds.get("target", 0.0)
        statistics.drafter_seconds = self.stopwatch.seconds.get("drafter", 0.0)
        statistics.total_seconds = total_seconds

    def output_ids(self) -> torch.LongTensor:
        """`generate`'s result `(B_all, prompt + steps)`."""
        return self.sequences[:, : self.num_columns + self.num_steps].clone()


def output_vocab_size(model: PreTrainedModel) -> int:
    """Number of scores that the model's head gives; ids from there on it cannot emit."""
    size = getattr(model.get_output_embeddings(), "out_features", None)
    return model.config.get_text_config().vocab_size if size is None else size
