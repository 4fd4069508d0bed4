"""What EAGLE drafters are trained on, against plain loops: one position, one step, one token after the other."""

from __future__ import annotations

import copy
import importlib
import math

import pytest
import torch
from conftest import VOCAB_SIZE, tiny_llama
from safetensors.torch import load_file
from transformers import TrainingArguments

from hf_specdec import AutoDrafter, EagleModel
from hf_specdec.modeling.eagle import Eagle3Objective, EagleObjective
from hf_specdec.modeling.eagle.objective import objective, step_attention
from hf_specdec.modeling.target import hidden_states
from hf_specdec.training.data import Example
from hf_specdec.training.features import write_features
from hf_specdec.training.objective import Batch, Losses
from hf_specdec.training.run import TrainingData, measure_by_decoding, train_drafter, training_arguments
from hf_specdec.training.trainer import DrafterTrainer

LENGTHS = (14, 9, 12)
SOME_IDS = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))[:50].sort().values
VOCABULARIES = pytest.mark.parametrize("token_ids", [None, SOME_IDS], ids=["whole", "reduced"])
BOTH_VERSIONS = pytest.mark.parametrize("version", [1, 3])
PLAIN = {"fc_norm": False, "norm_output": False}  # EAGLE-3 as first published; the default is EAGLE-3.1


def make_drafter(target, version: int = 3, token_ids=None, seed: int = 0, **options) -> EagleModel:
    """Random weights of such a size that every part matters."""
    if version == 3:
        options = {"target_layers": [0, 2, 1]} | options
    drafter = EagleModel.for_target(target, version, token_ids, **options)
    torch.manual_seed(seed)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    return drafter.eval()


