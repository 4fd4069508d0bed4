"""Static trees: which guesses of a level are nodes, and which of these are continued."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
import torch

from hf_specdec.generation.tree import ROOT
from hf_specdec.modeling.eagle.trees import EAGLE_1_TREE, StaticTree


def random_paths(seed: int, num_nodes: int = 30, width: int = 4) -> list[list[int]]:
    """A random tree, its nodes in random order."""
    generator = random.Random(seed)
    paths: list[tuple[int, ...]] = [()]
    while len(paths) <= num_nodes:
        path = (*generator.choice(paths), generator.randrange(width))
        if path not in paths:
            paths.append(path)
    paths = [list(path) for path in paths[1:]]
    generator.shuffle(paths)
    return paths


def codes(tree: StaticTree, num_levels: int) -> tuple[torch.LongTensor, dict[int, tuple[int, ...]]]:
    """All guesses of these levels `(1, all)`, each another number, and the path that each number stands for.

    What is continued are the nodes that have children, level by level in the order that `continued` gives them.
    """
    meaning: dict[int, tuple[int, ...]] = {}
    parents: list[tuple[int, ...]] = [()]
    for level in range(num_levels):
        guesses = [(*parent, rank) for parent in parents for rank in range(tree.width)]
        meaning |= {len(meaning) + place: path for place, path in enumerate(guesses)}
        parents = [guesses[place] for place in tree.continued[level]]
    return torch.arange(len(meaning))[None], meaning


def paths_of(candidates, meaning: dict[int, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The path of every node as its token says it, once the parents are seen to say the same."""
    paths = [meaning[token] for token in candidates.tokens[0].tolist()]
    for path, parent in zip(paths, candidates.parents.tolist()):
        assert path[:-1] == (() if parent == ROOT else paths[parent])
    return paths


def test_the_published_tree():
    assert len(EAGLE_1_TREE) == 25
    assert Counter(map(len, EAGLE_1_TREE)) == {1: 4, 2: 8, 3: 8, 4: 3, 5: 2}
    parents = {tuple(path[:-1]) for path in EAGLE_1_TREE}
    assert sum(tuple(path) not in parents for path in EAGLE_1_TREE) == 15, "leaves"
    assert EAGLE_1_TREE[:5] == [[0], [1], [2], [3], [0, 0]]
    assert EAGLE_1_TREE[-1] == [0, 0, 0, 0, 1]
    tree = StaticTree(EAGLE_1_TREE)
    assert (tree.width, tree.depth) == (4, 5)
    assert [len(level) for level in tree.continued] == [4, 4, 1, 1, 0], "nodes that a pass reads"


@pytest.mark.parametrize("paths", [EAGLE_1_TREE, [[2], [2, 3]], [[0]], *map(random_paths, range(6))])
def test_every_node_gets_its_guess(paths):
    tree = StaticTree(paths)
    for num_levels in range(1, tree.depth + 1):
        guesses, meaning = codes(tree, num_levels)
        candidates = tree.filled(guesses, num_levels)
        wanted = [tuple(path) for path in sorted(paths, key=len) if len(path) <= num_levels]
        assert paths_of(candidates, meaning) == wanted
        assert candidates.depth == num_levels
    assert tree.continued[-1] == []


def test_rows_have_guesses_of_their_own():
    tree = StaticTree([[0], [2], [2, 1]])
    candidates = tree.filled(torch.tensor([[10, 11, 12, 20, 21, 22], [30, 31, 32, 40, 41, 42]]), 2)
    assert candidates.tokens.tolist() == [[10, 12, 21], [30, 32, 41]]
    assert candidates.parents.tolist() == [ROOT, ROOT, 1]


@pytest.mark.parametrize("paths", [EAGLE_1_TREE, random_paths(7)])
def test_cut(paths):
    whole = StaticTree(paths)
    for num_nodes in range(1, len(paths) + 3):
        tree = whole.cut(num_nodes)
        assert tree.paths == whole.paths[:num_nodes]
        guesses, meaning = codes(tree, tree.depth)
        assert paths_of(tree.filled(guesses, tree.depth), meaning) == tree.paths
    assert whole.cut(len(paths)) is whole
    assert (whole.cut(1).width, whole.cut(1).depth) == (1 + whole.paths[0][-1], 1)


def test_own_paths_are_put_in_order():
    assert StaticTree([[0, 0, 1], [1], [0, 0], [0]]).paths == [(1,), (0,), (0, 0), (0, 0, 1)]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [1, 0]], "`tree` has the path [1, 0]; expected ranks from 0, each path once and with its parent"),
        ([[0, 0]], "`tree` has the path [0, 0]; expected ranks from 0"),
        ([[0], [0, -1]], "`tree` has the path [0, -1]; expected ranks from 0"),
        ([[0], [0, 1.0]], "`tree` has the path [0, 1.0]; expected ranks from 0"),
        ([[0], []], "`tree` has the path []; expected ranks from 0"),
        ([[0], [1], [0]], "`tree` has the path [0]; expected ranks from 0"),
        ([0, 1], "`tree` is [0, 1]; expected paths of ranks, e.g. [[0], [1], [0, 0]]"),
        ([], "`tree` has no path; give at least [[0]]"),
    ],
)
def test_errors(paths, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        StaticTree(paths)
