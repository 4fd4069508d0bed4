"""Training data: chats and plain text in the formats of the ecosystem, and which of their tokens are responses.

Shapes: T tokens of one example.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

USERS = ("user", "human")
ASSISTANTS = ("assistant", "gpt", "chatgpt", "bing", "bard")  # all of them occur in ShareGPT
ROLES = {"system": "system"} | dict.fromkeys(USERS, "user") | dict.fromkeys(ASSISTANTS, "assistant")
FILE_FORMATS = (".jsonl", ".json", ".parquet", ".txt")
FORMATS = '"messages", "conversations", "turns", "prompt" (with "completion" or without) or "text"'


class Example(NamedTuple):
    """Ids of one text of T tokens, and which of them the target wrote, or is to be taken to have written."""

    input_ids: list[int]
    is_response: list[bool]


def load_records(source: str | Path, split: str = "train") -> list[dict[str, Any]]:
    """Reads data and brings every record into one of three forms.

    The forms: `{"messages": [{"role", "content"}, ...]}`, `{"prompt": str, "completion": str}`, `{"text": str}`. What
    an assistant says before the user's first message answers nothing and is dropped, as FastChat does; so is a chat
    without a user.

    Args:
        source: a .jsonl, .json, .parquet or .txt file (one text a line), or the name of a dataset on the Hub, whose
            configuration may follow after a colon (`"openai/gsm8k:main"`).
        split: of a dataset on the Hub, e.g. `"train"` or `"train[:1000]"`.

    Raises:
        FileNotFoundError: if the source is written as a file and none is there.
        ValueError: if there are no records, or one has none of the known columns; the message names it.
        ModuleNotFoundError: if the package `datasets` is needed and missing.
    """
    try:
        records = [_normalise(record, f"record {i} of {source}") for i, record in enumerate(_read(str(source), split))]
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is no UTF-8 text ({error}); convert it.") from error
    records = [record for record in records if record is not None]
    if not records:
        raise ValueError(f"{source} holds no records; give a file or dataset with {FORMATS}.")
    return records


def _read(source: str, split: str) -> Iterator[Any]:
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix not in FILE_FORMATS:
            raise ValueError(f"{source!r} is of an unknown kind; expected {', '.join(FILE_FORMATS)}.")
    elif path.suffix in FILE_FORMATS or (source.startswith((".", "/", "~")) and not path.exists()):
        raise FileNotFoundError(f"there is no file {source!r}")
    if path.suffix == ".jsonl":
        return _read_lines(path)
    if path.suffix == ".json":
        return _read_json(path)
    if path.suffix == ".txt":
        return ({"text": line} for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip())
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'reading {source!r} needs the package datasets; run: pip install "hf_specdec[train]"', name="datasets"
        ) from error
    if path.suffix == ".parquet":
        return iter(load_dataset("parquet", data_files=str(path), split="train"))
    name, _, configuration = source.partition(":")
    try:
        return iter(load_dataset(name, configuration or None, split=split))
    except (OSError, ValueError) as error:
        raise OSError(f"{source!r} is no file here, and no dataset of that name can be loaded: {error}") from error


def _read_lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"line {number} of {path} is no JSON ({error.msg}); mend or remove it.") from error


def _read_json(path: Path) -> Iterator[Any]:
    """One list of records, one record, or (as `datasets` writes it) one record a line."""
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return _read_lines(path)
        raise ValueError(f"{path} is no JSON ({error.msg}, line {error.lineno}); mend it.") from error
    return iter(data if isinstance(data, list) else [data])


def _normalise(record: Any, place: str) -> dict[str, Any] | None:
    """The record in one of the three forms; `None` for a chat without a user."""
    if not isinstance(record, dict):
        raise ValueError(f"{place} is a {type(record).__name__}; expected an object with {FORMATS}.")
    prompt, completion, turns = record.get("prompt"), record.get("completion"), record.get("turns")
    chat = record["messages"] if record.get("messages") is not None else record.get("conversations")
    if chat is None and isinstance(turns, list):  # questions without answers, as in MT-bench and Spec-Bench
        chat = [{"role": "user", "content": turn} for turn in turns]
    if chat is None and isinstance(prompt, list) and isinstance(completion, list | None):
        chat = prompt + (completion or [])
    if chat is None and isinstance(prompt, str) and completion is None:
        chat = [{"role": "user", "content": prompt}]
    if isinstance(chat, list):
        messages = [_message(message, place) for message in chat]
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            return None
        return {"messages": [m for i, m in enumerate(messages) if i >= first or m["role"] == "system"]}
    if isinstance(prompt, str) and isinstance(completion, str):
        return {"prompt": prompt, "completion": completion}
    if isinstance(record.get("text"), str):
        return {"text": record["text"]}
    columns = ", ".join(f"{name} ({type(value).__name__})" for name, value in sorted(record.items()))
    raise ValueError(f"{place} has the columns {columns or 'none'}; expected {FORMATS}.")


def _message(message: Any, place: str) -> dict[str, Any]:
    message = message if isinstance(message, dict) else {"content": message}
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    if not isinstance(role, str) or role not in ROLES or not isinstance(content, str):
        raise ValueError(
            f"{place} has a message of the role {role!r} with a {type(content).__name__} as content; expected text of "
            f"one of {', '.join(ROLES)}. Remove such records, calls of tools for instance."
        )
    return {"role": ROLES[role], "content": content} | ({"is_cut": True} if message.get("is_cut") else {})


def encode(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Example:
    """Ids of one record, as the target reads them, and which of them are the target's own words.

    In a chat those are the responses, each with the mark that ends it (not behind a message that is marked
    `"is_cut": True`: the target had not finished); after a prompt, the completion; of plain text, everything but the
    first token.

    Args:
        record: as [`load_records`] gives it.

    Raises:
        ValueError: if the tokenizer gives no offsets; if the record is a chat and the tokenizer has no chat template,
            or one that refuses this chat or writes responses elsewhere than behind its generation prompt.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"`tokenizer` is a {type(tokenizer).__name__}, which does not say where in the text a token stands; load "
            "the model's fast tokenizer, the one with a tokenizer.json."
        )
    if "messages" in record:
        text, spans = _render_with_responses(record["messages"], tokenizer)
    elif "prompt" in record:
        text = record["prompt"] + record["completion"]
        spans = [(len(record["prompt"]), len(text))]
    else:
        text = record["text"]
        spans = [(0, len(text))]
    encoded = tokenizer(
        text,
        add_special_tokens="messages" not in record,  # a template writes them itself
        return_offsets_mapping=True,
        return_special_tokens_mask=True,  # True where the tokenizer added a token that is not in the text
        verbose=False,
    )
    is_response = []
    for (begin, end), is_added in zip(encoded["offset_mapping"], encoded["special_tokens_mask"]):
        while spans and end > spans[0][1]:
            spans = spans[1:]
        is_response.append(bool(spans) and spans[0][0] <= begin and not is_added)
    if is_response:
        is_response[0] = False  # nothing stands before it to predict it from
    return Example(encoded["input_ids"], is_response)


