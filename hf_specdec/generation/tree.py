"""Candidate trees: what a drafter proposes and the target verifies in one pass. A chain is a tree without branches.

Shapes: B rows (sequences still being decoded), N nodes of the tree, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

NO_TOKEN = -1  # fills nodes that a row does not use; never equals a token that the target chooses
ROOT = -1  # parent of a tree's first level: the last verified token, which is not a node of the tree


@dataclass
class CandidateTree:
    """Draft tokens of every row, arranged as a tree below the last verified token.

    Args:
        tokens (`torch.LongTensor` of shape `(B, N)`): token of each node; `NO_TOKEN` (-1) where a row has no draft.
        parents (`torch.LongTensor` of shape `(N,)` or `(B, N)`, *optional*): index of each node's parent, smaller than
            the node's own index; `ROOT` (-1) for the first level. `None` (default) makes a chain.
        draft_probs (`torch.FloatTensor` of shape `(B, N, V)`, *optional*): float32 rows, the distribution that each
            token was really drawn from. Only `assistant_sampling="rejection"` reads it, and only for chains. `None`
            says that the drafts are deterministic.
        depth (`int`, *optional*): nodes on the longest branch. Where the parents are on an accelerator, giving it saves
            a read.

    Raises:
        ValueError: if the shapes disagree.
    """

    tokens: torch.LongTensor
    parents: torch.LongTensor | None = None
    draft_probs: torch.FloatTensor | None = None
    depth: int | None = None
    _visibility: tuple[torch.LongTensor, torch.BoolTensor] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("tokens", "parents"):
            value = getattr(self, name)
            if name == "parents" and value is None:
                continue
            if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.dtype == torch.bool:
                kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
                raise ValueError(f"`{name}` is a {kind}; expected a torch.LongTensor (or `CandidateTree.from_lists`).")
            setattr(self, name, value.long())
        if self.tokens.ndim != 2:
            raise ValueError(f"`tokens` has shape {tuple(self.tokens.shape)}; expected (rows, nodes).")
        if self.draft_probs is not None and self.draft_probs.shape[:2] != self.tokens.shape:
            raise ValueError(
                f"`draft_probs` has shape {tuple(self.draft_probs.shape)}; expected "
                f"{(*self.tokens.shape, 'vocabulary')}, a distribution for each draft token."
            )
        if self.parents is not None and self.parents.shape not in (self.tokens.shape, self.tokens.shape[1:]):
            raise ValueError(
                f"`parents` has shape {tuple(self.parents.shape)}; expected {tuple(self.tokens.shape)} or "
                f"{tuple(self.tokens.shape[1:])}, as `tokens`."
            )
        if self.is_chain:
            self.depth = self.num_nodes
            return
        is_on_host = self.parents.device.type == "cpu"  # where looking at them costs no wait
        if is_on_host and ((self.parents < ROOT) | (self.parents >= torch.arange(self.num_nodes))).any():
            raise ValueError(
                f"`parents` is {self.parents.tolist()}; each node's parent must be {ROOT} (the root) or a "
                "node before it."
            )
        if self.depth is None or is_on_host:
            self.depth = int(self.visibility()[0].max())

    @classmethod
    def from_lists(cls, drafts: list[list[int]], device: torch.device | str = "cpu") -> CandidateTree:
        """A chain for each row from lists of different lengths, e.g. `[[5, 8], []]` -> tokens `[[5, 8], [-1, -1]]`."""
        width = max(map(len, drafts), default=0)
        rows = [draft + [NO_TOKEN] * (width - len(draft)) for draft in drafts]
        return cls(torch.tensor(rows, dtype=torch.long, device=device).view(len(drafts), width))

    @classmethod
    def from_paths(cls, paths: list[list[int]], tokens: torch.LongTensor) -> CandidateTree:
        """A tree of one shape for all rows, filled with ranked guesses for each depth.

        Args:
            paths: for each node the ranks on the way to it from the root, each parent before its children.
            tokens (`torch.LongTensor` of shape `(B, depths, ranks)`): the guesses, best first.

        Example: paths [[0], [1], [0, 0]] -> parents [-1, -1, 0]; the last node is the best guess for the second depth.
        """
        places = {tuple(path): node for node, path in enumerate(paths)}
        parents = torch.tensor([places.get(tuple(path[:-1]), ROOT) for path in paths])
        depths, ranks = torch.tensor([[len(path) - 1, path[-1]] for path in paths]).T
        depth = int(depths.max()) + 1
        return cls(tokens[:, depths.to(tokens.device), ranks.to(tokens.device)], parents.to(tokens.device), depth=depth)

    @classmethod
    def best_first(
        cls, tokens: torch.LongTensor, chances: torch.Tensor, num_nodes: int, min_chance: float = 0.0
    ) -> CandidateTree | None:
        """The nodes that the target is likeliest to choose, where the guesses for a depth are the same on all branches.

        The chance of a node is the product of the chances on the way to it, so a node never has a better one than its
        parent, and the best nodes are a tree. Found level by level: the best of one level have their parents among the
        best of the level above.

        Args:
            tokens (`torch.LongTensor` of shape `(B, depths, ranks)`): the guesses for each depth, best first.
            chances (`torch.FloatTensor` of the same shape): of each guess, if all above it was right.
            num_nodes (`int`): the most nodes of a row.
            min_chance (`float`): leaves out nodes with a smaller chance; above zero it costs a read on an accelerator.

        Returns: each row a tree of its own; `None` if no node is likely enough.
        """
        num_rows, num_depths, width = tokens.shape
        chances = chances.nan_to_num(0.0)  # of a drafter that overflowed in half precision
        scores = chances.new_zeros(num_rows, 1)
        index = torch.full((num_rows, 1), ROOT, device=tokens.device)
        levels, num_before = [], 0
        for depth in range(num_depths):
            below = (scores[:, :, None] + chances[:, depth, None].log()).flatten(1)
            scores, flat = below.topk(min(num_nodes, below.shape[1]))
            level = tokens[:, depth].gather(1, flat % width)
            levels.append((level, index.gather(1, flat // width), scores))
            index = torch.arange(num_before, num_before + flat.shape[1], device=tokens.device).expand_as(flat)
            num_before += flat.shape[1]
        return cls.best_of(*(torch.cat(parts, dim=1) for parts in zip(*levels)), num_nodes, min_chance, num_depths)

    @classmethod
    def best_of(
        cls,
        tokens: torch.LongTensor,
        parents: torch.LongTensor,
        scores: torch.Tensor,
        num_nodes: int,
        min_chance: float,
        depth: int,
    ) -> CandidateTree | None:
        """The likeliest nodes of a larger tree.

        Args:
            tokens, parents (`torch.LongTensor` of shape `(B, M)`): the larger tree, level by level.
            scores (`torch.FloatTensor` of shape `(B, M)`): logarithm of each node's chance; never above its parent's.
            depth (`int`): levels of the larger tree.
            num_nodes, min_chance: as for `best_first`.

        Returns: each row a tree of its own; `None` if no node is likely enough.
        """
        # A stable sort: of equal scores, a certain child's and its parent's, the shallower comes first.
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :num_nodes]
        is_kept = scores.gather(1, order) >= (math.log(min_chance) if min_chance > 0 else torch.finfo(scores.dtype).min)
        if min_chance > 0:
            widest = int(is_kept.sum(1).max())
            if widest == 0:
                return None
            order, is_kept = order[:, :widest], is_kept[:, :widest]
        places = torch.arange(order.shape[1], device=order.device).expand_as(order)
        place = torch.zeros_like(parents).scatter_(1, order, places)  # of each node in the tree
        parents = parents.gather(1, order)
        parents = torch.where(parents == ROOT, ROOT, place.gather(1, parents.clamp(min=0)))
        tokens = tokens.gather(1, order).where(is_kept, NO_TOKEN)
        return cls(tokens, parents, depth=min(depth, tokens.shape[1]))

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]

    @property
    def is_chain(self) -> bool:
        return self.parents is None

    def on_host(self, choices: torch.LongTensor | None) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        """Reads the target's choices `(B, 1 + N)`, the tokens and the parents of every row in one go."""
        num_rows, num_nodes = self.tokens.shape
        read = [self.tokens] if choices is None else [choices.to(self.tokens.device), self.tokens]
        if not self.is_chain:
            read.append(self.parents.to(self.tokens.device).expand(num_rows, -1))
        sizes = [part.shape[1] for part in read]
        parts = [part.tolist() for part in torch.cat(read, dim=1).cpu().split(sizes, dim=1)]
        choices = [] if choices is None else parts.pop(0)
        parents = [list(range(-1, num_nodes - 1))] * num_rows if self.is_chain else parts[1]
        return choices, parts[0], parents

    def visibility(self) -> tuple[torch.LongTensor, torch.BoolTensor]:
        """Depths and ancestors of the block that the target reads: the last verified token, then the nodes.

        Returns:
            depths (`torch.LongTensor` of shape `(B or 1, 1 + N)`): 0 for the root token, 1 for its children, ...
            is_visible (`torch.BoolTensor` of shape `(B or 1, 1 + N, 1 + N)`): True where query i may attend to key j,
            that is where j is i or one of its ancestors.

        Example: parents [-1, -1, 0] -> depths [0, 1, 1, 2]; the last row of is_visible is [1, 1, 0, 1].
        """
        if self._visibility is None:
            self._visibility = self._chain_visibility() if self.is_chain else self._tree_visibility()
        return self._visibility

    def _chain_visibility(self) -> tuple[torch.LongTensor, torch.BoolTensor]:
        positions = torch.arange(self.num_nodes + 1, device=self.tokens.device)
        return positions[None], (positions[:, None] >= positions[None, :])[None]

    def _tree_visibility(self) -> tuple[torch.LongTensor, torch.BoolTensor]:
        num_block, device = self.num_nodes + 1, self.tokens.device
        parents = self.parents if self.parents.ndim == 2 else self.parents[None]
        parents = torch.nn.functional.pad(parents.to(device) + 1, (1, 0))  # in the block; the root is its own parent
        is_visible = torch.eye(num_block, dtype=torch.bool, device=device).expand(len(parents), -1, -1)
        # Doubling: after k rounds a node sees its ancestors up to distance 2^k - 1.
        jump = parents
        for _ in range(max(1, num_block.bit_length())):
            is_visible = is_visible | is_visible.gather(1, jump[..., None].expand(-1, -1, num_block))
            jump = jump.gather(1, jump)
        return is_visible.sum(-1) - 1, is_visible


def children(tokens: list[int], parents: list[int]) -> dict[tuple[int, int], int]:
    """Index of one row's tree by (parent, token), for the walk; of two equal siblings the first is kept."""
    index: dict[tuple[int, int], int] = {}
    for node, (token, parent) in enumerate(zip(tokens, parents)):
        if token != NO_TOKEN:
            index.setdefault((parent, token), node)
    return index


def longest_branch(tokens: list[int], parents: list[int]) -> int:
    """Draft tokens on the longest branch of one row's tree."""
    depths: list[int] = []
    for token, parent in zip(tokens, parents):
        depths.append(0 if token == NO_TOKEN else 1 + (0 if parent == ROOT else depths[parent]))
    return max(depths, default=0)
