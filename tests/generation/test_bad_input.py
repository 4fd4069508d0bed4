"""What a user may get wrong: a message that names it, and never another text."""

from __future__ import annotations

import copy

import huggingface_hub
import pytest
import torch
from conftest import ragged_batch

import hf_specdec
from hf_specdec import CandidateGenerator, CandidateTree, PromptLookup
from hf_specdec.registry import METHODS


class Proposes(CandidateGenerator):
    def __init__(self, make):
        self.make = make

    def propose(self, run, num_draft_tokens):
        return self.make(run)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda run: [[1, 2]], r"`propose` of Proposes returned a list; return a CandidateTree"),
        (lambda run: torch.tensor([[1, 2]]), r"returned a Tensor"),
        (lambda run: CandidateTree([[1, 2]]), r"`tokens` is a list; expected a torch.LongTensor"),
        (lambda run: CandidateTree(torch.ones(1, 2)), r"`tokens` is a torch.float32"),
        (lambda run: CandidateTree(torch.tensor([[1, 2]]), torch.tensor([1, -1])), r"a node before it"),
        (lambda run: CandidateTree(torch.tensor([[1, 2]]), torch.tensor([-2, 0])), r"a node before it"),
        (lambda run: CandidateTree(torch.tensor([[1, 2]]), torch.tensor([-1, 7])), r"a node before it"),
        (lambda run: CandidateTree(torch.tensor([[1, 2]]), torch.tensor([-1.0, 0])), r"`parents` is a torch.float32"),
        (lambda run: CandidateTree(torch.tensor([[1, 2]]), None, torch.ones(1, 3, 5)), r"`draft_probs` has shape"),
    ],
)
def test_malformed_proposals(target, make, message):
    with pytest.raises(ValueError, match=message):
        target.generate(**ragged_batch((4,)), max_new_tokens=8, pad_token_id=0, assistant=Proposes(make))


def test_a_wrong_depth_is_mended(target, same_text):
    tree = Proposes(lambda run: CandidateTree(torch.tensor([[1, 2, 3]]), torch.tensor([-1, 0, 1]), depth=1))
    same_text(target, ragged_batch((4,)), tree, do_sample=True)


@pytest.mark.parametrize("layers", [(0, 4), (-1,)])
def test_hidden_state_layers_out_of_range(target, layers):
    drafter = Proposes(lambda run: None)
    drafter.hidden_state_layers = layers
    with pytest.raises(ValueError, match=r"`hidden_state_layers` of Proposes is .*has the layers 0 to 3"):
        target.generate(**ragged_batch((4,)), max_new_tokens=8, assistant=drafter)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("num_assistant_tokens", 0),
        ("num_assistant_tokens", True),
        ("num_assistant_tokens", "many"),
        ("num_assistant_tokens", 2.5),
        ("prompt_lookup_num_tokens", -1),
        ("max_matching_ngram_size", 0),
        ("num_assistant_tokens_schedule", "rising"),
        ("assistant_sampling", "typical"),
        ("assistant_acceptance", "typically"),
        ("assistant_confidence_threshold", -1),
        ("assistant_confidence_threshold", float("nan")),
        ("assistant_confidence_threshold", "high"),
    ],
)
def test_arguments_out_of_range(target, argument, value):
    with pytest.raises(ValueError, match=rf"`{argument}` is .*expected"):
        target.generate(**ragged_batch((4,)), max_new_tokens=8, assistant="prompt_lookup", **{argument: value})


def test_wrong_kinds_of_assistant(target):
    for assistant, message in [(PromptLookup, r"PromptLookup\(\)"), (3, "got a int"), ({}, "got a dict")]:
        with pytest.raises(ValueError, match=message):
            target.generate(**ragged_batch((4,)), max_new_tokens=8, assistant=assistant)
    with pytest.raises(ValueError, match="takes a loaded causal language model"):
        hf_specdec.DraftModel("user/name")
    with pytest.raises(ValueError, match="expected a string and a callable"):
        hf_specdec.register_method("nothing", None)
    assert "nothing" not in METHODS


def test_a_typo_in_a_name_gets_a_hint(target, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="Did you mean 'prompt_lookup'"):
        target.generate(**ragged_batch((4,)), max_new_tokens=8, assistant="promt_lookup")


def test_assistant_none_is_plain_generate(target):
    inputs = ragged_batch((4,))
    plain = target.generate(**inputs, max_new_tokens=8, pad_token_id=0)
    got = target.generate(
        **inputs,
        max_new_tokens=8,
        pad_token_id=0,
        assistant=None,
        assistant_sampling="rejection",
        num_assistant_tokens="auto",
        prompt_lookup_num_tokens=3,
    )
    assert torch.equal(got, plain)


@pytest.mark.parametrize("sampling", ["shared_noise", "rejection"])
def test_nan_scores_raise_as_with_plain_generate(target, sampling):
    model = copy.deepcopy(target)
    model.lm_head.weight.data[3] = float("nan")
    options = {"max_new_tokens": 5, "do_sample": True, "pad_token_id": 0}
    with pytest.raises(RuntimeError, match="nan"):
        model.generate(**ragged_batch((4,)), **options)
    with pytest.raises(RuntimeError, match="nan"):
        model.generate(**ragged_batch((4,)), assistant="prompt_lookup", assistant_sampling=sampling, **options)


def test_a_very_long_ngram_size_costs_nothing(target, same_text):
    same_text(target, ragged_batch((9,)), "prompt_lookup", max_matching_ngram_size=10**6)
