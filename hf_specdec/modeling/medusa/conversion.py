"""Medusa heads in the formats of other projects, told apart by the names of their tensors.

The numbers of heads and blocks are counted from the names: published configs lack them, or say too few.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from ..checkpoint import Checkpoint, account_for, drafter_of, refuse_other_dtypes
from .configuration import MedusaConfig
from .modeling import MedusaModel


class Dialect(NamedTuple):
    """How the tensors of head `{i}`, block `{j}` of `{n}` are called.

    Attributes:
        prefix: what the names of all tensors of the heads begin with; those beside them are the target's.
        block: the linear layer of a block.
        output: the output layer of a head.
    """

    prefix: str
    block: str
    output: str

    def indices(self, layer: str, names: list[str]) -> list[tuple[int, ...]]:
        """The numbers in the names of the weights that are such layers."""
        pattern = re.sub(r"\\{[ijn]\\}", r"(\\d{1,4})", re.escape(f"{self.prefix}{layer}.weight"))
        return [tuple(map(int, match.groups())) for match in (re.fullmatch(pattern, name) for name in names) if match]


DIALECTS = (
    Dialect("medusa_head.", "{i}.{j}.linear", "{i}.{n}"),  # FasterDecoding v1.0, beside the target they belong to
    Dialect("medusa_heads.", "{i}.{j}.linear", "{i}.{n}"),  # NVIDIA ModelOpt
    Dialect("medusa_heads.", "{i}.medusa_layers.{j}.linear", "{i}.lm_head"),  # NVIDIA TensorRT-LLM
    Dialect("medusa_heads.", "blocks.{i}.layers.{j}", "lm_heads.{i}"),  # vLLM, the longer names
    Dialect("", "blocks.{i}.layers.{j}", "lm_heads.{i}"),  # vLLM
    Dialect("", "{i}.{j}.linear", "{i}.{n}"),  # FasterDecoding v0.1; TGI's "version 2" has no output layers
)
CONFIG_KEYS = {"medusa_num_heads", "medusa_num_layers", "medusa"}
HEADS = "the Medusa heads"  # in messages


def convert(checkpoint: Checkpoint) -> MedusaModel | None:
    """The heads of a checkpoint, in the dtype of the file; `None` if there are none.

    A pickle file is opened only if the config or the file's own name speaks of Medusa.

    Raises:
        ValueError: if tensors of the heads are missing, left over, of the wrong shape or quantized.
        OSError: if the weights are not there, damaged, or in a pickle file that was not asked for.
    """
    weights = checkpoint.weights
    says_medusa = (
        _is_vllm(checkpoint)
        or not CONFIG_KEYS.isdisjoint(checkpoint.config)
        or (weights is not None and weights.name.startswith("medusa_"))
    )
    if not says_medusa and (weights is None or checkpoint.is_one_pickle):
        return None
    names = checkpoint.tensor_names
    dialect = next((dialect for dialect in DIALECTS if dialect.indices(dialect.block, names)), None)
    if dialect is not None:
        return _load(checkpoint, dialect)
    if not says_medusa:
        return None
    raise ValueError(
        f"{checkpoint.name!r} should hold Medusa heads, but {weights.name} has no tensor named like one of "
        f"{', '.join(f'{d.prefix}{d.block}.weight' for d in DIALECTS)}; download it again, or take another checkpoint."
    )


def _is_vllm(checkpoint: Checkpoint) -> bool:
    """Whether the config is about the heads; elsewhere it is the target's with a few more keys."""
    config = checkpoint.config
    return config.get("model_type") == "medusa" or "MedusaModel" in (config.get("architectures") or ())


