"""Streamers: the prompt first, then a piece per accepted block; together they are the output."""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import OracleDrafter, ragged_batch, real_rows, tiny_llama
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

NUM_NEW = 16
ONE, RAGGED = (7,), (5, 11, 3)


class Pieces(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.pieces: list[torch.Tensor] = []
        self.num_ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert self.num_ends == 0
        assert value.device.type == "cpu"
        self.pieces.append(value.clone())

    def end(self) -> None:
        self.num_ends += 1


class Spelling:
    """A tokenizer's decode: every id becomes a word."""

    def decode(self, ids: list[int], **kwargs) -> str:
        return "".join(f"{token} " for token in ids)


@pytest.fixture(scope="module")
def target():
    return tiny_llama(2, seed=3, initializer_range=0.5)


@pytest.fixture(scope="module")
def texts(target):
    return {
        lengths: target.generate(**ragged_batch(lengths), max_new_tokens=NUM_NEW, pad_token_id=0)
        for lengths in (ONE, RAGGED)
    }


def oracle(texts, lengths, rate: float = 0.8, branches: int = 1) -> OracleDrafter:
    return OracleDrafter(real_rows(texts[lengths], ragged_batch(lengths)), rate, branches)


@pytest.mark.parametrize("lengths", [ONE, RAGGED])
@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("is_lockstep", [False, True])
def test_pieces_make_up_the_output(target, texts, lengths, branches, stops, is_lockstep):
    class Nothing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores

    inputs = ragged_batch(lengths)
    streamer = Pieces()
    kwargs = {"max_new_tokens": NUM_NEW, "pad_token_id": 0}
    if stops:
        kwargs["eos_token_id"] = [texts[lengths][row, max(lengths) + 3 + 4 * row].item() for row in range(len(lengths))]
    if is_lockstep:
        kwargs["logits_processor"] = LogitsProcessorList([Nothing()])
    expected = target.generate(**inputs, **kwargs)
    got = target.generate(**inputs, **kwargs, assistant=oracle(texts, lengths, branches=branches), streamer=streamer)
    assert got.tolist() == expected.tolist()
    assert streamer.pieces[0].tolist() == inputs["input_ids"].tolist()
    assert torch.cat(streamer.pieces, dim=1).tolist() == expected.tolist()
    if not stops:
        assert len(streamer.pieces) < 1 + NUM_NEW, "a piece per block, not per token"
    assert streamer.num_ends == 1


def test_pieces_come_before_the_end(target, texts):
    """A piece per pass: each pass that emits something hands it on before the next one starts."""
    streamer = Pieces()
    seen = []

    class Watched(OracleDrafter):
        def propose(self, run, num_draft_tokens):
            seen.append(sum(piece.shape[1] for piece in streamer.pieces))
            return super().propose(run, num_draft_tokens)

    drafts = Watched(real_rows(texts[ONE], ragged_batch(ONE)), 1.0)
    target.generate(**ragged_batch(ONE), max_new_tokens=NUM_NEW, pad_token_id=0, assistant=drafts, streamer=streamer)
    assert seen == sorted(set(seen))
    assert seen[0] == 7


def test_stops_without_eos_are_streamed_as_far_as_the_output_goes(target, texts):
    streamer = Pieces()
    got = target.generate(
        **ragged_batch(RAGGED),
        max_new_tokens=NUM_NEW,
        pad_token_id=0,
        assistant=oracle(texts, RAGGED),
        streamer=streamer,
        stopping_criteria=StoppingCriteriaList([MaxTimeCriteria(0.0)]),
    )
    assert got.shape[1] == max(RAGGED) + 1
    assert torch.cat(streamer.pieces, dim=1).tolist() == got.tolist()


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_text_streamer(target, texts, capsys, skip_prompt):
    shown = []
    for assistant in (None, oracle(texts, ONE), oracle(texts, ONE, branches=3)):
        target.generate(
            **ragged_batch(ONE),
            max_new_tokens=NUM_NEW,
            pad_token_id=0,
            assistant=assistant,
            streamer=TextStreamer(Spelling(), skip_prompt=skip_prompt),
        )
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2]
    assert len(shown[0].split()) == NUM_NEW + (0 if skip_prompt else 7)


def test_text_iterator_streamer_in_a_thread_ends(target, texts):
    streamer = TextIteratorStreamer(Spelling(), skip_prompt=True, timeout=60)
    kwargs = {"max_new_tokens": NUM_NEW, "pad_token_id": 0, "assistant": oracle(texts, ONE), "streamer": streamer}
    thread = threading.Thread(target=target.generate, kwargs=ragged_batch(ONE) | kwargs)
    thread.start()
    text = "".join(streamer)
    thread.join(60)
    assert not thread.is_alive()
    assert text == Spelling().decode(texts[ONE][0, 7:].tolist())


def test_text_streamer_takes_one_row_as_with_plain_generate(target, texts):
    with pytest.raises(ValueError, match="batch size 1"):
        target.generate(
            **ragged_batch(RAGGED), max_new_tokens=3, assistant=oracle(texts, RAGGED), streamer=TextStreamer(Spelling())
        )
