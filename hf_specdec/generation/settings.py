"""What the user asked of the drafter."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

if TYPE_CHECKING:
    from .candidates import CandidateGenerator


@dataclass
class Settings:
    """What the user asked of the drafter; `None` where nothing was said. Names are those of `generate`."""

    num_assistant_tokens: int | str | None = None
    num_assistant_tokens_schedule: str | None = None
    assistant_confidence_threshold: float | None = None
    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int | None = None
    assistant_sampling: str = "shared_noise"
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
        return replace(self, **given)

    def draft_length(self, generator: CandidateGenerator) -> tuple[int | str, str, int]:
        """Arguments for `DraftLength`: the draft length asked for, its schedule, and where an adaptive one starts."""
        default = generator.default_num_draft_tokens
        asked = next((v for v in (getattr(self, name) for name in generator.length_settings) if v is not None), default)
        return asked, self.num_assistant_tokens_schedule or "constant", default
