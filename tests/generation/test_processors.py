"""Logits processors, a user's own too: called once per emitted token, with what plain `generate` shows them."""

from __future__ import annotations

import pytest
import torch
from conftest import OracleDrafter, ragged_batch, real_rows, tiny_llama
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
    TemperatureLogitsWarper,
    WatermarkingConfig,
)

NUM_NEW = 16
ONE, RAGGED = (7,), (5, 11, 3)
CASES = [
    pytest.param(lengths, oracle, id=f"{len(lengths)}-{name}")
    for lengths in (ONE, RAGGED)
    for name, oracle in {"chain": (0.8, 1), "tree": (0.8, 3)}.items()
]
OPTIONS = {
    "guidance": {"guidance_scale": 1.7},
    "guidance_sample": {"guidance_scale": 1.7, "do_sample": True, "temperature": 0.7},
    "synth_id": {
        "watermarking_config": lambda: SynthIDTextWatermarkingConfig(
            ngram_len=3, keys=[7, 8, 9], context_history_size=8
        ),
        "do_sample": True,
    },
    "watermark": {"watermarking_config": lambda: WatermarkingConfig(bias=2.0, seeding_scheme="selfhash")},
    "watermark_sample": {"watermarking_config": lambda: WatermarkingConfig(bias=2.0), "do_sample": True},
    "encoder_repetition": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat": {"encoder_no_repeat_ngram_size": 2, "do_sample": True},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(0, 97, 4))},
    "min_length": {"min_length": 14, "eos_token_id": list(range(0, 97, 4)), "do_sample": True},
    "forced_eos": {"forced_eos_token_id": 33, "eos_token_id": 33},
    "decay": {"exponential_decay_length_penalty": (4, 1.6), "eos_token_id": 33},
    "decay_sample": {"exponential_decay_length_penalty": (2, 1.9), "eos_token_id": 33, "do_sample": True},
    "sequence_bias": {"sequence_bias": [[[40], 5.0], [[40, 41], 9.0], [[41, 42, 43], -3.0]]},
    "begin_suppress": {"begin_suppress_tokens": list(range(0, 97, 2)), "eos_token_id": list(range(0, 97, 3))},
    "no_repeat_of_stop": {"no_repeat_ngram_size": 1, "eos_token_id": [11, 52]},
    "top_h": {"top_h": 0.5, "do_sample": True},
    "eta": {"eta_cutoff": 1e-2, "do_sample": True},
}


@pytest.fixture(scope="module")
def target():
    return tiny_llama(2, seed=3, initializer_range=0.5)


@pytest.mark.parametrize(("lengths", "oracle"), CASES)
@pytest.mark.parametrize("name", OPTIONS)
def test_option(target, same_text, lengths, oracle, name):
    kwargs = dict(OPTIONS[name])
    if "watermarking_config" in kwargs:
        kwargs["watermarking_config"] = kwargs["watermarking_config"]()
    output = same_text(target, ragged_batch(lengths), oracle=oracle, max_new_tokens=NUM_NEW, **kwargs)
    assert output.speculation.num_accepted > 0 or output.speculation.num_emitted < 8


@pytest.mark.parametrize("name", ["guidance_sample", "watermark", "sequence_bias", "decay_sample"])
def test_option_with_a_draft_model(target, same_text, name):
    """Its drafts see neither the user's processors nor those that count."""
    kwargs = {k: v() if callable(v) else v for k, v in OPTIONS[name].items()}
    drafter = tiny_llama(1)
    same_text(target, ragged_batch(RAGGED), drafter, max_new_tokens=NUM_NEW, **kwargs)


@pytest.mark.parametrize(("lengths", "oracle"), CASES)
@pytest.mark.parametrize("do_sample", [False, True])
def test_guidance_with_a_negative_prompt(target, same_text, lengths, oracle, do_sample):
    negative = ragged_batch(tuple(length + 2 for length in lengths), seed=4)
    same_text(
        target,
        ragged_batch(lengths),
        oracle=oracle,
        max_new_tokens=NUM_NEW,
        guidance_scale=2.0,
        negative_prompt_ids=negative["input_ids"],
        negative_prompt_attention_mask=negative["attention_mask"],
        do_sample=do_sample,
    )


