"""What a call must fulfil before decoding starts; each error names the fix."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache, GenerationConfig, PreTrainedModel


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
    cache = model_kwargs.get("past_key_values")
    implementation = generation_config.cache_implementation
    if implementation not in (None, "dynamic", "dynamic_full"):
        raise ValueError(
            f"`cache_implementation` is {implementation!r}; speculative decoding preallocates a cache of its own. "
            "Leave it out, or leave out `assistant`."
        )
    if cache is not None and type(cache) is not DynamicCache:
        raise ValueError(
            f"`past_key_values` is a {type(cache).__name__}; speculative decoding continues from a DynamicCache. Pass "
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
        raise ValueError(
            f"the {role} {name} keeps a recurrent or other state that cannot be rolled back when a draft is rejected; "
            "such models are not supported yet. Generate without `assistant=`."
        )
