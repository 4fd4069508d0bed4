"""The heart: with any drafter the text is that of plain `generate`, greedy and sampled with the same seed."""

from __future__ import annotations

import pytest
import torch
from conftest import ragged_batch

import hf_specdec

WAYS_TO_CHOOSE = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "top_k": 0},
    "cold": {"do_sample": True, "temperature": 0.3},
    "top_p": {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.9},
    "min_p": {"do_sample": True, "top_k": 0, "min_p": 0.05},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "penalty_sample": {"do_sample": True, "repetition_penalty": 1.2, "top_k": 20},
    "no_repeat": {"do_sample": False, "no_repeat_ngram_size": 2},
    "everything": {
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
        "typical_p": 0.9,
        "epsilon_cutoff": 1e-3,
        "bad_words_ids": [[7], [8, 9]],
        "suppress_tokens": [11],
        "renormalize_logits": True,
    },
}
BATCHES = {"one": (7,), "one_token": (1,), "ragged": (5, 11, 3, 17), "level": (6, 6)}
CASES = [(choose, batch) for choose in WAYS_TO_CHOOSE for batch in ("one", "ragged")]
CASES += [(choose, batch) for choose in ("greedy", "sample") for batch in ("one_token", "level")]


def eagle(target, **options):
    torch.manual_seed(3)
    model = hf_specdec.EagleModel.for_target(target, **options)
    return hf_specdec.Eagle(model, num_draft_tokens=6, depth=2, width=3)


@pytest.mark.parametrize(("choose", "batch"), CASES)
@pytest.mark.parametrize(
    "method",
    ["draft_model", "prompt_lookup", "medusa", "eagle", "eagle3", "chain", "tree", "always_wrong", "always_right"],
)
def test_same_text(target, drafter, same_text, choose, batch, method):
    inputs = ragged_batch(BATCHES[batch])
    methods = {
        "draft_model": {"assistant": drafter},
        "prompt_lookup": {"assistant": hf_specdec.PromptLookup()},
        "medusa": {"assistant": hf_specdec.MedusaModel.for_target(target), "assistant_confidence_threshold": 0.01},
        "eagle": {"assistant": eagle(target, version=1), "assistant_confidence_threshold": 0.01},
        "eagle3": {"assistant": eagle(target, target_layers=[0, 2]), "assistant_confidence_threshold": 0.01},
        "chain": {"oracle": (0.6, 1)},
        "tree": {"oracle": (0.6, 3), "num_assistant_tokens": 4},
        "always_wrong": {"oracle": (0.0, 1)},
        "always_right": {"oracle": (1.0, 1)},
    }
    output = same_text(target, inputs, **methods[method], **WAYS_TO_CHOOSE[choose])
    assert output.speculation.num_emitted == 40 * len(BATCHES[batch])
    if method == "always_right":
        # 6 tokens a pass (5 drafts and the target's own), from the prefill on; the last pass may want fewer.
        assert output.speculation.num_target_passes == -(-40 // 6)
    if method == "always_wrong":
        assert output.speculation.num_accepted == 0


@pytest.mark.parametrize("num_assistant_tokens", [1, 2, 7, 64, "auto"])
def test_any_draft_length(target, drafter, same_text, num_assistant_tokens):
    for inputs in (ragged_batch((4,)), ragged_batch()):
        same_text(target, inputs, drafter, num_assistant_tokens=num_assistant_tokens, do_sample=True)


@pytest.mark.parametrize("schedule", ["constant", "heuristic", "heuristic_transient"])
def test_schedules(target, drafter, same_text, schedule):
    same_text(target, ragged_batch((4,)), drafter, num_assistant_tokens_schedule=schedule)


@pytest.mark.parametrize("threshold", [0.05, 0.4, 0.99])
def test_confidence_threshold(target, drafter, same_text, threshold):
    for do_sample in (False, True):
        same_text(target, ragged_batch(), drafter, assistant_confidence_threshold=threshold, do_sample=do_sample)


@pytest.mark.parametrize("do_sample", [False, True])
def test_num_return_sequences(target, drafter, same_text, do_sample):
    if do_sample:
        same_text(target, ragged_batch((5, 9)), drafter, num_return_sequences=3, do_sample=True)
    else:
        with pytest.raises(ValueError, match="num_return_sequences"):
            target.generate(**ragged_batch((5,)), assistant=drafter, num_return_sequences=3, do_sample=False)


def test_through_custom_generate(target, drafter):
    inputs = ragged_batch((9,))
    expected = target.generate(**inputs, max_new_tokens=20, pad_token_id=0)
    got = target.generate(
        **inputs,
        max_new_tokens=20,
        pad_token_id=0,
        custom_generate=hf_specdec.speculative_decoding,
        assistant=drafter,
    )
    assert torch.equal(got, expected)


def test_same_text_in_half_precision_up_to_near_ties(target, drafter):
    """bfloat16: where the texts part, plain generate's own two best scores were nearly equal."""
    import copy

    model = copy.deepcopy(target).to(torch.bfloat16)
    inputs = ragged_batch((9,))
    plain = model.generate(
        **inputs, max_new_tokens=40, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    got = model.generate(**inputs, max_new_tokens=40, pad_token_id=0, assistant=copy.deepcopy(drafter).bfloat16())
    differs = (plain.sequences != got)[0, 9:].nonzero()
    if len(differs):
        best = plain.logits[int(differs[0])][0].topk(2).values
        assert best[0] - best[1] <= 2**-7 * best[0].abs() * 4


class Nonsense(hf_specdec.CandidateGenerator):
    """Proposes ids that no model emits, and more of them than were asked for."""

    def propose(self, run, num_draft_tokens):
        return hf_specdec.CandidateTree(
            torch.tensor([[run.vocab_size + 5, -7, 10**6, row[-1]] * 3 for row in run.tokens])
        )


@pytest.mark.parametrize("choose", ["greedy", "sample", "penalty"])
def test_ids_outside_the_vocabulary_are_no_guess(target, same_text, choose):
    for lengths in ((4,), (5, 9)):
        output = same_text(target, ragged_batch(lengths), Nonsense(), max_new_tokens=12, **WAYS_TO_CHOOSE[choose])
        assert output.speculation.num_accepted == 0
