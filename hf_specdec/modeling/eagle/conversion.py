"""EAGLE drafters in the formats of other projects, told apart by the names of their tensors.

Options are taken from the tensors where these tell, dimensions and rotary frequencies from the drafter's own config:
they may differ from the target's.
"""

from __future__ import annotations

import re
from itertools import count
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

from ..checkpoint import Checkpoint, account_for, drafter_of, parameter_shapes, refuse_other_dtypes
from .configuration import EagleConfig
from .modeling import EagleModel

logger = logging.get_logger(__name__)

EAGLE = "the EAGLE drafter"  # in messages
ARCHITECTURES = re.compile(r"eagle\w*forcausallm|forcausallmeagle|eagle3?(draftmodel|speculator)|eagle3model", re.I)
# What is not supported -> which names of tensors beside `fc`, architectures or settings speak of it.
RELATIVES = {
    "P-EAGLE (drafts in parallel)": r"^mask_hidden$|^PEagle|^parallel_drafting$",
    "EAGLE-4": r"^efficient_lm_head|Eagle4$",
    "EAGLE with MLA": r"^(midlayer|layers\.0)\.self_attn\.(q|kv)_a_|Eagle\w*Deepseek|Deepseek\w*Eagle",
    "EAGLE with parallel heads (ModelOpt)": r"^parallel_draft_heads\.",
    "DSpark": r"^(markov_head\.)?markov_w|^DSparkDraftModel$|^dspark$",
    "Domino": r"^prefix_gru\.|^DominoDraftModel$|^domino$",
    "XPress": r"^(refiner|xpress)_head\.|XPress",
}
# What a DFlash drafter or an MTP module has beside `fc`.
OTHERS = {"hidden_norm.weight", "pre_fc_norm_embedding.weight", "enorm.weight", "hnorm.weight"}
LAYER = "body.layers.0."
PREFIXES = {"midlayer.": LAYER, "layers.": "body.layers."}
REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "hidden_act", "rms_norm_eps")


