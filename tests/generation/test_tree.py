"""Trees: who sees whom, and one pass over a tree against one pass for each of its paths."""

from __future__ import annotations

import itertools
import math
import random
from contextlib import ExitStack

import pytest
import torch
from conftest import ragged_batch, real_rows, tiny_llama
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
)

from hf_specdec import CandidateTree
from hf_specdec.generation.cached_model import CachedModel
from hf_specdec.generation.tree import NO_TOKEN, ROOT, children, longest_branch


def random_parents(num_nodes: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(-1, node - 1) if rng.random() < 0.7 else node - 1 for node in range(num_nodes)]


def path_to(node: int, parents: list[int]) -> list[int]:
    """Nodes from the first level down to this one."""
    path = []
    while node != ROOT:
        path.insert(0, node)
        node = parents[node]
    return path


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 7, 8, 16, 33])
@pytest.mark.parametrize("seed", range(5))
def test_visibility_against_brute_force(num_nodes, seed):
    rows = [random_parents(num_nodes, 10 * seed + row) for row in range(3)]
    tokens = torch.zeros(3, num_nodes, dtype=torch.long)
    for parents in (torch.tensor(rows), torch.tensor(rows[0])):
        tree = CandidateTree(tokens, parents)
        depths, is_visible = tree.visibility()
        expected = rows if parents.ndim == 2 else rows[:1]
        assert depths.shape == (len(expected), num_nodes + 1)
        for row, above in enumerate(expected):
            for node in range(-1, num_nodes):
                path = path_to(node, above)
                assert depths[row, node + 1] == len(path)
                seen = is_visible[row, node + 1].nonzero()[:, 0].tolist()
                assert seen == sorted([0, *(n + 1 for n in path)])
        assert tree.depth == max(longest_branch([5] * num_nodes, above) for above in expected)
        assert not tree.is_chain


def test_deepest_chain_as_a_tree():
    """The longest distance that the doubling has to cover."""
    for num_nodes in (1, 2, 3, 4, 5, 31, 32, 33):
        tokens = torch.zeros(1, num_nodes, dtype=torch.long)
        chain, tree = CandidateTree(tokens), CandidateTree(tokens, torch.arange(-1, num_nodes - 1))
        for a, b in zip(chain.visibility(), tree.visibility()):
            assert torch.equal(a, b)
        assert chain.is_chain
        assert chain.depth == tree.depth == num_nodes


def test_example_of_the_docstring():
    depths, is_visible = CandidateTree(torch.tensor([[4, 5, 6]]), torch.tensor([-1, -1, 0])).visibility()
    assert depths.tolist() == [[0, 1, 1, 2]]
    assert is_visible[0, -1].tolist() == [True, True, False, True]


def test_from_lists():
    tree = CandidateTree.from_lists([[5, 8], [], [3]])
    assert tree.tokens.tolist() == [[5, 8], [NO_TOKEN] * 2, [3, NO_TOKEN]]
    assert tree.is_chain
    assert CandidateTree.from_lists([[], []]).tokens.shape == (2, 0)


def test_children_and_branches():
    tokens, parents = [7, 7, 8, NO_TOKEN, 9, 6], [-1, -1, 0, 0, 3, 2]
    assert children(tokens, parents) == {(-1, 7): 0, (0, 8): 2, (3, 9): 4, (2, 6): 5}
    assert longest_branch(tokens, parents) == 3
    assert longest_branch([], []) == 0
    assert longest_branch([NO_TOKEN] * 2, [-1, 0]) == 0


def test_from_paths_by_hand():
    tokens = torch.tensor([[[10, 11, 12], [20, 21, 22], [30, 31, 32]], [[40, 41, 42], [50, 51, 52], [60, 61, 62]]])
    tree = CandidateTree.from_paths([[0], [2], [0, 1], [2, 0], [0, 1, 2]], tokens)
    assert tree.tokens.tolist() == [[10, 12, 21, 20, 32], [40, 42, 51, 50, 62]]
    assert tree.parents.tolist() == [-1, -1, 0, 1, 2]
    assert tree.depth == 3
    example = CandidateTree.from_paths([[0], [1], [0, 0]], tokens)
    assert example.parents.tolist() == [-1, -1, 0]
    assert example.tokens[0].tolist() == [10, 11, 20]
    assert example.depth == 2


def rank_paths(tree: CandidateTree, guesses: torch.Tensor, row: int) -> list[tuple[int, ...]]:
    """Ranks on the way to each node of a row that holds a token, in the tree's order; checks that there is a way."""
    parents = tree.parents[row].tolist()
    paths: list[tuple[int, ...] | None] = []
    for node, token in enumerate(tree.tokens[row].tolist()):
        if token == NO_TOKEN:
            paths.append(None)
            continue
        assert parents[node] < node
        above = () if parents[node] == ROOT else paths[parents[node]]
        assert above is not None, "the child of a node that was left out"
        paths.append((*above, guesses[row, len(above)].tolist().index(token)))
    return [path for path in paths if path is not None]


