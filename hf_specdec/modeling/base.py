"""What every drafter with weights is: a `PreTrainedModel` that belongs to a target.

Saving, loading and `push_to_hub` are those of transformers, in safetensors. What a drafter shares with its target (its
embedding, its output head) is handed to it where it is used, and never stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig, PreTrainedModel

from .checkpoint import Checkpoint
from .target import text_config, unwrap

BASE_FIELDS = set(PreTrainedConfig().to_dict()) | {"_name_or_path", "torch_dtype", "auto_map", "_commit_hash"}


@strict
class DrafterConfig(PreTrainedConfig):
    """Fields that all drafters have.

    Args:
        hidden_size (`int`): of the target.
        vocab_size (`int`): of the target; 0 where a published file does not say.
        num_target_layers (`int`, *optional*): decoder layers of the target; `None` where a published file does not say.
        target_name_or_path (`str`, *optional*): the target it was trained for.

    Raises:
        ValueError: for a field that the method does not have.
    """

    hidden_size: int = 0
    vocab_size: int = 0
    num_target_layers: int | None = None
    target_name_or_path: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        unknown = sorted(set(kwargs) - BASE_FIELDS)
        if unknown:
            raise ValueError(
                f"{type(self).__name__} has no field {', '.join(map(repr, unknown))}; it has "
                f"{', '.join(sorted(set(type(self).__dataclass_fields__) - BASE_FIELDS))}."
            )
        super().__post_init__(**kwargs)

    @classmethod
    def fields_of_target(cls, target: Any) -> dict[str, Any]:
        """The fields above for a drafter of this target."""
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

    @classmethod
    def convert(cls, checkpoint: Checkpoint) -> DrafterModel | None:
        """A drafter from a checkpoint in another project's format; `None` if it is not one of this method.

        Raises:
            ValueError: if it is one, but a tensor is missing, left over or of the wrong shape.
        """
        return None

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