def _load(checkpoint: Checkpoint, dialect: Dialect) -> MedusaModel:
    config = checkpoint.config.get("text_config") or checkpoint.config
    names = [name for name in checkpoint.tensor_names if name.startswith(dialect.prefix)]
    heads, layers = (set(index) for index in zip(*dialect.indices(dialect.block, names)))
    published = _published_names(checkpoint, dialect, names, len(heads), len(layers))
    stored = checkpoint.tensors(names)
    token_map = stored.pop(published.pop("draft_token_ids", ""), None)
    refuse_other_dtypes(checkpoint, HEADS, stored)

    tensors = {own: stored[name] for own, name in published.items()}
    outputs = [own for own in tensors if own.startswith("output_heads.")]
    num_rows = tensors[outputs[0]].shape[:1].numel() if outputs else 0
    vocab_size, ids = _vocabulary(checkpoint, config.get("vocab_size"), num_rows, token_map)
    if ids is not None:
        tensors |= {own: tensors[own][ids] for own in outputs if tensors[own].shape[:1] == (vocab_size,)}
    model_config = MedusaConfig(
        hidden_size=config.get("hidden_size") or tensors["heads.0.0.linear.weight"].shape[-1:].numel(),
        vocab_size=vocab_size,
        num_target_layers=None if _is_vllm(checkpoint) else config.get("num_hidden_layers"),
        target_name_or_path=(
            checkpoint.name  # the target lies beside its heads
            if len(names) < len(checkpoint.tensor_names)
            else checkpoint.config.get("base_model_name_or_path")
        ),
        num_heads=len(heads),
        num_layers=len(layers),
        block_bias="heads.0.0.linear.bias" in tensors,
        has_own_output_heads=bool(outputs),
        draft_vocab_size=None if ids is None else len(ids),
    )
    # Heads that share an output layer get copies.
    tensors |= {own: tensors[own].clone() for own in outputs[1:]}
    return drafter_of(MedusaModel, model_config, tensors, ids, checkpoint, published)


def _published_names(
    checkpoint: Checkpoint, dialect: Dialect, names: list[str], num_heads: int, num_layers: int
) -> dict[str, str]:
    """Our name of every tensor -> its name in the file, with all that are there accounted for."""
    config, nested = checkpoint.config, checkpoint.config.get("medusa")
    if _is_vllm(checkpoint):
        claimed = config.get("num_heads")
    else:
        claimed = nested.get("num_medusa_heads") if isinstance(nested, dict) else None
    if claimed is not None and claimed > num_heads:  # with these two keys, programs make that many heads
        raise ValueError(
            f"{checkpoint.place} has {num_heads} heads, but its config.json speaks of {claimed}; download it "
            "again, or take another checkpoint."
        )
    published = {}
    kinds = ["weight", "bias"] if any(name.endswith(".bias") for name in names) else ["weight"]
    for i in range(num_heads):
        for j in range(num_layers):
            for kind in kinds:
                published[f"heads.{i}.{j}.linear.{kind}"] = f"{dialect.prefix}{dialect.block.format(i=i, j=j)}.{kind}"
    num_outputs = len({index[0] for index in dialect.indices(dialect.output, names)})
    is_shared = num_outputs == 1 and config.get("original_lm_head")  # vLLM: the first head's serves all
    for i in range(num_heads if num_outputs else 0):
        output = dialect.output.format(i=0 if is_shared else i, n=num_layers)
        published[f"output_heads.{i}.weight"] = f"{dialect.prefix}{output}.weight"
    if f"{dialect.prefix}token_map" in names:
        published["draft_token_ids"] = f"{dialect.prefix}token_map"
    expected = set(published.values())
    account_for(checkpoint, HEADS, expected - set(names), set(names) - expected)
    return published


def _vocabulary(
    checkpoint: Checkpoint, vocab_size: int | None, num_rows: int, token_map: torch.Tensor | None
) -> tuple[int, torch.LongTensor | None]:
    """Size of the target's vocabulary (0 if nothing says it), and the ids that the heads propose, if not all.

    vLLM's heads may propose `truncated_vocab_size` ids: those in `token_map`, or else the first.
    """
    num_ids = checkpoint.config.get("truncated_vocab_size") or (None if token_map is None else token_map.numel())
    if num_ids is None or num_ids == vocab_size:
        return vocab_size or num_rows, None
    ids = torch.arange(min(num_ids, vocab_size or 0)) if token_map is None else token_map
    if (
        ids.is_floating_point()
        or ids.shape != (num_ids,)
        or len(ids.unique()) < num_ids
        or not 0 <= ids.min() <= ids.max() < (vocab_size or 0)
    ):
        raise ValueError(
            f"{checkpoint.place} has `truncated_vocab_size` {checkpoint.config.get('truncated_vocab_size')}, "
            f"`vocab_size` {vocab_size} and a `token_map` of shape {None if token_map is None else tuple(ids.shape)}; "
            "expected as many different ids as the first says, all below the second."
        )
    return vocab_size, ids.long()
