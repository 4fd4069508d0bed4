"""The shared noise is what `torch.multinomial` draws, step by step, whoever asks for it and in whatever order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_specdec import CandidateTree
from hf_specdec.generation import choice
from hf_specdec.generation.choice import Greedy, Rejection, SharedNoise, TypicalAcceptance, sample
from hf_specdec.generation.run import Row

CPU = torch.device("cpu")


def make_run(num_emitted: list[int], indices: list[int] | None = None) -> SimpleNamespace:
    """What a choice looks at: rows of the batch (some may have left it) and how far each of them is."""
    indices = list(range(len(num_emitted))) if indices is None else indices
    return SimpleNamespace(rows=[Row(index, [], num_emitted=n) for index, n in zip(indices, num_emitted)])


def multinomial_text(scores: torch.Tensor, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Plain `generate`'s choices for scores `(steps, B, V)`, and the random state before each step and at the end."""
    torch.manual_seed(seed)
    tokens, states = [], [torch.get_rng_state()]
    for step in scores:
        tokens.append(torch.multinomial(step.softmax(-1), 1)[:, 0])
        states.append(torch.get_rng_state())
    return torch.stack(tokens), states


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 97), (3, 97), (2, 1000), (1, 151936), (5, 7)])
def test_same_as_multinomial_bit_for_bit(num_rows, vocab_size):
    scores = 2 * torch.randn(6, num_rows, vocab_size, generator=torch.Generator().manual_seed(1))
    expected, states = multinomial_text(scores, seed=3)
    torch.manual_seed(3)
    noise = SharedNoise(num_rows, CPU, vocab_size)
    for step in (0, 1, 2, 3, 4, 5):
        run = make_run([step] * num_rows)
        assert noise.choose(scores[step][:, None], run, None)[:, 0].tolist() == expected[step].tolist()
    assert torch.equal(torch.get_rng_state(), states[0]), "the global state is left alone until the end"
    for num_steps in (6, 2, 4):
        noise.finish(num_steps)
        assert torch.equal(torch.get_rng_state(), states[num_steps])


def test_finish_draws_what_was_never_asked_for():
    _, states = multinomial_text(torch.zeros(5, 2, 11), seed=3)
    torch.manual_seed(3)
    noise = SharedNoise(2, CPU, 11)
    noise.finish(5)
    assert torch.equal(torch.get_rng_state(), states[5])


@pytest.mark.parametrize("capacity", [1, 2, 100])
def test_noise_is_drawn_again_after_eviction(monkeypatch, capacity):
    """Rows of a batch may be many steps apart; what is no longer kept comes again from the saved states."""
    num_rows, vocab_size = 3, 13
    monkeypatch.setattr(choice, "NOISE_BYTES", capacity * num_rows * vocab_size * 4)
    torch.manual_seed(3)
    expected = [torch.empty(num_rows, vocab_size).exponential_() for _ in range(12)]
    torch.manual_seed(3)
    noise = SharedNoise(num_rows, CPU, vocab_size)
    for step in (0, 5, 1, 1, 11, 5, 0, 3, 2, 11, 10):
        assert torch.equal(noise.noise(step), expected[step])
        assert len(noise.draws) <= capacity


def test_rows_are_each_at_their_own_step():
    """Row b's t-th token uses row b of the t-th draw, also when others have left the batch."""
    scores = torch.randn(8, 4, 29, generator=torch.Generator().manual_seed(1))
    expected, _ = multinomial_text(scores, seed=3)
    torch.manual_seed(3)
    noise = SharedNoise(4, CPU, 29)
    steps, indices = [7, 0, 3], [3, 0, 2]
    mine = torch.stack([scores[step, index] for step, index in zip(steps, indices)])
    chosen = noise.choose(mine[:, None], make_run(steps, indices), None)
    assert chosen[:, 0].tolist() == [expected[step, index].item() for step, index in zip(steps, indices)]


