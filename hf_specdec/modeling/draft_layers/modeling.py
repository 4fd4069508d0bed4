"""Draft layers: what they own, and the causal LM they make with the embedding and the output head of a target.

Shapes: B rows, T tokens, D hidden size of the target, V its vocabulary, V_draft the ids that the layers can propose.
"""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ...generation.attention import decoder_model
from ..base import DrafterModel
from ..target import Borrowed, OutputHead, text_config, unwrap
from .configuration import DraftLayersConfig

SHARED = ("model.embed_tokens.", "lm_head.")  # of a causal LM: what the target lends
OWN = ("model.layers.", "model.norm.")
CUT = ("gate_proj", "up_proj", "down_proj")  # linear layers that `intermediate_size` makes smaller

# For each drafter and each target's output layer: what the copied rows were copied from, and a layer of these rows.
_heads: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, tuple[tuple, nn.Linear]]] = WeakKeyDictionary()


class DraftLayersModel(DrafterModel):
    """The layers and the final norm; embedding and output head stay the target's and are never stored.

    With `draft_token_ids` only these rows of the output head are computed: on a CPU the head of a large vocabulary
    costs more than the layers.
    """

    config_class = DraftLayersConfig
    config: DraftLayersConfig

    def __init__(self, config: DraftLayersConfig) -> None:
        super().__init__(config)
        self.body = _body(config.layer_config)
        self.post_init()

    @classmethod
    def for_target(
        cls,
        target: Any,
        num_layers: int = 1,
        intermediate_size: int | None = None,
        draft_token_ids: torch.LongTensor | None = None,
        layers: list[int] | None = None,
    ) -> DraftLayersModel:
        """Untrained layers: copies of the target's own, with its final norm. They draft poorly until trained.

        Args:
            num_layers (`int`): copies this many of the target's layers, evenly spread from the first to the last; one
                is the first.
            intermediate_size (`int`, *optional*): width of the MLPs, of which the first rows are copied; default the
                target's.
            draft_token_ids (`torch.LongTensor` of shape `(V_draft,)`, *optional*): the ids to propose; default all.
            layers (`list[int]`, *optional*): the layers to copy, counted from zero, instead of `num_layers`.

        Raises:
            ValueError: if an argument is out of its range, the architecture is none of Llama's kind, or the target's
                layers are quantized, adapted or offloaded.
        """
        config = text_config(target)
        chosen = _chosen_layers(config.num_hidden_layers, num_layers, layers)
        widest = getattr(config, "intermediate_size", None)
        if intermediate_size is not None and not (isinstance(widest, int) and 1 <= intermediate_size <= widest):
            raise ValueError(
                f"`intermediate_size` is {intermediate_size}; expected 1 to {widest}, the target's, or None."
            )
        fields = DraftLayersConfig.fields_of_target(target)
        fields["layer_config"] = DraftLayersConfig.layer_config_of(target, chosen, intermediate_size)
        model = cls._made(fields, draft_token_ids)
        source, own = decoder_model(unwrap(target)), model.body.model
        if not hasattr(source, "layers") or not hasattr(source, "norm"):
            raise _unsupported(type(unwrap(target)).__name__, "its decoder has no `layers` and `norm`")
        for layer, index in zip(own.layers, chosen):
            _copy(source.layers[index], layer)
        _copy(source.norm, own.norm)
        return model.to(device=target.device, dtype=target.dtype)

    def causal_lm(self, target: Any) -> PreTrainedModel:
        """A causal LM of the target's architecture: its embedding, these layers, its output head.

        It is a view: it owns no weight but the rows of the head for `token_ids`, which are copied once for a target.
        Nothing is attached to the target. Layers on another device or in another dtype than the target's are fine.

        Returns: [`PreTrainedModel`] with logits `(B, T, V_draft)`.
        Raises: `ValueError` if the layers were made for a target of another shape.
        """
        causal_lm = _view(self.body)
        causal_lm._modules |= {"model": self._decoder(target), "lm_head": self._head(target)}
        return causal_lm

    def _decoder(self, target: Any) -> PreTrainedModel:
        self.check_target(target)
        decoder = _view(self.body.model)
        embedding = unwrap(target).get_input_embeddings()
        decoder._modules["embed_tokens"] = Borrowed(embedding, self.device, self.dtype)
        return decoder

    def _head(self, target: Any) -> nn.Module:
        head, ids = unwrap(target).get_output_embeddings(), self.token_ids
        # Rows can be taken out of a plain layer only, not of a quantized, offloaded or adapted one.
        if ids is None or type(head) is not nn.Linear or head.weight.device.type == "meta":
            return Borrowed(head, self.device, self.dtype, ids)
        state = (*_state(head.weight), *_state(ids), self.device, self.dtype)
        heads = _heads.setdefault(self, WeakKeyDictionary())
        if head not in heads or heads[head][0] != state:
            with torch.inference_mode(False):  # else the rows would be of no use outside of it
                heads[head] = state, _linear(OutputHead(target, ids)).to(self.device, self.dtype)
        return heads[head][1]

    def forward(self, target: Any, input_ids: torch.LongTensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """States `(B, T, D)` after the final norm, of texts padded on the right.

        Args:
            target: the causal LM whose embedding reads the ids.
            input_ids, attention_mask (`torch.LongTensor` of shape `(B, T)`): the texts.
        """
        decoder = self._decoder(target)
        return decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state


def _body(layer_config: dict[str, Any]) -> PreTrainedModel:
    """A causal LM of these layers, in place of whose embedding and output head nothing is left."""
    name = layer_config.get("model_type")
    try:
        body = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{"model_type": None} | layer_config))
    except ValueError as error:
        raise _unsupported(name, f"transformers has no causal LM for it: {error}") from error
    others = [name for name, _ in body.named_parameters() if not name.startswith(SHARED + OWN)]
    if others or not all(hasattr(getattr(body, "model", None), part) for part in ("embed_tokens", "layers", "norm")):
        raise _unsupported(name, f"it has other weights, such as {others[0]}" if others else "it has other parts")
    body.model.embed_tokens = body.lm_head = None
    return body


