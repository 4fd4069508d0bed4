"""Known wrong verifiers: each must be caught by the equality with plain `generate`, or the equality proves nothing."""

from __future__ import annotations

import pytest
import torch
from conftest import OracleDrafter, ragged_batch, real_rows, tiny_llama
from transformers import MistralConfig, MistralForCausalLM

from hf_specdec.generation import attention, cache, choice, target, tree, verification


def accept_every_draft(monkeypatch):
    real = verification.children
    monkeypatch.setattr(verification, "children", lambda tokens, parents: AnyToken(real(tokens, parents)))


class AnyToken(dict):
    """Finds a child whatever token was chosen."""

    def get(self, step, default=None):
        return next((node for (parent, _), node in self.items() if parent == step[0]), default)


def forget_to_move_the_branch(monkeypatch):
    monkeypatch.setattr(cache.RaggedCache, "move", lambda *args: None)


def noise_one_step_late(monkeypatch):
    real = choice.SharedNoise.noise
    monkeypatch.setattr(choice.SharedNoise, "noise", lambda self, step: real(self, step + 1))


def noise_of_another_row(monkeypatch):
    real = choice.SharedNoise.noise
    monkeypatch.setattr(choice.SharedNoise, "noise", lambda self, step: real(self, step).flip(0))


def siblings_see_each_other(monkeypatch):
    real = tree.CandidateTree.visibility

    def visibility(self):
        depths, is_visible = real(self)
        return depths, torch.ones_like(is_visible).tril().expand_as(is_visible)

    monkeypatch.setattr(tree.CandidateTree, "visibility", visibility)


def nodes_at_their_slots(monkeypatch):
    real = tree.CandidateTree.visibility
    monkeypatch.setattr(
        tree.CandidateTree,
        "visibility",
        lambda self: (torch.arange(self.num_nodes + 1)[None].expand(len(self.tokens), -1), real(self)[1]),
    )


def no_window(monkeypatch):
    real = attention.attention_kinds
    monkeypatch.setattr(attention, "attention_kinds", lambda model: dict.fromkeys(real(model)))


def keep_one_token_too_many(monkeypatch):
    real = target.Target.commit

    def commit(self, run, outputs, paths):
        real(self, run, outputs, paths)
        self.lengths = [length + 1 for length in self.lengths]

    monkeypatch.setattr(target.Target, "commit", commit)


def positions_with_padding(monkeypatch):
    real = target.Target._learn_inputs

    def learn(self, *args):
        real(self, *args)
        self.position_shift = [self.num_columns - len(columns) for columns in self.columns]

    monkeypatch.setattr(target.Target, "_learn_inputs", learn)


@pytest.fixture(scope="module")
def sliding():
    torch.manual_seed(0)
    config = tiny_llama().config.to_dict() | {"sliding_window": 8, "model_type": "mistral"}
    return MistralForCausalLM(MistralConfig(**config)).eval()


MUTANTS = [
    accept_every_draft,
    forget_to_move_the_branch,
    noise_one_step_late,
    noise_of_another_row,
    siblings_see_each_other,
    nodes_at_their_slots,
    no_window,
    keep_one_token_too_many,
    positions_with_padding,
]


@pytest.mark.parametrize("mutant", [None, *MUTANTS], ids=lambda mutant: getattr(mutant, "__name__", "unchanged"))
def test_mutants_are_caught(target, sliding, monkeypatch, mutant):
    inputs = ragged_batch()
    texts = []
    if mutant is not None:
        mutant(monkeypatch)
    for model, branches, do_sample in [(target, 3, True), (target, 1, True), (sliding, 3, False), (sliding, 1, False)]:
        options = {"max_new_tokens": 30, "pad_token_id": 0, "do_sample": do_sample, "top_k": 0}
        torch.manual_seed(3)
        plain = model.generate(**inputs, **options)
        torch.manual_seed(3)
        drafter = OracleDrafter(real_rows(plain, inputs), 0.6, branches)
        texts.append((plain.tolist(), model.generate(**inputs, assistant=drafter, **options).tolist()))
    assert all(expected == got for expected, got in texts) == (mutant is None)
