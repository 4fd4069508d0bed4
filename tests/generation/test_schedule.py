"""Draft lengths on synthetic rounds: drafts accepted with a fixed probability, times from a known cost of a pass."""

import random

import pytest

from hf_specdec.generation import theory
from hf_specdec.generation.candidates import CandidateGenerator
from hf_specdec.generation.schedule import DraftLength
from hf_specdec.generation.settings import Settings


def record(length, num_drafted, num_accepted, target_seconds=0.1, drafter_seconds=0.01):
    length.record(
        num_drafted,
        num_accepted,
        width=max(num_drafted, default=0) + 1,
        target_seconds=target_seconds,
        drafter_seconds=drafter_seconds,
    )


class Rounds:
    """Plays decoding rounds against a `DraftLength`.

    `target_seconds(width)` and `drafter_seconds(K)` are the true costs; every time is up to 10 % longer, and one in
    fifty 20 times as long, the first one too.
    """

    def __init__(self, length, target_seconds, drafter_seconds, num_rows=1, seed=0):
        self.length, self.target_seconds, self.drafter_seconds = length, target_seconds, drafter_seconds
        self.rng, self.num_rows = random.Random(seed), num_rows
        self.asked, self.num_tokens, self.seconds = [], 0, 0.0

    def noise(self):
        is_outlier = not self.asked[1:] or self.rng.random() < 0.02
        return (20 if is_outlier else 1) * (1 + self.rng.random() / 10)

    def accepted(self, num_drafted, acceptance_rate):
        count = 0
        while count < num_drafted and self.rng.random() < acceptance_rate:
            count += 1
        return count

    def play(self, num_rounds, acceptance_rate, has_draft=1.0):
        for _ in range(num_rounds):
            wanted = self.length.next()
            self.asked.append(wanted)
            drafted = [wanted if self.rng.random() < has_draft else 0 for _ in range(self.num_rows)]
            accepted = [self.accepted(num, acceptance_rate) for num in drafted]
            target = self.target_seconds(max(drafted) + 1)
            drafter = self.drafter_seconds(wanted) if wanted else 0.0
            self.num_tokens += sum(accepted) + self.num_rows
            self.seconds += target + drafter
            record(self.length, drafted, accepted, target * self.noise(), drafter * self.noise())
        return self.asked[-num_rounds:]

    def speed(self):
        return self.num_tokens / self.num_rows / self.seconds

    def best(self, acceptance_rate):
        speeds = [
            theory.expected_tokens_per_pass(acceptance_rate, num)
            / (self.target_seconds(num + 1) + (self.drafter_seconds(num) if num else 0.0))
            for num in range(33)
        ]
        return speeds.index(max(speeds)), max(speeds)


def flat(width):
    """An accelerator: the width costs nothing."""
    return 0.02


def cpu(width):
    """SmolLM2-135M on a CPU: 134 ms for one token, 235 for 4, 249 for 8, 295 for 16."""
    return 0.134 if width == 1 else 0.216 + 0.005 * width


def test_constant():
    length = DraftLength(4)
    for _ in range(3):
        assert length.next() == 4
        record(length, [4, 4], [0, 4])
    assert DraftLength(7, "constant", initial=3).next() == 7


@pytest.mark.parametrize("schedule", ["heuristic", "heuristic_transient"])
def test_heuristic(schedule):
    length = DraftLength(3, schedule, initial=9)
    assert length.next() == 3
    record(length, [3], [3])
    assert length.next() == 5
    record(length, [5, 2], [5, 2])
    assert length.next() == 7
    record(length, [7, 7], [7, 6])
    assert length.next() == 6
    record(length, [0, 4], [0, 4])  # a row without drafts has none that fail
    assert length.next() == 8
    record(length, [0, 0], [0, 0])
    assert length.next() == 8
    for _ in range(10):
        record(length, [2], [0])
    assert length.next() == 1


def test_auto_starts_at_initial():
    length = DraftLength("auto", initial=5)
    assert length.next() == length.next() == 5
    assert DraftLength("auto", "heuristic", initial=100).next() == 32


@pytest.mark.parametrize("acceptance_rate", [0.2, 0.5, 0.8, 0.9, 0.97])
@pytest.mark.parametrize(
    ("target_seconds", "drafter_seconds"),
    [
        pytest.param(flat, lambda num: 0.001 * num, id="draft model, flat"),
        pytest.param(flat, lambda num: 0.004, id="one-shot drafter, flat"),
        pytest.param(cpu, lambda num: 0.0134 * num, id="draft model, cpu"),
        pytest.param(cpu, lambda num: 0.0001, id="prompt lookup, cpu"),
    ],
)
def test_auto_comes_close_to_the_best_fixed_length(target_seconds, drafter_seconds, acceptance_rate):
    efficiencies = []
    for seed in range(3):
        rounds = Rounds(DraftLength("auto", initial=5), target_seconds, drafter_seconds, seed=seed)
        rounds.play(400, acceptance_rate)
        efficiencies.append(rounds.speed() / rounds.best(acceptance_rate)[1])
    assert sum(efficiencies) / 3 > 0.9


def test_auto_settles_around_the_best_length():
    rounds = Rounds(DraftLength("auto", initial=5), flat, lambda num: 0.001 * num, num_rows=8)
    asked = rounds.play(300, 0.8)[100:]
    assert rounds.best(0.8)[0] == 8
    assert 6 <= sum(asked) / len(asked) <= 10


