"""What `assistant=` may be."""

from __future__ import annotations

import copy
import difflib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ..modeling.auto import load, place_beside
from ..modeling.base import DrafterModel
from ..modeling.checkpoint import Checkpoint
from ..registry import METHODS, names_without_weights
from .candidates import CandidateGenerator
from .draft_model import DraftModel

if TYPE_CHECKING:
    from .run import Run

# Drafters loaded by name, as long as their target lives; nothing is attached to the target itself.
_loaded: WeakKeyDictionary[PreTrainedModel, dict[str, PreTrainedModel]] = WeakKeyDictionary()


def as_candidate_generator(assistant: Any, run: Run) -> CandidateGenerator:
    """The generator for one call: a copy of the user's, or one made for the model or the name given.

    Raises:
        ValueError: for anything else.
        OSError: if a name is neither a method, nor a folder, nor a model that can be loaded.
    """
    if isinstance(assistant, CandidateGenerator):
        return copy.copy(assistant)
    if isinstance(assistant, (str, Path)):
        if str(assistant) in names_without_weights():
            return METHODS[str(assistant)].candidates()
        model = load_by_name(str(assistant), run.target, run.device)
        if isinstance(model, DrafterModel):
            return generator_of(model)
        if run.settings.tokenizer is not None and run.settings.assistant_tokenizer is None:
            with suppress(OSError, ValueError):  # it brings none, so it is taken to be one for the target's
                run.settings.assistant_tokenizer = AutoTokenizer.from_pretrained(str(assistant))
        return DraftModel(model)
    if isinstance(assistant, DrafterModel):
        return generator_of(assistant)
    if isinstance(assistant, nn.Module) and hasattr(assistant, "generate"):
        return DraftModel(assistant)
    if isinstance(assistant, type) and issubclass(assistant, CandidateGenerator):
        raise ValueError(
            f"`assistant` got the class {assistant.__name__}; pass an object of it: {assistant.__name__}()."
        )
    raise ValueError(
        f"`assistant` got a {type(assistant).__name__}; it takes a causal language model, a drafter, a Hub id or local "
        f"folder, one of {', '.join(map(repr, names_without_weights()))}, or a CandidateGenerator."
    )


def generator_of(model: DrafterModel) -> CandidateGenerator:
    """The generator of the method that a drafter belongs to."""
    for method in METHODS.values():
        if method.drafter is not None and isinstance(model, method.drafter):
            return method.candidates(model)
    raise ValueError(
        f"`assistant` got a {type(model).__name__}, which no method knows; call `register_method(name, candidates, "
        f"{type(model).__name__})` first."
    )


def load_by_name(name: str, target: PreTrainedModel, fallback_device: torch.device) -> PreTrainedModel:
    """Loads a drafter or a causal LM by Hub id or folder beside the target, in its dtype; safetensors only.

    The weights of an offloaded target are on no device, so its drafter goes to `fallback_device`.

    Raises:
        OSError: if it is not there, or only partly.
    """
    models = _loaded.setdefault(target, {})
    if name not in models:
        if name in METHODS and not Path(name).is_dir():
            raise ValueError(
                f"`assistant` got {name!r}, a method that has weights; give the Hub id or folder of a drafter trained "
                "for this target, or the loaded drafter."
            )
        try:
            drafter = load(Checkpoint(name))
            if drafter is not None:
                drafter.check_target(target)  # before it is kept
                place_beside(drafter.to(fallback_device), target)
                return models.setdefault(name, drafter.eval())
            model, loading = AutoModelForCausalLM.from_pretrained(
                name, dtype=target.dtype, use_safetensors=True, output_loading_info=True
            )
        except SafetensorError as error:
            raise OSError(
                f"the weights of {name!r} are incomplete or damaged ({error}); delete the file and download it again."
            ) from error
        except OSError as error:
            close = difflib.get_close_matches(name, names_without_weights(), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            known = ", ".join(map(repr, names_without_weights()))
            raise OSError(
                f"`assistant` got {name!r}, which is neither one of {known} nor a model that can be loaded.{hint} "
                f"{error}"
            ) from error
        if loading["missing_keys"]:  # transformers fills them with random numbers
            raise OSError(
                f"the checkpoint {name!r} lacks {', '.join(sorted(loading['missing_keys']))}; download it again, or "
                "take another drafter."
            )
        device = target.get_input_embeddings().weight.device
        models[name] = model.to(fallback_device if device.type == "meta" else device).eval()
    return models[name]
