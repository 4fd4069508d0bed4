"""Configuration of EAGLE drafters."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict

from ..base import DrafterConfig
from ..target import text_config

# Of decoder layers: qwen2's have biases of q, k and v, qwen3's norms of q and k.
FLAVOURS = ("llama", "qwen2", "qwen3")
VERSIONS = (1, 3)


@strict
class EagleConfig(DrafterConfig):
    """A decoder layer that continues the target's hidden states (Li et al. 2401.15077, 2406.16858, 2503.01840).

    Version 1 reads [embedding; feature] through `fc`, a feature being the target's last hidden state. EAGLE-2 is
    another tree from the same weights. Version 3 fuses the outputs of several layers of the target through `fc`, and
    its first layer attends over [normed embedding; normed feature].

    Args:
        version (`int`): 1 (also EAGLE-2) or 3.
        layer_config (`dict`): of the drafter's own layers, with the `model_type` "llama", "qwen2" or "qwen3".
        target_layers (`list[int]`, *optional*): layers of the target whose outputs are fused, counted from zero;
            `None` for the reference's choice, which depends on the target's depth. Version 1 always reads the last.
        source_numbering (`str`, *optional*): how the published file that this was read from counts them.
        num_target_features (`int`): how many are fused.
        has_fc, fc_bias (`bool`): whether `fc` is there (not needed for one feature of the drafter's own width), and
            whether it has a bias.
        fc_norm (`bool`): a norm for each of the target's features, before `fc` (EAGLE-3.1).
        norm_before_fc (`bool`): one norm over all of them together.
        norm_before_residual (`bool`): the first layer's residual is the normed feature.
        norm_output (`bool`): the state that the next draft starts from has passed the final norm (EAGLE-3.1).
        has_own_embedding, has_own_output_head (`bool`): else the target's is used.

    Raises:
        ValueError: if a value is not allowed, or two exclude each other.
    """

    model_type = "hf_specdec_eagle"

    version: int = 3
    layer_config: dict[str, Any] = field(default_factory=dict)
    target_layers: list[int] | None = None
    source_numbering: str | None = None
    num_target_features: int = 3
    has_fc: bool = True
    fc_bias: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    has_own_embedding: bool = False
    has_own_output_head: bool = False

    @property
    def width(self) -> int:
        """Hidden size of the drafter's own layers."""
        return self.layer_config.get("hidden_size", self.hidden_size)

    def validate_layers(self) -> None:
        if self.version not in VERSIONS:
            raise ValueError(f"`version` is {self.version}; expected 1 (also for EAGLE-2) or 3.")
        flavour = self.layer_config.get("model_type", FLAVOURS[0])
        if flavour not in FLAVOURS:
            raise ValueError(f"`layer_config` has model_type {flavour!r}; expected one of {FLAVOURS}.")
        if self.num_target_features < 1:
            raise ValueError(f"`num_target_features` is {self.num_target_features}; expected at least 1.")
        if self.target_layers is not None and len(self.target_layers) != self.num_target_features:
            raise ValueError(
                f"`target_layers` is {self.target_layers} and `num_target_features` is {self.num_target_features}; "
                "give as many layers as features."
            )

    def validate_sizes(self) -> None:
        if self.width == self.hidden_size:
            return
        if self.version == 1 or not (self.has_own_embedding and self.has_own_output_head and self.has_fc):
            raise ValueError(
                f"`layer_config` has hidden_size {self.width} and the target {self.hidden_size}; a drafter of another "
                "width is of version 3 and has an embedding, an output head and `fc` of its own."
            )

    def validate_norms(self) -> None:
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("`fc_norm` and `norm_before_fc` are both True; they exclude each other.")
        options = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
        if self.version == 1 and any(getattr(self, name) for name in options):
            raise ValueError(f"version 1 has no norms; leave {', '.join(options)} out.")

    @staticmethod
    def layer_config_of(target: Any, num_layers: int = 1, intermediate_size: int | None = None) -> dict[str, Any]:
        """`layer_config` of Llama layers as wide as the target's."""
        config = text_config(target)
        width, num_heads = config.hidden_size, config.num_attention_heads
        rope = getattr(config, "rope_parameters", None) or {}
        return {
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": intermediate_size or getattr(config, "intermediate_size", None) or 4 * width,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": getattr(config, "num_key_value_heads", None) or num_heads,
            "head_dim": getattr(config, "head_dim", None) or width // num_heads,
            "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-5),
            "max_position_embeddings": getattr(config, "max_position_embeddings", 2048),
            "rope_parameters": {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)},
        }
