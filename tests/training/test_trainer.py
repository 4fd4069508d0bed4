"""One trainer for all drafters: what moves, what stays, what is saved, what is counted."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import VOCAB_SIZE, tiny_llama
from torch.nn import functional as F
from transformers import TrainingArguments

from hf_specdec import AutoDrafter, MedusaModel
from hf_specdec.modeling.medusa import MedusaObjective
from hf_specdec.modeling.target import hidden_states
from hf_specdec.training.data import Example
from hf_specdec.training.features import write_features
from hf_specdec.training.objective import Batch
from hf_specdec.training.trainer import DrafterTrainer, collate

LENGTHS = (9, 14, 6, 12, 17, 8)


def examples(lengths=LENGTHS, seed: int = 0) -> list[Example]:
    """Counting texts, the first third of each a prompt."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        start = int(torch.randint(3, 40, (1,), generator=generator))
        rows.append(Example([start + i for i in range(length)], [i > length // 3 for i in range(length)]))
    return rows


def arguments(folder, **options) -> TrainingArguments:
    defaults = {"per_device_train_batch_size": 2, "learning_rate": 3e-3, "report_to": "none", "disable_tqdm": True}
    defaults |= {"save_strategy": "no", "max_steps": 1, "dataloader_pin_memory": False, "logging_steps": 100}
    return TrainingArguments(str(folder), **defaults | options)


def snapshot(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def moved(model, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize("source", ["online", "features"])
@pytest.mark.parametrize("own", [True, False])
def test_one_step_moves_the_drafter_alone(tmp_path, own, source):
    target = tiny_llama(2)
    heads = MedusaModel.for_target(target, num_heads=2, has_own_output_heads=own)
    data = examples()
    if source == "features":
        data = write_features(target, data, tmp_path / "features", layers=(1,))
    before = snapshot(target), snapshot(heads)
    DrafterTrainer(heads, target, MedusaObjective(heads, target), arguments(tmp_path), data).train()
    assert moved(target, before[0]) == set()
    assert moved(heads, before[1]) == set(before[1])


def test_features_and_online_states_give_the_same_training(tmp_path):
    target = tiny_llama(2)
    store = write_features(target, examples(), tmp_path / "features", layers=(1,), dtype=torch.float32)
    trained = []
    for data in (examples(), store):
        torch.manual_seed(0)
        heads = MedusaModel.for_target(target, num_heads=2)
        DrafterTrainer(
            heads, target, MedusaObjective(heads, target), arguments(tmp_path / "out", max_steps=4), data
        ).train()
        trained.append(snapshot(heads))
    for name, value in trained[0].items():
        torch.testing.assert_close(value, trained[1][name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("draft_vocab_size", [None, 30])
def test_loss_and_counts_equal_a_plain_reference(draft_vocab_size):
    target = tiny_llama(2)
    ids = None if draft_vocab_size is None else torch.arange(5, 5 + draft_vocab_size)
    heads = MedusaModel.for_target(target, ids, num_heads=3)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.2)
    rows = examples()
    batch = collate(rows)
    hidden = hidden_states(target, batch["input_ids"], batch["attention_mask"], (1,))
    got = MedusaObjective(heads, target, decay=0.7)(heads, target, Batch(**batch, hidden_states=hidden))

    vocabulary = list(range(VOCAB_SIZE)) if ids is None else ids.tolist()
    expected = 0.0
    for head in range(3):
        losses, num_right, num_counted = [], 0, 0
        for row in rows:
            states = target.model(torch.tensor([row.input_ids])).last_hidden_state[0]
            for position in range(len(row.input_ids) - head - 2):
                label = row.input_ids[position + head + 2]
                if not row.is_response[position + head + 2]:
                    continue
                num_counted += 1
                if label in vocabulary:
                    logits = (target.lm_head.weight @ heads.heads[head](states[position]))[vocabulary]
                    losses.append(F.cross_entropy(logits, torch.tensor(vocabulary.index(label))))
                    num_right += int(vocabulary[int(logits.argmax())] == label)
        expected = expected + 0.7 ** (head + 1) * torch.stack(losses).mean()
        assert [float(part) for part in got.counts[f"accept_{head + 1}"]] == [num_right, num_counted]
    torch.testing.assert_close(got.loss, expected, atol=1e-5, rtol=1e-5)


def test_a_batch_without_labels_for_the_last_head():
    """Texts shorter than a head looks ahead give no loss, and no nan."""
    target = tiny_llama(2)
    heads = MedusaModel.for_target(target, num_heads=4)
    batch = collate(examples((3, 4)))
    hidden = hidden_states(target, batch["input_ids"], batch["attention_mask"], (1,))
    losses = MedusaObjective(heads, target)(heads, target, Batch(**batch, hidden_states=hidden))
    losses.loss.backward()
    assert torch.isfinite(losses.loss)
    assert float(losses.counts["accept_4"][1]) == 0


def test_heads_learn_and_evaluation_counts_exactly(tmp_path):
    target = tiny_llama(2)
    heads = MedusaModel.for_target(target, num_heads=2, has_own_output_heads=True)
    held_out = examples()[:3]
    trainer = DrafterTrainer(
        heads,
        target,
        MedusaObjective(heads, target),
        arguments(tmp_path, max_steps=60, learning_rate=1e-2, per_device_eval_batch_size=2),
        examples(LENGTHS * 4),
        held_out,
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.7 * before["eval_loss"]
    assert after["eval_accept_1"] > before["eval_accept_1"] + 0.2
    num_right = num_counted = 0  # over all held-out tokens at once, whatever the batches were
    for row in held_out:
        states = target.model(torch.tensor([row.input_ids])).last_hidden_state[0]
        best = heads.output_heads[0](heads.heads[0](states)).argmax(-1)
        for position in range(2, len(row.input_ids)):
            if row.is_response[position]:
                num_right += int(best[position - 2] == row.input_ids[position])
                num_counted += 1
    assert after["eval_accept_1"] == round(num_right / num_counted, 4)


def test_resuming_gives_what_an_uninterrupted_run_gives(tmp_path):
    target = tiny_llama(2)

    class Killed(Exception):
        pass

    def train(folder, killed_at=None, resume=None):
        torch.manual_seed(0)
        heads = MedusaModel.for_target(target, num_heads=2)
        options = arguments(folder, max_steps=6, save_strategy="steps", save_steps=2, save_total_limit=2)
        trainer = DrafterTrainer(heads, target, MedusaObjective(heads, target), options, examples())
        if killed_at is not None:
            compute_loss = trainer.compute_loss

            def dying(*args, **kwargs):
                if trainer.state.global_step == killed_at:
                    raise Killed
                return compute_loss(*args, **kwargs)

            trainer.compute_loss = dying
        trainer.train(resume_from_checkpoint=resume)
        return snapshot(heads)

    expected = train(tmp_path / "whole")
    with pytest.raises(Killed):
        train(tmp_path / "cut", killed_at=5)
    got = train(tmp_path / "cut", resume=True)
    for name, value in expected.items():
        assert torch.equal(got[name], value)


def test_checkpoints_load_as_drafters(tmp_path):
    target = tiny_llama(2)
    ids = torch.arange(3, 53)
    heads = MedusaModel.for_target(target, ids, num_heads=2)
    options = arguments(tmp_path, save_strategy="steps", save_steps=1)
    DrafterTrainer(heads, target, MedusaObjective(heads, target), options, examples()).train()
    loaded = AutoDrafter.from_pretrained(tmp_path / "checkpoint-1", target=target)
    assert moved(loaded, snapshot(heads)) == set()


def test_a_full_disk_leaves_the_last_complete_checkpoint(tmp_path, monkeypatch):
    target = tiny_llama(2)
    heads = MedusaModel.for_target(target, num_heads=2)
    options = arguments(tmp_path, max_steps=4, save_strategy="steps", save_steps=1)
    trainer = DrafterTrainer(heads, target, MedusaObjective(heads, target), options, examples())
    save = type(heads).save_pretrained

    def full(self, folder, *args, **kwargs):
        save(self, folder, *args, **kwargs)
        if "checkpoint-3" in str(folder):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(heads), "save_pretrained", full)
    with pytest.raises(OSError, match=r"checkpoint-3 could not be written.*free some disk space and resume"):
        trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file()


class TestJoint:
    """Medusa-2: the target is trained too, through an adapter."""

    @pytest.fixture
    def target(self):
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        return peft.get_peft_model(tiny_llama(2), config)

    def train(self, target, folder, num_steps=2, **options):
        heads = MedusaModel.for_target(target, num_heads=2)
        objective = MedusaObjective(heads, target, is_joint=True, **options)
        options = arguments(folder, max_steps=num_steps, save_strategy="steps", save_steps=num_steps)
        DrafterTrainer(heads, target, objective, options, examples(), trains_target=True).train()
        return heads

    def test_adapter_and_heads_move_and_the_base_stays(self, target, tmp_path):
        before = snapshot(target)
        self.train(target, tmp_path)
        changed = moved(target, before)
        assert changed == {name for name in before if "lora_" in name}

    def test_both_are_saved_and_resumed(self, target, tmp_path):
        from peft import PeftModel

        heads = self.train(target, tmp_path)
        folder = tmp_path / "checkpoint-2"
        adapted = PeftModel.from_pretrained(tiny_llama(2), folder / "target")
        ids = torch.arange(5, 20)[None]
        torch.testing.assert_close(adapted(ids).logits, target.eval()(ids).logits)
        assert moved(AutoDrafter.from_pretrained(folder, target=tiny_llama(2)), snapshot(heads)) == set()
        other = copy.deepcopy(target)
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                if "lora_" in name:
                    parameter.zero_()
        heads = MedusaModel.for_target(other, num_heads=2)
        options = arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
        objective = MedusaObjective(heads, other, is_joint=True)
        trainer = DrafterTrainer(heads, other, objective, options, examples(), trains_target=True)
        trainer.train(resume_from_checkpoint=True)
        torch.testing.assert_close(other.eval()(ids).logits, target(ids).logits)

    @pytest.mark.parametrize("is_adapted", [True, False])
    def test_the_targets_own_loss_is_its_distance_from_itself(self, target, is_adapted):
        if not is_adapted:
            for module in target.modules():
                if hasattr(module, "reset_lora_parameters"):
                    module.reset_lora_parameters("default", init_lora_weights=True)
        heads = MedusaModel.for_target(target, num_heads=2)
        batch = collate(examples())
        hidden = hidden_states(target, batch["input_ids"], batch["attention_mask"], (1,))
        losses = MedusaObjective(heads, target, is_joint=True)(heads, target, Batch(**batch, hidden_states=hidden))
        counted = batch["is_response"][:, 1:]
        log_probs = target(**{k: batch[k] for k in ("input_ids", "attention_mask")}).logits.log_softmax(-1)
        with target.disable_adapter():
            before = target(**{k: batch[k] for k in ("input_ids", "attention_mask")}).logits.log_softmax(-1)
        expected = (before.exp() * (before - log_probs)).sum(-1)[:, :-1][counted].mean()
        torch.testing.assert_close(losses.counts["target_loss"][0], expected, atol=1e-5, rtol=1e-4)
        assert (float(expected.detach()) > 0.01) == is_adapted

    def test_head_warmup(self, target):
        heads = MedusaModel.for_target(target, num_heads=2)
        batch = collate(examples())
        hidden = hidden_states(target, batch["input_ids"], batch["attention_mask"], (1,))
        batch = Batch(**batch, hidden_states=hidden)
        heads_alone = MedusaObjective(heads, target)(heads, target, batch).loss
        objective = MedusaObjective(heads, target, is_joint=True, head_weight=0.5, head_warmup=0.5)
        for progress, warmth in ((0.0, 0.0), (0.25, 0.5**0.5), (0.5, 1.0), (1.0, 1.0)):
            objective.progress = progress
            losses = objective(heads, target, batch)
            own = losses.counts["target_loss"][0]
            torch.testing.assert_close(losses.loss - own, 0.5 * warmth * heads_alone, atol=1e-4, rtol=1e-4)
