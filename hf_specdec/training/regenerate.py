"""Answers written by the target itself: drafters learn best from the very text that they will have to guess."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..modeling.target import target_hash
from .data import render
from .settings import changed_settings, write_settings


def regenerate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    records: list[dict[str, Any]],
    output: str | Path,
    *,
    max_new_tokens: int = 512,
    max_prompt_tokens: int = 1024,
    batch_size: int = 16,
    temperature: float = 0.0,
    seed: int = 0,
    assistant: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Writes a .jsonl file in which the target answers every user turn anew, batch by batch.

    Chats keep their system and user messages; an answer that `max_new_tokens` cut short is marked `"is_cut": true`.
    Plain text keeps its first `max_prompt_tokens` tokens, and a completion takes the place of the rest. Records whose
    prompt is longer than `max_prompt_tokens` are left out, and a chat ends where its next prompt would be. An
    interrupted run goes on where it stopped, with the same result.

    Args:
        records: as [`load_records`] gives them.
        output: the file; `<output>.settings.json` beside it remembers what it was made with.
        temperature (`float`): 0 is greedy.
        seed (`int`): batch i is sampled with seed + i.
        assistant: drafter for the target, anything that `generate` takes; it changes the speed alone.
        progress: called with the number of records done and their total, first when the run begins.

    Returns: the number of records in the file.

    Raises:
        ValueError: if an argument is out of range, prompt and answer are longer than the target reads, the file was
            begun with other settings or data, or no prompt is short enough.
        OSError: if the file cannot be written; what it held before stays.
    """
    _check_sizes(target, max_new_tokens, max_prompt_tokens, batch_size, temperature)
    output = Path(output)
    if output.is_dir():
        raise ValueError(f"`output` is {output}, a folder; give the .jsonl file to write.")
    conversations = [_Conversation(record, tokenizer, max_prompt_tokens) for record in records]
    conversations = sorted((c for c in conversations if c.wants_answer), key=lambda c: len(c.prompt_ids))
    if not conversations:
        raise ValueError(
            f"`max_prompt_tokens` is {max_prompt_tokens} and every prompt is longer, or there is none; raise it."
        )
    settings = {
        "target": target_hash(target),
        "dtype": str(target.dtype).removeprefix("torch."),
        "max_new_tokens": max_new_tokens,
        "max_prompt_tokens": max_prompt_tokens,
        "batch_size": batch_size,
        "temperature": temperature,
        "seed": seed,
        "num_records": len(records),
        "records_sha256": fingerprint(records),
    }
    num_done = _resume(output, settings, batch_size, len(conversations))
    if assistant is not None:
        import hf_specdec  # noqa: F401 (adds the keyword)
    progress = progress or (lambda num_done, total: None)
    progress(num_done, len(conversations))
    for start in range(num_done, len(conversations), batch_size):
        batch = conversations[start : start + batch_size]
        torch.manual_seed(seed + start // batch_size)
        while waiting := [c for c in batch if c.wants_answer]:
            answers = _answer(target, tokenizer, waiting, max_new_tokens, temperature, assistant)
            for conversation, (answer, is_cut) in zip(waiting, answers):
                conversation.take(answer, is_cut)
        _append(output, [json.dumps(c.record, ensure_ascii=False) + "\n" for c in batch])
        progress(start + len(batch), len(conversations))
    return len(conversations)


def fingerprint(records: list[dict[str, Any]]) -> str:
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps(record, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _check_sizes(
    target: PreTrainedModel, max_new_tokens: int, max_prompt_tokens: int, batch_size: int, temperature: float
) -> None:
    sizes = {"max_new_tokens": max_new_tokens, "max_prompt_tokens": max_prompt_tokens, "batch_size": batch_size}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"`{name}` is {size}; it must be 1 or more.")
    if temperature < 0:
        raise ValueError(f"`temperature` is {temperature}; it must be 0 (greedy) or more.")
    limit = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and max_prompt_tokens + max_new_tokens > limit:
        raise ValueError(
            f"`max_prompt_tokens` and `max_new_tokens` are {max_prompt_tokens} and {max_new_tokens}, together more "
            f"than the {limit} tokens that the target reads; lower one."
        )


class _Conversation:
    """One record while it is answered.

    Attributes:
        record: what will be written, so far.
        prompt_ids (`list[int]`): what the target reads next; empty if nothing is left to answer.
    """

    def __init__(self, record: dict[str, Any], tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> None:
        self.tokenizer, self.max_prompt_tokens = tokenizer, max_prompt_tokens
        if "messages" in record:
            self.pending = [message for message in record["messages"] if message["role"] != "assistant"]
            self.record: dict[str, Any] = {"messages": []}
            self._advance()
            return
        self.prompt_ids = tokenizer(record.get("prompt", record.get("text")), verbose=False)["input_ids"]
        if self.prompt_ids[-1:] == [tokenizer.eos_token_id]:  # some tokenizers end every text with it
            del self.prompt_ids[-1]
        if "text" in record:
            del self.prompt_ids[max_prompt_tokens:]
        self.record = {"prompt": _decode(tokenizer, self.prompt_ids)}

    @property
    def wants_answer(self) -> bool:
        return 0 < len(self.prompt_ids) <= self.max_prompt_tokens

    def take(self, answer: str, is_cut: bool) -> None:
        if "messages" not in self.record:
            self.record["completion"], self.prompt_ids = answer, []
            return
        mark = {"is_cut": True} if is_cut else {}
        self.record["messages"].append({"role": "assistant", "content": answer} | mark)
        self._advance()

    def _advance(self) -> None:
        """Takes in messages up to and with the next one of the user."""
        self.prompt_ids = []
        while self.pending and not self.prompt_ids:
            message = self.pending.pop(0)
            self.record["messages"].append(message)
            if message["role"] == "user":
                text = render(self.record["messages"], self.tokenizer, add_generation_prompt=True)
                self.prompt_ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _answer(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: list[_Conversation],
    max_new_tokens: int,
    temperature: float,
    assistant: Any,
) -> list[tuple[str, bool]]:
    """Each conversation's next answer, and whether it was cut: whether the target had not ended it."""
    prompts = [conversation.prompt_ids for conversation in conversations]
    width = max(map(len, prompts))
    eos = target.generation_config.eos_token_id
    eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (eos or [0])[0]
    # The device of an offloaded model is "meta"; accelerate then moves the inputs.
    device = "cpu" if target.device.type == "meta" else target.device
    inputs = {
        "input_ids": torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompts], device=device),
        "attention_mask": torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=device),
    }
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    drafting = {} if assistant is None else {"assistant": assistant, "tokenizer": tokenizer}
    ids = target.generate(**inputs, max_new_tokens=max_new_tokens, pad_token_id=pad, **sampling, **drafting)
    answers = ids[:, width:].tolist()
    return [(_decode(tokenizer, answer), not set(eos) & set(answer)) for answer in answers]


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """The text of the ids, without a character at its end that was cut in two."""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).rstrip("\ufffd")


