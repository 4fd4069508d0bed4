"""The target's hidden states on disk: drafters train on them without running the target again.

A store is a folder with `index.json` and shards of whole examples, the longest examples first. A shard holds the tokens
of its examples one after the other: `input_ids` (N,), `is_response` (N,), `hidden_states.{layer}` (N, D). The index
says which examples it holds, how long each is and, once it is finished, how large its file is.

Shapes: N tokens of one shard, T tokens of one example, D hidden size of the target.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from ..modeling.target import hidden_states, target_hash, text_config, unwrap
from .data import Example

FORMAT_VERSION = 1
INDEX_FILE = "index.json"
SCRATCH_FOLDER = "unfinished"  # inside the store, while a file is written
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def write_features(
    target: Any,
    examples: Sequence[Example],
    folder: str | Path,
    *,
    layers: tuple[int, ...],
    batch_size: int = 8,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 512 * 2**20,
    progress: Callable[[int, int], None] | None = None,
) -> FeatureStore:
    """Runs the target over the examples and writes the outputs of some of its layers.

    An interrupted run goes on behind its last finished shard, with the same result; damaged shards are made anew. A
    rerun may use another batch size (states then differ by rounding) and keeps the first run's cut into shards. Only
    one process may write a folder. Memory: two shards.

    Args:
        target: causal model, or one in a PEFT wrapper. It reads in evaluation mode and comes back as it was.
        layers: counted from zero; the output of the last layer is stored after the final norm.
        batch_size (`int`): examples a pass; they are of similar lengths and padded on the right.
        dtype (`torch.dtype`, *optional*): of the stored states: float16, bfloat16 or float32. `None` is bfloat16 for a
            target in bfloat16, else float16.
        shard_bytes (`int`): size of a shard; an example longer than that has a shard of its own.
        progress: called after every pass with the number of examples done and their total.

    Raises:
        ValueError: if an argument is out of range, the folder holds features of another target, data, layers or dtype,
            or the states do not fit into `dtype`.
        OSError: if the disk has too little room, before the target runs, or is full; finished shards stay.
    """
    folder, layers, width = Path(folder), tuple(sorted(set(layers))), text_config(target).hidden_size
    progress = progress or (lambda num_done, total: None)
    if dtype is None:
        dtype = torch.bfloat16 if unwrap(target).dtype == torch.bfloat16 else torch.float16
    _check_arguments(target, layers, batch_size, dtype, shard_bytes)
    _check_examples(target, examples)
    index = {
        "format_version": FORMAT_VERSION,
        "target": target_name(target),
        "target_hash": target_hash(target),
        "data_hash": data_hash(examples),
        "layers": list(layers),
        "hidden_size": width,
        "dtype": str(dtype).removeprefix("torch."),
        "num_examples": len(examples),
    }
    before = _read_index(folder)
    if before is None and folder.is_dir() and any(path.name != SCRATCH_FOLDER for path in folder.iterdir()):
        raise ValueError(f"`folder` is {folder}, which holds other files; give a new or an empty folder.")
    if before is None:
        max_tokens = shard_bytes // _token_bytes(width, layers, dtype)
        index["shards"] = _plan_shards([len(example.input_ids) for example in examples], max_tokens)
    else:
        _check_same(folder, before, index)
        index = before
    missing = [shard for shard in index["shards"] if _damage(folder, shard) is not None]
    todo = [examples[i] for shard in missing for i in shard["examples"]]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        _check_room(folder, required_bytes(todo, width, layers, dtype))
        _write_index(folder, index)
    num_done = len(examples) - len(todo)
    with _evaluating(target), torch.no_grad():
        for shard in missing:
            chosen = [examples[i] for i in shard["examples"]]
            passes = []
            for first in range(0, len(chosen), batch_size):
                batch = chosen[first : first + batch_size]
                passes.append(_read(target, batch, layers, dtype))
                num_done += len(batch)
                progress(num_done, len(examples))
            tensors = {f"hidden_states.{layer}": torch.cat([states[layer] for states in passes]) for layer in layers}
            tensors["input_ids"] = torch.tensor([token for example in chosen for token in example.input_ids])
            tensors["is_response"] = torch.tensor([flag for example in chosen for flag in example.is_response]).bool()
            path = folder / shard["file"]
            _publish(path, partial(save_file, tensors))
            shard["num_bytes"] = path.stat().st_size
            _write_index(folder, index)
    return FeatureStore(folder)


class FeatureStore(Dataset):
    """What [`write_features`] wrote; item i is example i.

    Every item is read from its shard alone, with no file held open, so worker processes may share or pickle a store.
    An item is a dict: `input_ids` (`torch.LongTensor` of shape `(T,)`), `is_response` (`torch.BoolTensor` of shape
    `(T,)`) and `hidden_states`, a dict from layer to a tensor `(T, D)` in the stored dtype.

    Args:
        folder: of the store.

    Attributes:
        layers: whose outputs it holds, in ascending order.
        hidden_size (`int`): D.
        dtype (`torch.dtype`): of the hidden states.

    Raises:
        FileNotFoundError: if there is no store.
        ValueError: if it is unfinished, or a file of it is missing, damaged or half written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index = _read_index(self.folder)
        if index is None:
            raise FileNotFoundError(
                f"there are no features in '{folder}' (no {INDEX_FILE}); give a folder that `write_features` wrote."
            )
        shards = index["shards"]
        num_finished = sum(shard["num_bytes"] is not None for shard in shards)
        if num_finished < len(shards):
            raise ValueError(
                f"the features in '{folder}' are unfinished: {num_finished} of {len(shards)} shards are there. Run "
                "`write_features` again with the same arguments; it goes on from there."
            )
        for shard in shards:
            if (damage := _damage(self.folder, shard)) is not None:
                raise ValueError(
                    f"{self.folder / shard['file']} {damage}. Run `write_features` again with the same arguments; it "
                    "makes only the damaged shards anew."
                )
        self.layers: tuple[int, ...] = tuple(index["layers"])
        self.hidden_size: int = index["hidden_size"]
        self.dtype: torch.dtype = DTYPES[index["dtype"]]
        self._target, self._target_hash = index["target"], index["target_hash"]
        self._files = [shard["file"] for shard in shards]
        # Shard, first token and end of every example; a tensor, which forked workers share without copying.
        self._places = torch.empty(index["num_examples"], 3, dtype=torch.long)
        for number, shard in enumerate(shards):
            ends = torch.tensor(shard["lengths"]).cumsum(0)
            starts = ends - torch.tensor(shard["lengths"])
            self._places[shard["examples"]] = torch.stack([torch.full_like(ends, number), starts, ends], dim=1)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._tensors(index, ["input_ids", "is_response", *(f"hidden_states.{layer}" for layer in self.layers)])
        hidden_states = {layer: row.pop(f"hidden_states.{layer}") for layer in self.layers}
        return {**row, "hidden_states": hidden_states}

    def example(self, index: int) -> Example:
        """What the states of `self[index]` were computed from, read without them."""
        row = self._tensors(index, ["input_ids", "is_response"])
        return Example(row["input_ids"].tolist(), row["is_response"].tolist())

    def _tensors(self, index: int, names: list[str]) -> dict[str, torch.Tensor]:
        number, start, end = self._places[index].tolist()
        with safe_open(self.folder / self._files[number], "pt") as file:
            # A slice is a view of the whole mapped shard, all of which would go to another process with it.
            return {name: file.get_slice(name)[start:end].clone() for name in names}

    def check(self, target: Any = None, layers: Sequence[int] | None = None) -> None:
        """Raises `ValueError` if the features come from another target or lack one of these layers."""
        again = "Write them anew with `write_features` into another folder"
        if layers is not None and not set(layers) <= set(self.layers):
            raise ValueError(
                f"`layers` is {tuple(layers)}; the features in '{self.folder}' are of the layers {self.layers}. "
                f"{again} (`hf-specdec features --layers {','.join(map(str, sorted(layers)))}`), or ask for those."
            )
        if target is None:
            return
        given = f"`target` '{target_name(target)}'"
        made = f"the features in '{self.folder}' come from '{self._target}'"
        again = f"{again}, or give that target."
        if (width := text_config(target).hidden_size) != self.hidden_size:
            raise ValueError(f"{given} has the hidden size {width}; {made} with {self.hidden_size}. {again}")
        if (found := target_hash(target)) != self._target_hash:
            raise ValueError(f"{given} has the hash {found[:12]}; {made} with {self._target_hash[:12]}. {again}")


