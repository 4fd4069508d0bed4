"""What every drafter with weights is: a `PreTrainedModel` that belongs to a target.

Saving, loading and `push_to_hub` are those of transformers, in safetensors. What a drafter shares with its target (its
embedding, its output head) is handed to it where it is used, and never stored.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig, PreTrainedModel

from .checkpoint import Checkpoint
from .target import text_config, unwrap

if TYPE_CHECKING:
    from typing_extensions import Self

BASE_FIELDS = set(PreTrainedConfig().to_dict()) | {"_name_or_path", "torch_dtype", "auto_map", "_commit_hash"}


@strict
class DrafterConfig(PreTrainedConfig):
    """Fields that all drafters have.

    Args:
        hidden_size (`int`): of the target.
        vocab_size (`int`): of the target; 0 where a published file does not say.
        num_target_layers (`int`, *optional*): decoder layers of the target; `None` where a published file does not say.
        target_name_or_path (`str`, *optional*): the target it was trained for.
        draft_vocab_size (`int`, *optional*): the drafter proposes this many ids only, those in the model's buffer
            `draft_token_ids`; `None` for the target's whole vocabulary.

    Raises:
        ValueError: for a field that the method does not have, or a size out of its range.
    """

    hidden_size: int = 0
    vocab_size: int = 0
    num_target_layers: int | None = None
    target_name_or_path: str | None = None
    draft_vocab_size: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        unknown = sorted(set(kwargs) - BASE_FIELDS)
        if unknown:
            raise ValueError(
                f"{type(self).__name__} has no field {', '.join(map(repr, unknown))}; it has "
                f"{', '.join(sorted(set(type(self).__dataclass_fields__) - BASE_FIELDS))}."
            )
        super().__post_init__(**kwargs)

    def validate_draft_vocab_size(self) -> None:
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` is {self.draft_vocab_size}; expected 1 to {self.vocab_size}, the target's "
                "vocabulary, or None for all of it."
            )

    @classmethod
    def fields_of_target(cls, target: Any) -> dict[str, Any]:
        """What all drafters of this target have in these fields."""
        config, name = text_config(target), unwrap(target).config._name_or_path
        return {
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_target_layers": config.num_hidden_layers,
            # Of a local folder its name alone: a path says nothing elsewhere.
            "target_name_or_path": Path(name).name if name and Path(name).is_dir() else name or None,
        }


class DrafterModel(PreTrainedModel):
    """Base of all drafters with weights. A room subclasses it and registers the subclass with its generator.

    `from_pretrained` reads what `save_pretrained` wrote; [`AutoDrafter`] reads the formats of other projects too.
    """

    config_class = DrafterConfig
    base_model_prefix = ""
    main_input_name = "hidden_states"

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        if config.draft_vocab_size is not None:
            self.register_buffer("draft_token_ids", torch.arange(config.draft_vocab_size))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # The rotary frequencies move with the layers, but a cast of these would blur the positions of a long text.
        exact = {
            (module, name): module._buffers[name]
            for module in self.modules()
            for name in module._non_persistent_buffers_set
        }
        super()._apply(fn, recurse)
        for (module, name), buffer in exact.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(module._buffers[name].device)
        return self

    @property
    def token_ids(self) -> torch.LongTensor | None:
        """Ids `(V_draft,)` of the target that the drafter's logits stand for; `None`: all, in order."""
        return self.draft_token_ids if self.config.draft_vocab_size is not None else None

    def places(self, token_ids: torch.LongTensor) -> torch.LongTensor:
        """Where in the drafter's logits these ids of the target stand; -1 for those it does not propose."""
        if self.token_ids is None:
            return token_ids
        places = torch.full((self.config.vocab_size,), -1, device=token_ids.device)
        places[self.token_ids.to(places.device)] = torch.arange(len(self.token_ids), device=places.device)
        return places[token_ids]

    @classmethod
    def convert(cls, checkpoint: Checkpoint) -> DrafterModel | None:
        """A drafter from a checkpoint in another project's format; `None` if it is not one of this method.

        Raises:
            ValueError: if it is one, but a tensor is missing, left over or of the wrong shape.
        """
        return None

    @classmethod
    def _made(cls, config_fields: dict[str, Any], draft_token_ids: torch.LongTensor | None) -> Self:
        """An untrained drafter with these fields that proposes these ids, or all.

        Raises:
            ValueError: if an id comes twice, or the target does not have it.
        """
        if draft_token_ids is None:
            return cls(cls.config_class(**config_fields))
        ids, vocab_size = draft_token_ids, config_fields["vocab_size"]
        is_row = ids.ndim == 1 and len(ids) > 0 and not ids.is_floating_point()
        if not (is_row and len(ids.unique()) == len(ids) and 0 <= ids.min() <= ids.max() < vocab_size):
            raise ValueError(
                f"`draft_token_ids` is a {ids.dtype} tensor of shape {tuple(ids.shape)}; expected one row of different "
                f"ids from 0 to {vocab_size - 1}, the target's vocabulary, or None for all of it."
            )
        drafter = cls(cls.config_class(**config_fields, draft_vocab_size=len(ids)))
        drafter.draft_token_ids.copy_(ids)
        return drafter

    def check_target(self, target: Any) -> None:
        """Raises `ValueError` if the drafter was made for a target of another shape; the message names both values."""
        config = text_config(target)
        for field, name in (
            ("hidden_size", "hidden_size"),
            ("vocab_size", "vocab_size"),
            ("num_target_layers", "num_hidden_layers"),
        ):
            own, given = getattr(self.config, field), getattr(config, name)
            if own and own != given:  # published files do not say everything
                made_for = self.config.target_name_or_path
                raise ValueError(
                    f"this {type(self).__name__} was made for a target with {name} {own}"
                    f"{f' ({made_for})' if made_for else ''}, but {type(unwrap(target)).__name__} has {name} {given}; "
                    "take the drafter of this target, or train one."
                )
