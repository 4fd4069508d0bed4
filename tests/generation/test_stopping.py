"""Texts stop at the same token as with plain `generate`, also in the middle of an accepted block, row by row."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from conftest import OracleDrafter, ragged_batch, real_rows, tiny_llama
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

NUM_NEW = 20
ONE, RAGGED = (7,), (5, 11, 3)
CASES = [
    pytest.param(lengths, oracle, id=f"{len(lengths)}-{name}")
    for lengths in (ONE, RAGGED)
    for name, oracle in {"chain": (0.8, 1), "tree": (0.8, 3), "right": (1.0, 1)}.items()
]


@pytest.fixture(scope="module")
def target():
    return tiny_llama(2, seed=3, initializer_range=0.5)


def new_tokens(model, inputs, **kwargs) -> list[list[int]]:
    """What plain `generate` gives when nothing stops it."""
    kwargs = {"max_new_tokens": NUM_NEW, "pad_token_id": 0} | kwargs
    return model.generate(**inputs, **kwargs)[:, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize(("lengths", "oracle"), CASES)
@pytest.mark.parametrize("limit", [1, 2, 6, 7])
def test_length_limit(target, same_text, lengths, oracle, limit):
    inputs = ragged_batch(lengths)
    output = same_text(target, inputs, oracle=oracle, max_new_tokens=limit)
    assert output.speculation.num_emitted == limit * len(lengths)


@pytest.mark.parametrize(("lengths", "oracle"), CASES)
def test_max_length_and_default_length(target, same_text, lengths, oracle):
    inputs = ragged_batch(lengths)
    same_text(target, inputs, oracle=oracle, max_new_tokens=None, max_length=max(lengths) + 9)
    same_text(target, inputs, oracle=oracle, max_new_tokens=None)


@pytest.mark.parametrize(("lengths", "oracle"), CASES)
@pytest.mark.parametrize("do_sample", [False, True])
def test_eos_inside_a_block(target, same_text, lengths, oracle, do_sample):
    inputs = ragged_batch(lengths)
    torch.manual_seed(5)
    texts = new_tokens(target, inputs, do_sample=do_sample)
    ends = set()
    for place in (0, 3, 4, 9):
        eos = texts[0][place]
        output = same_text(target, inputs, oracle=oracle, max_new_tokens=NUM_NEW, eos_token_id=eos, do_sample=do_sample)
        ends.add(output.sequences.shape[1])
    assert len(lengths) > 1 or len(ends) == 4


@pytest.mark.parametrize(("lengths", "oracle"), CASES)
def test_several_eos_ids_and_rows_that_stop_at_different_times(target, same_text, lengths, oracle):
    inputs = ragged_batch(lengths)
    texts = new_tokens(target, inputs)
    eos = [text[6 + 3 * row] for row, text in enumerate(texts)]
    output = same_text(target, inputs, oracle=oracle, max_new_tokens=NUM_NEW, eos_token_id=eos)
    ends = [len(mask) for mask in output.speculation.drafted_mask]
    assert max(ends) < NUM_NEW
    assert len(lengths) == 1 or len(set(ends)) > 1, "the rows were to stop at different times"


@pytest.mark.parametrize("branches", [1, 3])
def test_finished_rows_leave_the_batch(target, branches):
    inputs = ragged_batch(RAGGED)
    eos = [text[4 + 5 * row] for row, text in enumerate(new_tokens(target, inputs))]
    expected = target.generate(**inputs, max_new_tokens=NUM_NEW, eos_token_id=eos, pad_token_id=0)
    oracle = OracleDrafter(real_rows(expected, inputs), 1.0, branches)
    got = target.generate(**inputs, max_new_tokens=NUM_NEW, eos_token_id=eos, pad_token_id=0, assistant=oracle)
    assert got.tolist() == expected.tolist()
    assert oracle.passes[0] == len(RAGGED)
    assert oracle.passes[-1] < len(RAGGED)
    assert oracle.passes == sorted(oracle.passes, reverse=True)


@pytest.mark.parametrize(("lengths", "oracle"), CASES)
@pytest.mark.parametrize("with_eos", [False, True])
def test_stop_strings(target, tokenizer, same_text, lengths, oracle, with_eos):
    """Without an EOS token plain `generate` goes on with a stopped row until all have stopped; so do we."""
    inputs = ragged_batch(lengths)
    texts = new_tokens(target, inputs)
    strings = [tokenizer.decode(text[3 + 4 * row : 5 + 4 * row]) for row, text in enumerate(texts)]
    output = same_text(
        target,
        inputs,
        oracle=oracle,
        max_new_tokens=NUM_NEW,
        stop_strings=strings,
        tokenizer=tokenizer,
        eos_token_id=2 if with_eos else None,
    )
    ends = [len(mask) for mask in output.speculation.drafted_mask]
    assert max(ends) < NUM_NEW
    if len(lengths) > 1:
        assert (len(set(ends)) > 1) == with_eos


@pytest.mark.parametrize("oracle", [(0.8, 1), (0.8, 3)])
def test_max_time(target, same_text, monkeypatch, oracle):
    """A clock that ticks whenever it is asked: once for each token."""
    same_text(target, ragged_batch(RAGGED), oracle=oracle, max_time=0.0)
    same_text(target, ragged_batch(RAGGED), oracle=oracle, max_time=1e9, max_new_tokens=9)
    inputs = ragged_batch(ONE)
    expected = target.generate(**inputs, max_new_tokens=8, pad_token_id=0)
    drafts = OracleDrafter(real_rows(target.generate(**inputs, max_new_tokens=30, pad_token_id=0), inputs), *oracle)
    ticks = itertools.count()
    monkeypatch.setattr(time, "time", lambda: float(next(ticks)))
    got = target.generate(**inputs, max_new_tokens=30, max_time=7.5, pad_token_id=0, assistant=drafts)
    assert got.tolist() == expected.tolist()


class Recorder(StoppingCriteria):
    """Keeps what it was called with; stops row b when it has as many columns as `ends[b]` says."""

    def __init__(self, ends: list[int | None]) -> None:
        self.ends, self.ids, self.scores = ends, [], []

    def __call__(self, input_ids, scores, **kwargs):
        self.ids.append(input_ids.tolist())
        self.scores.append(None if scores is None else [step.clone() for step in scores])
        assert input_ids.view(-1).shape[0] == input_ids.numel()  # as contiguous as in plain `generate`
        return torch.tensor([end is not None and input_ids.shape[1] >= end for end in self.ends])


@pytest.mark.parametrize(("lengths", "oracle"), CASES)
@pytest.mark.parametrize("with_eos", [False, True])
@pytest.mark.parametrize("do_sample", [False, True])
def test_own_criteria_see_what_plain_generate_shows_them(target, lengths, oracle, with_eos, do_sample):
    inputs = ragged_batch(lengths)
    width = max(lengths)
    kwargs = {"max_new_tokens": 12, "pad_token_id": 0, "do_sample": do_sample}
    torch.manual_seed(5)
    texts = target.generate(**inputs, **kwargs)
    if with_eos:
        kwargs["eos_token_id"] = texts[-1, width + 2].item()
    for ends in ([None] * len(lengths), [width + 4, None, width + 6][: len(lengths)], [width + 7] * len(lengths)):
        plain, ours = Recorder(ends), Recorder(ends)
        torch.manual_seed(5)
        expected = target.generate(**inputs, **kwargs, stopping_criteria=StoppingCriteriaList([plain]))
        drafts = OracleDrafter(real_rows(texts, inputs), *oracle)
        torch.manual_seed(5)
        got = target.generate(**inputs, **kwargs, stopping_criteria=StoppingCriteriaList([ours]), assistant=drafts)
        assert got.tolist() == expected.tolist()
        assert ours.ids == plain.ids


@pytest.mark.parametrize("branches", [1, 3])
def test_own_criteria_see_the_scores(target, branches):
    inputs = ragged_batch(RAGGED)
    kwargs = {"max_new_tokens": 8, "pad_token_id": 0, "return_dict_in_generate": True, "output_scores": True}
    plain, ours = Recorder([None, 15, None]), Recorder([None, 15, None])
    expected = target.generate(**inputs, **kwargs, stopping_criteria=StoppingCriteriaList([plain]))
    drafts = OracleDrafter(real_rows(expected.sequences, inputs), 0.8, branches)
    got = target.generate(**inputs, **kwargs, stopping_criteria=StoppingCriteriaList([ours]), assistant=drafts)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert list(map(len, ours.scores)) == list(map(len, plain.scores)) == list(range(1, 9))
    torch.testing.assert_close(ours.scores[-1], plain.scores[-1], atol=1e-4, rtol=1e-4)


class StopsAtToken(EosTokenCriteria):
    """A subclass of a criterion of the library's may do anything, so it is treated as a user's own."""

    def __call__(self, input_ids, scores, **kwargs):
        return super().__call__(input_ids, scores) & torch.tensor(input_ids.shape[1] % 2 == 0)


@pytest.mark.parametrize(("lengths", "oracle"), CASES)
def test_subclass_of_a_librarys_criterion(target, same_text, lengths, oracle):
    inputs = ragged_batch(lengths)
    ids = list(range(0, 97, 5))
    for criterion in (StopsAtToken(ids), EosTokenCriteria(ids), MaxLengthCriteria(max(lengths) + 5)):
        same_text(target, inputs, oracle=oracle, max_new_tokens=12, stopping_criteria=StoppingCriteriaList([criterion]))