@pytest.mark.parametrize(("lengths", "oracle"), CASES)
@pytest.mark.parametrize("with_eos", [False, True])
def test_prefix_allowed_tokens_fn_sees_what_plain_generate_shows_it(target, lengths, oracle, with_eos):
    inputs = ragged_batch(lengths)
    calls: list[tuple[int, list[int]]] = []

    def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
        calls.append((batch_id, ids.tolist()))
        return [(3 * int(ids[-1]) + 7 * k + batch_id) % 97 for k in range(9)]

    kwargs = {"max_new_tokens": NUM_NEW, "pad_token_id": 0, "prefix_allowed_tokens_fn": allowed}
    texts = target.generate(**inputs, **kwargs)
    kwargs["eos_token_id"] = texts[-1, max(lengths) + 5].item() if with_eos else None
    calls.clear()
    expected = target.generate(**inputs, **kwargs)
    expected_calls = list(calls)
    calls.clear()
    got = target.generate(**inputs, **kwargs, assistant=OracleDrafter(real_rows(texts, inputs), *oracle))
    assert got.tolist() == expected.tolist()
    assert calls == expected_calls


class Recorder(LogitsProcessor):
    """Keeps what it was called with; what it returns depends on how often it was called."""

    def __init__(self) -> None:
        self.ids: list[list[list[int]]] = []
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids, scores):
        self.ids.append(input_ids.tolist())
        self.scores.append(scores.clone())
        assert input_ids.is_contiguous()
        scores[:, (13 * len(self.ids)) % 97 :][:, :7] += 4.0  # in place: it may
        return scores


class UnevenTemperature(TemperatureLogitsWarper):
    """Subclass of a stateless built-in, itself stateful."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.num_calls = 0

    def __call__(self, input_ids, scores):
        self.num_calls += 1
        return super().__call__(input_ids, scores) * (1 + self.num_calls % 3)


@pytest.mark.parametrize(("lengths", "oracle"), CASES)
@pytest.mark.parametrize("with_eos", [False, True])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("returns_dict", [False, True])
def test_own_processor_sees_what_plain_generate_shows_it(target, lengths, oracle, with_eos, do_sample, returns_dict):
    inputs = ragged_batch(lengths)
    width = max(lengths)
    kwargs = {"max_new_tokens": NUM_NEW, "pad_token_id": 0, "do_sample": do_sample}

    def generate(**more):
        recorder, uneven = Recorder(), UnevenTemperature()
        torch.manual_seed(5)
        ids = target.generate(**inputs, **kwargs, **more, logits_processor=LogitsProcessorList([recorder, uneven]))
        return getattr(ids, "sequences", ids), recorder, uneven

    texts = generate()[0]
    if with_eos:
        kwargs["eos_token_id"] = texts[:, width + 5].tolist()
    expected, plain, plain_uneven = generate()
    drafts = OracleDrafter(real_rows(texts, inputs), *oracle)
    got, ours, ours_uneven = generate(assistant=drafts, return_dict_in_generate=returns_dict)
    assert got.tolist() == expected.tolist()
    assert ours.ids == plain.ids
    assert ours_uneven.num_calls == plain_uneven.num_calls
    is_ended = torch.zeros(len(lengths), dtype=torch.bool)
    for step, (mine, theirs) in enumerate(zip(ours.scores, plain.scores, strict=True)):
        assert mine.dtype == theirs.dtype == torch.float32
        if with_eos and step > 0:
            is_ended |= torch.isin(got[:, width + step - 1], torch.tensor(kwargs["eos_token_id"]))
        # A row that has stopped holds zeros where plain `generate` holds the scores after a padding token.
        torch.testing.assert_close(mine[~is_ended], theirs[~is_ended], atol=1e-4, rtol=1e-4)


def test_own_processor_is_never_called_for_a_draft(target):
    inputs = ragged_batch(ONE)
    recorder = Recorder()
    target.generate(
        **inputs,
        max_new_tokens=NUM_NEW,
        pad_token_id=0,
        assistant=tiny_llama(1),
        logits_processor=LogitsProcessorList([recorder]),
    )
    assert len(recorder.ids) == NUM_NEW


@pytest.mark.parametrize("branches", [1, 3])
def test_processors_at_the_end_of_the_text(target, same_text, branches):
    """Drafts that reach past the last column: processors that look at the ids see them cut off."""
    for limit in (2, 3, 5):
        same_text(target, ragged_batch(RAGGED), oracle=(0.9, branches), max_new_tokens=limit, repetition_penalty=1.5)
