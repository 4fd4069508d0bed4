"""What every drafter is to the decoding loop: a `CandidateGenerator`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from .tree import CandidateTree

if TYPE_CHECKING:
    import torch

    from .run import Run


class CandidateGenerator(ABC):
    """Guesses the tokens that the target will choose next. Subclass it to bring a drafter of your own.

    The one method to write is [`propose`]. The loop works on a shallow copy of the object that was passed as
    `assistant=`, made anew for every call of `generate`: what a method sets on `self` lives for that call only, and one
    object may serve several calls, also at once. Nothing that a generator returns can change the text, because the
    target chooses every token: a wrong guess only costs time.

    Example (repeats the last token):
        >>> class Parrot(CandidateGenerator):
        ...     def propose(self, run, num_draft_tokens):
        ...         return CandidateTree.from_lists([[row[-1]] * num_draft_tokens for row in run.tokens], run.device)

    Attributes:
        hidden_state_layers (`tuple[int, ...]`): layers of the target whose outputs `run.hidden_states` shall hold;
            index l is the output of decoder layer l, counted from zero.
        default_num_draft_tokens (`int`): draft length when the user names none.
        drafts_trees (`bool`): `num_draft_tokens` is a budget of nodes, not a length: the generator itself sees to it
            that no branch is longer than `run.num_wanted - 1`.
        length_settings (`tuple[str, ...]`): arguments of `generate` that set the draft length; the first given wins.
    """

    hidden_state_layers: tuple[int, ...] = ()
    default_num_draft_tokens: int = 5
    drafts_trees: bool = False
    length_settings: tuple[str, ...] = ("num_assistant_tokens",)

    def begin(self, run: Run) -> None:  # noqa: B027 (optional hook)
        """Called once per `generate`, before the target's first pass, with the prompts in `run.tokens`.

        Raise `ValueError` here if the generator does not fit `run.target`.
        """

    def max_draft_tokens(self, run: Run) -> int | None:
        """Most draft tokens this generator can give now (its own context window, say); `None` for no limit."""
        return None

    @abstractmethod
    def propose(self, run: Run, num_draft_tokens: int) -> CandidateTree | None:
        """Draft tokens for every row of `run.tokens`, at most `num_draft_tokens` nodes a row.

        Args:
            run ([`Run`]): the state of this call; see its attributes. Read only.
            num_draft_tokens (`int`): the most nodes wanted, at least 1.

        Returns:
            [`CandidateTree`] on `run.device` with one row for each row of `run.tokens`; `None` or an empty tree for
            no drafts.
        """

    def update(self, run: Run) -> None:  # noqa: B027 (optional hook)
        """Called after every target pass, the prefill included, with the accepted tokens in `run.tokens`."""

    def keep_rows(self, rows: torch.LongTensor) -> None:  # noqa: B027 (optional hook)
        """Called when finished rows leave the batch: keep only these rows of any per-row state.

        Args:
            rows (`torch.LongTensor` of shape `(B_new,)`): indices into the rows as they were until now.
        """
