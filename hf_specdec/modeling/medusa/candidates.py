"""Trees from Medusa heads: each head guesses one depth, whatever stands above it."""

from __future__ import annotations

import torch

from ...generation.candidates import CandidateGenerator
from ...generation.choice import target_ids, target_probs
from ...generation.run import Run
from ...generation.tree import CandidateTree
from ..target import OutputHead, text_config
from .modeling import MedusaModel
from .trees import static_tree

# SmolLM2-135M, 2 cores, 11 categories of Spec-Bench: 18.7, 20.6, 21.0 and 21.1 tokens a second for 0.1 to 0.4, with
# 1.28 to 1.12 tokens a pass: a node must have a good chance to pay for its place in the pass.
MIN_CHANCE_ON_CPU = 0.3
UNCERTAINTY = 1.5  # stories260K, temperature 1, 32 nodes: 2.20 tokens a pass; with 1 it is 2.15


class Medusa(CandidateGenerator):
    """Drafts trees with Medusa heads (Cai et al. 2401.10774).

    By default each pass gets a tree of its own: the nodes with the highest chance to be what the target chooses, the
    product of what the heads say for each depth, up to `num_assistant_tokens` nodes. Under sampling the heads' guesses
    are ranked with the noise that the target will choose with.

    Args:
        model ([`MedusaModel`]): the heads.
        num_draft_tokens (`int`): nodes of a tree where `generate` is given none.
        tree (`int` or `list[list[int]]`, *optional*): a static tree instead: 16, 26 or 64 (tokens a pass, the last
            verified one included), or paths of ranks from the root, e.g. `[[0], [1], [0, 0]]`: the best guess, the
            second, and the best guess after the best. Of it, too, `num_assistant_tokens` takes the first nodes only.

    Raises:
        ValueError: if `model` is no [`MedusaModel`], a path is deeper than there are heads, or its parent is missing;
            at `generate`, if the heads were made for another target.
    """

    drafts_trees = True

    def __init__(
        self, model: MedusaModel, num_draft_tokens: int = 32, tree: int | list[list[int]] | None = None
    ) -> None:
        if not isinstance(model, MedusaModel):
            raise ValueError(
                f"`model` is a {type(model).__name__}; Medusa takes a loaded MedusaModel "
                "(`AutoDrafter.from_pretrained`). A Hub id or folder can be passed to `generate` itself: "
                '`assistant="user/name"`.'
            )
        self.model = model
        self.paths = None if tree is None else static_tree(tree, model.config.num_heads)
        self.default_num_draft_tokens = num_draft_tokens if tree is None else len(self.paths)

    def begin(self, run: Run) -> None:
        self.model.check_target(run.target)
        self.layer = text_config(run.target).num_hidden_layers - 1
        self.hidden_state_layers = (self.layer,)
        self.output_head = OutputHead(run.target, self.model.token_ids)
        self.token_ids = None if self.model.token_ids is None else self.model.token_ids.to(run.device)

    def propose(self, run: Run, num_draft_tokens: int) -> CandidateTree | None:
        if not run.num_new:
            return None  # nothing has been read yet
        states = run.hidden_states[self.layer]
        last = torch.tensor([max(num - 1, 0) for num in run.num_new], device=states.device)
        rows = torch.arange(len(states), device=states.device)
        states = states[rows, last].to(self.model.device, self.model.dtype)
        logits = self.model(states, self.output_head)[:, : run.num_wanted - 1].to(run.device)
        scores = run.processors.draft(logits, self.token_ids)
        if not run.choice.takes_trees:
            return self._chain(run, scores[:, :num_draft_tokens])
        width = num_draft_tokens if self.paths is None else 1 + max(max(path) for path in self.paths)
        chances = run.choice.chances(scores, run, self.token_ids, UNCERTAINTY)
        chances, tokens = chances.topk(min(width, scores.shape[-1]))
        tokens = target_ids(tokens, self.token_ids)
        if self.paths is not None:
            num_depths, width = tokens.shape[1:]
            paths = [path for path in self.paths if len(path) <= num_depths and max(path) < width]
            return CandidateTree.from_paths(paths[:num_draft_tokens], tokens) if paths else None
        return CandidateTree.best_first(tokens, chances, num_draft_tokens, run.min_chance(MIN_CHANCE_ON_CPU))

    def _chain(self, run: Run, scores: torch.Tensor) -> CandidateTree:
        """One drawn token for each depth, with the distributions they were drawn from."""
        drafted = [run.choice.draft(scores[:, depth], run, depth) for depth in range(scores.shape[1])]
        tokens, probs = (torch.stack(parts, dim=1) for parts in zip(*drafted))
        probs = target_probs(probs, self.token_ids, run.vocab_size)
        return CandidateTree(target_ids(tokens, self.token_ids), draft_probs=probs)
