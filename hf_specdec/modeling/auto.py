"""`AutoDrafter`: finds the method that a checkpoint belongs to and loads it."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError

from ..registry import METHODS
from .base import DrafterModel
from .checkpoint import Checkpoint


class AutoDrafter:
    """Loads drafters: ours, and those published by other projects, in the format they are in."""

    def __init__(self) -> None:
        raise OSError("AutoDrafter is not made itself; call `AutoDrafter.from_pretrained(name, target=model)`.")

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str,
        target: Any = None,
        *,
        dtype: torch.dtype | str | None = None,
        use_safetensors: bool | None = None,
        **hub_options: Any,
    ) -> DrafterModel:
        """A drafter in evaluation mode.

        Args:
            pretrained_model_name_or_path (`str`): a folder or a Hub id.
            target ([`PreTrainedModel`], *optional*): checks that the drafter fits, and puts it into the target's dtype
                and onto the device of its output head.
            dtype (`torch.dtype` or `str`, *optional*): default the target's; without a target, that of the file.
            use_safetensors (`bool`, *optional*): `False` also reads legacy pickle files (tensors only).
            hub_options: `revision`, `token`, `cache_dir`, `subfolder`, `local_files_only`, `force_download`, `proxies`.

        Raises:
            ValueError: if no method knows the format, a tensor is missing or left over, it fits another target, or
                `target` or `dtype` is none.
            OSError: if it is not there, only partly there, or in a pickle file that was not asked for.
            TypeError: for another option.
        """
        if target is not None and not hasattr(target, "get_output_embeddings"):
            raise ValueError(f"`target` got a {type(target).__name__}; pass the loaded causal LM, or None.")
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype, dtype)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"`dtype` is {dtype!r}; expected a floating-point torch.dtype or its name such as 'bfloat16', or None "
                "for the target's or the file's."
            )
        checkpoint = Checkpoint(pretrained_model_name_or_path, use_safetensors, **hub_options)
        if not checkpoint.config:
            raise OSError(f"{checkpoint.name!r} has no config.json; download it again, or take another checkpoint.")
        drafter = load(checkpoint)
        if drafter is None and checkpoint.weights is None:
            raise OSError(f"{checkpoint.name!r} has no weights; download it again, or take another checkpoint.")
        if drafter is None:
            raise ValueError(
                f"{checkpoint.name!r} (model_type {checkpoint.config.get('model_type')!r}, architectures "
                f"{checkpoint.config.get('architectures')}) is in the format of no drafter known here: "
                f"{', '.join(name for name, method in METHODS.items() if method.drafter)}. A causal language model is "
                "loaded with AutoModelForCausalLM."
            )
        if target is not None:
            drafter.check_target(target)
            place_beside(drafter, target)
        if dtype is not None:
            drafter.to(dtype)
        return drafter.eval()


def load(checkpoint: Checkpoint) -> DrafterModel | None:
    """The drafter in a checkpoint; `None` if it is none that is known."""
    if not checkpoint.config:
        return None
    drafters = [method.drafter for method in METHODS.values() if method.drafter is not None]
    for drafter in drafters:
        if checkpoint.config.get("model_type") == drafter.config_class.model_type:
            return _load_ours(drafter, checkpoint)
    converted = (drafter.convert(checkpoint) for drafter in drafters)
    return next((drafter for drafter in converted if drafter is not None), None)


def _load_ours(drafter: type[DrafterModel], checkpoint: Checkpoint) -> DrafterModel:
    try:
        model, loading = drafter.from_pretrained(
            checkpoint.name, dtype="auto", use_safetensors=True, output_loading_info=True, **checkpoint.hub_options
        )
    except (SafetensorError, FileNotFoundError) as error:
        raise OSError(
            f"the weights of {checkpoint.name!r} are incomplete or damaged ({error}); download it again."
        ) from error
    missing, left_over = (sorted(loading[keys]) for keys in ("missing_keys", "unexpected_keys"))
    if missing or left_over:  # transformers only warns, and fills what is missing with random numbers
        raise ValueError(
            f"{checkpoint.name!r} does not hold the tensors that its config.json speaks of: missing "
            f"{', '.join(missing) or 'none'}; left over {', '.join(left_over) or 'none'}. Download it again."
        )
    return model


def place_beside(drafter: DrafterModel, target: Any) -> None:
    """Moves the drafter to where the target computes its logits, in the target's dtype."""
    head = target.get_output_embeddings()
    weight = None if head is None else getattr(head, "weight", None)
    if weight is not None and weight.device.type != "meta":
        drafter.to(weight.device)
    drafter.to(target.dtype)