def test_auto_grows_in_steps():
    length = DraftLength("auto", initial=3)
    asked = []
    for _ in range(6):
        asked.append(length.next())
        record(length, [asked[-1]], [asked[-1]], drafter_seconds=0.0)
    assert asked == [3, 6, 12, 24, 32, 32]


def test_auto_stops_drafting_and_looks_again():
    rounds = Rounds(DraftLength("auto", initial=5), cpu, lambda num: 0.0134 * num)
    asked = rounds.play(200, 0.05)[40:]
    assert 0 < sum(map(bool, asked)) <= 10  # every 17th round
    assert max(asked) == DraftLength.PROBE_LENGTH
    asked = rounds.play(100, 0.95)  # the text has become easy
    assert min(asked[60:]) >= 4


def test_auto_is_not_held_at_zero_by_rounds_without_drafts():
    rounds = Rounds(DraftLength("auto", initial=5), cpu, lambda num: 0.0001)
    rounds.play(100, 0.0, has_draft=0.3)
    assert rounds.length.next() in (0, DraftLength.PROBE_LENGTH)
    asked = rounds.play(200, 0.95, has_draft=0.3)
    assert min(asked[150:]) >= 4


def test_auto_forgets():
    rounds = Rounds(DraftLength("auto", initial=5), flat, lambda num: 0.001 * num)
    rounds.play(300, 0.95)
    assert sum(rounds.play(60, 0.3)[40:]) / 20 < 5
    assert sum(rounds.play(80, 0.95)[60:]) / 20 > 8


def test_auto_counts_only_the_first_rejection():
    # alpha is 2/3 in both, 2 accepted and 1 rejection a round, however many drafts lie behind the rejected one.
    def after(num_drafted):
        length = DraftLength("auto", initial=10)
        for _ in range(30):
            num = num_drafted if length.next() else 0  # 0: it wants to time a plain pass
            record(length, [num], [min(num, 2)], target_seconds=1.0, drafter_seconds=0.1 * num)
        return length.next()

    # Drafting takes a tenth of a pass: 3 -> 2.407 / 1.3 = 1.852, 4 -> 2.605 / 1.4 = 1.861, 5 -> 2.737 / 1.5 = 1.825.
    assert after(3) == after(12) == 4


def test_auto_shrugs_off_outliers():
    def after(times):
        length = DraftLength("auto", initial=6)
        for seconds in times:
            record(length, [6], [4], target_seconds=seconds, drafter_seconds=0.1)
        return length.next()

    calm = after([1.0] * 12)
    assert calm > 0
    assert after([50.0, *[1.0] * 11]) == calm
    assert after([*[1.0] * 6, 50.0, *[1.0] * 5]) == calm
    assert after([50.0, 50.0, *[1.0] * 10]) == calm


def test_auto_learns_what_a_plain_pass_costs():
    # Fitted through widths of 5 and more, a plain pass would seem to take 0.22 s, and drafting to pay.
    rounds = Rounds(DraftLength("auto", initial=8), cpu, lambda num: 0.0001)
    asked = rounds.play(60, 0.35)
    assert rounds.best(0.35)[0] == 0
    assert 0 in asked[:10]
    assert sum(map(bool, asked[20:])) < 10


def test_auto_without_a_clock():
    length = DraftLength("auto", initial=4)
    for _ in range(40):
        num = length.next()
        record(length, [num], [num], target_seconds=0.0, drafter_seconds=0.0)
    assert length.next() == 32


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((0,), "`num_draft_tokens` is 0; expected an int of at least 1 or 'auto'"),
        ((2.5,), "`num_draft_tokens` is 2.5; expected an int of at least 1 or 'auto'"),
        (("automatic",), "`num_draft_tokens` is 'automatic'; expected an int"),
        ((4, "linear"), "`schedule` is 'linear'; expected one of 'constant', 'heuristic', 'heuristic_transient'"),
        (("auto", "constant", 0), "`initial` is 0; expected an int of at least 1"),
    ],
)
def test_errors(args, message):
    with pytest.raises(ValueError, match=message):
        DraftLength(*args)


class Chains(CandidateGenerator):
    default_num_draft_tokens = 6

    def propose(self, run, num_draft_tokens):
        return None


class Trees(Chains):
    drafts_trees = True


def test_lengths_of_chains_and_of_trees():
    asked = Settings(num_assistant_tokens="auto", num_assistant_tokens_schedule="heuristic")
    assert asked.draft_length(Chains()) == ("auto", "heuristic", 6)
    for generator in (Chains(), Trees()):
        assert Settings().draft_length(generator) == (6, "constant", 6)
        assert Settings(num_assistant_tokens=64).draft_length(generator) == (64, "constant", 6)
        assert Settings(num_assistant_tokens_schedule="constant").draft_length(generator) == (6, "constant", 6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_assistant_tokens": "auto"}, "`num_assistant_tokens` is 'auto', which adapts the length of a chain"),
        (
            {"num_assistant_tokens_schedule": "heuristic"},
            "`num_assistant_tokens_schedule` is 'heuristic', which adapts the length of a chain, but Trees drafts "
            "trees; give the number of nodes as `num_assistant_tokens`",
        ),
        (
            {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "heuristic_transient"},
            "_transient', which adapts",
        ),
    ],
)
def test_trees_have_no_schedule(settings, message):
    with pytest.raises(ValueError, match=message):
        Settings(**settings).draft_length(Trees())
