"""What speculative decoding can gain: the formulas of Leviathan et al. 2023 (arXiv 2211.17192).

Symbols: alpha is the acceptance rate, the probability that a draft token is accepted when all before it were; K is the
number of draft tokens a round; c is the time of one draft token and v the time of the target pass that verifies, K + 1
tokens wide, both in units of a target pass over one token.
"""

from __future__ import annotations

import math
from collections.abc import Callable


def expected_tokens_per_pass(acceptance_rate: float, num_draft_tokens: int) -> float:
    """Tokens that a row gains per target pass on average: (1 - alpha^(K+1)) / (1 - alpha), the target's own included.

    Args:
        acceptance_rate (`float`): alpha, in [0, 1].
        num_draft_tokens (`int`): K, at least 0.

    Returns:
        `float`: between 1 and K + 1 (exactly K + 1 for alpha = 1).

    Raises:
        ValueError: if an argument is out of its range.

    Source: equation 1 of the paper. Example: alpha = 0.5, K = 2 -> 1 + 0.5 + 0.25 = 1.75.
    """
    _check_acceptance_rate(acceptance_rate)
    _check_count("num_draft_tokens", num_draft_tokens)
    if acceptance_rate == 1.0:
        return float(num_draft_tokens + 1)
    if acceptance_rate == 0.0:
        return 1.0
    # expm1 keeps all digits where alpha is close to 1 and the plain formula cancels.
    return -math.expm1((num_draft_tokens + 1) * math.log(acceptance_rate)) / (1.0 - acceptance_rate)


def expected_speedup(
    acceptance_rate: float,
    num_draft_tokens: int,
    cost_ratio: float,
    verification_cost: float | Callable[[int], float] = 1.0,
) -> float:
    """Tokens per second relative to plain decoding: (1 - alpha^(K+1)) / ((1 - alpha) (c K + v)).

    Args:
        acceptance_rate (`float`): alpha, in [0, 1].
        num_draft_tokens (`int`): K, at least 0. Without drafts there is nothing to verify: K = 0 gives 1.
        cost_ratio (`float`): c, the time of one draft token; at least 0.
        verification_cost (`float` or `Callable[[int], float]`): v, the time of the verifying pass, or a function that
            gives it for K. The paper assumes 1: a pass over K + 1 tokens takes no longer than a pass over one. That is
            near the truth on accelerators; on a CPU measure it.

    Returns:
        `float`: above 1 where drafting pays.

    Raises:
        ValueError: if an argument is out of its range.

    Source: theorem 3.8 of the paper. Example: alpha = 0.8, K = 5, c = 0.05 -> 3.69 / 1.25 = 2.95.
    """
    tokens = expected_tokens_per_pass(acceptance_rate, num_draft_tokens)
    if not (cost_ratio >= 0 and math.isfinite(cost_ratio)):
        raise ValueError(
            f"`cost_ratio` is {cost_ratio}; expected a finite number of at least 0: give the time of one draft token "
            "divided by the time of a target pass over one token."
        )
    if num_draft_tokens == 0:
        return 1.0
    cost = verification_cost(num_draft_tokens) if callable(verification_cost) else verification_cost
    if not (cost > 0 and math.isfinite(cost)):
        raise ValueError(
            f"`verification_cost` is {cost} for {num_draft_tokens} draft tokens; expected a finite number above 0: "
            "give the time of the verifying pass divided by the time of a target pass over one token."
        )
    return tokens / (cost_ratio * num_draft_tokens + cost)


def best_num_draft_tokens(
    acceptance_rate: float,
    cost_ratio: float,
    max_draft_tokens: int = 32,
    verification_cost: float | Callable[[int], float] = 1.0,
) -> int:
    """The K with the highest [`expected_speedup`], the smallest such K if several tie.

    Args:
        acceptance_rate (`float`): alpha, in [0, 1].
        cost_ratio (`float`): c, the time of one draft token; at least 0.
        max_draft_tokens (`int`): the largest K to consider.
        verification_cost (`float` or `Callable[[int], float]`): v, see [`expected_speedup`].

    Returns:
        `int`: 0..max_draft_tokens; 0 says that no draft pays off.

    Raises:
        ValueError: if an argument is out of its range.

    Example: alpha = 0.8, c = 0.05 -> 8; alpha = 0.1, c = 0.2 -> 0.
    """
    _check_count("max_draft_tokens", max_draft_tokens)
    return max(
        range(max_draft_tokens + 1),
        key=lambda num: expected_speedup(acceptance_rate, num, cost_ratio, verification_cost),
    )


def acceptance_rate_from_tokens_per_pass(tokens_per_pass: float, num_draft_tokens: int) -> float:
    """The alpha at which [`expected_tokens_per_pass`] gives `tokens_per_pass`, found by bisection.

    Args:
        tokens_per_pass (`float`): measured tokens per target pass and row, in [1, K + 1].
        num_draft_tokens (`int`): K, at least 1.

    Returns:
        `float`: alpha in [0, 1].

    Raises:
        ValueError: if an argument is out of its range.

    Example: 1.75 tokens with K = 2 -> 0.5.
    """
    _check_count("num_draft_tokens", num_draft_tokens, at_least=1)
    if not 1 <= tokens_per_pass <= num_draft_tokens + 1:
        raise ValueError(
            f"`tokens_per_pass` is {tokens_per_pass}; expected 1 to {num_draft_tokens + 1} with {num_draft_tokens} "
            "draft tokens: give the tokens emitted per target pass and row, the target's own token included."
        )
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:  # until no float lies between them
        if expected_tokens_per_pass(middle, num_draft_tokens) < tokens_per_pass:
            low = middle
        else:
            high = middle
    return high if tokens_per_pass > 1 else 0.0


def _check_acceptance_rate(value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(
            f"`acceptance_rate` is {value}; expected a number in [0, 1]: give accepted / (accepted + rejections)."
        )


def _check_count(name: str, value: int, at_least: int = 0) -> None:
    if not isinstance(value, int) or value < at_least:
        raise ValueError(f"`{name}` is {value!r}; expected an int of at least {at_least}.")
