"""Chains and trees from EAGLE drafters: every level of the tree is one pass of the drafter over its likeliest nodes.

Shapes: B rows, T positions, H width of the drafter, F nodes of a level that are continued, W guesses for each of them,
V_draft ids that the drafter can propose.
"""

from __future__ import annotations

import torch

from ...generation.cache import GROWTH_ROOM, RaggedCache, WritePlan
from ...generation.candidates import CandidateGenerator
from ...generation.choice import target_ids, target_probs
from ...generation.run import Run
from ...generation.tree import NO_TOKEN, ROOT, CandidateTree
from .modeling import EagleModel
from .trees import StaticTree

MIN_CHANCE_ON_CPU = 0.3
UNCERTAINTY = 1.0


class Eagle(CandidateGenerator):
    """Drafts with an EAGLE drafter (Li et al. 2401.15077, 2406.16858, 2503.01840).

    By default each pass gets a tree of its own, as in EAGLE-2: of every level the `width` likeliest nodes are continued
    by their `width` likeliest tokens, and the likeliest `num_assistant_tokens` of all these nodes are verified. Under
    sampling the guesses are ranked with the noise that the target will choose with. With `assistant_sampling=
    "rejection"` it drafts a chain.

    The drafter has a ragged cache of its own. The features of the tokens that the target has just read take the place
    of the drafter's own guesses there, in the pass that also gives the first level.

    Args:
        model ([`EagleModel`]): the drafter.
        num_draft_tokens (`int`): nodes of a tree where `generate` is given none.
        depth (`int`): the most levels, each of them a pass of the drafter.
        width (`int`): nodes of a level that are continued, and guesses for each; 1 drafts a chain.
        tree (`list[list[int]]`, *optional*): a static tree instead, as in EAGLE-1: paths of ranks from the root, e.g.
            `[[0], [1], [0, 0]]`: the best guess, the second, and the best guess after the best. Of it
            `num_assistant_tokens` takes the first nodes only; `EAGLE_1_TREE` is the one that was published.

    Raises:
        ValueError: if `model` is no [`EagleModel`], a number is below 1, or a path lacks its parent; at `generate`, if
            the drafter was made for another target.
    """

    drafts_trees = True

    def __init__(
        self,
        model: EagleModel,
        num_draft_tokens: int = 32,
        depth: int = 6,
        width: int = 8,
        tree: list[list[int]] | None = None,
    ) -> None:
        if not isinstance(model, EagleModel):
            raise ValueError(
                f"`model` is a {type(model).__name__}; Eagle takes a loaded EagleModel. A Hub id or folder can be "
                'passed to `generate` itself: `assistant="user/name"`.'
            )
        for name, value in (("num_draft_tokens", num_draft_tokens), ("depth", depth), ("width", width)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` is {value!r}; expected an int of at least 1.")
        self.model = model
        self.default_num_draft_tokens = num_draft_tokens
        self.depth, self.width = depth, width
        self.tree = None if tree is None else StaticTree(tree)

    def begin(self, run: Run) -> None:
        self.model.check_target(run.target)
        self.hidden_state_layers = self.model.layers_of(run.target)
        self.embedding = self.model.embedding(run.target)
        self.output_head = self.model.output_head(run.target)
        self.token_ids = None if self.model.token_ids is None else self.model.token_ids.to(run.device)
        if self.tree is not None:
            self.tree = self.tree.narrowed(run.vocab_size if self.token_ids is None else len(self.token_ids))
        self.lengths = [0] * len(run.rows)  # tokens of each row whose features the drafter has read
        self.cache = RaggedCache(max(map(len, run.tokens)) + min(run.max_new_tokens, GROWTH_ROOM))

    def propose(self, run: Run, num_draft_tokens: int) -> CandidateTree | None:
        if not run.num_new:
            return None  # nothing has been read yet
        static = None if self.tree is None or not run.choice.takes_trees else self.tree.cut(num_draft_tokens)
        # Of one level no more nodes than the tree may have can get into it.
        width = min(self.width, num_draft_tokens) if static is None else static.width
        width = width if run.choice.takes_trees else 1
        depth = min(self.depth if static is None else static.depth, num_draft_tokens, run.num_wanted - 1)
        threshold = 0.0 if static is not None else run.min_chance(MIN_CHANCE_ON_CPU)
        states = self._read_new(run)
        num_rows = len(states)
        # Of the nodes that are continued: score, place among all nodes, ancestors among those the drafter has read.
        scores = torch.zeros(num_rows, 1, device=run.device)
        places = torch.full((num_rows, 1), ROOT, device=run.device)
        is_ancestor = torch.zeros(num_rows, 1, 0, dtype=torch.bool, device=self.model.device)
        levels, probs, num_before = [], [], 0
        for level in range(depth):
            logits = self.model.logits(states, self.output_head).to(run.device)
            guesses, chances, prob = self._guess(run, run.processors.draft(logits, self.token_ids), level, width)
            probs.append(prob)
            tokens = target_ids(guesses, self.token_ids).flatten(1)
            below = (scores[:, :, None] + chances.log()).flatten(1)
            levels.append((tokens, places.repeat_interleave(guesses.shape[-1], dim=1), below))
            if level + 1 == depth:
                break
            if static is None:
                scores, chosen = below.topk(min(width, below.shape[1]))
                if threshold > 0:  # what follows an unlikely node is more unlikely still
                    num_likely = int((scores.exp() >= threshold).sum(1).max())
                    if num_likely == 0:
                        break
                    scores, chosen = scores[:, :num_likely], chosen[:, :num_likely]
            else:
                chosen = torch.tensor(static.continued[level], device=run.device).expand(num_rows, -1)
                scores = below.gather(1, chosen)
            places, num_before = num_before + chosen, num_before + below.shape[1]
            parents = (chosen // guesses.shape[-1]).to(states.device)
            is_ancestor = self._with_level(is_ancestor, parents)
            states = states.gather(1, parents[..., None].expand(-1, -1, states.shape[-1]))
            states = self._read_level(states, tokens.gather(1, chosen), is_ancestor, level)
        tokens, parents, scores = (torch.cat(parts, dim=1) for parts in zip(*levels))
        if static is not None:
            return static.filled(tokens, len(levels))
        if self.width > 1 and run.choice.takes_trees:
            return CandidateTree.best_of(tokens, parents, scores, num_draft_tokens, threshold, len(levels))
        draft_probs = None
        if probs[0] is not None:
            draft_probs = target_probs(torch.cat(probs, 1), self.token_ids, run.vocab_size)
            # Whether a drawn token is shown must not depend on what was drawn: those after an unlikely one are cut.
            scores = torch.nn.functional.pad(scores[:, :-1], (1, 0))
        tokens = tokens.where(scores.exp() >= threshold, NO_TOKEN) if threshold > 0 else tokens
        return CandidateTree(tokens, draft_probs=draft_probs)

    def _guess(
        self, run: Run, scores: torch.Tensor, level: int, width: int
    ) -> tuple[torch.LongTensor, torch.Tensor, torch.Tensor | None]:
        """The best guesses `(B, F, W)` for the tokens after the nodes of a level, their chances, and under rejection
        sampling, where they are drawn, the distribution `(B, 1, V_draft)`."""
        if not run.choice.takes_trees:
            index, probs = run.choice.draft(scores[:, 0], run, level, self.token_ids)
            chances = probs.gather(1, index[:, None].clamp(min=0)).nan_to_num(0.0)
            return index[:, None, None], chances[:, None], probs[:, None]
        chances = run.choice.chances(scores, run, self.token_ids, UNCERTAINTY, offset=level)
        chances, index = chances.nan_to_num(0.0).topk(min(width, chances.shape[-1]))
        return index, chances, None

    def _read_new(self, run: Run) -> torch.Tensor:
        """Reads the features of the tokens that the target has read; states `(B, 1, H)` after each row's last one."""
        # After a prompt of embeddings some features belong to tokens without an id.
        counts = [min(num, len(tokens)) for num, tokens in zip(run.num_new, run.tokens)]
        width = max(counts)
        following = [tokens[len(tokens) - count :] for tokens, count in zip(run.tokens, counts)]
        following = torch.tensor([ids + [0] * (width - len(ids)) for ids in following], device=run.device)
        features = [run.hidden_states[layer] for layer in self.hidden_state_layers]
        if counts != run.num_new:
            index = torch.tensor([[num - count] for num, count in zip(run.num_new, counts)]) + torch.arange(width)
            index = index.clamp(max=features[0].shape[1] - 1)
            rows = torch.arange(len(index))[:, None]
            features = [states[rows.to(states.device), index.to(states.device)] for states in features]
        features = [states[:, :width] for states in features]  # as wide as a row needed that has left the batch
        starts = torch.tensor(self.lengths, device=self.model.device)[:, None]
        positions = starts + torch.arange(width, device=starts.device)
        plan, mask = WritePlan(self.lengths, width), None
        if not plan.is_uniform:  # else the layers' own causal mask says the same
            mask = torch.arange(plan.end, device=starts.device) <= positions[..., None]
        states = self._pass(plan, self.model.fuse(features), following, positions, mask)
        last = torch.tensor([max(count - 1, 0) for count in counts], device=states.device)
        self.lengths = [length + count for length, count in zip(self.lengths, counts)]
        return states[torch.arange(len(states), device=states.device), last][:, None]

    def _read_level(
        self, states: torch.Tensor, tokens: torch.LongTensor, is_ancestor: torch.BoolTensor, level: int
    ) -> torch.Tensor:
        """Reads the nodes of a level: their tokens `(B, F)` and the states `(B, F, H)` that they were guessed from."""
        num_nodes, num_read = is_ancestor.shape[1:]
        plan = WritePlan([length + num_read - num_nodes for length in self.lengths], num_nodes)
        starts = torch.tensor(self.lengths, device=states.device)[:, None]
        is_visible = (torch.arange(plan.end, device=states.device) < starts)[:, None].repeat(1, num_nodes, 1)
        slots = starts + torch.arange(num_read, device=states.device)
        is_visible.scatter_(2, slots[:, None].expand(-1, num_nodes, -1), is_ancestor)
        return self._pass(plan, states, tokens, (starts + level).expand(-1, num_nodes), is_visible)

    def _pass(
        self,
        plan: WritePlan,
        features: torch.Tensor,
        tokens: torch.LongTensor,
        positions: torch.LongTensor,
        is_visible: torch.BoolTensor | None,
    ) -> torch.Tensor:
        self.cache.prepare(plan)
        mask = None if is_visible is None else is_visible[:, None]
        return self.model(features, self.embedding(tokens.clamp(min=0)), positions, mask, self.cache)

    @staticmethod
    def _with_level(is_ancestor: torch.BoolTensor, parents: torch.LongTensor) -> torch.BoolTensor:
        """Ancestors `(B, F_new, M + F_new)` of the nodes of a new level, themselves included, given their parents'.

        Args:
            is_ancestor (`torch.BoolTensor` of shape `(B, F, M)`): of the level before.
            parents (`torch.LongTensor` of shape `(B, F_new)`): places in the level before.
        """
        inherited = is_ancestor.gather(1, parents[..., None].expand(-1, -1, is_ancestor.shape[-1]))
        own = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
        return torch.cat([inherited, own], dim=-1)

    def keep_rows(self, rows: torch.LongTensor) -> None:
        rows = rows.tolist()
        self.cache.keep_rows(rows)
        self.lengths = [self.lengths[row] for row in rows]
