"""Static trees, as paths of ranks from the root.

Source: the tree `mc_sim_7b_63` that FasterDecoding/Medusa publishes, in its own order: best node first, so that each
prefix of it is the best tree of its size.
"""

from __future__ import annotations

_PATHS = """0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005
0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"""
PATHS = [[int(rank) for rank in path] for path in _PATHS.split()]
SIZES = (16, 26, 64)  # tokens a pass: the last verified one and the nodes


def static_tree(tree: int | list[list[int]], num_heads: int) -> list[list[int]]:
    """The paths of a tree, parents before their children.

    Args:
        tree: one of `SIZES` (paths deeper than there are heads are left out), or paths.

    Raises:
        ValueError: for another size, a path that is too deep, or one whose parent is missing.
    """
    if isinstance(tree, int):
        if tree not in SIZES:
            raise ValueError(f"`tree` is {tree}; the ready-made sizes are {SIZES}. Or give the paths themselves.")
        return [path for path in PATHS[: tree - 1] if len(path) <= num_heads]
    known: set[tuple[int, ...]] = {()}
    paths = sorted((list(path) if isinstance(path, (list, tuple)) else [path] for path in tree), key=len)
    for path in paths:
        is_path = path and all(isinstance(rank, int) and rank >= 0 for rank in path) and len(path) <= num_heads
        if not is_path or tuple(path[:-1]) not in known or tuple(path) in known:
            raise ValueError(
                f"`tree` has the path {path}; expected ranks from 0, at most {num_heads} of them (one for each head), "
                "the path to its parent in the tree too, and each path once."
            )
        known.add(tuple(path))
    if not paths:
        raise ValueError(
            f"`tree` is {tree}; expected at least one path. To decode without drafts, pass `assistant=None`."
        )
    return paths
