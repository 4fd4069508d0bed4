"""Verification: the target chooses a token at every drafted position, and each row walks down its tree as far as the
drafts are what the target chose. One path for greedy and sampling, chain and tree, one row and many.

Shapes: B rows, M = 1 + N tokens of a block (the last verified token, then the tree's nodes), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .record import Record
from .tree import ROOT, CandidateTree, children, longest_branch

if TYPE_CHECKING:
    from .run import Row, Run


@dataclass
class Verdict:
    """What one pass settled, by row of the pass.

    Attributes:
        paths: the nodes whose tokens the row emitted, less the last token emitted, which the next pass reads as its
            first; `None` for a row that emitted nothing.
        num_drafted, num_accepted: of the live rows: draft tokens on the longest branch, and how many were kept.
    """

    paths: list[list[int] | None]
    num_drafted: list[int]
    num_accepted: list[int]


def verify(run: Run, tree: CandidateTree | None, logits: torch.Tensor, record: Record) -> Verdict:
    """Emits the tokens that one target pass settles.

    Args:
        tree ([`CandidateTree`], *optional*): the drafts, a row for each of `run.rows`; `None`: no drafts.
        logits (`torch.Tensor` of shape `(B, M, V)`): the target's, after every token of the block.

    Syncs: one read for stateless processors; one per emitted token for a user's own.
    """
    logits = logits.to(run.device)
    if not run.is_plain_argmax:
        logits = logits.float()
    scores = choices = None
    if not run.processors.is_stateful:
        scores = run.processors.block(logits, run, tree)
        choices = run.choice.choose(scores, run, tree)
    if tree is None:
        tokens = parents = [[]] * len(run.rows)
        picks = [] if choices is None else choices.tolist()
    else:
        picks, tokens, parents = tree.on_host(choices)  # the one read of this pass
    nodes_below = [children(*row) for row in zip(tokens, parents)]
    walked: list[list[int]] = [[] for _ in run.rows]
    emitted_before = run.num_emitted

    live = [place for place, row in enumerate(run.rows) if run.is_live(row)]
    for group in [live] if run.is_lockstep else [[place] for place in live]:
        while group:
            rows = [run.rows[place] for place in group]
            here = [(walked[place] or [ROOT])[-1] for place in group]
            if not picks:
                step_scores = _column_scores(run, rows, logits[group, [node + 1 for node in here]])
                picked = _choose_column(run, step_scores, tree, depth=len(walked[group[0]]))
                picked = [picked[place] for place in group]
            else:
                step_scores = None
                picked = [picks[place][node + 1] for place, node in zip(group, here)]
            if min(picked) < 0:
                raise RuntimeError(
                    "the scores of a token are nan, or all of them -inf: there is nothing to sample from (plain "
                    "`generate` fails here too). Half precision may have overflowed, or a processor "
                    "forbidden every token."
                )
            found = [nodes_below[place].get(step) for place, step in zip(group, zip(here, picked))]
            if record.is_on:
                paths = [walked[place] for place in group]
                record.add(run, group, paths, logits, scores, step_scores)
            run.emit(rows, picked, [node is not None for node in found])
            for place, node in zip(group, found):
                if node is not None:
                    walked[place].append(node)
            going = [(place, node) for place, node in zip(group, found) if run.is_live(run.rows[place])]
            if any(node is None for _, node in going) or run.is_over:
                break  # rows in lockstep wait for the one whose drafts have run out
            group = [place for place, _ in going]

    num_new = [row.num_emitted - before for row, before in zip(run.rows, emitted_before)]
    return Verdict(
        paths=[path[: new - 1] if new else None for path, new in zip(walked, num_new)],
        num_drafted=[
            min(longest_branch(tokens[place], parents[place]), run.max_new_tokens - emitted_before[place])
            for place in live
        ],
        num_accepted=[len(walked[place]) for place in live],
    )


def _column_scores(run: Run, rows: list[Row], logits: torch.Tensor) -> torch.Tensor:
    """Scores `(B_all, V)` of one step for a user's processors, which see the whole batch; finished rows hold zeros."""
    whole = logits.new_zeros(run.num_rows, logits.shape[-1])
    whole[[row.index for row in rows]] = logits
    return run.processors.column(run.ids_until(rows[0].num_emitted), whole)


def _choose_column(run: Run, scores: torch.Tensor, tree: CandidateTree | None, depth: int) -> list[int]:
    """The target's token of one step for every row of `run.rows`."""
    drafts = None
    if tree is not None and tree.is_chain and depth < tree.num_nodes:
        here = slice(depth, depth + 1)
        drafts = CandidateTree(
            tree.tokens[:, here], None, None if tree.draft_probs is None else tree.draft_probs[:, here]
        )
    scores = scores[[row.index for row in run.rows], None]
    return run.choice.choose(scores, run, drafts)[:, 0].tolist()