def make_batch(target, layers, lengths=LENGTHS, seed: int = 0) -> Batch:
    """Random texts, a part of whose tokens are responses; nonsense stands in the padding."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    mask = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(3, VOCAB_SIZE, shape, generator=generator)
    is_response = (torch.rand(shape, generator=generator) < 0.6) & mask.bool()
    with torch.no_grad():
        states = hidden_states(target, ids, mask, layers)
    for layer in layers:
        states[layer] = states[layer].masked_fill(mask[..., None] == 0, 3.0)
    return Batch(ids, mask, is_response, states)


def losses_of(drafter, target, batch=None, **options) -> Losses:
    goal = objective(drafter, target, **options)
    return goal(drafter, target, batch or make_batch(target, goal.hidden_state_layers))


def rows_of(batch):
    """Each text alone, without its padding: ids, which are responses, hidden states `(1, T, D)`."""
    for row, length in enumerate(batch.attention_mask.sum(1).tolist()):
        states = {layer: states[row : row + 1, :length] for layer, states in batch.hidden_states.items()}
        yield batch.input_ids[row, :length], batch.is_response[row, :length], states


def cross_entropy(wanted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    p, q = wanted.softmax(-1), logits.softmax(-1)
    return -sum(p[i] * q[i].log() for i in range(len(p)))


def gradients_of(drafter, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    drafter.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}


def assert_same_training(drafter, losses, expected_loss, expected_counts) -> None:
    torch.testing.assert_close(losses.loss, expected_loss, atol=1e-5, rtol=1e-5)
    assert losses.counts.keys() == expected_counts.keys()
    for name, pair in expected_counts.items():
        assert [float(part) for part in losses.counts[name]] == pytest.approx(pair, rel=1e-4)
    gradients, expected = gradients_of(drafter, losses.loss), gradients_of(drafter, expected_loss)
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0, name
        assert torch.allclose(gradient, expected[name], atol=1e-5, rtol=1e-3), name


@pytest.fixture
def several_chunks(monkeypatch):
    """The loss is summed over pieces of the tokens; here they are so small that there are several."""
    module = importlib.import_module("hf_specdec.modeling.eagle.objective")  # the package has a function of this name
    monkeypatch.setattr(module, "CHUNK", 4)


@pytest.fixture
def target():
    return tiny_llama(4).requires_grad_(False)


@pytest.mark.usefixtures("several_chunks")
class TestVersion1:
    @staticmethod
    def reference(drafter, target, batch, feature_weight=1.0, token_weight=0.1):
        ids = torch.arange(VOCAB_SIZE) if drafter.token_ids is None else drafter.token_ids
        losses, distances, num_right = [], [], 0
        for text, is_response, states in rows_of(batch):
            states = states[3]
            embeddings = target.model.embed_tokens(text[1:])[None]
            guesses = drafter(states[:, :-1], embeddings, torch.arange(len(text) - 1)[None])[0]
            for place in range(len(text) - 2):  # reads h[t] and x[t + 1], guesses h[t + 1], from which x[t + 2] comes
                if not is_response[place + 2]:
                    continue
                guess, wanted = guesses[place], states[0, place + 1]
                gap = (guess - wanted).abs()
                distance = torch.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean()
                distances.append(float(distance.detach()))
                logits = (target.lm_head.weight @ guess)[ids]
                entropy = cross_entropy((target.lm_head.weight @ wanted)[ids], logits)
                losses.append(feature_weight * distance + token_weight * entropy)
                num_right += int(ids[logits.argmax()] == text[place + 2])
        counts = {"accept_1": (num_right, len(losses)), "distance": (sum(distances), len(losses))}
        return torch.stack(losses).mean(), counts

    @VOCABULARIES
    @pytest.mark.parametrize("options", [{}, {"feature_weight": 0.5, "token_weight": 2.0}], ids=["default", "weights"])
    def test_loss_and_gradient_of_a_plain_loop(self, target, token_ids, options):
        drafter = make_drafter(target, 1, token_ids)
        batch = make_batch(target, (3,))
        losses = losses_of(drafter, target, batch, noise=0.0, **options)
        assert_same_training(drafter, losses, *self.reference(drafter, target, batch, **options))

    def test_what_is_right_counts(self, target):
        """Texts in which every token is the drafter's own guess."""
        drafter = make_drafter(target, 1)
        batch = make_batch(target, (3,), lengths=(8,))
        batch.is_response[:] = True
        for place in range(2, 8):
            states = hidden_states(target, batch.input_ids, batch.attention_mask, (3,))[3]
            embeddings = target.model.embed_tokens(batch.input_ids[:, 1:place])
            guess = drafter(states[:, : place - 1], embeddings, torch.arange(place - 1)[None])[0, -1]
            batch.input_ids[0, place] = (target.lm_head.weight @ guess).argmax()
        batch.hidden_states = hidden_states(target, batch.input_ids, batch.attention_mask, (3,))
        assert [int(part) for part in losses_of(drafter, target, batch, noise=0.0).counts["accept_1"]] == [6, 6]

    def test_noise(self, target):
        """Uniform, wider in shorter texts, in training alone; what the drafter shall come to stays exact."""
        drafter = make_drafter(target, 1)
        batch = make_batch(target, (3,), lengths=(64, 16))
        read = []
        drafter.register_forward_pre_hook(lambda module, args: read.append(args[0]))
        exact = losses_of(drafter, target, batch, noise=0.0)
        assert torch.equal(losses_of(drafter, target, batch).loss, exact.loss)
        drafter.train()
        torch.manual_seed(0)
        blurred = losses_of(drafter, target, batch, noise=0.2)
        assert not torch.equal(blurred.loss, exact.loss)
        assert torch.equal(losses_of(drafter, target, batch, noise=0.0).loss, exact.loss)
        for row, length in enumerate((64, 16)):
            noise = (read[2] - read[0])[row, : length - 1]
            bound = 0.1 * 512 / length
            assert 0.98 * bound < noise.abs().max() <= bound * 1.0001
            assert noise.std() == pytest.approx(bound / math.sqrt(3), rel=0.1)
            assert noise.mean().abs() < 0.2 * bound


