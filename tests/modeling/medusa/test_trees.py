"""The ready-made trees, and paths of a user's own."""

from __future__ import annotations

import re

import pytest

from hf_specdec.modeling.medusa.trees import PATHS, SIZES, static_tree


@pytest.mark.parametrize("num_heads", [4, 5])
def test_sizes(num_heads):
    """A size counts the tokens that the target reads: the last verified one, and the nodes."""
    assert SIZES == (16, 26, 64)
    for size in SIZES:
        paths = static_tree(size, num_heads)
        assert len(paths) == size - 1
        assert paths == PATHS[: size - 1], "the best of each size, best first"
        known = {()}
        for path in paths:
            assert tuple(path[:-1]) in known, "each parent comes before its children"
            known.add(tuple(path))
        assert len(known) == size
    assert max(map(len, static_tree(64, num_heads))) == 4
    assert max(max(path) for path in PATHS) == 9


@pytest.mark.parametrize("num_heads", [1, 2, 3])
def test_fewer_heads(num_heads):
    for size in SIZES:
        paths = static_tree(size, num_heads)
        assert paths == [path for path in static_tree(size, 4) if len(path) <= num_heads]
        assert max(map(len, paths)) == num_heads


def test_own_paths_are_put_in_order():
    assert static_tree([[0, 0, 1], [1], [0, 0], [0]], 3) == [[1], [0], [0, 0], [0, 0, 1]]
    assert static_tree([(3,), (3, 2)], 2) == [[3], [3, 2]]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (15, "`tree` is 15; the ready-made sizes are (16, 26, 64). Or give the paths themselves."),
        (True, "`tree` is True; the ready-made sizes are"),
        ([[0], [0, 0], [0, 0, 0]], "`tree` has the path [0, 0, 0]; expected ranks from 0, at most 2 of them"),
        ([[0], [1, 0]], "`tree` has the path [1, 0]; expected ranks from 0"),
        ([[0], [0, -1]], "`tree` has the path [0, -1]; expected ranks from 0"),
        ([[0], []], "`tree` has the path []; expected ranks from 0"),
        ([[0], [1], [0]], "`tree` has the path [0]; expected ranks from 0"),
        ([0, [0]], "`tree` has the path [0]; expected ranks from 0"),
        ([], "`tree` is []; expected at least one path"),
    ],
)
def test_errors(tree, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        static_tree(tree, 2)