def _resume(output: Path, settings: dict[str, Any], batch_size: int, total: int) -> int:
    """Checks that the file was begun with these settings, cuts it back to whole batches, and counts its records."""
    settings_file = output.with_name(output.name + ".settings.json")
    if not output.exists() or output.stat().st_size == 0:
        write_settings(settings_file, settings)
        return 0
    changes = changed_settings(settings_file, settings) if settings_file.exists() else None
    if changes != "":
        raise ValueError(
            f"`output` is {output}, which exists and was "
            f"{f'made with other settings: {changes}' if changes else 'not made by this function'}; give another "
            "output, or delete it to begin anew."
        )
    lines = output.read_bytes().split(b"\n")[:-1]  # what follows the last line break is nothing, or half a record
    num_done = total if len(lines) >= total else len(lines) - len(lines) % batch_size
    os.truncate(output, sum(len(line) + 1 for line in lines[:num_done]))
    return num_done


def _append(output: Path, lines: list[str]) -> None:
    """Adds the lines to the file, all or none of them."""
    size = output.stat().st_size if output.exists() else 0
    try:
        with output.open("ab") as file:
            file.write("".join(lines).encode())
    except OSError as error:
        if output.exists():
            os.truncate(output, size)
        raise OSError(
            error.errno,
            f"{error.strerror}; the answers written before stay usable, and the same call goes on behind them once "
            "there is room",
            str(output),
        ) from error
