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

from ..registry import METHODS
from .candidates import CandidateGenerator
from .draft_model import DraftModel

if TYPE_CHECKING:
    from .run import Run

# Draft models loaded by name, as long as their target lives; nothing is attached to the target itself.
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
        if str(assistant) in METHODS:
            return METHODS[str(assistant)]()
        model = load_draft_model(str(assistant), run.target, run.device)
        if run.settings.tokenizer is not None and run.settings.assistant_tokenizer is None:
            with suppress(OSError, ValueError):  # it brings none, so it is taken to be one for the target's
                run.settings.assistant_tokenizer = AutoTokenizer.from_pretrained(str(assistant))
        return DraftModel(model)
    if isinstance(assistant, nn.Module) and hasattr(assistant, "generate"):
        return DraftModel(assistant)
    if isinstance(assistant, type) and issubclass(assistant, CandidateGenerator):
        raise ValueError(
            f"`assistant` got the class {assistant.__name__}; pass an object of it: {assistant.__name__}()."
        )
    raise ValueError(
        f"`assistant` got a {type(assistant).__name__}; it takes a causal language model, a Hub id or local folder, "
        f"one of {', '.join(map(repr, METHODS))}, or a CandidateGenerator."
    )


def load_draft_model(name: str, target: PreTrainedModel, fallback_device: torch.device) -> PreTrainedModel:
    """Loads a causal LM by Hub id or folder onto the target's device and in its dtype; safetensors only.

    The weights of an offloaded target are on no device, so its drafter goes to `fallback_device`.

    Raises:
        OSError: if it is not there, or only partly.
    """
    models = _loaded.setdefault(target, {})
    if name not in models:
        try:
            model, loading = AutoModelForCausalLM.from_pretrained(
                name, dtype=target.dtype, use_safetensors=True, output_loading_info=True
            )
        except SafetensorError as error:
            raise OSError(
                f"the weights of {name!r} are incomplete or damaged ({error}); delete the file and download it again."
            ) from error
        except OSError as error:
            close = difflib.get_close_matches(name, METHODS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise OSError(
                f"`assistant` got {name!r}, which is neither one of {', '.join(map(repr, METHODS))} nor a model that "
                f"can be loaded.{hint} {error}"
            ) from error
        if loading["missing_keys"]:  # transformers fills them with random numbers
            raise OSError(
                f"the checkpoint {name!r} lacks {', '.join(sorted(loading['missing_keys']))}; download it again, or "
                "take another drafter."
            )
        device = target.get_input_embeddings().weight.device
        models[name] = model.to(fallback_device if device.type == "meta" else device).eval()
    return models[name]
