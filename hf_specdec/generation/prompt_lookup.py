"""Prompt lookup: what followed the last few tokens when they stood in the text before (Saxena 2023).

No model drafts; it pays where the answer repeats the prompt (summaries, edits, extraction) or itself.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from .candidates import CandidateGenerator
from .tree import CandidateTree

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from .run import Run

NUM_DRAFT_TOKENS = 15  # with the last verified token 16, and matrix kernels work in tiles of 16
LONGEST_NGRAM = 32  # a longer match is found by its last 32 tokens
# 8 copy-heavy prompts, SmolLM2-135M, 2 cores: 1.55 times plain `generate` with 3 drafts a row, 1.07 times with 10.
CPU_TOKENS_PER_PASS = 32
# Passes over 1, 3, 11 and 16 tokens take 44, 53, 97 and 87 ms there. Replayed on 78 greedy answers, 2 tokens for weak
# matches give 1.55 times plain `generate`; no draft for single tokens 1.45, the full draft for every match 1.27 times.
CPU_WEAK_DRAFT = 2
# Names under which configs keep the ids that stand for images, videos and sounds in a prompt: `image_token_id`,
# `video_token_index`, `vision_start_token_id`, `boi_token_id`, ...
_PLACEHOLDER = re.compile(r"(image|img|video|audio|vision|visual|speech|boi|eoi|boa|eoa).*token_(id|ids|index)$")


class PromptLookup(CandidateGenerator):
    """Drafts the continuation of the latest earlier match of the row's last tokens, the longest n-gram first.

    If the match lies so close that its continuation reaches the end of the text, the text repeats itself with that
    period, and the draft goes on repeating it. Each row has an index of its own n-grams, built once from its prompt and
    extended by what it accepts, so a step costs the same for a prompt of 100 and of 100,000 tokens.

    Args:
        num_draft_tokens (`int`, *optional*): draft length when `generate` is given none. Default: 15; on a CPU, where
            every token of a pass costs, fewer for a batch: 32 tokens a pass over all rows.
        max_ngram_size (`int`): longest n-gram to match; `generate(..., max_matching_ngram_size=...)` overrides it. On
            a CPU a shorter match, which is often wrong, gets no more than 2 draft tokens.
        min_ngram_size (`int`): shortest n-gram to match.

    Raises:
        ValueError: if a number is out of its range.

    Example: tokens [5, 6, 7, 8, 5, 6], 3 wanted -> the bigram (5, 6) stood at 0, then came [7, 8, 5].
    """

    length_settings = ("prompt_lookup_num_tokens", "num_assistant_tokens")

    def __init__(self, num_draft_tokens: int | None = None, max_ngram_size: int = 3, min_ngram_size: int = 1) -> None:
        if num_draft_tokens is not None:
            _check_positive("num_draft_tokens", num_draft_tokens)
        _check_positive("max_ngram_size", max_ngram_size)
        _check_positive("min_ngram_size", min_ngram_size)
        if min_ngram_size > max_ngram_size:
            raise ValueError(
                f"`min_ngram_size` is {min_ngram_size}; expected at most `max_ngram_size`, which is {max_ngram_size}: "
                "lower the one or raise the other."
            )
        self.default_num_draft_tokens = num_draft_tokens or NUM_DRAFT_TOKENS
        self.has_own_length = num_draft_tokens is not None
        self.max_ngram_size = max_ngram_size
        self.min_ngram_size = min_ngram_size

    def begin(self, run: Run) -> None:
        asked = run.settings.max_matching_ngram_size
        if asked is not None:
            _check_positive("max_matching_ngram_size", asked)
        longest = min(self.max_ngram_size if asked is None else asked, LONGEST_NGRAM)
        shortest = min(self.min_ngram_size, longest)
        self._placeholders = placeholder_token_ids(run.target.config)
        self._vocab_size = run.vocab_size
        self._indexes: list[NgramIndex] = []
        for row, tokens in enumerate(run.tokens):
            if row > 0 and tokens == run.tokens[row - 1]:  # several sequences for one prompt
                index = self._indexes[-1].copy()
            else:
                index = NgramIndex(shortest, longest)
                index.extend(tokens)
            self._indexes.append(index)

    def max_draft_tokens(self, run: Run) -> int | None:
        was_asked = self.has_own_length or any(getattr(run.settings, name) for name in self.length_settings)
        if was_asked or run.device.type != "cpu":
            return None
        return max(1, CPU_TOKENS_PER_PASS // len(run.rows) - 1)

    def propose(self, run: Run, num_draft_tokens: int) -> CandidateTree | None:
        on_cpu = run.device.type == "cpu"
        drafts = []
        for index, tokens in zip(self._indexes, run.tokens):
            index.extend(tokens)
            start, size = index.find(tokens)
            is_weak = on_cpu and size < index.max_size
            length = min(num_draft_tokens, CPU_WEAK_DRAFT) if is_weak else num_draft_tokens
            drafts.append([] if start is None else self._emittable(continuation(tokens, start, length)))
        return CandidateTree.from_lists(drafts, run.device) if any(drafts) else None

    def keep_rows(self, rows: torch.LongTensor) -> None:
        self._indexes = [self._indexes[row] for row in rows.tolist()]

    def _emittable(self, draft: list[int]) -> list[int]:
        """The draft up to the first token that the target never emits."""
        for place, token in enumerate(draft):
            if not 0 <= token < self._vocab_size or token in self._placeholders:
                return draft[:place]
        return draft


class NgramIndex:
    """For every n-gram of a growing text, the position of the token that followed its latest occurrence.

    Only n-grams that something followed are in it, so the n-gram at the text's end finds its latest earlier occurrence.

    Args:
        min_size, max_size (`int`): the sizes to index.
    """

    def __init__(self, min_size: int, max_size: int) -> None:
        self.max_size = max_size
        sizes = range(max_size, min_size - 1, -1)
        self._followers: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in sizes}
        self._num_indexed = 0  # tokens up to here are followers in the index

    def extend(self, tokens: list[int]) -> None:
        """Takes in what `tokens`, the whole text, has more than at the last call."""
        for size, followers in self._followers.items():
            first = max(self._num_indexed, size)
            new = tokens[first - size : -1]
            followers.update(zip(zip(*(new[offset:] for offset in range(size))), range(first, len(tokens))))
        self._num_indexed = len(tokens)

    def find(self, tokens: list[int]) -> tuple[int | None, int]:
        """Where the continuation of the longest indexed n-gram at the end of `tokens` starts, and that n-gram's size.

        `(None, 0)`: no match.
        """
        for size, followers in self._followers.items():
            start = followers.get(tuple(tokens[-size:]))
            if start is not None:
                return start, size
        return None, 0

    def copy(self) -> NgramIndex:
        other = NgramIndex.__new__(NgramIndex)
        other.max_size = self.max_size
        other._followers = {size: followers.copy() for size, followers in self._followers.items()}
        other._num_indexed = self._num_indexed
        return other


def continuation(tokens: list[int], start: int, length: int) -> list[int]:
    """`length` tokens from `start`, and round again from there where the text ends.

    Example: [1, 2, 3, 1, 2, 3], start 3, length 5 -> [1, 2, 3, 1, 2].
    """
    draft = tokens[start : start + length]
    return (draft * (length // len(draft) + 1))[:length] if len(draft) < length else draft


def placeholder_token_ids(config: PreTrainedConfig | dict[str, Any]) -> set[int]:
    """Ids that a config, or one inside it, names as stand-ins for images, videos and sounds."""
    found: set[int] = set()
    for name, value in (config if isinstance(config, dict) else vars(config)).items():
        if name.endswith("config") and (isinstance(value, dict) or hasattr(value, "__dict__")):
            found |= placeholder_token_ids(value)
        elif _PLACEHOLDER.search(name):
            found.update(
                token for token in (value if isinstance(value, list | tuple) else [value]) if token is not None
            )
    return found


def _check_positive(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"`{name}` is {value!r}; expected an int of at least 1.")
