"""Checkpoints as they lie in a folder or on the Hub, read tensor by tensor; no code of theirs is ever run."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable
from functools import cached_property, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file, has_file

if TYPE_CHECKING:
    from .base import DrafterConfig, DrafterModel

# The first that is there holds the weights. Heads that lie beside a whole model in a file of their own come before it.
WEIGHTS = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
PICKLES = (".pt", ".bin")
QUANTIZED = re.compile(r"scale|scaling_factor|qweight|qzeros|g_idx|absmax|quant_map")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HUB_OPTIONS = {"revision", "token", "cache_dir", "subfolder", "local_files_only", "force_download", "proxies"}


def folder_or_id(name: str) -> str:
    """A name that is written as a path is that folder; any other is a Hub id or folder as it is.

    Raises:
        FileNotFoundError: if no folder is there.
    """
    if not name.startswith((".", "/", "~")):
        return name
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder '{name}'")
    return str(folder)


class Checkpoint:
    """Config (empty if it has none, as an adapter) and tensors of a checkpoint.

    Files are looked for, and on the Hub downloaded, when they are needed: of a whole model that is stored in several
    files, only those that hold the tensors asked for.

    Args:
        name (`str`): a folder or a Hub id.
        use_safetensors (`bool`, *optional*): `False` also reads legacy pickle files, with `weights_only=True`.
        hub_options: `revision`, `token`, `cache_dir`, `subfolder`, `local_files_only`, `force_download`, `proxies`.

    Raises:
        OSError: if there is no such checkpoint or its config.json is damaged; later, if it has no weights or only part
            of them, or they are in a pickle file that was not asked for.
        TypeError: for another option.
    """

    def __init__(self, name: str, use_safetensors: bool | None = None, **hub_options: Any) -> None:
        unknown = sorted(set(hub_options) - HUB_OPTIONS)
        if unknown:
            raise TypeError(
                f"a checkpoint is not loaded with {', '.join(map(repr, unknown))}; the options are "
                f"{', '.join(sorted(HUB_OPTIONS))}. Move the loaded drafter with `.to(...)`."
            )
        self.name = folder_or_id(str(name))
        self.hub_options = hub_options
        self.takes_pickles = use_safetensors is False
        path = cached_file(self.name, "config.json", **hub_options)
        self.config: dict[str, Any] = {} if path is None else _json_object(Path(path))

    def _find(self, file: str) -> Path | None:
        if file.endswith(PICKLES) and not self.takes_pickles:  # not downloaded only to be refused
            there = has_file(self.name, str(Path(self.hub_options.get("subfolder") or "", file)), **self.hub_options)
            return Path(file) if there else None
        found = cached_file(self.name, file, _raise_exceptions_for_missing_entries=False, **self.hub_options)
        return None if found is None else Path(found)

    @cached_property
    def weights(self) -> Path | None:
        """The file with the weights, or their index; `None` if there is neither."""
        return next(filter(None, map(self._find, WEIGHTS)), None)

    @property
    def place(self) -> str:
        """Name and file, for messages."""
        return f"{self.name!r} ({self.weights.name})"

    @property
    def is_one_pickle(self) -> bool:
        """Whether not even the names can be read without opening a pickle file."""
        return self.weights is not None and self.weights.suffix in PICKLES

    @cached_property
    def files(self) -> dict[str, str]:
        """Tensor name -> name of the file that holds it."""
        if self.weights is None:
            raise OSError(f"{self.name!r} has no weights; expected one of {', '.join(WEIGHTS)}. Download it again.")
        if self.weights.suffix != ".json":
            names = self._pickle(self.weights) if self.is_one_pickle else _safetensors(self.weights)
            return dict.fromkeys(names, self.weights.name)
        shards = _json_object(self.weights).get("weight_map")
        if not isinstance(shards, dict):
            raise OSError(f"{self.weights} has no 'weight_map'; download it again.")
        suffix = Path(self.weights.name.removesuffix(".index.json")).suffix
        for shard in shards.values():  # an index of safetensors must not lead to a pickle, nor out of the folder
            if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(suffix):
                raise OSError(f"{self.weights} names {shard!r}; expected a {suffix} file beside it.")
        return shards

    @property
    def tensor_names(self) -> list[str]:
        return list(self.files)

    def tensors(self, names: list[str]) -> dict[str, torch.Tensor]:
        """These tensors, on the CPU, in the dtype they are stored in."""
        found: dict[str, torch.Tensor] = {}
        for file in dict.fromkeys(self.files[name] for name in names):
            path = self.weights if file == self.weights.name else self._find(file)
            if path is None:
                raise OSError(f"{self.name!r} lacks {file}, which {self.weights.name} names; download it again.")
            here = [name for name in names if self.files[name] == file]
            if path.suffix in PICKLES:
                stored = self._pickle(path)
                lacking = [name for name in here if name not in stored]
                if lacking:
                    raise OSError(f"{path} lacks {', '.join(lacking)}; download it again.")
                found |= {name: stored[name].clone() for name in here}  # else all of the file stays in memory
            else:
                found |= _safetensors(path, here)
        return {name: found[name] for name in names}

    def _pickle(self, path: Path) -> dict[str, torch.Tensor]:
        if not self.takes_pickles:
            raise OSError(
                f"{self.name!r} has its weights in a legacy pickle file only ({path.name}); load it with "
                "`AutoDrafter.from_pretrained(..., use_safetensors=False)` (tensors only, no code is run)."
            )
        try:
            stored = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except Exception as error:  # of a dozen kinds, and with advice to load it unsafely: not repeated here
            stored = error
        if not isinstance(stored, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in stored.values()):
            raise OSError(
                f"{path} is no file of plain tensors ({type(stored).__name__}): it is damaged, or it would run code "
                "when loaded, which is refused. Download it again, or ask its publisher for safetensors."
            )
        return stored


def account_for(checkpoint: Checkpoint, what: str, missing: Iterable[str], left_over: Iterable[str]) -> None:
    """Raises `ValueError` if there are such tensors, named as in the file: they are quantized, or of another kind."""
    missing, left_over = sorted(missing), sorted(left_over)
    _refuse_quantized(checkpoint, what, [name for name in left_over if QUANTIZED.search(name)])
    if missing or left_over:
        raise ValueError(
            f"the tensors of {what} in {checkpoint.place} are not complete, or not of a kind known here: missing "
            f"{', '.join(missing) or 'none'}; left over {', '.join(left_over) or 'none'}. Download it again, or take "
            "another checkpoint."
        )


def refuse_other_dtypes(checkpoint: Checkpoint, what: str, tensors: dict[str, torch.Tensor]) -> None:
    """Raises `ValueError` if one of these weights is not in one of `DTYPES`."""
    other = [f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in DTYPES]
    _refuse_quantized(checkpoint, what, other)


def _refuse_quantized(checkpoint: Checkpoint, what: str, names: list[str]) -> None:
    if names:
        raise ValueError(
            f"the tensors of {what} in {checkpoint.place} are quantized: {', '.join(names)}; expected float16, "
            "bfloat16, float32 or float64. Take the checkpoint that was not quantized."
        )


def parameter_shapes(drafter: type[DrafterModel], config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Our names of the parameters that a drafter with this config has, with their shapes."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in drafter(config).named_parameters()}


def drafter_of(
    drafter: type[DrafterModel],
    config: DrafterConfig,
    tensors: dict[str, torch.Tensor],
    draft_token_ids: torch.LongTensor | None,
    checkpoint: Checkpoint,
    published: dict[str, str],
) -> DrafterModel:
    """The drafter with these weights; of a file of several dtypes, in the one that holds them all.

    Args:
        tensors: our name of each of its parameters -> weight.
        published: our name -> name in the file, for messages.

    Raises:
        ValueError: if a weight is of the wrong shape.
    """
    shapes = parameter_shapes(drafter, config)
    wrong = [
        f"{published[own]} is {tuple(tensor.shape)}, expected {shapes[own]}"
        for own, tensor in tensors.items()
        if tuple(tensor.shape) != shapes[own]
    ]
    if wrong:
        raise ValueError(f"{checkpoint.place} has tensors of the wrong shape: {'; '.join(wrong)}.")
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    if draft_token_ids is not None:
        tensors = tensors | {"draft_token_ids": draft_token_ids}
    # Unlike `load_state_dict` this also fills the buffers that are in no file, such as rotary frequencies.
    return drafter.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # also for what is not UTF-8
        content = None
    if not isinstance(content, dict):
        raise OSError(f"{path} is incomplete or no JSON object; download it again.")
    return content


def _safetensors(path: Path, names: list[str] | None = None) -> dict[str, torch.Tensor | None]:
    """These tensors; without names, `None` for every one in the file."""
    try:
        with safe_open(path, "pt") as file:
            if names is None:
                return dict.fromkeys(file.keys())
            return {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise OSError(f"{path} is incomplete or damaged ({error}); delete it and download it again.") from error