@pytest.mark.parametrize("shared_parents", [False, True])
def test_a_node_uses_the_noise_of_its_depth(shared_parents):
    parents = torch.tensor([[-1, -1, 0, 2, 1], [-1, 0, 1, 2, -1]])
    depths = [[0, 1, 1, 2, 3, 2], [0, 1, 2, 3, 4, 1]]
    if shared_parents:
        parents, depths = parents[0], depths[:1] * 2
    tree = CandidateTree(torch.zeros(2, 5, dtype=torch.long), parents)
    scores = torch.randn(2, 6, 29, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(3)
    draws = [torch.empty(2, 29).exponential_() for _ in range(8)]
    torch.manual_seed(3)
    chosen = SharedNoise(2, CPU, 29).choose(scores, make_run([2, 3]), tree)
    for row, start in enumerate([2, 3]):
        for node, depth in enumerate(depths[row]):
            expected = (scores[row, node].softmax(-1) / draws[start + depth][row]).argmax()
            assert chosen[row, node] == expected


def test_chain_is_a_tree_with_one_child_per_node():
    scores = torch.randn(2, 5, 29, generator=torch.Generator().manual_seed(1))
    tokens = torch.zeros(2, 4, dtype=torch.long)
    torch.manual_seed(3)
    noise = SharedNoise(2, CPU, 29)
    run = make_run([2, 0])
    as_chain = noise.choose(scores, run, CandidateTree(tokens))
    assert torch.equal(as_chain, noise.choose(scores, run, CandidateTree(tokens, torch.arange(-1, 3))))


@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("draft_size", [20, 29])
def test_drafter_ranks_by_the_targets_noise(offset, draft_size):
    """With the target's own scores it guesses the target's choice; a smaller vocabulary uses the noise of its ids."""
    scores = torch.randn(6, 2, 29, generator=torch.Generator().manual_seed(1))
    scores[..., draft_size:] = -torch.inf
    expected, _ = multinomial_text(scores, seed=3)
    torch.manual_seed(3)
    noise = SharedNoise(2, CPU, 29)
    run = make_run([1, 3])
    mine = torch.stack([scores[1 + offset, 0], scores[3 + offset, 1]])[:, :draft_size]
    token, probs = noise.draft(mine, run, offset)
    assert probs is None
    assert token.tolist() == [expected[1 + offset, 0], expected[3 + offset, 1]]
    # Several nodes a row: the same noise for all of them.
    ranks = noise.rank(mine[:, None].expand(-1, 3, -1), run, offset)
    assert torch.equal(ranks.argmax(-1), token[:, None].expand(-1, 3))


def test_head_wider_than_it_says():
    """The draws are as wide as the logits that come, whatever was drawn for the first drafts."""
    scores = torch.randn(2, 1, 31, generator=torch.Generator().manual_seed(1))
    expected, states = multinomial_text(scores, seed=3)
    torch.manual_seed(3)
    noise = SharedNoise(1, CPU, 29)
    noise.draft(scores[0, :, :29], make_run([0]), 1)
    for step in (0, 1):
        assert noise.choose(scores[step][:, None], make_run([step]), None).item() == expected[step].item()
    noise.finish(2)
    assert torch.equal(torch.get_rng_state(), states[2])


def test_greedy():
    scores = torch.tensor([[[0.0, 2.0, 2.0], [1.0, 0.0, -1.0]]])
    run = make_run([0])
    assert Greedy().choose(scores, run, None).tolist() == scores.argmax(-1).tolist() == [[1, 0]]
    token, probs = Greedy().draft(scores[:, 0], run, 3)
    assert token.tolist() == [1]
    assert probs is None


def test_rejection_keeps_every_draft_of_the_targets_own_distribution():
    scores = torch.randn(1000, 3, 5, generator=torch.Generator().manual_seed(1))
    probs = scores.softmax(-1)[:, :2]
    torch.manual_seed(0)
    tree = CandidateTree(sample(probs), draft_probs=probs)
    chosen = Rejection().choose(scores, make_run([0] * 1000), tree)
    assert torch.equal(chosen[:, :2], tree.tokens)


def test_rejection_never_keeps_what_the_target_rules_out():
    """A rejected draft is never drawn again, so "kept" and "chosen token equals the draft" are the same."""
    scores = torch.zeros(500, 2, 4)
    scores[..., 2] = -torch.inf
    tokens = torch.full((500, 1), 2)
    for probs in (None, torch.full((500, 1, 4), 0.25)):
        torch.manual_seed(0)
        chosen = Rejection().choose(scores, make_run([0] * 500), CandidateTree(tokens, draft_probs=probs))
        assert set(chosen.flatten().tolist()) == {0, 1, 3}


def test_rejection_without_drafts():
    scores = torch.full((4, 3, 6), -torch.inf)
    scores[..., 5] = 0.0
    run = make_run([0] * 4)
    assert Rejection().choose(scores[:, :1], run, None).tolist() == [[5]] * 4
    empty = CandidateTree(torch.full((4, 2), -1), draft_probs=torch.zeros(4, 2, 6))
    assert Rejection().choose(scores, run, empty).tolist() == [[5, 5, 5]] * 4


CHOICES = {
    "greedy": lambda: Greedy(),
    "shared_noise": lambda: SharedNoise(3, CPU, 29),
    "typical": lambda: TypicalAcceptance(),
}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("draft_size", [20, 29])
def test_chances_are_distributions(name, draft_size):
    scores = 3 * torch.randn(2, 4, draft_size, generator=torch.Generator().manual_seed(1))
    scores[..., ::3] = -torch.inf
    for uncertainty in (0.01, 1.0, 1.5, 100.0):
        chances = CHOICES[name]().chances(scores, make_run([3, 0], [2, 0]), uncertainty=uncertainty)
        assert chances.shape == scores.shape
        torch.testing.assert_close(chances.sum(-1), torch.ones(2, 4))
        assert (chances[..., ::3] == 0).all()
        if name != "shared_noise":
            assert torch.equal(chances, scores.softmax(-1))


def test_a_certain_drafter_knows_the_targets_choice():
    """With little uncertainty all chance lies on what the target chooses under its noise, step by step."""
    scores = torch.randn(8, 3, 29, generator=torch.Generator().manual_seed(1))
    expected, _ = multinomial_text(scores, seed=3)
    torch.manual_seed(3)
    noise = SharedNoise(3, CPU, 29)
    steps, indices = [4, 1], [2, 0]
    mine = torch.stack([scores[step : step + 3, index] for step, index in zip(steps, indices)])
    chances = noise.chances(mine, make_run(steps, indices), uncertainty=1e-3)
    chosen = torch.stack([expected[step : step + 3, index] for step, index in zip(steps, indices)])
    assert torch.equal(chances.argmax(-1), chosen)
    assert (chances.gather(-1, chosen[..., None]) > 0.9).all()
    # A vague one hardly looks at the noise.
    torch.testing.assert_close(
        noise.chances(mine, make_run(steps, indices), uncertainty=1e4), mine.softmax(-1), rtol=0.01, atol=0
    )


def test_chances_of_some_ids_use_the_noise_of_these():
    ids = torch.tensor([28, 3, 17, 4])
    scores = torch.full((2, 3, 29), -torch.inf)
    scores[..., ids] = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    noise = SharedNoise(2, CPU, 29)
    run = make_run([5, 2])
    few = noise.chances(scores[..., ids], run, ids, 1.5)
    torch.testing.assert_close(few, noise.chances(scores, run, uncertainty=1.5)[..., ids])
    assert not torch.allclose(few, noise.chances(scores[..., ids], run, uncertainty=1.5), atol=1e-2)


@pytest.mark.parametrize("uncertainty", [0.1, 0.7, 1.5, 4.0])
def test_chances_are_calibrated(uncertainty):
    """Averaged over the noise they are about what the drafter says; and they are what happens.

    In a world where the target's log-probabilities are the drafter's plus an error of that scale, a guess with chance c
    is right about c of the time.
    """
    num_rows = 20000
    torch.manual_seed(1)
    scores = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0]).expand(num_rows, 1, 5)
    noise = SharedNoise(num_rows, CPU, 5)
    run = make_run([0] * num_rows)
    chances = noise.chances(scores, run, uncertainty=uncertainty)
    torch.testing.assert_close(chances.mean((0, 1)), scores[0, 0].softmax(-1), atol=0.04, rtol=0)
    errors = -torch.empty(num_rows, 5).exponential_(generator=torch.Generator().manual_seed(2)).log() * uncertainty
    means = scores[:, 0].log_softmax(-1) * (1 + uncertainty**2) ** 0.5
    chosen = (means + errors - noise.noise(0).log()).argmax(-1)
    best = chances[:, 0].max(-1)
    is_right = best.indices == chosen
    for low in (0.3, 0.5, 0.7, 0.9):
        here = (best.values >= low) & (best.values < low + 0.2)
        if here.sum() > 500:
            assert abs(is_right[here].float().mean() - best.values[here].mean()) < 0.05
