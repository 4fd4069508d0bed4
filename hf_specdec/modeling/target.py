"""The only code that reaches into a hub model: what drafters see of their target and what they share with it.

Shapes: B rows, T tokens, D hidden size of the target, V its vocabulary, V_draft the ids that a drafter can propose.
"""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..generation.target import selection

NUM_HASHED_VALUES = 256  # of each weight


def unwrap(target: Any) -> PreTrainedModel:
    """The causal model itself, without a PEFT wrapper around it (its adapters stay in)."""
    return target.get_base_model() if hasattr(target, "get_base_model") else target


def text_config(target: Any) -> Any:
    """The config of the target's decoder: `hidden_size`, `vocab_size`, `num_hidden_layers` and so on."""
    return unwrap(target).config.get_text_config(decoder=True)


def hidden_states(
    target: Any, input_ids: torch.LongTensor, attention_mask: torch.Tensor | None, layers: tuple[int, ...]
) -> dict[int, torch.Tensor]:
    """Outputs `(B, T, D)` of these layers, counted from zero; that of the last layer comes after the final norm.

    Args:
        input_ids, attention_mask (`torch.LongTensor` of shape `(B, T)`): the texts, padded.
    """
    options: dict[str, Any] = {"output_hidden_states": selection(layers), "use_cache": False}
    if "logits_to_keep" in inspect.signature(unwrap(target).forward).parameters:
        options["logits_to_keep"] = 1  # nobody reads the logits
    states = target(input_ids=input_ids, attention_mask=attention_mask, **options).hidden_states
    shift = len(states) - text_config(target).num_hidden_layers  # the embeddings may come first
    return {layer: states[layer + shift] for layer in layers}


def target_hash(target: Any) -> str:
    """Tells targets apart by name, shape and some values of every weight, PEFT adapters included.

    The values are rounded to bfloat16 first, so a checkpoint loaded in float32 and in bfloat16 has one hash. Loaded in
    float16, which lacks the smallest numbers, or quantised, it has another. Offloaded weights count with name and shape
    alone; settings without weights, such as a scaled rotary embedding, do not count.
    """
    digest = hashlib.sha256(str(text_config(target).hidden_size).encode())
    for name, weight in sorted(target.state_dict().items()):
        if not isinstance(weight, torch.Tensor):
            continue
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        if not weight.is_meta:
            values = weight.detach().reshape(-1)
            # The step is no power of two for the usual shapes: the values come from many columns.
            values = values[:: len(values) // NUM_HASHED_VALUES + 1]
            digest.update(values.to(torch.bfloat16).float().cpu().numpy().tobytes())
    return digest.hexdigest()


class OutputHead:
    """The target's output layer with what the model does to its logits, for all ids or for some.

    Args:
        target: a causal LM; nothing of it is changed or stored in a drafter.
        token_ids (`torch.LongTensor` of shape `(V_draft,)`, *optional*): the ids wanted; default all.

    Raises:
        ValueError: if the target has no output layer.
    """

    def __init__(self, target: Any, token_ids: torch.LongTensor | None = None) -> None:
        self.head = unwrap(target).get_output_embeddings()
        if self.head is None:
            raise ValueError(f"{type(unwrap(target)).__name__} has no output layer; the target must be a causal LM.")
        config = text_config(target)
        self.scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        self.softcap = getattr(config, "final_logit_softcapping", None)
        self.token_ids = token_ids
        self.weight = self.bias = None
        # Rows can be taken out of a plain layer only, not of a quantized, offloaded or adapted one.
        if token_ids is not None and type(self.head) is nn.Linear and self.head.weight.device.type != "meta":
            index = token_ids.to(self.head.weight.device)
            self.weight = self.head.weight.detach()[index]
            self.bias = None if self.head.bias is None else self.head.bias.detach()[index]

    def rows(self) -> torch.Tensor:
        """The layer's weight `(V or V_draft, D)` for the ids wanted, a copy.

        Raises:
            ValueError: if the layer is quantized, adapted or offloaded.
        """
        if self.weight is not None:
            return self.weight
        if type(self.head) is not nn.Linear or self.head.weight.device.type == "meta":
            raise ValueError(
                f"the target's output layer is a {type(self.head).__name__} on {self.head.weight.device}; its weight "
                "cannot be copied. Load the target unquantized on one device, or share its output layer."
            )
        return self.head.weight.detach().clone()

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Logits `(..., V or V_draft)` of hidden states `(..., D)` that have passed the final norm."""
        if self.weight is not None:
            logits = nn.functional.linear(states.to(self.weight), self.weight, self.bias)
        else:
            weight = getattr(self.head, "weight", None)
            on_meta = weight is None or weight.device.type == "meta"
            logits = self.head(states if on_meta or not weight.is_floating_point() else states.to(weight))
            if self.token_ids is not None:
                logits = logits[..., self.token_ids.to(logits.device)]
        logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class Borrowed(nn.Module):
    """A layer of the target, for callers on another device or in another dtype.

    Args:
        layer (`nn.Module`): an embedding or an output layer; not changed.
        device, dtype: of what the caller gets.
        token_ids (`torch.LongTensor` of shape `(V_draft,)`, *optional*): the columns of the output wanted; default all.
    """

    def __init__(
        self, layer: nn.Module, device: torch.device, dtype: torch.dtype, token_ids: torch.LongTensor | None = None
    ) -> None:
        super().__init__()
        self.layer = layer
        self.device, self.dtype = device, dtype
        self.token_ids = token_ids

    @property
    def weight(self) -> torch.Tensor:
        return self.layer.weight

    @property
    def out_features(self) -> int:
        return self.layer.out_features if self.token_ids is None else len(self.token_ids)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if weight.device.type != "meta":
            is_cast = inputs.is_floating_point() and weight.is_floating_point()
            inputs = inputs.to(weight.device, weight.dtype if is_cast else None)
        outputs = self.layer(inputs)
        if self.token_ids is not None:
            outputs = outputs[..., self.token_ids.to(outputs.device)]
        return outputs.to(self.device, self.dtype)
