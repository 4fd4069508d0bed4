"""What one call of `generate` did, and how long its parts took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class SpeculationStatistics:
    """Counts and times of one call; `outputs.speculation`.

    Attributes:
        num_target_passes (`int`): forward passes of the target, the prefill included.
        num_row_passes (`int`): the same counted per unfinished row; equal to `num_target_passes` for one row.
        num_emitted (`int`): new tokens of all rows.
        num_drafted, num_accepted (`int`): draft tokens verified (on the longest branch of a tree), and kept.
        drafted_per_depth, accepted_per_depth (`list[int]`): the same by depth; index 0 is the first draft token.
        drafted_mask (`list[list[bool]]`): for each row, which new tokens were drafted (True) or the target's own.
        target_seconds, drafter_seconds, total_seconds (`float`): wall time, in seconds.
    """

    num_target_passes: int = 0
    num_row_passes: int = 0
    num_emitted: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_per_depth: list[int] = field(default_factory=list)
    accepted_per_depth: list[int] = field(default_factory=list)
    drafted_mask: list[list[bool]] = field(default_factory=list, repr=False)
    target_seconds: float = 0.0
    drafter_seconds: float = 0.0
    total_seconds: float = 0.0

    @property
    def other_seconds(self) -> float:
        """Wall time outside the target's passes and the drafter."""
        return self.total_seconds - self.target_seconds - self.drafter_seconds

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per target pass and row: `num_emitted / num_row_passes`."""
        return self.num_emitted / max(1, self.num_row_passes)

    @property
    def acceptance_rate(self) -> float:
        """`num_accepted / num_drafted`."""
        return self.num_accepted / max(1, self.num_drafted)

    @property
    def acceptance_rate_per_depth(self) -> list[float]:
        """Share of the draft tokens at each depth that were kept."""
        return [kept / max(1, drafted) for kept, drafted in zip(self.accepted_per_depth, self.drafted_per_depth)]

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Adds one row's part of one verification (depth of its drafts, depth kept)."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        for counts, number in ((self.drafted_per_depth, num_drafted), (self.accepted_per_depth, num_accepted)):
            counts.extend([0] * (num_drafted - len(counts)))
            for depth in range(number):
                counts[depth] += 1


class Stopwatch:
    """Seconds spent in named parts; on CUDA by events, so that timing never makes the host wait."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.seconds: dict[str, float] = {}
        self.last: dict[str, float] = {}  # the newest finished measurement of each part
        self.pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        if self.is_cuda:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            yield
            events[1].record()
            self.pending.append((part, *events))
        else:
            start = time.perf_counter()
            yield
            self._add(part, time.perf_counter() - start)

    def collect(self, wait: bool = False) -> None:
        """Adds up the measurements that are complete; all of them if `wait`."""
        if wait and self.pending:
            torch.cuda.synchronize()
        while self.pending and self.pending[0][2].query():
            part, start, end = self.pending.pop(0)
            self._add(part, start.elapsed_time(end) / 1000)

    def _add(self, part: str, seconds: float) -> None:
        self.last[part] = seconds
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