CHANCES = {
    "random": lambda shape, generator: torch.rand(shape, generator=generator, dtype=torch.double),
    "certain": lambda shape, generator: torch.rand(shape, generator=generator, dtype=torch.double).round(),
    "ties": lambda shape, generator: torch.randint(0, 4, shape, generator=generator).double() / 4,
    "peaked": lambda shape, generator: (9 * torch.randn(shape, generator=generator)).softmax(-1),
}


@pytest.mark.parametrize("chances", CHANCES)
@pytest.mark.parametrize(("num_depths", "width"), [(1, 1), (1, 7), (3, 1), (2, 3), (4, 4), (5, 2)])
@pytest.mark.parametrize("min_chance", [0.0, 0.11, 0.8])
def test_best_first_against_brute_force(chances, num_depths, width, min_chance):
    generator = torch.Generator().manual_seed(num_depths * 10 + width)
    num_rows = 4
    chances = CHANCES[chances]((num_rows, num_depths, width), generator).sort(-1, descending=True).values
    guesses = torch.rand(num_rows, num_depths, 50, generator=generator).argsort(-1)[..., :width]
    num_all = sum(width**depth for depth in range(1, num_depths + 1))
    for num_nodes in (1, 2, 5, 16, num_all, num_all + 9):
        tree = CandidateTree.best_first(guesses, chances, num_nodes, min_chance)
        best = []
        for row in chances.tolist():
            every = (
                math.prod(row[depth][rank] for depth, rank in enumerate(path))
                for num in range(1, num_depths + 1)
                for path in itertools.product(range(width), repeat=num)
            )
            every = sorted((chance for chance in every if chance > 0 and chance >= min_chance), reverse=True)
            best.append(every[:num_nodes])
        if tree is None:
            assert min_chance > 0
            assert not any(best)
            continue
        assert tree.num_nodes <= num_nodes
        assert min_chance == 0 or tree.num_nodes == max(map(len, best))
        assert not tree.is_chain
        for row, expected in enumerate(best):
            paths = rank_paths(tree, guesses, row)
            assert len(set(paths)) == len(paths)
            got = [math.prod(chances[row, depth, rank].item() for depth, rank in enumerate(path)) for path in paths]
            assert got == pytest.approx(expected, rel=1e-5), "best first"
            assert set(tree.tokens[row, len(paths) :].tolist()) <= {NO_TOKEN}
        depths = [longest_branch(*row) for row in zip(tree.tokens.tolist(), tree.parents.tolist())]
        assert max(depths) <= tree.depth <= num_depths


def test_best_first_by_hand():
    """0.6, 0.6 * 0.9, 0.4, 0.4 * 0.9; the second row is sure of all, and then shallow nodes come first."""
    guesses = torch.tensor([[[5, 6], [7, 8]], [[15, 16], [17, 18]]])
    chances = torch.tensor([[[0.6, 0.4], [0.9, 0.1]], [[1.0, 1.0], [1.0, 0.0]]])
    tree = CandidateTree.best_first(guesses, chances, 4)
    assert tree.tokens.tolist() == [[5, 7, 6, 7], [15, 16, 17, 17]]
    assert tree.parents.tolist() == [[-1, 0, -1, 2], [-1, -1, 0, 1]]
    assert tree.depth == 2
    assert CandidateTree.best_first(guesses[:1], chances[:1], 4, 0.5).tokens.tolist() == [[5, 7]]
    assert CandidateTree.best_first(guesses[:1], chances[:1], 4, 0.7) is None


def test_best_first_with_a_broken_guess():
    """A head that has overflowed says nan; the guesses above it are as good as before."""
    guesses = torch.tensor([[[5, 6], [7, 8], [9, 10]]])
    chances = torch.tensor([[[0.6, 0.4], [torch.nan, torch.nan], [0.9, 0.1]]])
    for min_chance in (0.0, 0.1):
        tree = CandidateTree.best_first(guesses, chances, 6, min_chance)
        tokens = [token for token in tree.tokens[0].tolist() if token != NO_TOKEN]
        assert tokens == [5, 6]
    assert CandidateTree.best_first(guesses, torch.full_like(chances, torch.nan), 6, 0.1) is None


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        (torch.zeros(3), None, r"`tokens` has shape \(3,\); expected \(rows, nodes\)"),
        (torch.zeros(1, 2, 3), None, r"`tokens` has shape \(1, 2, 3\)"),
        (torch.zeros(2, 3), torch.zeros(2), r"`parents` has shape \(2,\); expected \(2, 3\) or \(3,\)"),
        (torch.zeros(2, 3), torch.zeros(1, 3), r"`parents` has shape \(1, 3\)"),
    ],
)
def test_shapes_that_disagree(tokens, parents, message):
    with pytest.raises(ValueError, match=message):
        CandidateTree(tokens.long(), None if parents is None else parents.long())


SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.4,
    "pad_token_id": 0,
}


def make_model(name: str, attention: str):
    torch.manual_seed(0)
    if name == "llama":
        return tiny_llama(2, initializer_range=0.4, attn_implementation=attention)
    if name == "gpt2":
        config = GPT2Config(
            vocab_size=97, n_embd=32, n_head=4, n_layer=2, n_positions=64, attn_implementation=attention
        )
        return GPT2LMHeadModel(config).eval()
    if name == "mistral":
        config = MistralConfig(**SIZES, sliding_window=5, attn_implementation=attention)
        return MistralForCausalLM(config).eval()
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=5, layer_types=kinds, attn_implementation=attention)
    return Gemma3ForCausalLM(config).eval()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("lengths", [(6,), (4, 9, 2)])
@pytest.mark.parametrize("shape", ["own_parents", "shared_parents", "chain"])
@torch.no_grad()
def test_one_pass_over_a_tree_equals_a_pass_for_each_path(name, attention, lengths, shape):
    model = make_model(name, attention)
    inputs = ragged_batch(lengths)
    rows = real_rows(inputs["input_ids"], inputs)
    num_nodes = 9
    tokens = torch.randint(3, 97, (len(rows), num_nodes), generator=torch.Generator().manual_seed(2))
    parents = [random_parents(num_nodes, 0 if shape == "shared_parents" else row) for row in range(len(rows))]
    if shape == "chain":
        parents, tree = [list(range(-1, num_nodes - 1))] * len(rows), CandidateTree(tokens)
    else:
        tree = CandidateTree(tokens, torch.tensor(parents if shape == "own_parents" else parents[0]))
    with ExitStack() as stack:
        cached = CachedModel(model, 4, stack)  # too small: the buffers have to grow
        cached.lengths = [0] * len(rows)
        prompt_logits = cached.catch_up([row[:-1] for row in rows], "cpu")
        last = torch.tensor([[row[-1]] for row in rows])
        lengths_before = list(cached.lengths)
        logits = cached(torch.cat([last, tokens], dim=1), tree).logits
        assert cached.lengths == lengths_before
    for row, text in enumerate(rows):
        expected = model(torch.tensor([text[:-1]])).logits[0, -1]
        torch.testing.assert_close(prompt_logits[row], expected, atol=1e-4, rtol=1e-4)
        for node in range(-1, num_nodes):
            path = [tokens[row, n].item() for n in path_to(node, parents[row])]
            expected = model(torch.tensor([text + path])).logits[0, -1]
            torch.testing.assert_close(logits[row, node + 1], expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_an_accepted_branch_moves_to_where_a_chain_would_lie():
    """Then the next pass goes on from it; rows with shorter branches keep what they had."""
    model = make_model("llama", "sdpa")
    rows = [[5, 6, 7], [8, 9, 10, 11, 12]]
    tokens = torch.tensor([[20, 21, 22, 23], [30, 31, 32, 33]])
    parents = torch.tensor([[-1, -1, 1, 2], [-1, -1, 0, 1]])
    paths = [[1, 2, 3], [1]]
    with ExitStack() as stack:
        cached = CachedModel(model, 64, stack)
        cached.lengths = [0, 0]
        cached.catch_up([row[:-1] for row in rows], "cpu")
        block = torch.cat([torch.tensor([[row[-1]] for row in rows]), tokens], dim=1)
        cached(block, CandidateTree(tokens, parents))
        width = max(map(len, paths))
        sources = [
            [n + 1 + node for node in [*path, *range(len(path), width)]] for n, path in zip(cached.lengths, paths)
        ]
        places = [[n + 1 + depth for depth in range(width)] for n in cached.lengths]
        cached.cache.move(sources, places)
        cached.lengths = [n + 1 + len(path) for n, path in zip(cached.lengths, paths)]
        texts = [[*row, *(tokens[index, n].item() for n in paths[index]), 40] for index, row in enumerate(rows)]
        logits = cached.catch_up(texts, "cpu")
    for row, text in enumerate(texts):
        torch.testing.assert_close(logits[row], model(torch.tensor([text])).logits[0, -1], atol=1e-4, rtol=1e-4)
