"""Candidate trees: what a drafter proposes and the target verifies in one pass. A chain is a tree without branches.

Shapes: B rows (sequences still being decoded), N nodes of the tree, V vocabulary.
"""

from __future__ import annotations

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