def encode_records(records: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[Example]:
    """Encodes records and cuts them to `max_length` tokens; what then has no response token is left out.

    Raises:
        ValueError: if no example is left, or a record cannot be encoded (see [`encode`]).
    """
    if max_length < 2:
        raise ValueError(f"`max_length` is {max_length}; it must be 2 or more: a token and the one to predict from it.")
    if not records:
        raise ValueError("`records` is empty; give at least one.")
    examples = [Example(*(part[:max_length] for part in encode(record, tokenizer))) for record in records]
    examples = [example for example in examples if any(example.is_response)]
    if not examples:
        raise ValueError(
            f"`records` has no response tokens among the first `max_length` = {max_length} tokens of any record; if "
            "they are questions without answers, let the target answer them first (hf-specdec regenerate), else raise "
            "`max_length`."
        )
    return examples


def render(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, add_generation_prompt: bool = False
) -> str:
    """The chat as the target reads it; to be tokenised without adding special tokens.

    Raises:
        ValueError: if the tokenizer has no chat template, or its template refuses the chat.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "the data are chats and the target's tokenizer has no chat template; set `tokenizer.chat_template`, take "
            'the instruction-tuned model\'s tokenizer, or give plain text ("text", or "prompt" and "completion").'
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"the tokenizer's chat template refuses a chat of the roles {roles} ({error}); leave such chats out, or "
            "set another `tokenizer.chat_template`."
        ) from error


def _render_with_responses(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> tuple[str, list[tuple[int, int]]]:
    """The chat as text, and where in it the responses stand: from the generation prompt to the end-of-turn mark."""
    text = render(messages, tokenizer)
    spans = []
    for index, message in enumerate(messages):
        content, is_cut = message["content"].strip(), message.get("is_cut", False)
        if message["role"] != "assistant" or not content:
            continue
        before = render(messages[:index], tokenizer, add_generation_prompt=True)
        after = render(messages[: index + 1], tokenizer)
        is_complete = text.startswith(after)  # else `after` ends as only a whole chat does (Phi-3), or was rewritten
        common = after if is_complete else os.path.commonprefix([text, after])  # noqa: RUF071 (texts, not paths)
        response = common.removeprefix(before)
        if not text.startswith(before) or not after.startswith(before):
            if index == len(messages) - 1:
                raise ValueError(
                    "the tokenizer's chat template does not write a response behind its generation prompt, so "
                    "responses cannot be told from the rest; set a `tokenizer.chat_template` that does."
                )
            continue  # the template rewrites earlier turns
        if response.lstrip().startswith(content):
            length = len(response) - len(response.lstrip()) + len(content)
            if not is_cut and (mark := re.match(r"\s*\S+", response[length:])):
                length += mark.end()
        elif is_complete and not is_cut:  # the template adds to it, say an empty block of reasoning
            length = len(response.rstrip())
        else:  # the template dropped its reasoning, say: the target never wrote these words
            continue
        spans.append((len(before), len(before) + length))
    return text, spans