@pytest.mark.usefixtures("several_chunks")
class TestVersion3:
    @staticmethod
    def sequential_states(drafter, target, text, states, num_steps):
        """For each position the states that drafting from there leaves, one token of the text after the other."""
        fused = drafter.fuse([states[layer] for layer in drafter.config.target_layers])
        embeddings = drafter.embedding(target)(text)[None]
        for place in range(len(text) - 1):
            features, drafted = fused[:, : place + 1], []
            for step in range(min(num_steps, len(text) - 1 - place)):
                length = place + 1 + step
                outputs = drafter(features, embeddings[:, 1 : 1 + length], torch.arange(length)[None])
                drafted.append(outputs[0, -1])
                features = torch.cat([features, outputs[:, -1:]], dim=1)
            yield place, drafted

    @classmethod
    def reference(cls, drafter, target, batch, num_steps=7, decay=0.8):
        ids = torch.arange(VOCAB_SIZE) if drafter.token_ids is None else drafter.token_ids
        head = drafter.lm_head.weight if drafter.lm_head is not None else target.lm_head.weight[ids]
        losses = [[] for _ in range(num_steps)]
        counts = {f"accept_{step + 1}": [0, 0] for step in range(num_steps)}
        for text, is_response, states in rows_of(batch):
            wanted = target(text[None]).logits[0][:, ids]
            for place, drafted in cls.sequential_states(drafter, target, text, states, num_steps):
                for step, state in enumerate(drafted):
                    label = place + step + 2
                    if label >= len(text) or not is_response[label]:
                        continue
                    count = counts[f"accept_{step + 1}"]
                    count[1] += 1
                    if text[label] not in ids:
                        continue
                    logits = head @ (state if drafter.config.norm_output else drafter.norm(state))
                    losses[step].append(cross_entropy(wanted[label - 1], logits))
                    count[0] += int(ids[logits.argmax()] == text[label])
        return sum(decay**step * torch.stack(part).mean() for step, part in enumerate(losses) if part), counts

    @pytest.mark.parametrize(
        "options",
        [
            {},
            PLAIN,
            {"norm_before_residual": True} | PLAIN,
            {"num_layers": 2},
            {"has_own_embedding": True},
        ],
        ids=["3.1", "plain", "norm_before_residual", "two_layers", "own_embedding"],
    )
    def test_every_step_is_a_step_of_drafting(self, target, options):
        drafter = make_drafter(target, **options)
        batch = make_batch(target, (0, 1, 2, 3))
        seen = []
        handle = drafter.register_forward_hook(lambda module, args, output: seen.append(output))
        losses_of(drafter, target, batch, num_steps=4)
        handle.remove()
        assert len(seen) == 4
        for row, (text, _, states) in enumerate(rows_of(batch)):
            for place, drafted in self.sequential_states(drafter, target, text, states, num_steps=4):
                for step, state in enumerate(drafted):
                    torch.testing.assert_close(seen[step][row, place], state, atol=1e-4, rtol=1e-4)

    @VOCABULARIES
    @pytest.mark.parametrize("options", [{}, PLAIN], ids=["3.1", "plain"])
    @pytest.mark.parametrize("own_head", [False, True], ids=["shared_head", "own_head"])
    def test_loss_and_gradient_of_drafting_one_by_one(self, target, token_ids, options, own_head):
        drafter = make_drafter(target, 3, token_ids, has_own_output_head=own_head, **options)
        batch = make_batch(target, (0, 1, 2, 3))
        losses = losses_of(drafter, target, batch, num_steps=3, decay=0.7)
        assert_same_training(drafter, losses, *self.reference(drafter, target, batch, 3, 0.7))

    def test_one_step_and_the_default(self, target):
        drafter = make_drafter(target)
        batch = make_batch(target, (0, 1, 2, 3))
        for options, num_steps in (({"num_steps": 1}, 1), ({}, 7)):
            losses = losses_of(drafter, target, batch, **options)
            loss, counts = self.reference(drafter, target, batch, num_steps)
            torch.testing.assert_close(losses.loss, loss)
            assert {name: list(map(int, pair)) for name, pair in losses.counts.items()} == counts

    def test_ids_that_are_not_proposed_count_as_missed(self, target):
        drafter = make_drafter(target, token_ids=SOME_IDS)
        batch = make_batch(target, (0, 1, 2, 3))
        counts = losses_of(drafter, target, batch, num_steps=2).counts
        assert int(counts["accept_2"][1]) == int(batch.is_response[:, 3:].sum())
        batch.input_ids[batch.is_response] = next(i for i in range(VOCAB_SIZE) if i not in SOME_IDS)
        losses = losses_of(drafter, target, batch, num_steps=2)
        assert losses.loss == 0
        assert int(losses.counts["accept_1"][0]) == 0 < int(losses.counts["accept_1"][1])

    def test_the_attention_is_as_it_was_afterwards(self, target, monkeypatch):
        drafter = make_drafter(target)
        losses_of(drafter, target)
        assert drafter.body.config._attn_implementation == "sdpa"
        batch = make_batch(target, (0, 1, 2, 3))

        def broken(*args, **kwargs):
            raise RuntimeError("out of memory")

        monkeypatch.setattr(drafter.body, "forward", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            losses_of(drafter, target, batch)
        assert drafter.body.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_attention_of_a_dense_mask(step, num_kv_heads):
    generator = torch.Generator().manual_seed(step)
    num_rows, num_tokens, width = 2, 5, 8
    query = torch.randn(num_rows, 4, num_tokens, width, generator=generator)
    key, value = torch.randn(2, num_rows, num_kv_heads, (step + 1) * num_tokens, width, generator=generator)
    causal = torch.ones(1, 1, num_tokens, num_tokens, dtype=torch.bool).tril()
    got, _ = step_attention(None, query, key, value, causal, scaling=0.3)

    is_visible = torch.zeros(num_tokens, (step + 1) * num_tokens, dtype=torch.bool)
    for place in range(num_tokens):
        is_visible[place, : place + 1] = True
        for earlier in range(1, step + 1):
            is_visible[place, earlier * num_tokens + place] = True
    for head in range(4):
        kv = head // (4 // num_kv_heads)
        scores = query[:, head] @ key[:, kv].mT * 0.3
        expected = scores.masked_fill(~is_visible, -torch.inf).softmax(-1) @ value[:, kv]
        torch.testing.assert_close(got[:, :, head], expected, atol=1e-5, rtol=1e-5)


@BOTH_VERSIONS
def test_padding_and_company_change_nothing(target, version):
    """Sums over texts, whatever they are batched with."""
    drafter = make_drafter(target, version, SOME_IDS)
    goal = objective(drafter, target, **({"noise": 0.0} if version == 1 else {"num_steps": 1}))
    together = make_batch(target, goal.hidden_state_layers)
    in_vocabulary = torch.isin(together.input_ids, SOME_IDS) if version == 3 else together.input_ids >= 0
    nums = (together.is_response & in_vocabulary)[:, 2:].sum(1)
    total = 0.0
    for num, (text, is_response, states) in zip(nums, rows_of(together)):
        alone = Batch(text[None], torch.ones_like(text)[None], is_response[None], states)
        total += num * goal(drafter, target, alone).loss
    torch.testing.assert_close(goal(drafter, target, together).loss, total / nums.sum())


@BOTH_VERSIONS
def test_nothing_to_count(target, version):
    drafter = make_drafter(target, version)
    goal = objective(drafter, target)
    batch = make_batch(target, goal.hidden_state_layers)
    batch.is_response[:] = False
    losses = goal(drafter, target, batch)
    losses.loss.backward()
    assert losses.loss == 0
    assert all(int(pair[1]) == 0 for pair in losses.counts.values())
    assert all(torch.isfinite(parameter.grad).all() for parameter in drafter.parameters() if parameter.grad is not None)


@BOTH_VERSIONS
@pytest.mark.parametrize("lengths", [(2, 2), (3, 2), (5, 3)])
def test_texts_too_short(target, version, lengths):
    drafter = make_drafter(target, version)
    goal = objective(drafter, target)
    batch = make_batch(target, goal.hidden_state_layers, lengths)
    batch.is_response = batch.attention_mask.bool()
    losses = goal(drafter, target, batch)
    losses.loss.backward()
    assert torch.isfinite(losses.loss)
    for step in range(7 if version == 3 else 1):
        num_counted = sum(max(length - 2 - step, 0) for length in lengths)
        assert int(losses.counts.get(f"accept_{step + 1}", (0, 0))[1]) == num_counted


@BOTH_VERSIONS
def test_in_another_dtype_than_the_target(target, version):
    half = copy.deepcopy(target).bfloat16()
    drafter = make_drafter(target, version)
    goal = objective(drafter, half)
    batch = make_batch(target, goal.hidden_state_layers)
    exact = objective(drafter, target)(drafter, target, batch).loss
    batch.hidden_states = {layer: states.bfloat16() for layer, states in batch.hidden_states.items()}
    loss = goal(drafter, half, batch).loss
    loss.backward()
    assert next(drafter.parameters()).grad.dtype == torch.float32
    torch.testing.assert_close(loss, exact, atol=0, rtol=0.05)


class TestErrors:
    def test_the_other_version(self, target):
        drafters = {version: make_drafter(target, version) for version in (1, 3)}
        assert isinstance(objective(drafters[1], target), EagleObjective)
        assert isinstance(objective(drafters[3], target), Eagle3Objective)
        with pytest.raises(ValueError, match=r"is of version 3, but this objective is for version 1; .*version=1"):
            EagleObjective(drafters[3], target)
        with pytest.raises(ValueError, match=r"is of version 1, but this objective is for version 3; .*version=3"):
            Eagle3Objective(drafters[1], target)

    @BOTH_VERSIONS
    def test_another_target(self, target, version):
        with pytest.raises(ValueError, match=r"was made for a target with num_hidden_layers 4, but LlamaForCausalLM"):
            objective(make_drafter(target, version), tiny_llama(3))

    def test_no_step(self, target):
        with pytest.raises(ValueError, match=r"`num_steps` is 0; expected at least 1"):
            Eagle3Objective(make_drafter(target), target, num_steps=0)


def counting_target():
    """A target that counts from 3 to 34 and begins anew; its layers hardly matter."""
    target = tiny_llama(4)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight *= 0.1
            layer.mlp.down_proj.weight *= 0.1
        embeddings = torch.linalg.qr(torch.randn(32, 32)).Q
        target.model.embed_tokens.weight[3:35] = 3 * embeddings
        target.lm_head.weight.zero_()
        target.lm_head.weight[3:35] = 2 * embeddings.roll(1, 0)
    return target


def counting(num_examples: int = 40, length: int = 16) -> list[Example]:
    starts = torch.randint(0, 32, (num_examples,), generator=torch.Generator().manual_seed(2)).tolist()
    return [Example([3 + (start + i) % 32 for i in range(length)], [i >= 4 for i in range(length)]) for start in starts]


def arguments(folder, num_steps: int, **options) -> TrainingArguments:
    defaults = {"per_device_train_batch_size": 4, "learning_rate": 3e-3, "report_to": "none", "disable_tqdm": True}
    defaults |= {"save_strategy": "no", "max_steps": num_steps, "dataloader_pin_memory": False, "use_cpu": True}
    return TrainingArguments(str(folder), **defaults | options)


def values(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def moved(model, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}


class TestTraining:
    def make(self, target, version: int, **options) -> EagleModel:
        torch.manual_seed(0)
        layers = {"target_layers": [0, 1, 2]} if version == 3 else {}
        return EagleModel.for_target(target, version, **layers | options)

    @BOTH_VERSIONS
    def test_learns_to_draft(self, tmp_path, version):
        target = counting_target()
        drafter = self.make(target, version)
        data = TrainingData.split(counting(), 5, seed=0)
        goal = objective(drafter, target, **({"num_steps": 4} if version == 3 else {}))
        prompts = data.test_prompts(2)
        text = target.generate(torch.tensor(prompts[:1]), max_new_tokens=40, pad_token_id=0)[0].tolist()
        assert text == [3 + (text[0] - 3 + i) % 32 for i in range(len(text))]
        before = measure_by_decoding(target, drafter, prompts, max_new_tokens=40)
        options = training_arguments(tmp_path, epochs=12, learning_rate=1e-2, batch_size=8, seed=0)
        options.disable_tqdm, options.eval_strategy, options.save_strategy = True, "no", "no"
        report = train_drafter(drafter, target, goal, data, options, num_test_prompts=2)
        assert before["tokens_per_pass"] < 1.5
        assert report["tokens_per_pass"] > 4
        assert report["accept_1"] > 0.9
        assert not any("head" in name or "embed" in name for name in load_file(tmp_path / "model.safetensors"))
        loaded = AutoDrafter.from_pretrained(tmp_path, target=target)
        again = measure_by_decoding(target, loaded, prompts)
        assert again["tokens_per_pass"] == report["tokens_per_pass"]

    @BOTH_VERSIONS
    @pytest.mark.parametrize("own_head", [False, True])
    def test_a_step_moves_the_drafter_alone(self, target, tmp_path, version, own_head):
        drafter = self.make(target, version, has_own_output_head=own_head)
        before = values(target), values(drafter)
        DrafterTrainer(drafter, target, objective(drafter, target), arguments(tmp_path, 1), counting(4)).train()
        assert moved(target, before[0]) == set()
        assert moved(drafter, before[1]) == {name for name, _ in drafter.named_parameters()}
        assert ("lm_head.weight" in before[1]) == own_head

    @BOTH_VERSIONS
    def test_online_and_offline_features_train_alike(self, target, tmp_path, version):
        trained, losses = [], []
        for is_offline in (False, True):
            drafter, data = self.make(target, version), counting(8)
            goal = objective(drafter, target)
            if is_offline:
                layers = goal.hidden_state_layers
                data = write_features(target, data, tmp_path / "features", layers=layers, dtype=torch.float32)
            trainer = DrafterTrainer(drafter, target, goal, arguments(tmp_path, 4), data, counting(3)[1:])
            if is_offline:
                trainer.eval_dataset = write_features(
                    target, counting(3)[1:], tmp_path / "held_out", layers=layers, dtype=torch.float32
                )
            trainer.train()
            trained.append(values(drafter))
            losses.append(trainer.evaluate()["eval_loss"])
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        for name, tensor in trained[0].items():
            torch.testing.assert_close(tensor, trained[1][name], atol=1e-4, rtol=1e-3)

    @BOTH_VERSIONS
    def test_a_target_with_an_adapter(self, tmp_path, version):
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        target = peft.get_peft_model(tiny_llama(4), config)
        drafter = make_drafter(target, version)
        goal, examples = objective(drafter, target), counting(4)
        trainer = DrafterTrainer(drafter, target, goal, arguments(tmp_path, 1), examples, examples)
        before = values(target)
        loss = trainer.evaluate()["eval_loss"]
        merged = copy.deepcopy(target).merge_and_unload()
        goal = objective(drafter, merged)
        alone = DrafterTrainer(drafter, merged, goal, arguments(tmp_path, 1), examples, examples)
        assert loss == pytest.approx(alone.evaluate()["eval_loss"], rel=1e-4)
        trainer.train()
        assert moved(target, before) == set()
        assert measure_by_decoding(target, drafter, [[5, 6, 7]], max_new_tokens=8)["tokens_per_pass"] >= 1

    @BOTH_VERSIONS
    def test_resuming_gives_what_an_uninterrupted_run_gives(self, target, tmp_path, version):
        def train(folder, num_steps, resume=None):
            drafter = self.make(target, version)
            options = arguments(folder, 4, save_strategy="steps", save_steps=2)
            trainer = DrafterTrainer(drafter, target, objective(drafter, target), options, counting(8))
            if num_steps < 4:
                step = trainer.training_step

                def dying(*args, **kwargs):
                    if trainer.state.global_step == num_steps:
                        raise KeyboardInterrupt
                    return step(*args, **kwargs)

                trainer.training_step = dying
            trainer.train(resume_from_checkpoint=resume)
            return values(drafter)

        expected = train(tmp_path / "whole", 4)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "cut", 3)
        got = train(tmp_path / "cut", 4, resume=True)
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
