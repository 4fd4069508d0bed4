"""What the user asked of the drafter."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from .choice import TypicalAcceptance
from .schedule import SCHEDULES

if TYPE_CHECKING:
    from .candidates import CandidateGenerator


INTEGERS = {"num_assistant_tokens": ("auto",), "prompt_lookup_num_tokens": ("auto",), "max_matching_ngram_size": ()}
CHOICES = {
    "num_assistant_tokens_schedule": SCHEDULES,
    "assistant_sampling": ("shared_noise", "rejection"),
}


@dataclass
class Settings:
    """What the user asked of the drafter; `None` where nothing was said. Names are those of `generate`."""

    num_assistant_tokens: int | str | None = None
    num_assistant_tokens_schedule: str | None = None
    assistant_confidence_threshold: float | None = None
    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int | None = None
    assistant_sampling: str = "shared_noise"
    assistant_acceptance: str | TypicalAcceptance = "exact"
    tokenizer: Any = None
    assistant_tokenizer: Any = None

    def completed(self, generation_config: GenerationConfig) -> Settings:
        """Fills what was not given to `generate` from its generation config.

        `generate` has filled that with transformers' own defaults, so a value equal to one of these counts as unsaid.
        """
        unsaid = GenerationConfig._get_default_generation_params()
        given = {}
        for name in (field.name for field in fields(self)):
            value = getattr(generation_config, name, None)
            if getattr(self, name) is None and value is not None and value != unsaid.get(name):
                given[name] = value
        settings = replace(self, **given)
        settings.validate()
        return settings

    def validate(self) -> None:
        """Raises `ValueError` for a value that is not allowed."""
        for name, words in INTEGERS.items():
            value = getattr(self, name)
            is_int = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if value is not None and value not in words and not is_int:
                words = "".join(f" or {word!r}" for word in words)
                raise ValueError(
                    f"`{name}` is {value!r}; expected an int of at least 1{words}. To decode without drafts, pass "
                    "`assistant=None`."
                )
        for name, words in CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in words:
                raise ValueError(f"`{name}` is {value!r}; expected one of {', '.join(map(repr, words))}.")
        acceptance = self.assistant_acceptance
        if acceptance not in ("exact", "typical") and not isinstance(acceptance, TypicalAcceptance):
            raise ValueError(
                f"`assistant_acceptance` is {acceptance!r}; expected 'exact', 'typical', or TypicalAcceptance(epsilon, "
                "delta)."
            )
        threshold = self.assistant_confidence_threshold
        if threshold is not None and not (isinstance(threshold, (int, float)) and 0 <= threshold <= 1):
            raise ValueError(f"`assistant_confidence_threshold` is {threshold!r}; expected a probability, 0 to 1.")

    def draft_length(self, generator: CandidateGenerator) -> tuple[int | str, str, int]:
        """Arguments for `DraftLength`: the draft length asked for, its schedule, and where an adaptive one starts."""
        default = generator.default_num_draft_tokens
        asked = next((v for v in (getattr(self, name) for name in generator.length_settings) if v is not None), default)
        schedule = self.num_assistant_tokens_schedule or "constant"
        if generator.drafts_trees and (asked == "auto" or schedule != "constant"):
            name, value = (
                ("num_assistant_tokens", asked) if asked == "auto" else ("num_assistant_tokens_schedule", schedule)
            )
            raise ValueError(
                f"`{name}` is {value!r}, which adapts the length of a chain, but {type(generator).__name__} drafts "
                "trees; give the number of nodes as `num_assistant_tokens`."
            )
        return asked, schedule, default
