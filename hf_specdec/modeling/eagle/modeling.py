"""EAGLE drafters: what they own, and how they continue the target's hidden states.

Source: Li et al. 2401.15077 (EAGLE), section 4.1; Li et al. 2503.01840 (EAGLE-3), section 3.1.
Shapes: B rows, T positions, D hidden size of the target, H the drafter's own, V_draft ids that it can propose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, Cache, PreTrainedModel

from ...generation.cache import CACHE_NAME
from ..base import DrafterModel
from ..checkpoint import Checkpoint
from ..target import Borrowed, OutputHead, text_config, unwrap
from .configuration import EagleConfig


class FirstLayer(nn.Module):
    """A decoder layer of transformers, rewired: it attends over something else than its residual.

    Version 1 attends over its input as it is, without a norm. Version 3 attends over [normed embedding; normed
    feature], twice as wide, and its residual is the feature.

    Args:
        layer (`nn.Module`): the decoder layer whose parts are taken over.
    """

    def __init__(self, layer: nn.Module, config: EagleConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.is_fusing = config.version == 3
        self.norm_before_residual = config.norm_before_residual
        if not self.is_fusing:
            return
        self.input_layernorm = layer.input_layernorm
        self.hidden_norm = type(layer.input_layernorm)(config.width, layer.input_layernorm.variance_epsilon)
        for name in ("q_proj", "k_proj", "v_proj"):
            given = getattr(self.self_attn, name)
            wide = nn.Linear(2 * config.width, given.out_features, bias=given.bias is not None)
            setattr(self.self_attn, name, wide)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        residual = hidden_states
        if self.is_fusing:
            embeddings, residual = hidden_states.chunk(2, dim=-1)
            normed = self.hidden_norm(residual)
            hidden_states = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
            residual = normed if self.norm_before_residual else residual
        states = residual + self.self_attn(hidden_states=hidden_states, **kwargs)[0]
        return states + self.mlp(self.post_attention_layernorm(states))


class EagleModel(DrafterModel):
    """A decoder layer (or several) on the target's hidden states; it guesses the state that comes next.

    At position t it reads the feature of token t and the embedding of token t + 1, and its output stands for token
    t + 2. Embedding and output head are the target's, and not stored, unless the config says that it has its own.
    """

    config_class = EagleConfig
    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.body = _body(config)
        norm = self.body.norm
        self.body.norm = nn.Identity()  # applied in `logits`: the next draft starts from the state before it
        self.norm = self.fc = self.fc_norm = self.input_norm = self.embed_tokens = self.lm_head = None
        if config.version == 1:
            self.norm = nn.Identity()
            self.fc = nn.Linear(2 * config.width, config.width, bias=config.fc_bias)
        else:
            self.norm = norm
            num_inputs = config.num_target_features * config.hidden_size
            if config.has_fc:
                self.fc = nn.Linear(num_inputs, config.width, bias=config.fc_bias)
            if config.norm_before_fc:
                self.input_norm = type(norm)(num_inputs, norm.variance_epsilon)
            if config.fc_norm:
                self.fc_norm = nn.ModuleList(
                    type(norm)(config.hidden_size, norm.variance_epsilon) for _ in range(config.num_target_features)
                )
        if config.has_own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        if config.has_own_output_head:
            self.lm_head = nn.Linear(config.width, config.draft_vocab_size or config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def for_target(
        cls,
        target: Any,
        version: int = 3,
        draft_token_ids: torch.LongTensor | None = None,
        num_layers: int = 1,
        intermediate_size: int | None = None,
        **fields: Any,
    ) -> EagleModel:
        """An untrained drafter. An output head of its own begins as a copy of the target's.

        Version 3 gets the norms of EAGLE-3.1 (`fc_norm`, `norm_output`) unless `fields` say otherwise: the outputs of a
        target's layers differ in size by orders of magnitude, and a state without a norm grows from draft to draft.

        Args:
            version (`int`): 1 or 3.
            draft_token_ids (`torch.LongTensor` of shape `(V_draft,)`, *optional*): the ids to propose; default all.
            num_layers, intermediate_size (`int`, *optional*): of the drafter; default one layer, MLPs as the target's.
            fields: of [`EagleConfig`], e.g. `target_layers`.

        Raises:
            ValueError: if an argument is not allowed, or the target has too few layers for the default of version 3.
        """
        layer_config = EagleConfig.layer_config_of(target, num_layers, intermediate_size)
        if version == 1:
            fields = {"num_target_features": 1} | fields
        else:
            layers = fields.get("target_layers") or list(default_layers(text_config(target).num_hidden_layers))
            has_norms = {"fc_norm": not fields.get("norm_before_fc", False), "norm_output": True}
            fields = has_norms | fields | {"target_layers": layers, "num_target_features": len(layers)}
        fields = {"version": version, "layer_config": layer_config} | fields
        model = cls._made(EagleConfig.fields_of_target(target) | fields, draft_token_ids)
        model.layers_of(target)
        if model.lm_head is not None:
            model.lm_head.weight.data.copy_(OutputHead(target, model.token_ids).rows())
        return model.to(device=target.device, dtype=target.dtype)

    @classmethod
    def convert(cls, checkpoint: Checkpoint) -> EagleModel | None:
        from .conversion import convert

        return convert(checkpoint)

    def check_target(self, target: Any) -> None:
        super().check_target(target)
        self.layers_of(target)

    def layers_of(self, target: Any) -> tuple[int, ...]:
        """The layers of the target whose outputs are the features, in the order in which they are fused.

        Raises:
            ValueError: if the target does not have one of them, or is too shallow for the reference's choice.
        """
        num_layers = text_config(target).num_hidden_layers
        if self.config.version == 1 or (self.config.target_layers is None and self.config.num_target_features == 1):
            return (num_layers - 1,)
        layers = self.config.target_layers
        if layers is None:
            if self.config.num_target_features != 3:
                raise ValueError(
                    f"the drafter fuses {self.config.num_target_features} layers of the target and its file does not "
                    "say which; set `drafter.config.target_layers`."
                )
            return default_layers(num_layers)
        num_features = self.config.num_target_features
        if not (isinstance(layers, (list, tuple)) and len(layers) == num_features):
            raise ValueError(f"`target_layers` is {layers!r}; the drafter fuses {num_features} layers, give so many.")
        if not all(isinstance(layer, int) and 0 <= layer < num_layers for layer in layers):
            raise ValueError(
                f"the drafter reads the layers {layers} of its target, but {type(unwrap(target)).__name__} has the "
                f"layers 0 to {num_layers - 1}; take the drafter of this target."
            )
        if self.config.source_numbering is not None and num_layers - 1 in layers:
            raise ValueError(
                "the drafter reads the last layer's output before the target's final norm, which is not supported yet; "
                "take a drafter of another layer."
            )
        return tuple(layers)

    def embedding(self, target: Any) -> Borrowed:
        """What turns ids `(B, T)` into embeddings `(B, T, H)`, on the drafter's device: its own, or the target's."""
        layer = unwrap(target).get_input_embeddings() if self.embed_tokens is None else self.embed_tokens
        return Borrowed(layer, self.device, self.dtype)

    def output_head(self, target: Any) -> nn.Module | OutputHead:
        """What turns states `(..., H)` that have passed the final norm into logits `(..., V_draft)`."""
        return self.lm_head if self.lm_head is not None else OutputHead(target, self.token_ids)

    def fuse(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        """The feature `(B, T, H)` that the drafter reads, from the target's `(B, T, D)` in the order of `layers_of`."""
        features = [states.to(self.device, self.dtype) for states in features]
        if self.config.version == 1:
            return features[0]
        if self.fc_norm is not None:
            features = [norm(states) for norm, states in zip(self.fc_norm, features)]
        fused = torch.cat(features, dim=-1)
        if self.input_norm is not None:
            fused = self.input_norm(fused)
        return fused if self.fc is None else self.fc(fused)

    def forward(
        self,
        features: torch.Tensor,
        embeddings: torch.Tensor,
        position_ids: torch.LongTensor,
        attention_mask: torch.BoolTensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """The states that come next: features of the drafter's own.

        Args:
            features (`torch.Tensor` of shape `(B, T, H)`): from `fuse`, or what this method gave for the token before.
            embeddings (`torch.Tensor` of shape `(B, T, H)`): of the tokens that follow those of the features.
            position_ids (`torch.LongTensor` of shape `(B or 1, T)`): of the features' tokens.
            attention_mask (`torch.BoolTensor` of shape `(B or 1, 1, T, S)`, *optional*): True where a position sees
                another; default causal.
            cache ([`Cache`], *optional*): keys and values of the positions before.

        Returns: `torch.Tensor` of shape `(B, T, H)`.
        """
        inputs = torch.cat([embeddings, features], dim=-1)
        if self.config.version == 1:
            inputs = self.fc(inputs)
        states = self.body(
            inputs_embeds=inputs,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=cache is not None,
            **{CACHE_NAME: cache},
        ).last_hidden_state
        return self.norm(states) if self.config.norm_output else states

    def logits(self, states: torch.Tensor, output_head: nn.Module | OutputHead) -> torch.Tensor:
        """Logits `(..., V_draft)` of states `(..., H)` from `forward`."""
        return output_head(states if self.config.norm_output else self.norm(states))


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer, as the reference has them: the inputs of the blocks 2, n // 2 and n - 3.

    Raises:
        ValueError: if the target has fewer than 7 layers, where they would not be three in ascending order.
    """
    layers = 1, num_layers // 2 - 1, num_layers - 4
    if num_layers < 7:
        raise ValueError(
            f"the target has {num_layers} layers, and EAGLE-3's choice of a low, a middle and a high one needs 7; "
            f"say which to read, e.g. `target_layers={list(range(max(num_layers - 1, 1)))[:3]}`."
        )
    return layers


def _body(config: EagleConfig) -> PreTrainedModel:
    """The decoder layers, in place of whose embedding nothing is left."""
    fields = {"model_type": "llama"} | config.layer_config | {"vocab_size": 1}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        fields[name] = None
    layer_config = AutoConfig.for_model(**fields)
    body = AutoModel.from_config(layer_config, attn_implementation="sdpa")
    body.embed_tokens = None
    body.layers[0] = FirstLayer(body.layers[0], config)
    return body
