"""Drafts across tokenizers: a row of the target's ids as the drafter's ids, and the drafter's draft as target ids.

The two tokenizers meet in the text. Whatever comes out here is a guess: the target chooses every token, so a text that
the tokenizers cut differently costs acceptance and never changes the output.
"""

from __future__ import annotations

import copy
import itertools
import re
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Characters of text that every call may re-tokenise; a longer text has its beginning settled, all but `_KEPT` of it.
_WINDOW = 128
_KEPT = 32
# Target tokens looked back for the beginning of the word that a draft continues.
_LOOKBACK = 8
# A character has at most 4 bytes, so at most 3 byte tokens at the end of a row wait for the rest of theirs.
_MAX_WAITING = 3
_BROKEN = "\ufffd"

_same: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def same_tokenizer(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers have the same ids for the same tokens, so that drafts need no translation.

    Vocabularies, added tokens included, are compared once for a pair of objects and remembered while both live.

    Args:
        a (`PreTrainedTokenizerBase`): one tokenizer.
        b (`PreTrainedTokenizerBase`): the other.

    Returns:
        `bool`. Tokenizers that differ in anything but their vocabulary (merges, say) count as the same: a draft that
        is cut differently is still a draft in the target's ids.
    """
    if a is b:
        return True
    if len(a) != len(b):
        return False
    known, sizes, same = _same.get(a, (None, None, None))
    if known is None or known() is not b or sizes != (len(a), len(b)):
        same = a.get_vocab() == b.get_vocab()
        _same[a] = (weakref.ref(b), (len(a), len(b)), same)
    return same


class _Codec:
    """One tokenizer, asked for pieces of a row instead of whole texts.

    Attributes:
        marks (`dict[int, str]`): its added tokens (BOS, chat markers, ...), which cut a row into segments of text.
        mark_ids (`dict[str, int]`): the same by string.
        special_ids (`frozenset[int]`): the ids that must never come from text.
        start_ids (`list[int]`): what it puts before a text by itself, often `[bos]`.
        separator_ids (`list[int]`): what parts two documents: the same, or one token that is both BOS and EOS.
        restarts (`bool`): True if it treats text after a mark like the beginning of a text (a prefix space, say).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.special_ids = frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}
        self.marks = {i: tokenizer.convert_ids_to_tokens(i) for i in self.special_ids}
        self.marks |= {i: token.content for i, token in added.items()}
        self.mark_ids = {mark: i for i, mark in self.marks.items()}
        special_marks = [re.escape(mark) for i in self.special_ids if len(mark := self.marks[i]) > 1]
        self._special_mark = re.compile("|".join(special_marks) or r"(?!)")
        self._anchors = {anchor: self._encode(anchor) for anchor in ("a", "\n", "\0")}

        plain = self._anchors["a"]
        whole = tokenizer.encode("a")
        begins = [i for i in range(len(whole)) if whole[i : i + len(plain)] == plain]
        self.start_ids: list[int] = whole[: begins[0]] if begins and plain else []
        eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
        self.separator_ids: list[int] = self.start_ids or ([eos] if eos is not None and eos == bos else [])
        after_marks = [
            ids[1:]
            for i in sorted(self.special_ids)
            if (ids := tokenizer.encode(self.marks[i] + "a", add_special_tokens=False))[:1] == [i]
        ]
        self.restarts = not after_marks or after_marks[0] == plain

    def _encode(self, text: str) -> list[int]:
        # A special string in the text stays text (real ones are known by their ids), so it is encoded in two halves:
        # `split_special_tokens=True` would do, but it changes the tokenizer for everybody else who uses it.
        cuts = [*(match.start() + 1 for match in self._special_mark.finditer(text)), len(text)]
        ids: list[int] = self.tokenizer.encode(text[: cuts[0]], add_special_tokens=False, verbose=False)
        for begin, end in itertools.pairwise(cuts):
            ids += self.encode(text[begin:end], is_start=False)
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of some ids, marks included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def encode(self, text: str, is_start: bool) -> list[int]:
        """Ids of a piece of text, at the start of a segment or in the middle of one.

        In the middle, the piece is encoded behind an anchor that is cut off again: alone, "ing" would become a word
        with a space before it for SentencePiece. Anchors are tried until one does not merge with the piece.
        """
        if not text:
            return []
        if not is_start:
            for anchor in ("a" if text[0].isspace() else "\n", "\0"):
                prefix = self._anchors[anchor]
                ids = self._encode(anchor + text)
                if ids[: len(prefix)] == prefix:
                    return ids[len(prefix) :]
        return self._encode(text)

    def is_start(self, ids: list[int], end: int) -> bool:
        """Whether text after `ids[:end]` is encoded like the beginning of a text."""
        if end <= len(self.start_ids) and ids[:end] == self.start_ids[:end]:
            return True
        return self.restarts and ids[end - 1] in self.marks

    def context(self, ids: list[int], end: int) -> list[int]:
        """The few ids before `end` that show a decoder in the middle of what text it is (it strips no space then)."""
        if self.is_start(ids, end):
            return []
        context: list[int] = []
        for size in (1, 2, 3, 4, 8):  # one character is up to 4 byte tokens, and it must be whole
            context = ids[max(0, end - size) : end]
            marks = [i for i, token in enumerate(context) if token in self.marks]
            if marks:
                return context[marks[-1] + 1 :] or context[-1:]
            text = self.decode(context)
            if text and _BROKEN not in text:
                break
        return context

    def continuation(self, context: list[int], ids: list[int]) -> str | None:
        """Text of `ids` after `context`; `None` if they change the text of the context (a broken character)."""
        before, text = self.decode(context) if context else "", self.decode(context + ids)
        return text[len(before) :] if text.startswith(before) else None

    def whole_characters(self, context: list[int], ids: list[int]) -> tuple[str, int]:
        """Text of as many of `ids` as end with a whole character, and how many these are."""
        for num_used in range(len(ids), max(-1, len(ids) - _MAX_WAITING - 1), -1):
            text = self.continuation(context, ids[:num_used]) if num_used else ""
            if text is not None and not text.endswith(_BROKEN):
                return text, num_used
        # Bytes that no further byte can repair: let them pass as they are, but only when they are surely that.
        return ("", 0) if len(ids) <= 2 * _MAX_WAITING else (self.decode(ids), len(ids))


