"""The keyword `assistant=` of `model.generate`."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from transformers import GenerationMixin

from .generation.generate import speculative_decoding

DRAFT_ARGUMENTS = [
    name
    for name, parameter in inspect.signature(speculative_decoding).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name != "tokenizer"
]


def install_keyword() -> None:
    """Adds `assistant=` to `generate` of every transformers model; without the keyword nothing changes. Idempotent."""
    if not hasattr(GenerationMixin.generate, "_takes_assistant"):
        GenerationMixin.generate = _with_assistant(GenerationMixin.generate)
        GenerationMixin._extract_generation_mode_kwargs = _with_streamer(
            GenerationMixin._extract_generation_mode_kwargs
        )


def _with_assistant(generate):
    @functools.wraps(generate)
    def wrapper(self, *args: Any, **kwargs: Any):
        has_other = kwargs.get("assistant_model") is not None
        if kwargs.get("assistant") is not None:
            if has_other:
                raise ValueError(
                    "`assistant` and `assistant_model` were both given; `assistant` takes draft models too."
                )
            kwargs.setdefault("custom_generate", speculative_decoding)
        elif "assistant" in kwargs:  # None: plain `generate`, whatever else was said of drafts
            for name in ("assistant",) if has_other else DRAFT_ARGUMENTS:
                kwargs.pop(name, None)
        return generate(self, *args, **kwargs)

    wrapper._takes_assistant = True
    return wrapper


def _with_streamer(extract):
    """transformers (5.18) hands a `custom_generate` callable neither streamer nor tokenizers; ours gets them."""

    @functools.wraps(extract)
    def wrapper(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer):
        names = ("tokenizer", "assistant_tokenizer")
        dropped = {"streamer": streamer, "synced_gpus": synced_gpus, **{name: kwargs.get(name) for name in names}}
        mode_kwargs = extract(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer)
        if custom_generate is speculative_decoding:
            mode_kwargs |= {name: value for name, value in dropped.items() if value is not None}
        return mode_kwargs

    return wrapper