def convert(checkpoint: Checkpoint) -> EagleModel | None:
    """The drafter of a checkpoint, in the dtype of the file; `None` if it is no EAGLE.

    A pickle file is opened only if the config speaks of EAGLE, of a draft vocabulary, or of one layer alone: the config
    of an EAGLE-1 says no more than that.

    Raises:
        ValueError: if it is of a kind that is not supported, a number is missing in its config or contradicts its
            tensors, or a tensor is missing, left over, of the wrong shape or quantized.
        OSError: if the weights are not there, damaged, or in a pickle file that was not asked for.
    """
    config = checkpoint.config
    architectures = config.get("architectures") or []
    says_eagle = bool(config.get("eagle_config")) or any(map(ARCHITECTURES.search, architectures))
    may_be_eagle = says_eagle or config.get("draft_vocab_size") is not None or config.get("num_hidden_layers") == 1
    if not says_eagle and (checkpoint.weights is None or (checkpoint.is_one_pickle and not may_be_eagle)):
        return None
    names = {name.removeprefix("model.") for name in checkpoint.tensor_names}
    _refuse_relatives(checkpoint, names)
    is_version_3 = "layers.0.hidden_norm.weight" in names or any(name.startswith("midlayer.") for name in names)
    is_version_1 = {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names and names.isdisjoint(OTHERS)
    if is_version_3 or is_version_1:
        return _load(checkpoint)
    if not says_eagle:
        return None
    raise ValueError(
        f"{checkpoint.name!r} should hold an EAGLE drafter, but {checkpoint.weights.name} has no tensor named like one "
        "of midlayer.*, layers.0.hidden_norm.weight, or fc.weight beside layers.0.self_attn.q_proj.weight; download it "
        "again, or take another checkpoint."
    )


def _refuse_relatives(checkpoint: Checkpoint, names: set[str]) -> None:
    config, dflash = checkpoint.config, checkpoint.config.get("dflash_config") or {}
    signs = sorted(names) if "fc.weight" in names else []
    signs += [*(config.get("architectures") or ()), dflash.get("projector_type") or ""]
    signs += ["parallel_drafting"] * bool(config.get("parallel_drafting"))
    for relative, pattern in RELATIVES.items():
        sign = next((sign for sign in signs if re.search(pattern, sign, re.I)), None)
        if sign is not None:
            raise ValueError(
                f"{checkpoint.name!r} is {relative}, as {sign!r} tells, which is not supported yet; take an EAGLE-3 or "
                "EAGLE-2 drafter of this target, or train one."
            )


def _load(checkpoint: Checkpoint) -> EagleModel:
    # The dimensions may lie in a dict of their own.
    config = checkpoint.config | (checkpoint.config.get("transformer_layer_config") or {})
    lacking = [key for key in REQUIRED if config.get(key) is None]
    if lacking:
        raise ValueError(
            f"the config.json of {checkpoint.name!r} lacks {', '.join(lacking)} of {EAGLE}; take the complete "
            "checkpoint, or add what its publisher says."
        )
    published = _own_names(checkpoint)
    account_for(checkpoint, EAGLE, _file_names({f"{LAYER}self_attn.q_proj.weight"} - set(published), published), ())
    stored = checkpoint.tensors(list(published.values()))
    tensors = {own: stored[name] for own, name in published.items()}
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    refuse_other_dtypes(checkpoint, EAGLE, {published[own]: tensor for own, tensor in tensors.items()})
    vocab_size, ids = _vocabulary(checkpoint, config, tensors, d2t, t2d)

    width, target_size = config["hidden_size"], config.get("target_hidden_size") or config["hidden_size"]
    q_width = tensors[f"{LAYER}self_attn.q_proj.weight"].shape[-1:].numel()
    version = 3 if q_width == 2 * width or f"{LAYER}hidden_norm.weight" in tensors else 1
    num_features, target_layers, source_numbering = _features(checkpoint, config, version, tensors.get("fc.weight"))
    has_own_embedding = target_size != width or bool(config.get("embed_requires_grad"))
    if not has_own_embedding:
        tensors.pop("embed_tokens.weight", None)  # a copy of the target's
    if version == 3 and config.get("norm_output") and "midlayer." in published[f"{LAYER}self_attn.q_proj.weight"]:
        logger.warning_once(
            f"{checkpoint.name!r} has `norm_output: true`, which is read as EAGLE-3.1; for a while it also meant plain "
            "EAGLE-3. If few drafts are accepted, set `drafter.config.norm_output = False`."
        )
    norms = {"fc_norm": "fc_norm.0.weight", "norm_before_fc": "input_norm.weight"}
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    fields = dict(
        hidden_size=target_size,
        vocab_size=vocab_size,
        num_target_layers=config.get("num_target_layers"),
        target_name_or_path=verifier.get("name_or_path") or config.get("target_model_name_or_path"),
        draft_vocab_size=None if ids is None else len(ids),
        version=version,
        layer_config=_layer_config(checkpoint, config, tensors),
        target_layers=target_layers,
        source_numbering=source_numbering,
        num_target_features=num_features,
        has_fc="fc.weight" in tensors or version == 1 or num_features > 1,
        fc_bias="fc.bias" in tensors,
        # A norm that the config speaks of must be there; one that is there counts whatever the config says.
        **{option: name in tensors or bool(config.get(option)) for option, name in norms.items()},
        **{option: version == 3 and bool(config.get(option)) for option in ("norm_before_residual", "norm_output")},
        has_own_embedding=has_own_embedding,
        has_own_output_head="lm_head.weight" in tensors or target_size != width,
    )
    try:
        model_config = EagleConfig(**fields)
    except StrictDataclassError as error:
        raise ValueError(
            f"the config.json of {checkpoint.name!r} is of no EAGLE drafter known here: {error.__cause__ or error}"
        ) from error
    expected = set(parameter_shapes(EagleModel, model_config))
    missing, left_over = expected - set(tensors), set(tensors) - expected
    account_for(checkpoint, EAGLE, _file_names(missing, published), [published[own] for own in left_over])
    return drafter_of(EagleModel, model_config, tensors, ids, checkpoint, published)


def _own_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Our name of every tensor -> its name in the file."""
    published: dict[str, str] = {}
    twice = []
    for name in checkpoint.tensor_names:
        if name.endswith("rotary_emb.inv_freq"):  # of old files; it follows from the config
            continue
        own = name.removeprefix("model.")
        own = next((own.replace(prefix, ours, 1) for prefix, ours in PREFIXES.items() if own.startswith(prefix)), own)
        own = "d2t" if own == "draft_id_to_target_id" else own
        twice += [name] * (own in published)
        published[own] = name
    account_for(checkpoint, EAGLE, (), twice)
    return published


def _file_names(own_names: set[str], published: dict[str, str]) -> list[str]:
    """What tensors that are not in the file would be called there."""
    prefix = "model." if any(name.startswith("model.") for name in published.values()) else ""
    first = "midlayer." if any("midlayer." in name for name in published.values()) else "layers.0."
    return [
        ("" if own.startswith("lm_head.") else prefix) + own.replace(LAYER, first).removeprefix("body.")
        for own in own_names
    ]


def _layer_config(checkpoint: Checkpoint, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    is_windowed = config.get("use_sliding_window") and not config.get("max_window_layers")
    if is_windowed or "sliding_attention" in (config.get("layer_types") or ()):
        raise ValueError(
            f"{checkpoint.name!r} attends within a sliding window, which is not supported yet; take another drafter of "
            "this target, or train one."
        )
    attention, num_heads = f"{LAYER}self_attn.", config["num_attention_heads"]
    head_dim, rest = divmod(tensors[f"{attention}q_proj.weight"].shape[:1].numel(), num_heads)
    if rest:
        raise ValueError(
            f"q_proj of {checkpoint.place} has {head_dim * num_heads + rest} rows, which are not {num_heads} heads; "
            "correct `num_attention_heads` in its config.json."
        )
    fields = {key: config[key] for key in REQUIRED} | {
        "head_dim": config.get("head_dim") or head_dim,
        "num_hidden_layers": next(
            i for i in count() if not any(own.startswith(f"body.layers.{i}.") for own in tensors)
        ),
        "num_key_value_heads": config.get("num_key_value_heads") or num_heads,
        "rope_parameters": _rope(checkpoint, config),
    }
    if config.get("max_position_embeddings") is not None:
        fields["max_position_embeddings"] = config["max_position_embeddings"]
    has_bias = f"{attention}q_proj.bias" in tensors
    if f"{attention}q_norm.weight" in tensors:
        return fields | {"model_type": "qwen3", "attention_bias": has_bias, "use_sliding_window": False}
    if has_bias and f"{attention}o_proj.bias" not in tensors:
        return fields | {"model_type": "qwen2", "use_sliding_window": False}
    has_mlp_bias = f"{LAYER}mlp.gate_proj.bias" in tensors
    return fields | {"model_type": "llama", "attention_bias": has_bias, "mlp_bias": has_mlp_bias}


def _rope(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, Any]:
    """The rotary embedding; where the config says nothing, the drafter was trained with the base 10000."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.pop("type", None)
    rope["rope_type"] = kind = rope.get("rope_type") or kind or "default"
    thetas = {theta for theta in (rope.get("rope_theta"), config.get("rope_theta")) if theta is not None} or {10000.0}
    is_known = kind == "default" or (kind in ROPE_INIT_FUNCTIONS and config.get("max_position_embeddings") is not None)
    is_known &= not any(isinstance(value, dict) for value in rope.values())  # one for every kind of layer
    is_partial = {config.get("partial_rotary_factor"), rope.get("partial_rotary_factor")} - {None, 1}
    if len(thetas) > 1 or not is_known or is_partial:
        raise ValueError(
            f"the config.json of {checkpoint.name!r} has the rotary embedding {rope} and rope_theta "
            f"{config.get('rope_theta')}; expected one base, no partial rotary embedding, and as rope_type 'default' "
            f"or, with `max_position_embeddings`, one of {', '.join(ROPE_INIT_FUNCTIONS)}. Ask its publisher."
        )
    return rope | {"rope_theta": float(thetas.pop())}


def _features(
    checkpoint: Checkpoint, config: dict[str, Any], version: int, fc: torch.Tensor | None
) -> tuple[int, list[int] | None, str | None]:
    """How many of the target's states are read, of which layers (counted from zero), and how the file counts them."""
    eagle = config.get("eagle_config") or {}
    if version == 1 or False in (eagle.get("use_aux_hidden_state"), config.get("use_aux_hidden_state")):
        return 1, None, None
    nested = eagle.get("eagle_aux_hidden_state_layer_ids") or []
    said = (
        (config.get("eagle_aux_hidden_state_layer_ids"), False),  # vLLM, speculators
        (config.get("target_layer_ids"), True),  # DeepSpec
        (nested, nested[:1] == [1]),  # SpecForge, ModelOpt: the reference's first is the output of layer 1
    )
    ids, are_outputs = next(((ids, are_outputs) for ids, are_outputs in said if ids), (None, False))
    size = config.get("target_hidden_size") or config["hidden_size"]
    num_inputs = (3 if ids is None else len(ids)) * size if fc is None else fc.shape[-1:].numel()
    if num_inputs % size or num_inputs == 0 or (ids is not None and len(ids) * size != num_inputs):
        raise ValueError(
            f"`fc` of {checkpoint.place} reads {num_inputs} numbers; expected those of the target's layers {ids}, "
            f"{size} each. Download it again, or correct the layers in its config.json."
        )
    if ids is None:
        return num_inputs // size, None, None
    layers = [layer if are_outputs else layer - 1 for layer in ids]
    num_layers = config.get("num_target_layers")
    for layer, what in ((-1, "embeddings"), (num_layers and num_layers - 1, "state before the final norm")):
        if layer in layers:
            raise ValueError(
                f"{checkpoint.name!r} reads the target's {what} (layer {ids[layers.index(layer)]} of {ids}), which is "
                "not supported yet; take another drafter of this target, or train one."
            )
    return len(ids), layers, "outputs of layers" if are_outputs else "inputs of layers"


def _vocabulary(
    checkpoint: Checkpoint,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    d2t: torch.Tensor | None,
    t2d: torch.Tensor | None,
) -> tuple[int, torch.LongTensor | None]:
    """Size of the target's vocabulary, and the ids `(V_draft,)` that the drafter proposes, if not all in order."""
    rows = {own: tensor.shape[:1].numel() for own, tensor in tensors.items()} | {
        name: ids.numel() for name, ids in (("d2t", d2t), ("t2d", t2d)) if ids is not None
    }
    sizes = {"vocab_size": config.get("vocab_size")}
    sizes |= {name: rows.get(name) for name in ("t2d", "embed_tokens.weight")}
    vocab_size = _agreed(checkpoint, "ids of the target", sizes)
    if vocab_size is None:
        raise ValueError(f"the config.json of {checkpoint.name!r} lacks vocab_size, that of the target; add it.")
    sizes = {"draft_vocab_size": config.get("draft_vocab_size")}
    sizes |= {name: rows.get(name) for name in ("d2t", "lm_head.weight")}
    num_ids = _agreed(checkpoint, "ids that are proposed", sizes) or vocab_size
    if d2t is None and num_ids != vocab_size:
        raise ValueError(
            f"{checkpoint.place} proposes {num_ids} ids of {vocab_size}, but has no d2t that says which; download it "
            "again, or take the complete checkpoint."
        )
    offsets = torch.zeros(num_ids, dtype=torch.long) if d2t is None else d2t.flatten().long()
    ids = torch.arange(num_ids) + offsets
    marked = ids.sort().values if t2d is None else t2d.flatten().nonzero().flatten()
    is_right = len(ids.unique()) == num_ids and bool(0 <= ids.min() <= ids.max() < vocab_size)
    if not (is_right and torch.equal(ids.sort().values, marked)):
        marks = "" if t2d is None else f", the {len(marked)} that t2d marks"
        looks = "; it looks like ids, not offsets (id minus place)" if torch.equal(marked, offsets) else ""
        raise ValueError(
            f"d2t of {checkpoint.place} leads to {len(ids.unique())} different ids from {ids.min()} to {ids.max()}; "
            f"expected {num_ids} from 0 to {vocab_size - 1}{marks}{looks}. Take a repaired checkpoint."
        )
    return vocab_size, None if torch.equal(ids, torch.arange(vocab_size)) else ids


def _agreed(checkpoint: Checkpoint, what: str, sizes: dict[str, int | None]) -> int | None:
    sizes = {name: size for name, size in sizes.items() if size is not None}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"{checkpoint.place} speaks of different numbers of {what}: "
            f"{', '.join(f'{name} {size}' for name, size in sizes.items())}; expected one. Take the complete "
            "checkpoint, or correct its config.json."
        )
    return next(iter(sizes.values()), None)