def _unsupported(name: str | None, why: str) -> ValueError:
    return ValueError(
        f"draft layers cannot be made of the architecture {name!r}: {why}. Expected decoder layers at `model.layers` "
        "and a norm at `model.norm` (Llama, Qwen, Mistral, Gemma and the like); distil a small causal LM instead."
    )


def _view(module: PreTrainedModel) -> PreTrainedModel:
    """A second module with the same weights, whose submodules can be replaced."""
    view = copy.copy(module)
    view._modules = dict(module._modules)
    return view


def _linear(rows: OutputHead) -> nn.Linear:
    layer = nn.Linear(*reversed(rows.weight.shape), bias=rows.bias is not None, device="meta")
    layer.weight = nn.Parameter(rows.weight, requires_grad=False)
    if rows.bias is not None:
        layer.bias = nn.Parameter(rows.bias, requires_grad=False)
    return layer


def _state(tensor: torch.Tensor) -> tuple:
    """Changes when the values or their place do."""
    return tensor.data_ptr(), None if tensor.is_inference() else tensor._version, tensor.device, tensor.dtype


def _chosen_layers(num_target_layers: int, num_layers: int, layers: list[int] | None) -> list[int]:
    if layers is not None:
        if not layers or not all(0 <= layer < num_target_layers for layer in layers):
            raise ValueError(
                f"`layers` is {layers}; expected at least one of 0 to {num_target_layers - 1}, the target's."
            )
        return list(layers)
    if not 1 <= num_layers <= num_target_layers:
        raise ValueError(f"`num_layers` is {num_layers}; expected 1 to {num_target_layers}, the layers of the target.")
    return [round(i * (num_target_layers - 1) / max(num_layers - 1, 1)) for i in range(num_layers)]


@torch.no_grad()
def _copy(source: nn.Module, own: nn.Module) -> None:
    """Copies the weights of one module of the target, the first rows and columns where an MLP is narrower.

    Raises:
        ValueError: if they are of another form.
    """
    given, wanted = source.state_dict(), own.state_dict()
    odd = given.keys() ^ wanted.keys()
    odd |= {name for name, value in given.items() if not value.is_floating_point() or value.is_meta}
    if odd:
        raise ValueError(
            f"a {type(source).__name__} of the target cannot be copied because of {', '.join(sorted(odd))}: it is "
            "quantized, adapted, offloaded, or of another kind than the first layers. Load the target unquantized on "
            "one device, without adapters, or choose other `layers`."
        )
    for name, weight in wanted.items():
        if given[name].shape != weight.shape and not set(CUT) & set(name.split(".")):
            raise ValueError(
                f"`intermediate_size` cannot make a {type(source).__name__} smaller: its {name} is "
                f"{tuple(given[name].shape)}. Leave it out."
            )
        weight.copy_(given[name][tuple(slice(size) for size in weight.shape)])
