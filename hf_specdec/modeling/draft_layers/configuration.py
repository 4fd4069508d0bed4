"""Configuration of draft layers."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict

from ..base import BASE_FIELDS, DrafterConfig
from ..target import text_config

# Of the target's config: what belongs to its vocabulary and its storage, which the layers have no part in.
NOT_OF_LAYERS = {"quantization_config", "use_cache"} | BASE_FIELDS - {"model_type"}


@strict
class DraftLayersConfig(DrafterConfig):
    """A few decoder layers of the target's architecture, with the target's embedding and output head.

    Args:
        layer_config (`dict`): the target's own config, with fewer layers and without its vocabulary.

    Raises:
        ValueError: if a size is out of its range.
    """

    model_type = "hf_specdec_draft_layers"

    layer_config: dict[str, Any] = field(default_factory=dict)

    def validate_sizes(self) -> None:
        width = self.layer_config.get("hidden_size", self.hidden_size)
        if width != self.hidden_size:
            raise ValueError(
                f"`layer_config` has hidden_size {width} and `hidden_size` is {self.hidden_size}; both must be the "
                "target's."
            )

    @staticmethod
    def layer_config_of(target: Any, layers: list[int], intermediate_size: int | None = None) -> dict[str, Any]:
        """`layer_config` for these layers of the target, counted from zero."""
        config = text_config(target).to_dict()
        for name, value in config.items():  # such as `layer_types`: one entry for each layer
            if "layer" in name and isinstance(value, (list, tuple)) and len(value) == config["num_hidden_layers"]:
                config[name] = [value[layer] for layer in layers]
        if intermediate_size is not None:
            config["intermediate_size"] = intermediate_size
        kept = {
            name: 0 if name.endswith("_token_id") else value  # the one id of a vocabulary of one
            for name, value in config.items()
            if name not in NOT_OF_LAYERS
        }
        return kept | {"vocab_size": 1, "tie_word_embeddings": False, "num_hidden_layers": len(layers)}
