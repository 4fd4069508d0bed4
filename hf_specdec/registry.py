"""The methods that have a name: one dict from the name to a factory of candidate generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .generation.candidates import CandidateGenerator

METHODS: dict[str, Callable[[], CandidateGenerator]] = {}


def register_method(name: str, candidates: Callable[[], CandidateGenerator]) -> None:
    """Makes `assistant=name` mean a generator made by `candidates()`.

    Raises:
        ValueError: if the name is taken.
    """
    if not isinstance(name, str) or not callable(candidates):
        raise ValueError(f"register_method got {name!r} and {candidates!r}; expected a string and a callable.")
    if name in METHODS:
        raise ValueError(f"a method named {name!r} is registered already; choose another name.")
    METHODS[name] = candidates
