"""The decoding loop: draft, verify, commit. It knows no drafter by name."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from .record import Record
from .run import Run
from .schedule import DraftLength
from .target import Target
from .tree import NO_TOKEN, CandidateTree
from .verification import verify


def decode(
    run: Run,
    target: Target,
    record: Record,
    input_ids: torch.LongTensor,
    model_kwargs: dict[str, Any],
    streamer: BaseStreamer | None,
) -> None:
    """Emits tokens into `run` until every row has stopped."""
    run.generator.begin(run)
    length = DraftLength(*run.settings.draft_length(run.generator))
    with run.stopwatch.measure("drafter"):
        tree = draft(run, length.next()) if target.drafts_with_prompt(run, model_kwargs, record) else None
        tree = tree if tree is not None and tree.is_chain else None
    with run.stopwatch.measure("target"):
        outputs = target.prefill(input_ids, model_kwargs, run, tree)
    while True:
        record.outputs = outputs
        num_block = 1 if tree is None else 1 + tree.num_nodes
        verdict = verify(run, tree, outputs.logits[:, -num_block:], record)
        run.note(verdict, length, num_block)
        target.commit(run, outputs, verdict.paths)
        run.stream(streamer)
        if run.is_over:
            return
        run.generator.update(run)
        run.drop_finished(target)
        with run.stopwatch.measure("drafter"):
            tree = draft(run, length.next())
        with run.stopwatch.measure("target"):
            outputs = target.verify(run, tree)


def draft(run: Run, num_draft_tokens: int) -> CandidateTree | None:
    """Asks the generator for as many tokens as are still of use; `None` if it has no guess."""
    limit = run.generator.max_draft_tokens(run)
    useful = run.num_wanted - 1
    if run.generator.drafts_trees and useful > 0:
        useful = math.inf
    num_draft_tokens = min(num_draft_tokens, useful, math.inf if limit is None else limit)
    tree = run.generator.propose(run, num_draft_tokens) if num_draft_tokens > 0 else None
    if not isinstance(tree, CandidateTree | None):
        raise ValueError(
            f"`propose` of {type(run.generator).__name__} returned a {type(tree).__name__}; return a CandidateTree "
            "(for lists of draft tokens, `CandidateTree.from_lists(lists, run.device)`) or None."
        )
    if tree is None or tree.num_nodes == 0:
        return None
    if len(tree.tokens) != len(run.rows):
        raise ValueError(
            f"`propose` of {type(run.generator).__name__} returned {len(tree.tokens)} rows for the {len(run.rows)} "
            "rows of `run.tokens`; return one row for each, filled with -1 where there is no draft."
        )
    if not (tree.is_chain or run.choice.takes_trees):
        raise ValueError(
            '`assistant_sampling="rejection"` is defined for chains of draft tokens, but '
            f'{type(run.generator).__name__} proposed a tree. Use the default, "shared_noise".'
        )
    tokens = tree.tokens.to(run.device)
    if tree.is_chain and tree.num_nodes > num_draft_tokens:  # what is too long is of no use
        tokens = tokens[:, :num_draft_tokens]
        draft_probs = None if tree.draft_probs is None else tree.draft_probs[:, :num_draft_tokens]
        tree = CandidateTree(tokens, draft_probs=draft_probs)
    # An id that the target cannot emit is no guess at all. A copy keeps what the tree has computed.
    tree = copy.copy(tree)
    tree.tokens = tokens.where((tokens >= 0) & (tokens < run.vocab_size), NO_TOKEN)
    return tree