def required_bytes(examples: Sequence[Example], hidden_size: int, layers: Sequence[int], dtype: torch.dtype) -> int:
    """Disk space for the features of these examples, but for the index and headers (well below 1 %)."""
    return sum(len(example.input_ids) for example in examples) * _token_bytes(hidden_size, layers, dtype)


def _token_bytes(hidden_size: int, layers: Sequence[int], dtype: torch.dtype) -> int:
    return torch.int64.itemsize + torch.bool.itemsize + len(layers) * hidden_size * dtype.itemsize


def data_hash(examples: Sequence[Example]) -> str:
    """Of ids and response masks, in order."""
    digest = hashlib.sha256()
    for example in examples:
        ids = array("q", example.input_ids)
        digest.update(b"%d " % len(ids) + ids.tobytes() + bytes(example.is_response))
    return digest.hexdigest()


def target_name(target: Any) -> str:
    model = unwrap(target)
    return model.config._name_or_path or type(model).__name__


def _check_arguments(
    target: Any, layers: tuple[int, ...], batch_size: int, dtype: torch.dtype, shard_bytes: int
) -> None:
    num_layers = text_config(target).num_hidden_layers
    if not layers or not 0 <= layers[0] <= layers[-1] < num_layers:
        raise ValueError(
            f"`layers` is {layers}; give at least one of the layers 0 to {num_layers - 1} of '{target_name(target)}'."
        )
    if dtype not in DTYPES.values():
        raise ValueError(f"`dtype` is {dtype}; features are stored in one of {', '.join(map(str, DTYPES.values()))}.")
    for name, value in {"batch_size": batch_size, "shard_bytes": shard_bytes}.items():
        if value < 1:
            raise ValueError(f"`{name}` is {value}; it must be at least 1.")


