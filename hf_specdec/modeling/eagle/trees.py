"""Static trees, as paths of ranks from the root, whose guesses depend on what stands above them.

Source: the tree `mc_sim_7b_63` that SafeAILab/EAGLE publishes for EAGLE-1, in its own order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...generation.tree import ROOT, CandidateTree

_PATHS = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
EAGLE_1_TREE = [[int(rank) for rank in path] for path in _PATHS.split()]


class StaticTree:
    """What a drafter that works level by level needs to know of a tree.

    Args:
        paths: of every node, e.g. `[[0], [1], [0, 0]]`.

    Attributes:
        width (`int`): guesses that each node needs.
        depth (`int`): levels.
        continued (`list[list[int]]`): for each level the nodes that have children, as places among all guesses made
            for the level: guess r for the f-th node continued in the level above is `f * width + r`.

    Raises:
        ValueError: if there is no path, a path comes twice or lacks its parent, or a rank is none.
    """

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        if not all(isinstance(path, (list, tuple)) for path in paths):
            raise ValueError(f"`tree` is {paths}; expected paths of ranks, e.g. [[0], [1], [0, 0]].")
        self.paths = [tuple(path) for path in sorted(paths, key=len)]
        known: set[tuple[int, ...]] = {()}
        for path in self.paths:
            is_path = path and all(isinstance(rank, int) and rank >= 0 for rank in path)
            if not is_path or path in known or path[:-1] not in known:
                raise ValueError(
                    f"`tree` has the path {list(path)}; expected ranks from 0, each path once and with its parent, the "
                    "path without its last rank."
                )
            known.add(path)
        if not self.paths:
            raise ValueError("`tree` has no path; give at least [[0]], the best guess.")
        self.width = 1 + max(map(max, self.paths))
        self.depth = len(self.paths[-1])
        above = {path[:-1] for path in self.paths}
        self.continued: list[list[int]] = []
        self._places: list[int] = []  # of each node among all guesses of all levels
        parents, num_before = [()], 0
        for depth in range(1, self.depth + 1):
            level = [path for path in self.paths if len(path) == depth]
            place = {path: parents.index(path[:-1]) * self.width + path[-1] for path in level}
            self._places += [num_before + place[path] for path in level]
            num_before += len(parents) * self.width
            parents = [path for path in level if path in above]
            self.continued.append([place[path] for path in parents])
        node = {path: index for index, path in enumerate(self.paths)}
        self._parents = [node.get(path[:-1], ROOT) for path in self.paths]

    def cut(self, num_nodes: int) -> StaticTree:
        """The tree of the first `num_nodes` nodes, level by level."""
        return self if num_nodes >= len(self.paths) else StaticTree(self.paths[:num_nodes])

    def narrowed(self, width: int) -> StaticTree:
        """The tree without the ranks from `width` on."""
        return self if self.width <= width else StaticTree([path for path in self.paths if max(path) < width])

    def filled(self, guesses: torch.LongTensor, num_levels: int) -> CandidateTree:
        """The tree with its tokens.

        Args:
            guesses (`torch.LongTensor` of shape `(B, all)`): for the nodes continued of each level, one level after the
                other, the best `width` tokens, best first.
            num_levels (`int`): how many levels there are guesses for.
        """
        nodes = [place for path, place in zip(self.paths, self._places) if len(path) <= num_levels]
        parents = torch.tensor(self._parents[: len(nodes)], device=guesses.device)
        return CandidateTree(guesses[:, nodes], parents, depth=num_levels)
