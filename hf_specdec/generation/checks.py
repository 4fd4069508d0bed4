"""What a call must fulfil before decoding starts; each error names the fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from .cache import CACHE_NAME, SUPPORTED_LAYERS

# Of all layers in transformers, these read several tokens at once in another way than one by one.
NOT_TOKENWISE = {
    "DogeCDMoE": "its router mixes the tokens of a pass",
    "ProphetNetDecoder": "it reads one token a pass",
}
# The same for settings of a config.
NOT_TOKENWISE_SETTINGS = {
    ("recurrent_kv_cache_mode", "last_loop"): "earlier loops see what the last loop made of the tokens before",
}


def check_call(
    model: PreTrainedModel,
    assistant: Any,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    synced_gpus: bool,
) -> None:
    """Raises `ValueError` for what the decoding loop does not support."""
    name = type(model).__name__
    if assistant is None:
        raise ValueError("`assistant` is missing: give a draft model, a name such as 'prompt_lookup', or a generator.")
    check_decoder_only(model, "target")
    if generation_config.num_beams not in (None, 1):
        raise ValueError(
            f"`num_beams` is {generation_config.num_beams}; speculative decoding works with greedy decoding and "
            "sampling. Set `num_beams=1`, or leave out `assistant`."
        )
    for option in ("penalty_alpha", "dola_layers", "constraints", "force_words_ids"):
        if getattr(generation_config, option, None):
            raise ValueError(f"`{option}` selects another decoding method; leave it out, or leave out `assistant`.")
    if generation_config.use_cache is False:
        raise ValueError("`use_cache` is False; speculative decoding needs the cache. Leave `use_cache` out.")
    cache = model_kwargs.get(CACHE_NAME)
    implementation = generation_config.cache_implementation
    if implementation not in (None, "dynamic", "dynamic_full"):
        raise ValueError(
            f"`cache_implementation` is {implementation!r}; speculative decoding preallocates a cache of its own. "
            "Leave it out, or leave out `assistant`."
        )
    if cache is not None and (type(cache) is not DynamicCache or cache.offloading):
        kind = f"{'offloaded ' if getattr(cache, 'offloading', False) else ''}{type(cache).__name__}"
        raise ValueError(
            f"`{CACHE_NAME}` is a {kind}; speculative decoding continues from a DynamicCache. Pass "
            "one (`DynamicCache(config=model.config)`), or leave it out."
        )
    if synced_gpus:
        raise ValueError(
            "`synced_gpus` (FSDP, DeepSpeed ZeRO-3) is not supported: ranks would need different numbers of passes. "
            f"Gather {name}'s parameters before generating, or leave out `assistant`."
        )


def check_decoder_only(model: PreTrainedModel, role: str) -> None:
    """Raises `ValueError` unless the model is a decoder whose state is keys and values."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"the {role} {name} is an encoder-decoder model; only decoder-only models are supported so far."
        )
    if getattr(model, "_is_stateful", False) or not model._supports_default_dynamic_cache():
        other_state = {"a recurrent or other state"}
    else:
        other_state = {type(layer) for layer in DynamicCache(config=model.config).layers} - set(SUPPORTED_LAYERS)
        other_state = {f"a {layer.__name__}" for layer in other_state}
    if other_state:
        raise ValueError(
            f"the {role} {name} keeps {', '.join(sorted(other_state))}, which cannot be rolled back when a draft is "
            "rejected; such models are not supported yet. Generate without `assistant=`."
        )
    reasons = [NOT_TOKENWISE[n] for n in {type(module).__name__ for module in model.modules()} if n in NOT_TOKENWISE]
    config = model.config.get_text_config(decoder=True)
    reasons += [why for (key, value), why in NOT_TOKENWISE_SETTINGS.items() if getattr(config, key, None) == value]
    if reasons:
        raise ValueError(
            f"the {role} {name} cannot read several draft tokens in one pass: {reasons[0]}. Generate without "
            "`assistant=`."
        )


def check_positions(model: PreTrainedModel, positions: list[int], num_columns: int, max_new_tokens: int) -> None:
    """Raises `ValueError` if reading several tokens in one pass would change what their positions mean.

    Args:
        positions: of each row's first new token.
        num_columns (`int`): tokens of the prompts, padding included.
    """
    name = type(model).__name__
    window = getattr(model.config.get_text_config(decoder=True), "keep_window_size", None)
    if window is not None and num_columns + max_new_tokens > window:
        raise ValueError(
            f"{name} picks which {window} tokens it attends to where a text is longer, and equal ranks fall "
            f"differently in a pass over several tokens; this text may reach {num_columns + max_new_tokens}. Generate "
            "fewer tokens, or without `assistant=`."
        )
    end = max(positions) + max_new_tokens - 1  # the last token emitted is never read
    for kind, limit in changing_rope(model):
        if end > limit and not (kind == "longrope" and min(positions) > limit):
            raise ValueError(
                f"{name} changes its rotary embedding ({kind!r}) when a text grows beyond {limit} tokens, and this one "
                f"may reach {end}: a pass over several tokens would mix both. Generate fewer tokens, or without "
                "`assistant=`."
            )


def changing_rope(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Rotary embeddings that depend on the longest position of a pass: their type, and the last length before."""
    for module in model.modules():
        rope_types = vars(module).get("rope_type")
        if not isinstance(rope_types, dict):
            rope_types = {None: rope_types}
        for layer_type, rope_type in rope_types.items():
            if rope_type == "longrope":
                parameters = module.config.rope_parameters
                parameters = parameters if layer_type is None else parameters[layer_type]
                yield rope_type, parameters["original_max_position_embeddings"]
            elif rope_type is not None and "dynamic" in rope_type:
                yield rope_type, module.original_max_seq_len
