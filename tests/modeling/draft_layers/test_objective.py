"""Training of draft layers, and of a small causal LM in their place."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import VOCAB_SIZE, early_layers, tiny_llama
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainingArguments

from hf_specdec import AutoDrafter, DraftLayersModel
from hf_specdec.modeling.draft_layers import DraftLayersObjective, objective
from hf_specdec.modeling.target import hidden_states
from hf_specdec.training.data import Example
from hf_specdec.training.features import write_features
from hf_specdec.training.objective import Batch
from hf_specdec.training.trainer import DrafterTrainer

LENGTHS = (14, 9, 12)
SOME_IDS = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))[:50]


def make_batch(target, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    mask = (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.randint(3, VOCAB_SIZE, shape, generator=generator) * mask
    is_response = (torch.rand(shape, generator=generator) < 0.6) & mask.bool()
    with torch.no_grad():
        last = target.config.num_hidden_layers - 1
        return Batch(ids, mask, is_response, hidden_states(target, ids, mask, (last,)))


def reference(drafter_logits, target_logits, batch, token_ids=None, kind="distill", temperature=1.0):
    """Token by token."""
    token_ids = list(range(VOCAB_SIZE)) if token_ids is None else token_ids.tolist()
    losses, num_agreed, num_tokens, num_known = [], 0, 0, 0
    for row, length in enumerate(LENGTHS):
        for place in range(1, length):
            if not batch.is_response[row, place]:
                continue
            num_tokens += 1
            token = int(batch.input_ids[row, place])
            known = token in token_ids
            num_known += known
            mine, wanted = drafter_logits[row, place - 1], target_logits[row, place - 1][token_ids]
            num_agreed += int(mine.argmax() == wanted.argmax())
            if kind == "distill":
                p, q = (wanted / temperature).softmax(-1), (mine / temperature).softmax(-1)
                losses.append((p * (p / q).log()).sum() * temperature**2)
            elif known:
                losses.append(-mine.softmax(-1)[token_ids.index(token)].log())
    return torch.stack(losses).mean(), num_agreed, num_known, num_tokens


@pytest.fixture
def batch(target):
    return make_batch(target)


@pytest.mark.parametrize("token_ids", [None, SOME_IDS], ids=["whole", "reduced"])
@pytest.mark.parametrize(("kind", "temperature"), [("distill", 1.0), ("distill", 2.5), ("text", 1.0)])
def test_loss_and_gradient_of_a_plain_loop(target, batch, monkeypatch, token_ids, kind, temperature):
    monkeypatch.setattr(objective, "CHUNK", 4)
    drafter = DraftLayersModel.for_target(target, 2, draft_token_ids=token_ids)
    losses = DraftLayersObjective(drafter, target, kind, temperature)(drafter, target, batch)
    losses.loss.backward()
    gradients = [parameter.grad for parameter in drafter.parameters()]
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)
    drafter.zero_grad()

    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    with torch.no_grad():
        target_logits = target(**inputs).logits
    drafter_logits = drafter.causal_lm(target)(**inputs).logits
    loss, *counts = reference(drafter_logits, target_logits, batch, token_ids, kind, temperature)
    torch.testing.assert_close(losses.loss, loss)
    loss.backward()
    for gradient, parameter in zip(gradients, drafter.parameters()):
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-6, rtol=1e-4)
    num_agreed, num_known, num_tokens = counts
    expected = {"accept_1": (num_agreed, num_tokens)}
    if token_ids is not None:
        expected["in_vocabulary"] = (num_known, num_tokens)
    assert {name: tuple(map(int, pair)) for name, pair in losses.counts.items()} == expected


def test_a_copy_of_the_target_has_no_loss(target, batch):
    drafter = DraftLayersModel.for_target(target, layers=[0, 1, 2, 3], draft_token_ids=SOME_IDS)
    losses = DraftLayersObjective(drafter, target)(drafter, target, batch)
    assert losses.loss.abs() < 1e-5
    assert int(losses.counts["accept_1"][0]) == int(losses.counts["accept_1"][1]) > 10


@pytest.mark.parametrize("kind", ["distill", "text"])
def test_a_causal_lm(target, batch, kind):
    drafter = early_layers(target, 2)
    losses = DraftLayersObjective(drafter, target, kind)(drafter, target, batch)
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    with torch.no_grad():
        logits = [model(**inputs).logits for model in (drafter, target)]
    loss, num_agreed, _, num_tokens = reference(*logits, batch, kind=kind)
    torch.testing.assert_close(losses.loss.detach(), loss)
    assert {name: tuple(map(int, pair)) for name, pair in losses.counts.items()} == {
        "accept_1": (num_agreed, num_tokens)
    }
    losses.loss.backward()
    assert all(parameter.grad is not None for parameter in drafter.parameters())


def test_a_padded_vocabulary_counts_as_far_as_both_go(target, batch):
    drafter = tiny_llama(2, vocab_size=VOCAB_SIZE + 31)
    losses = DraftLayersObjective(drafter, target)(drafter, target, batch)
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    with torch.no_grad():
        expected = reference(drafter(**inputs).logits[..., :VOCAB_SIZE], target(**inputs).logits, batch)[0]
    torch.testing.assert_close(losses.loss.detach(), expected)


@pytest.mark.parametrize("kind", ["distill", "text"])
def test_nothing_to_count(target, batch, kind):
    drafter = DraftLayersModel.for_target(target, draft_token_ids=SOME_IDS)
    batch.is_response[:] = False
    losses = DraftLayersObjective(drafter, target, kind)(drafter, target, batch)
    assert losses.loss == 0
    losses.loss.backward()
    assert [int(count) for pair in losses.counts.values() for count in pair] == [0, 0, 0, 0]


def toy_examples(target, num_examples: int = 24) -> list[Example]:
    """Texts of the target itself, after prompts of two tokens."""
    ids = torch.randint(3, VOCAB_SIZE, (num_examples, 2), generator=torch.Generator().manual_seed(3))
    texts = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=14, pad_token_id=0)
    return [Example(text, [False, False] + [True] * (len(text) - 2)) for text in texts.tolist()]


def train(drafter, target, examples, folder, num_steps: int, **options):
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=num_steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    trainer = DrafterTrainer(drafter, target, DraftLayersObjective(drafter, target, **options), arguments, examples)
    trainer.train()
    return trainer


def values(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("token_ids", [None, SOME_IDS], ids=["whole", "reduced"])
def test_a_step_moves_the_layers_alone(target, tmp_path, token_ids):
    target = copy.deepcopy(target)
    drafter = DraftLayersModel.for_target(target, 1, draft_token_ids=token_ids)
    before_target, before = values(target), values(drafter)
    train(drafter, target, toy_examples(target, 8), tmp_path, 1)
    assert all(torch.equal(tensor, before_target[name]) for name, tensor in target.state_dict().items())
    # The trainer freezes the target, here as for every method.
    assert not any(parameter.requires_grad for parameter in target.parameters())
    moved = {name for name, tensor in drafter.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name, _ in drafter.named_parameters()}


@pytest.mark.parametrize("kind", ["distill", "text"])
@pytest.mark.parametrize("is_offline", [False, True], ids=["online", "offline"])
def test_the_loss_falls(target, tmp_path, kind, is_offline):
    target = copy.deepcopy(target)
    drafter = DraftLayersModel.for_target(target, 1, draft_token_ids=SOME_IDS)
    examples = toy_examples(target)
    if is_offline:
        layers = DraftLayersObjective(drafter, target).hidden_state_layers
        examples = write_features(target, examples, tmp_path / "features", layers=layers, dtype=torch.float32)
    trainer = train(drafter, target, examples, tmp_path / "out", 30, kind=kind)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert log[-1]["loss"] < 0.6 * log[0]["loss"]
    assert log[-1]["accept_1"] > log[0]["accept_1"] + 0.1
    assert 0 < log[0]["in_vocabulary"] < 1
    trainer.save_model()
    assert not any("head" in name or "embed" in name for name in load_file(tmp_path / "out" / "model.safetensors"))
    loaded = AutoDrafter.from_pretrained(str(tmp_path / "out"), target=target)
    assert all(torch.equal(tensor, drafter.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_a_causal_lm_learns_and_is_saved_as_one(target, tmp_path):
    target, drafter = copy.deepcopy(target), tiny_llama(1, tie_word_embeddings=True)
    before = values(target)
    trainer = train(drafter, target, toy_examples(target), tmp_path, 30)
    log = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert log[-1] < 0.6 * log[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    trainer.save_model()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[5, 17, 33]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, drafter.eval()(ids).logits)


def test_layers_in_another_dtype_than_the_target(target, batch):
    half = copy.deepcopy(target).bfloat16()
    drafter = DraftLayersModel.for_target(half, 1, draft_token_ids=SOME_IDS).float()
    exact = DraftLayersObjective(drafter, target)(drafter, target, batch).loss
    loss = DraftLayersObjective(drafter, half)(drafter, half, batch).loss
    loss.backward()
    assert next(drafter.parameters()).grad.dtype == torch.float32
    torch.testing.assert_close(loss, exact, atol=0, rtol=0.05)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kind": "hidden"}, r"`kind` is 'hidden'; expected one of 'distill', 'text'"),
        ({"temperature": 0.0}, r"`temperature` is 0.0; expected a number above 0, 1 for the target's own"),
    ],
)
def test_bad_options(target, options, expected):
    with pytest.raises(ValueError, match=expected):
        DraftLayersObjective(DraftLayersModel.for_target(target), target, **options)


def test_drafters_of_another_target(target):
    with pytest.raises(ValueError, match=r"was made for a target with num_hidden_layers 4, but LlamaForCausalLM has"):
        DraftLayersObjective(DraftLayersModel.for_target(target), tiny_llama(2))
    with pytest.raises(ValueError, match=r"`drafter` has a vocabulary of 609 tokens, the target of 97: they have diff"):
        DraftLayersObjective(tiny_llama(1, vocab_size=609), target)