class Retokenizer:
    """Translates one row between the target's tokenizer and the tokenizer of a drafter.

    The drafter reads the row as `to_drafter(target_ids)`, its draft comes back through `to_target`. A row only grows;
    each call looks at the new tokens and at a bounded piece of text at the end. Another row (also a shorter one) is
    noticed by its last tokens and starts over; use [`~Retokenizer.for_another_row`] to keep rows apart.

    Added tokens (BOS, chat markers) become the drafter's added token of the same string, or its text where it has
    none. What the target's tokenizer puts at the beginning becomes what the drafter's puts there, maybe nothing, and
    what parts two documents for the one becomes what parts them for the other.

    Args:
        target_tokenizer (`PreTrainedTokenizerBase`): tokenizer of the target.
        drafter_tokenizer (`PreTrainedTokenizerBase`): tokenizer of the drafter.

    Attributes:
        num_unchanged (`int`): how many of the ids that `to_drafter` returned last are, from the start, the same as in
            the call before: the part of the row that a KV cache of the drafter may keep.

    Example:
        >>> retokenizer = Retokenizer(target_tokenizer, drafter_tokenizer)
        >>> row = retokenizer.to_drafter(target_ids)
        >>> draft_ids = retokenizer.to_target(target_ids, drafter_greedy(row, num_draft_tokens))
    """

    def __init__(self, target_tokenizer: PreTrainedTokenizerBase, drafter_tokenizer: PreTrainedTokenizerBase):
        self._target = _Codec(target_tokenizer)
        self._drafter = _Codec(drafter_tokenizer)
        self._reset()

    def for_another_row(self) -> Retokenizer:
        """A retokenizer between the same two tokenizers with a row of its own."""
        other = copy.copy(self)
        other._reset()
        return other

    def _reset(self) -> None:
        self.num_unchanged = 0
        self._last_target_ids: list[int] = []  # the last ones of the row seen last, to recognise it
        self._num_target_ids = 0
        self._num_read = 0  # target ids whose text is in; the few behind them wait for the rest of a character
        self._ids: list[int] = []
        self._num_settled = 0
        self._text = ""  # of the row, behind the settled ids
        self._text_is_start = True

    def to_drafter(self, target_ids: list[int]) -> list[int]:
        """The whole row in the drafter's ids; see `num_unchanged` for the part that was there before.

        Args:
            target_ids (`list[int]`): the whole row in the target's ids, without padding.

        Returns:
            `list[int]`: the row in the drafter's ids, up to the last whole character. Read only: the next call
            changes this very list.
        """
        num_settled = self._num_settled
        if not self._is_known(target_ids):
            num_settled, old_ids = 0, self._ids
            self._reset()
        else:
            old_ids = self._ids[num_settled:]
        if not self._ids:
            self._ids = list(self._drafter.start_ids)
            self._num_settled = len(self._ids)
        self._read(target_ids)
        self._ids[self._num_settled :] = self._drafter.encode(self._text, self._text_is_start)
        if len(self._text) > _WINDOW:
            self._settle()

        self.num_unchanged = num_settled
        for old, new in zip(old_ids, self._ids[num_settled : num_settled + len(old_ids)]):
            if old != new:
                break
            self.num_unchanged += 1
        self._num_target_ids = len(target_ids)
        self._last_target_ids = target_ids[-_LOOKBACK:]
        return self._ids

    def to_target(self, target_ids: list[int], draft_drafter_ids: list[int]) -> list[int]:
        """A draft of the drafter as target ids.

        Args:
            target_ids (`list[int]`): the whole row in the target's ids, without padding.
            draft_drafter_ids (`list[int]`): what the drafter proposes after `to_drafter(target_ids)`.

        Returns:
            `list[int]`: the draft in the target's ids, to be appended to `target_ids`; empty if nothing of the draft
            can be said in the target's ids. An incomplete character at the end is left out, a word that may go on
            is not: its last id is right more often than not. Special ids are in it only where the drafter drafted its
            own special token of the same string (or of the same use: EOS, separator).
        """
        if len(target_ids) != self._num_target_ids or not self._is_known(target_ids):
            self.to_drafter(target_ids)
        draft: list[int] = []
        run: list[int] = []
        context = self._drafter.context(self._ids, len(self._ids))
        for draft_id in draft_drafter_ids:
            mark_id = self._target_mark(draft_id)
            if mark_id is None and draft_id not in self._drafter.special_ids:
                run.append(draft_id)
                continue
            piece = self._continue_target(target_ids, draft, context, run)
            draft += piece
            is_lost = not piece and (run or len(target_ids) > self._num_read)
            if mark_id is None or is_lost:
                return draft
            draft.append(mark_id)
            run, context = [], [] if self._drafter.restarts else [draft_id]
        return draft + self._continue_target(target_ids, draft, context, run)

    def _is_known(self, target_ids: list[int]) -> bool:
        """Whether the row is the one of the call before, grown or not."""
        num = self._num_target_ids
        return len(target_ids) >= num and target_ids[max(0, num - _LOOKBACK) : num] == self._last_target_ids

    def _read(self, target_ids: list[int]) -> None:
        """Takes in the text of the target ids that are new."""
        i, end, marks = self._num_read, len(target_ids), self._target.marks
        while i < end:
            next_mark = next((k for k in range(i, end) if target_ids[k] in marks), end)
            if i < next_mark:
                context, ids = self._target.context(target_ids, i), target_ids[i:next_mark]
                text, num_used = self._target.whole_characters(context, ids)
                if num_used < len(ids) and next_mark < end:  # no further byte will come
                    text = self._target.continuation(context, ids) or self._target.decode(ids)
                    num_used = len(ids)
                self._text += text
                i += num_used
                if next_mark == end:
                    break
            self._read_mark(target_ids, i)
            i += 1
        self._num_read = i

    def _read_mark(self, target_ids: list[int], i: int) -> None:
        """Takes in one added token of the target: as ids of the drafter where it has such, else as text."""
        target, drafter = self._target, self._drafter
        mark = target.marks[target_ids[i]]
        is_leading = target_ids[: i + 1] == target.start_ids[: i + 1]
        is_separator = target_ids[i] in target.separator_ids[:1]
        if drafter.start_ids and (is_leading or (is_separator and i == 0)):  # they are there already
            return
        if mark in drafter.mark_ids:
            ids = [drafter.mark_ids[mark]]
        elif is_leading:
            return
        elif is_separator:
            ids = drafter.separator_ids
        else:
            ids = []
        if not ids:
            self._text += mark
            return
        self._ids[self._num_settled :] = drafter.encode(self._text, self._text_is_start) + ids
        self._num_settled = len(self._ids)
        self._text, self._text_is_start = "", drafter.is_start(self._ids, len(self._ids))

    def _target_mark(self, draft_id: int) -> int | None:
        """The target's id for an added token of the drafter; `None` if the id is none or the target has no such."""
        target, drafter = self._target, self._drafter
        mark = drafter.marks.get(draft_id)
        if mark is None:
            return None
        if mark in target.mark_ids:
            return target.mark_ids[mark]
        if draft_id == drafter.tokenizer.eos_token_id:
            return target.tokenizer.eos_token_id
        return target.separator_ids[0] if draft_id in drafter.separator_ids[:1] and target.separator_ids else None

    def _settle(self) -> None:
        """Takes the beginning of the text out of what is encoded at every call, where the cut changes no id.

        The first places tried are those before a space, then any; if a text without spaces grows too long, the cut is
        made anyway.
        """
        text, ids = self._text, self._ids[self._num_settled :]
        last = len(text) - _KEPT
        places = range(last, max(0, last - _WINDOW), -1)
        before_space = [c for c in places if text[c].isspace() and not text[c - 1].isspace()]
        if len(text) <= 2 * _WINDOW:
            candidates = before_space[:2]
        else:
            candidates = before_space[:4] + list(places)[:8]
        for c in candidates:
            tail = self._drafter.encode(text[c:], is_start=False)
            if ids[len(ids) - len(tail) :] == tail:
                break
        else:
            if len(text) <= 4 * _WINDOW:
                return
            c = last
            tail = self._drafter.encode(text[c:], is_start=False)
            self._ids[self._num_settled :] = self._drafter.encode(text[:c], self._text_is_start) + tail
        self._num_settled = len(self._ids) - len(tail)
        self._text, self._text_is_start = text[c:], False

    def _word_begin(self, target_ids: list[int]) -> int:
        """Index of the target token with which the last word of the row begins."""
        end = self._num_read
        for i in range(end - 1, max(0, end - _LOOKBACK), -1):
            if target_ids[i - 1] in self._target.marks:
                return i
            before = self._target.decode([target_ids[i - 1]])
            piece = self._target.continuation([target_ids[i - 1]], [target_ids[i]])
            if piece and piece[0].isspace() and before and not before[-1].isspace():
                return i
        return max(0, end - _LOOKBACK)

    def _continue_target(
        self, target_ids: list[int], draft: list[int], context: list[int], run: list[int]
    ) -> list[int]:
        """Target ids for drafter ids without marks, after `target_ids + draft`, cut at the first that is special."""
        if not run:
            return []
        target = self._target
        text = self._drafter.whole_characters(context, run)[0].partition(_BROKEN)[0]
        if draft:
            ids = target.encode(text, target.restarts)
        else:
            ids = self._continue_word(target_ids, text)
        return ids[: next((i for i, token in enumerate(ids) if token in target.special_ids), len(ids))]

    def _continue_word(self, target_ids: list[int], text: str) -> list[int]:
        """Target ids of a text after the row: of the last word and the text together if that keeps the row's ids."""
        target, end = self._target, self._num_read
        is_segment_start = end > 0 and target_ids[end - 1] in target.marks
        for begin in (end if is_segment_start else self._word_begin(target_ids), end):
            context, kept = target.context(target_ids, begin), target_ids[begin:]
            word = target.continuation(context, target_ids[begin:end]) if begin < end else ""
            if word is not None:
                ids = target.encode(word + text, target.is_start(target_ids, begin))
                if ids[: len(kept)] == kept:
                    return ids[len(kept) :]
        return []  # the row ends in half a character, and the text goes on with another one
