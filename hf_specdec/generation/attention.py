"""Explicit attention masks for ragged rows and trees, in the form that each attention implementation wants.

Shapes: B rows, T tokens of the pass, S slots of the cache (up to the longest row).
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from .cache import WritePlan
from .tree import CandidateTree

logger = logging.get_logger(__name__)

WINDOW_BUILDERS = ("create_sliding_window_causal_mask", "create_chunked_causal_mask", "create_masks_for_generate")
MASK_BUILDERS = ("create_causal_mask", *WINDOW_BUILDERS)
EXPLICIT_MASK_IMPLEMENTATIONS = ("sdpa", "eager")


def attention_kinds(model: PreTrainedModel) -> dict[str, int | None]:
    """Kinds of attention layers in the model, each with its window or chunk in tokens (`None`: unlimited)."""
    config = model.config.get_text_config(decoder=True)
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    types = getattr(config, "layer_types", None)
    if types is None:  # as transformers' caches: one window for every layer
        types = ["sliding_attention" if window else "chunked_attention" if chunk else "full_attention"]
    sizes = {"full_attention": None, "sliding_attention": window, "chunked_attention": chunk}
    return {kind: sizes.get(kind, -1) for kind in types}


def why_no_explicit_mask(model: PreTrainedModel) -> str | None:
    """Why this model cannot be given a 4D mask and position ids, or `None` if it can."""
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    module = decoder_module(model)
    if getattr(config, "alibi", False) or (hasattr(module, "build_alibi_tensor") and not hasattr(config, "alibi")):
        return f"{name} computes ALiBi biases from a 2D mask"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{name} takes no position_ids"
    if not any(hasattr(module, builder) for builder in MASK_BUILDERS):
        return f"{name} does not build its masks with transformers.masking_utils"
    if any(is_window_table(buffer) for buffer in model.buffers()):
        return f"{name} applies its attention window by the place of a token in the cache"
    unknown = [kind for kind, size in attention_kinds(model).items() if size == -1]
    if unknown:
        return f"{name} has layers of kind {', '.join(unknown)}"
    return None


def why_not_own_mask(model: PreTrainedModel) -> str | None:
    """Why several tokens in one pass would see more than one by one if the model makes its own mask, or `None`.

    The tokens of a chain in a level batch usually see the same either way, and then need no explicit mask.
    """
    config = model.config.get_text_config(decoder=True)
    both_ways = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    if both_ways or getattr(config, "is_causal", True) is False:
        return "attends in both directions"
    has_window = any(size not in (None, -1) for size in attention_kinds(model).values())
    module = decoder_module(model)
    if has_window and not any(hasattr(module, builder) for builder in WINDOW_BUILDERS):
        return "limits its attention window by what the cache forgets"
    return None


def slot_limit(model: PreTrainedModel) -> float:
    """Length of the cache up to which a token's place in it may differ from its position in plain `generate`."""
    config = model.config.get_text_config(decoder=True)
    scales_by_place = getattr(config, "attn_temperature_tuning", False) and hasattr(config, "floor_scale")
    return config.floor_scale - 1 if scales_by_place else math.inf


def decoder_model(model: PreTrainedModel) -> PreTrainedModel:
    """The decoder inside the model; the model itself where transformers finds none."""
    decoder = model.get_decoder()
    return decoder if isinstance(decoder, PreTrainedModel) else model


def decoder_module(model: PreTrainedModel) -> ModuleType:
    """The Python module that defines the model's decoder, and with it how masks are made."""
    return sys.modules[type(decoder_model(model)).__module__]


def is_window_table(buffer: torch.Tensor) -> bool:
    """Whether a buffer is a causal mask by slots whose last query does not see the first key."""
    is_mask = (
        buffer.ndim == 4 and buffer.dtype in (torch.bool, torch.uint8) and buffer.shape[-1] == buffer.shape[-2] > 1
    )
    return is_mask and buffer.device.type != "meta" and not buffer[0, 0, -1, 0]


def explicit_mask(
    model: PreTrainedModel, plan: WritePlan, tree: CandidateTree | None, device: torch.device
) -> torch.Tensor | dict[str, torch.Tensor]:
    """The 4D mask `(B, 1, T, S)` of a pass: each token sees its row's cached tokens, its ancestors and itself.

    Returns bool (True: may attend) for sdpa, additive floats for eager; a dict by kind where layers differ.
    """
    starts = torch.tensor(plan.starts, device=device)
    if tree is None:
        depths = torch.arange(plan.width, device=device)[None]
        block = (depths[0][:, None] >= depths[0][None, :])[None]
    else:
        depths, block = tree.visibility()
    slots = torch.arange(plan.end, device=device)
    num_rows = len(starts)
    visible = (slots < starts[:, None])[:, None].repeat(1, plan.width, 1)
    columns = plan.slots(device)[:, None].expand(-1, plan.width, -1)
    visible.scatter_(2, columns, block.expand(num_rows, -1, -1))
    queries = starts[:, None] + depths  # positions within the row; a tree's nodes lie at their depth, not their slot
    keys = slots.expand(num_rows, -1).scatter(1, plan.slots(device), queries.expand(num_rows, -1))
    masks = {}
    for kind, size in attention_kinds(model).items():
        mask = visible
        if kind == "sliding_attention" and size is not None:
            mask = visible & (queries[:, :, None] - keys[:, None, :] < size)
        elif kind == "chunked_attention":
            mask = visible & (queries[:, :, None] // size == keys[:, None, :] // size)
        masks[kind] = mask[:, None]
    if model.config.get_text_config(decoder=True)._attn_implementation == "eager":
        lowest = torch.finfo(model.dtype).min
        masks = {k: torch.zeros_like(m, dtype=model.dtype).masked_fill_(~m, lowest) for k, m in masks.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))


@contextmanager
def masked_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the decoder runs an attention implementation that takes explicit masks; afterwards its own again.

    Raises: `ValueError` if it cannot be switched.
    """
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    if before in EXPLICIT_MASK_IMPLEMENTATIONS:
        yield
        return
    name = type(model).__name__
    decoder = decoder_model(model)
    instead = "sdpa" if decoder._supports_sdpa else "eager"
    if not decoder._can_set_attn_implementation():
        raise ValueError(
            f"`attn_implementation={before!r}` takes no explicit masks, which batches and trees need, and {name} "
            f"cannot switch it. Load the model with `attn_implementation={instead!r}`, or generate one row at a time "
            "with a chain drafter."
        )
    logger.warning_once(
        f"`attn_implementation={before!r}` takes no explicit masks, which batches and trees need: "
        f"{name} runs {instead!r} during this call and {before!r} again afterwards."
    )
    config._attn_implementation_internal = instead  # of the decoder alone: an image encoder keeps its own
    try:
        yield
    finally:
        config._attn_implementation_internal = before
