"""Logits processors: stateless ones for all drafted positions at once, a user's own once per emitted token.

Shapes: B rows, M = 1 + N tokens of a block, V vocabulary, L columns of `generate`'s ids so far.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
import transformers
from transformers import LogitsProcessor, LogitsProcessorList, SuppressTokensLogitsProcessor

from .tree import CandidateTree

if TYPE_CHECKING:
    from .run import Run

# Functions of the scores alone. Exact types: a subclass of a user may do anything.
CONTEXT_FREE = {
    getattr(transformers.generation.logits_process, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
    )
}
# Functions of one row's ids and scores, whatever the other rows hold and whatever was asked before.
ROWWISE = {
    getattr(transformers.generation.logits_process, name)
    for name in (
        "RepetitionPenaltyLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "ExponentialDecayLengthPenalty",
        "SuppressTokensAtBeginLogitsProcessor",
    )
}


class Processors:
    """The processors of one call, sorted by what they may be shown.

    Attributes:
        is_stateful (`bool`): some processor is not known to be a pure function of one row: all are called once per
            emitted token, in order, on the whole batch, and never on a position that was not accepted.
        is_context_free (`bool`): none looks at the ids.
    """

    def __init__(self, processors: LogitsProcessorList) -> None:
        self.processors = processors
        self.is_context_free = all(type(processor) in CONTEXT_FREE for processor in processors)
        self.is_stateful = not all(type(processor) in CONTEXT_FREE | ROWWISE for processor in processors)
        self.for_drafts = LogitsProcessorList(p for p in processors if type(p) in CONTEXT_FREE)

    def column(self, input_ids: torch.LongTensor, logits: torch.Tensor) -> torch.Tensor:
        """Scores `(B_all, V)` of one step of the whole batch, as plain `generate` computes them."""
        return self.processors(input_ids, logits)

    def block(self, logits: torch.Tensor, run: Run, tree: CandidateTree | None) -> torch.Tensor:
        """Scores `(B, M, V)` at all positions at once; stateless processors only."""
        if not self.processors:
            return logits
        if self.is_context_free:
            return self.processors(None, logits.flatten(0, 1)).view_as(logits)
        ids, lengths = contexts(run, tree)
        scores = torch.empty_like(logits)
        for length in sorted(set(lengths.flatten().tolist())):
            rows, nodes = (lengths == length).nonzero(as_tuple=True)
            indices = [run.rows[row].index for row in rows]
            processors = LogitsProcessorList(for_rows(processor, indices) for processor in self.processors)
            rows, nodes = rows.to(logits.device), nodes.to(logits.device)
            scores[rows, nodes] = processors(ids[rows, nodes, :length], logits[rows, nodes])
        return scores

    def draft(self, logits: torch.Tensor, token_ids: torch.LongTensor | None = None) -> torch.Tensor:
        """A drafter's scores, float32, `(..., V_draft)`: the warpers that look at the scores alone.

        Args:
            token_ids (`torch.LongTensor` of shape `(V_draft,)`, *optional*): the ids that the logits stand for, if not
                the first ones in order. Warpers that name ids are then left out.
        """
        logits = logits.float()
        warpers = [w for w in self.for_drafts if token_ids is None or type(w) is not SuppressTokensLogitsProcessor]
        if not warpers:
            return logits
        return LogitsProcessorList(warpers)(None, logits.reshape(-1, logits.shape[-1])).view_as(logits)


def for_rows(processor: LogitsProcessor, rows: list[int]) -> LogitsProcessor:
    """The processor for these rows of the batch: some hold a number for each row (left padding, transformers 5.24)."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, torch.Tensor):
        return processor
    processor = copy.copy(processor)
    processor.prompt_ignore_length = ignored[rows]
    return processor


def contexts(run: Run, tree: CandidateTree | None) -> tuple[torch.LongTensor, torch.LongTensor]:
    """What `generate`'s ids would be at every token of the block.

    Returns:
        ids (`torch.LongTensor` of shape `(B, M, L_max)`): prompt, emitted tokens, drafts on the way to the node.
        lengths (`torch.LongTensor` of shape `(B, M)`, on the CPU): how many columns of it are real.
    """
    starts = torch.tensor([run.num_columns + row.num_emitted for row in run.rows])
    index = torch.tensor([row.index for row in run.rows], device=run.device)
    if tree is None:
        return run.sequences[index, None, : int(starts.max())], starts[:, None]
    depths, _ = tree.visibility()
    depths = depths.expand(len(starts), -1)
    # Known without a read for a chain, so that the host does not wait.
    lengths = starts[:, None] + (torch.arange(tree.num_nodes + 1) if tree.is_chain else depths.cpu())
    ids = run.sequences[index, : int(lengths.max())]
    ids = torch.nn.functional.pad(ids, (0, int(lengths.max()) - ids.shape[1]))  # drafts may overshoot the last column
    ids = ids[:, None].repeat(1, depths.shape[1], 1)
    above = torch.arange(-1, tree.num_nodes - 1, device=run.device) if tree.is_chain else tree.parents
    block_parents = torch.nn.functional.pad(above.expand(len(starts), -1) + 1, (1, 0))
    tokens = torch.nn.functional.pad(tree.tokens.clamp(min=0), (1, 0))
    node = torch.arange(depths.shape[1], device=run.device).expand_as(depths)
    for _ in range(tree.depth):  # climb from every node to the root, writing each token at its depth
        depth = depths.gather(1, node)
        column = (starts.to(run.device)[:, None] + depth - 1)[..., None]
        token = torch.where(depth > 0, tokens.gather(1, node), ids.gather(2, column)[..., 0])
        ids.scatter_(2, column, token[..., None])
        node = block_parents.gather(1, node)
    return ids, lengths