def _check_examples(target: Any, examples: Sequence[Example]) -> None:
    if not examples:
        raise ValueError("`examples` is empty; give at least one example.")
    vocab_size = text_config(target).vocab_size
    for number, example in enumerate(examples):
        ids = example.input_ids
        if not 0 < len(ids) == len(example.is_response):
            raise ValueError(
                f"`examples[{number}]` has {len(ids)} ids and {len(example.is_response)} flags in `is_response`; both "
                "must be as many, and at least one. Mend or leave out this example."
            )
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ValueError(
                f"`examples[{number}]` has ids from {min(ids)} to {max(ids)}; '{target_name(target)}' knows 0 to "
                f"{vocab_size - 1}. Encode the data with the tokenizer of the target."
            )


def _check_same(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    meaning = {"target_hash": "target", "data_hash": "examples", "layers": "layers", "dtype": "dtype"}
    changes = [
        f"`{name}` was {_short(before[key])} and is {_short(now[key])}"
        for key, name in meaning.items()
        if before[key] != now[key]
    ]
    if changes:
        raise ValueError(
            f"'{folder}' holds features that were made otherwise: {'; '.join(changes)}. Give another folder, or delete "
            "this one to begin anew."
        )


def _short(value: Any) -> Any:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) == 64 else value  # a hash


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise OSError(
            f"the features need {num_bytes / 1e9:.2f} GB and the disk of '{folder}' has {free / 1e9:.2f} GB free. Make "
            "room, or give a folder on another disk, fewer examples or fewer `layers`."
        )


def _plan_shards(lengths: list[int], max_tokens: int) -> list[dict[str, Any]]:
    """Cuts the examples into shards, the longest first: a pass reads similar lengths, and the first is the largest."""
    shards: list[dict[str, Any]] = []
    num_tokens = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not shards or num_tokens + lengths[i] > max_tokens:
            file = f"features-{len(shards):05d}.safetensors"
            shards.append({"file": file, "examples": [], "lengths": [], "num_bytes": None})
            num_tokens = 0
        shards[-1]["examples"].append(i)
        shards[-1]["lengths"].append(lengths[i])
        num_tokens += lengths[i]
    return shards


def _read(target: Any, batch: list[Example], layers: tuple[int, ...], dtype: torch.dtype) -> dict[int, torch.Tensor]:
    """Hidden states at all tokens of a batch, row after row and without padding, on the CPU."""
    ids = [torch.tensor(example.input_ids) for example in batch]
    input_ids = pad_sequence(ids, batch_first=True).to(target.device)
    is_token = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True).to(target.device)
    tokens = {}
    for layer, states in hidden_states(target, input_ids, is_token, layers).items():
        exact = states[is_token.bool().to(states.device)]
        stored = exact.to(dtype)
        if not stored.isfinite().all():
            raise ValueError(
                f"`dtype` is {dtype}, which cannot hold the outputs of layer {layer} of '{target_name(target)}': they "
                f"reach {exact.abs().max().item():.3g} in {exact.dtype}. Give `dtype=torch.bfloat16`; if they are not "
                "finite to begin with, load the target in bfloat16 or float32."
            )
        tokens[layer] = stored.cpu()
    return tokens


@contextmanager
def _evaluating(target: Any) -> Iterator[None]:
    """Evaluation mode for a while; each module gets back the mode it had."""
    modes = {module: module.training for module in target.modules()}
    target.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _read_index(folder: Path) -> dict[str, Any] | None:
    path = folder / INDEX_FILE
    if not path.is_file():
        return None
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); delete '{folder}' and run `write_features` anew.") from error
    version = index.get("format_version") if isinstance(index, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has the format version {version}; this version of hf_specdec reads {FORMAT_VERSION}. Give another "
            "folder to `write_features`."
        )
    return index


def _write_index(folder: Path, index: dict[str, Any]) -> None:
    _publish(folder / INDEX_FILE, lambda path: path.write_text(json.dumps(index), encoding="utf-8"))


def _damage(folder: Path, shard: dict[str, Any]) -> str | None:
    """What is wrong with the file of a shard, as far as its size and header tell."""
    path = folder / shard["file"]
    if not path.is_file():
        return "is missing"
    if (size := path.stat().st_size) != shard["num_bytes"]:
        return f"has {size} bytes instead of {shard['num_bytes']}"
    try:
        with safe_open(path, "pt"):
            return None
    except SafetensorError as error:
        return f"is damaged ({error})"


def _publish(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file aside and renames it, so that what has its final name is complete.

    Aside is a folder of its own: safetensors has temporary files too, and a killed process leaves them behind.
    """
    scratch = path.parent / SCRATCH_FOLDER
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        write(scratch / path.name)
        with (scratch / path.name).open("r+b") as file:
            os.fsync(file.fileno())
        os.replace(scratch / path.name, path)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{path} could not be written: {error}. Finished shards stay; make room on the disk and run "
            "`write_features` again, which goes on from there."
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
