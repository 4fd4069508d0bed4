"""How many tokens to draft in the next round: a fixed number, transformers' heuristic, or what theory says pays."""

from __future__ import annotations

from collections import deque
from itertools import accumulate
from statistics import median_low
from typing import Literal

from . import theory

SCHEDULES = ("constant", "heuristic", "heuristic_transient")


class DraftLength:
    """The draft length K of one call of `generate`, adapted after every round.

    - A number with `schedule="constant"`: that number, always.
    - A number with `"heuristic"` or `"heuristic_transient"`: it starts there; a round in which every row's drafts were
      all accepted adds 2, any other takes 1 away, down to 1 (as transformers does). The two names mean the same here:
      nothing is kept for the next call.
    - `"auto"`: the K of the highest expected speedup ([`theory.best_num_draft_tokens`]) for the measured acceptance
      rate, drafting time and target pass time; `schedule` is not used. It starts at `initial`, at most doubles a round,
      and may be 0 where no draft pays; a short draft every `PROBE_INTERVAL` rounds then checks whether that holds.

    Args:
        num_draft_tokens (`int` or `"auto"`): draft tokens a round.
        schedule (`str`): `"constant"`, `"heuristic"` or `"heuristic_transient"`.
        initial (`int`): first K of `"auto"`; a number for `num_draft_tokens` is its own first K.

    Raises:
        ValueError: if an argument is none of the values above.
    """

    MAX_AUTO = 32
    PROBE_INTERVAL = 16
    PROBE_LENGTH = 2
    EXPLORE_INTERVAL = 32
    MIN_TIMED_DRAFTS = 3

    def __init__(
        self,
        num_draft_tokens: int | Literal["auto"],
        schedule: Literal["constant", "heuristic", "heuristic_transient"] = "constant",
        initial: int = 5,
    ) -> None:
        is_auto = num_draft_tokens == "auto"
        if not is_auto and (not isinstance(num_draft_tokens, int) or num_draft_tokens < 1):
            raise ValueError(
                f"`num_draft_tokens` is {num_draft_tokens!r}; expected an int of at least 1 or 'auto' "
                "(`num_assistant_tokens` of `generate`; to decode without drafts leave out the assistant)."
            )
        if schedule not in SCHEDULES:
            raise ValueError(
                f"`schedule` is {schedule!r}; expected one of {', '.join(map(repr, SCHEDULES))} "
                "(`num_assistant_tokens_schedule` of `generate`)."
            )
        if not isinstance(initial, int) or initial < 1:
            raise ValueError(f"`initial` is {initial!r}; expected an int of at least 1.")
        self._num_draft_tokens = min(initial, self.MAX_AUTO) if is_auto else num_draft_tokens
        self._is_constant = not is_auto and schedule == "constant"
        self._measured = _Measurements() if is_auto else None
        self._rounds_at_zero = self._rounds_unchanged = 0

    def next(self) -> int:
        """Draft tokens wanted for the next round; 0 (only with `"auto"`) asks for a plain target pass."""
        return self._num_draft_tokens

    def record(
        self,
        num_drafted: list[int],
        num_accepted: list[int],
        *,
        width: int,
        target_seconds: float,
        drafter_seconds: float,
    ) -> None:
        """Takes in what the round gave.

        Args:
            num_drafted (`list[int]`): draft tokens of each row (of a tree: its depth, not its nodes); 0 for none.
            num_accepted (`list[int]`): draft tokens accepted in each row.
            width (`int`): tokens a row in the target pass.
            target_seconds (`float`): time of the target pass.
            drafter_seconds (`float`): time of drafting.
        """
        if self._is_constant:
            return
        has_drafts = any(num_drafted)
        all_accepted = num_drafted == num_accepted
        if self._measured is None:
            if has_drafts:
                change = 2 if all_accepted else -1
                self._num_draft_tokens = max(1, self._num_draft_tokens + change)
            return
        self._measured.record(num_drafted, num_accepted, width, target_seconds, drafter_seconds)
        best = self._measured.best_num_draft_tokens(self.MAX_AUTO)
        if best == 0 and self._measured.drafting.num_records < self.MIN_TIMED_DRAFTS:
            best = 1
        if best == 0:
            # A probe that failed starts the wait anew; one that went well is repeated until K leaves 0.
            if has_drafts:
                self._rounds_at_zero = self.PROBE_INTERVAL if all_accepted else 0
            else:
                self._rounds_at_zero += 1
            self._num_draft_tokens = self.PROBE_LENGTH if self._rounds_at_zero >= self.PROBE_INTERVAL else 0
        elif self._measured.wants_plain_pass(best):
            self._num_draft_tokens = 0
        else:
            # Times of much longer drafts are extrapolated from few widths: go there in steps.
            wanted = min(best, max(self.PROBE_LENGTH, 2 * self._num_draft_tokens))
            self._rounds_unchanged = self._rounds_unchanged + 1 if wanted == self._num_draft_tokens else 0
            # One K alone tells nothing of how times grow with K.
            is_stale = self._rounds_unchanged >= self.EXPLORE_INTERVAL
            self._num_draft_tokens = max(1, wanted // 2) if is_stale else wanted


class _Measurements:
    """Running estimates behind `"auto"`: acceptance rate, drafting time by draft length, target time by width."""

    MEMORY = 0.95  # weight that acceptance counts keep from one round with drafts to the next: about 20 rounds
    PRIOR_ACCEPTED, PRIOR_REJECTED = 1.4, 0.6  # two tokens' worth of belief in an acceptance rate of 0.7
    PLAIN_INTERVAL = 100  # rounds after which the time of a plain pass, if it matters, is measured anew
    FIRST_PLAIN = 4  # rounds before it is measured first

    def __init__(self) -> None:
        self.num_accepted = self.num_rejected = 0.0
        self.num_rounds = 0
        self.rounds_since_plain: int | None = None
        # The plain pass has a time of its own: on a CPU 4 tokens cost nearly twice as much as 1, and 16 not much more.
        self.plain_pass = _Line(slope_of_one_point=0.0)
        self.wide_pass = _Line(slope_of_one_point=0.0)
        self.drafting = _Line(slope_of_one_point=1.0)

    def record(
        self,
        num_drafted: list[int],
        num_accepted: list[int],
        width: int,
        target_seconds: float,
        drafter_seconds: float,
    ) -> None:
        if any(num_drafted):
            # Each accepted token is a success, the first one after them a failure; what follows was never judged.
            num_rejected = sum(accepted < drafted for drafted, accepted in zip(num_drafted, num_accepted))
            self.num_accepted = self.MEMORY * self.num_accepted + sum(num_accepted)
            self.num_rejected = self.MEMORY * self.num_rejected + num_rejected
        self.num_rounds += 1
        if self.rounds_since_plain is not None:
            self.rounds_since_plain += 1
        if self.num_rounds == 1:
            return  # the first round pays for warming up: its times say nothing
        if width > 1:
            self.wide_pass.record(width, target_seconds)
        else:
            self.plain_pass.record(width, target_seconds)
            self.rounds_since_plain = 0
        if any(num_drafted):
            self.drafting.record(max(num_drafted), drafter_seconds)

    @property
    def acceptance_rate(self) -> float:
        accepted, rejected = self.num_accepted + self.PRIOR_ACCEPTED, self.num_rejected + self.PRIOR_REJECTED
        return accepted / (accepted + rejected)

    def best_num_draft_tokens(self, max_draft_tokens: int) -> int:
        """Best K; `max_draft_tokens` while the times seen so far give no reason for less."""
        plain_seconds = (self.plain_pass if self.plain_pass.is_known else self.wide_pass)(1)
        if plain_seconds <= 0:  # nothing measured yet, or a clock too coarse for it
            return max_draft_tokens
        wide = self.wide_pass if self.wide_pass.is_known else self.plain_pass
        fixed_drafting, drafting_per_token = self.drafting.coefficients()
        return theory.best_num_draft_tokens(
            self.acceptance_rate,
            drafting_per_token / plain_seconds,
            max_draft_tokens,
            lambda num: (wide(num + 1) + fixed_drafting) / plain_seconds,
        )

    def wants_plain_pass(self, num_draft_tokens: int) -> bool:
        """Whether to spend a round on timing a plain pass: only where plain decoding might be the better choice."""
        is_due = (
            self.num_rounds >= self.FIRST_PLAIN
            if self.rounds_since_plain is None
            else self.rounds_since_plain >= self.PLAIN_INTERVAL
        )
        return is_due and theory.expected_tokens_per_pass(self.acceptance_rate, num_draft_tokens) < 3


class _Line:
    """Times as a + b x with a, b >= 0, by least squares over the recent median time of each x.

    Every x counts the same, however often it was seen, so that the line follows the whole range and not the slope at
    the K in use. Until a second x is seen, `slope_of_one_point` says how to read the first: 0 as a constant, 1 as
    proportional to x.
    """

    WINDOW = 9  # recent times kept of each x
    MEMORY = 0.99  # weight that an x keeps from one record to the next
    MAX_AGE = 1000  # records; beyond that the weight is nothing
    OUTLIER = 3.0  # times this much above the line are left out, unless two come in a row

    def __init__(self, slope_of_one_point: float) -> None:
        self.slope_of_one_point = slope_of_one_point
        self.seconds: dict[int, deque[float]] = {}
        self.last_record: dict[int, int] = {}
        self.num_records = 0
        self._last_was_outlier = False
        self._coefficients: tuple[float, float] = (0.0, 0.0)

    @property
    def is_known(self) -> bool:
        return self.num_records > 0

    def record(self, x: int, seconds: float) -> None:
        # A compiler or a busy machine now and then makes one pass many times slower. A line known from smaller x only
        # is no reason to doubt a time that is in proportion.
        expected = max(self(x), *(self(other) * x / other for other in self.seconds), 0.0)
        is_outlier = self.is_known and seconds > self.OUTLIER * expected
        if is_outlier and not self._last_was_outlier:
            self._last_was_outlier = True
            return
        self._last_was_outlier = is_outlier
        self.num_records += 1
        self.last_record[x] = self.num_records
        self.seconds.setdefault(x, deque(maxlen=self.WINDOW)).append(seconds)
        self._coefficients = self._fit()

    def __call__(self, x: int) -> float:
        constant, slope = self._coefficients
        return constant + slope * x

    def coefficients(self) -> tuple[float, float]:
        """a and b; zeros while nothing was recorded."""
        return self._coefficients

    def _fit(self) -> tuple[float, float]:
        xs = sorted(x for x, record in self.last_record.items() if self.num_records - record < self.MAX_AGE)
        # Of two times the lower is the better one: time is only ever added. Twice as many tokens take at most twice as
        # long, and never less than half as many: times that say otherwise are disturbed ones.
        per_token = accumulate((median_low(self.seconds[x]) / x for x in xs), min)
        ys = list(accumulate(reversed([ratio * x for ratio, x in zip(per_token, xs)]), min))[::-1]
        weights = [self.MEMORY ** (self.num_records - self.last_record[x]) for x in xs]
        total = sum(weights)
        mean_x = sum(weight * x for weight, x in zip(weights, xs)) / total
        mean_y = sum(weight * y for weight, y in zip(weights, ys)) / total
        if len(xs) == 1:
            slope = self.slope_of_one_point * mean_y / mean_x
        else:
            variance = sum(weight * (x - mean_x) ** 2 for weight, x in zip(weights, xs))
            covariance = sum(weight * (x - mean_x) * (y - mean_y) for weight, x, y in zip(weights, xs, ys))
            slope = max(0.0, covariance / variance)  # below 0 by rounding only
        if slope * mean_x > mean_y:  # the constant would be negative: the best line through the origin
            slope = sum(w * x * y for w, x, y in zip(weights, xs, ys)) / sum(w * x * x for w, x in zip(weights, xs))
            return 0.0, slope
        return mean_y - slope * mean_x, slope
