"""The methods that have a name: one dict from the name to what makes its candidates, and its weights if it has any."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .generation.candidates import CandidateGenerator
    from .modeling.base import DrafterModel


class Method(NamedTuple):
    """One method.

    Attributes:
        candidates: makes a generator: of nothing, or of a model of the class `drafter`.
        drafter: the class of its weights; `None` for a method without any.
        objective: what it is trained on, if it trains here.
    """

    candidates: Callable[..., CandidateGenerator]
    drafter: type[DrafterModel] | None = None
    objective: Callable[..., Any] | None = None


METHODS: dict[str, Method] = {}


def register_method(
    name: str,
    candidates: Callable[..., CandidateGenerator],
    drafter: type[DrafterModel] | None = None,
    objective: Callable[..., Any] | None = None,
) -> None:
    """Registers a method.

    Without weights, `assistant=name` then means a generator made by `candidates()`; with weights, `assistant=` takes a
    model of the class `drafter`, or a checkpoint of one, and `candidates(model)` makes the generator.

    Raises:
        ValueError: if the name or the class is taken.
    """
    if not isinstance(name, str) or not callable(candidates):
        raise ValueError(f"register_method got {name!r} and {candidates!r}; expected a string and a callable.")
    if name in METHODS:
        raise ValueError(f"a method named {name!r} is registered already; choose another name.")
    if drafter is not None and any(method.drafter is drafter for method in METHODS.values()):
        raise ValueError(f"the drafter {drafter.__name__} belongs to a method already; subclass it.")
    METHODS[name] = Method(candidates, drafter, objective)


def names_without_weights() -> list[str]:
    """What `assistant=` may be as a plain name."""
    return [name for name, method in METHODS.items() if method.drafter is None]
