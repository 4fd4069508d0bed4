"""The formulas against exact values, against each other and against a simulation."""

import math
import random

import pytest

from hf_specdec.generation import theory


@pytest.mark.parametrize("acceptance_rate", [0.0, 0.2, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4, 16])
def test_tokens_per_pass_is_the_geometric_sum(acceptance_rate, num_draft_tokens):
    expected = math.fsum(acceptance_rate**i for i in range(num_draft_tokens + 1))
    assert theory.expected_tokens_per_pass(acceptance_rate, num_draft_tokens) == pytest.approx(expected, rel=1e-14)


def test_tokens_per_pass_keeps_its_digits_next_to_one():
    assert theory.expected_tokens_per_pass(1.0, 7) == 8.0
    # The plain formula gives 8.0 -+ 1e-3 here.
    assert theory.expected_tokens_per_pass(1 - 1e-13, 7) == pytest.approx(8 - 28e-13, rel=1e-15)
    assert theory.expected_tokens_per_pass(1e-300, 7) == 1.0


@pytest.mark.parametrize(("acceptance_rate", "num_draft_tokens"), [(0.3, 2), (0.7, 5), (0.95, 8)])
def test_tokens_per_pass_matches_simulation(acceptance_rate, num_draft_tokens):
    rng = random.Random(0)
    num_rounds = 40_000
    counts = []
    for _ in range(num_rounds):
        accepted = 0
        while accepted < num_draft_tokens and rng.random() < acceptance_rate:
            accepted += 1
        counts.append(accepted + 1)
    mean = sum(counts) / num_rounds
    standard_error = math.sqrt(sum((count - mean) ** 2 for count in counts)) / num_rounds
    assert abs(mean - theory.expected_tokens_per_pass(acceptance_rate, num_draft_tokens)) < 4 * standard_error


def test_speedup():
    assert theory.expected_speedup(0.8, 5, 0.05) == pytest.approx((1 - 0.8**6) / (0.2 * 1.25))
    assert theory.expected_speedup(0.8, 5, 0.05, 1.5) == pytest.approx((1 - 0.8**6) / (0.2 * 1.75))
    assert theory.expected_speedup(0.8, 5, 0.05, lambda num: 1 + num / 10) == theory.expected_speedup(0.8, 5, 0.05, 1.5)
    assert theory.expected_speedup(1.0, 4, 0.0) == 5.0
    assert theory.expected_speedup(0.0, 4, 0.25) == 0.5
    assert theory.expected_speedup(0.9, 0, 0.5, 3.0) == 1.0


def test_speedup_matches_simulated_time():
    rng = random.Random(1)
    seconds, num_tokens = 0.0, 0
    for _ in range(40_000):
        num_tokens += 1
        for _ in range(4):
            if rng.random() >= 0.6:
                break
            num_tokens += 1
        seconds += 4 * 0.1 + 1.3
    assert num_tokens / seconds == pytest.approx(theory.expected_speedup(0.6, 4, 0.1, 1.3), rel=0.01)


def test_best_num_draft_tokens():
    assert theory.best_num_draft_tokens(0.8, 0.05) == 8  # 0.8658 / 0.28 = 3.09; K = 7: 3.08, K = 9: 3.08
    assert theory.best_num_draft_tokens(1.0, 0.1, max_draft_tokens=12) == 12
    assert theory.best_num_draft_tokens(0.5, 0.0, max_draft_tokens=3) == 3
    # Nothing pays off when alpha <= c (corollary 3.9), when all is rejected, or when verifying is too dear.
    assert theory.best_num_draft_tokens(0.1, 0.2) == 0
    assert theory.best_num_draft_tokens(0.0, 0.0) == 0
    assert theory.best_num_draft_tokens(0.4, 0.0, verification_cost=1.7) == 0
    assert theory.best_num_draft_tokens(0.9, 0.1, max_draft_tokens=0) == 0


def test_best_num_draft_tokens_is_the_first_maximum():
    for acceptance_rate in (0.05, 0.3, 0.6, 0.8, 0.95):
        for cost_ratio in (0.0, 0.02, 0.1, 0.5):
            best = theory.best_num_draft_tokens(acceptance_rate, cost_ratio, 20, lambda num: 1 + 0.03 * num)
            speedups = [
                theory.expected_speedup(acceptance_rate, num, cost_ratio, lambda num: 1 + 0.03 * num)
                for num in range(21)
            ]
            assert best == speedups.index(max(speedups))


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 10])
@pytest.mark.parametrize("acceptance_rate", [0.0, 0.1, 0.5, 0.97, 1.0])
def test_acceptance_rate_inverts_tokens_per_pass(acceptance_rate, num_draft_tokens):
    tokens = theory.expected_tokens_per_pass(acceptance_rate, num_draft_tokens)
    inverse = theory.acceptance_rate_from_tokens_per_pass(tokens, num_draft_tokens)
    assert inverse == pytest.approx(acceptance_rate, abs=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.expected_tokens_per_pass(1.1, 3), r"`acceptance_rate` is 1.1; expected a number in \[0, 1\]"),
        (lambda: theory.expected_tokens_per_pass(math.nan, 3), "`acceptance_rate` is nan"),
        (lambda: theory.expected_tokens_per_pass(0.5, -1), "`num_draft_tokens` is -1; expected an int of at least 0"),
        (lambda: theory.expected_tokens_per_pass(0.5, 2.0), "`num_draft_tokens` is 2.0; expected an int"),
        (lambda: theory.expected_speedup(0.5, 3, -0.1), "`cost_ratio` is -0.1; expected a finite number of at least 0"),
        (lambda: theory.expected_speedup(0.5, 3, math.inf), "`cost_ratio` is inf"),
        (lambda: theory.expected_speedup(0.5, 3, 0.1, 0.0), "`verification_cost` is 0.0 for 3 draft tokens"),
        (lambda: theory.expected_speedup(0.5, 3, 0.1, lambda num: -num), "`verification_cost` is -3 for 3"),
        (lambda: theory.best_num_draft_tokens(0.5, 0.1, -1), "`max_draft_tokens` is -1; expected an int"),
        (
            lambda: theory.acceptance_rate_from_tokens_per_pass(4.5, 3),
            "`tokens_per_pass` is 4.5; expected 1 to 4",
        ),
        (lambda: theory.acceptance_rate_from_tokens_per_pass(0.5, 3), "`tokens_per_pass` is 0.5"),
        (lambda: theory.acceptance_rate_from_tokens_per_pass(1.0, 0), "`num_draft_tokens` is 0; .* at least 1"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
