"""From data to a tested drafter: the functions and the commands."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import tiny_llama
from test_regenerate import make_tokenizer
from torch.utils.data import Subset
from typer.testing import CliRunner

from hf_specdec import AutoDrafter, MedusaModel
from hf_specdec.cli import app
from hf_specdec.training.data import Example
from hf_specdec.training.features import FeatureStore, write_features
from hf_specdec.training.run import TrainingData, measure_by_decoding, open_output
from hf_specdec.training.trainer import DrafterTrainer

WORDS = (
    "the cat sat on the mat",
    "the dog sat on the log",
    "the cat and the dog sat",
    "the mat and the log and the cat",
)


class TestSplit:
    examples = [Example([i, i], [False, True]) for i in range(20)]

    def split(self, num_held_out, seed):
        data = TrainingData.split(self.examples, num_held_out, seed)
        return list(data.train), list(data.held_out)

    def test_deterministic_and_in_order(self):
        train, held_out = self.split(5, seed=3)
        assert (train, held_out) == self.split(5, seed=3)
        assert held_out != self.split(5, seed=4)[1]
        assert len(held_out) == 5
        assert sorted(train + held_out) == self.examples
        assert (train, held_out) == (sorted(train), sorted(held_out))
        assert self.split(0, seed=3) == (self.examples, [])

    @pytest.mark.parametrize("num_held_out", [-1, 20])
    def test_errors(self, num_held_out):
        message = f"`num_held_out` is {num_held_out} and there are 20 examples; it must be 0"
        with pytest.raises(ValueError, match=message):
            self.split(num_held_out, seed=0)


def test_draft_vocabulary_counts_responses_only():
    examples = [Example([9, 5, 5, 7], [False, True, True, True]), Example([9, 9, 3, 7], [False, False, True, True])]
    data = TrainingData(examples, [])
    assert data.draft_vocabulary(2, 20).tolist() == [5, 7]
    assert data.draft_vocabulary(5, 20).tolist() == [0, 1, 3, 5, 7]
    assert data.draft_vocabulary(None, 20) is None
    with pytest.raises(ValueError, match="`draft_vocab_size` is 21, but the target has 20 ids; give at most those"):
        data.draft_vocabulary(21, 20)


def test_ids_are_read_from_features_without_the_states(tmp_path, target, monkeypatch):
    examples = [Example([9, 5, 5, 7], [False, True, True, True]), Example([9, 3], [False, True])]
    store = write_features(target, examples, tmp_path, layers=(3,))
    assert [store.example(i) for i in range(2)] == examples
    monkeypatch.delattr(FeatureStore, "__getitem__")
    data = TrainingData.split(store, 1, seed=0)
    assert data.draft_vocabulary(1, 97).tolist() == [5]
    assert data.test_prompts(1) == [[9]]


def test_test_prompts():
    chat = Example([4, 5, 6, 7], [False, False, True, True])
    text = Example(list(range(3, 53)), [False] + [True] * 49)
    data = TrainingData([], Subset([chat, text], [0, 1]))
    assert data.test_prompts(5) == [[4, 5], list(range(3, 19))]
    assert data.test_prompts(1) == [[4, 5]]


def test_measure_by_decoding(target, drafter):
    prompts = [[5, 6, 7], [8, 9]]
    report = measure_by_decoding(target, drafter, prompts, max_new_tokens=20)
    assert report["tokens_per_pass"] > 1
    assert 0 < report["acceptance_rate"] <= 1
    assert measure_by_decoding(target, target, prompts, max_new_tokens=21)["acceptance_rate"] == 1


class TestOutput:
    def test_refuses_a_used_folder(self, tmp_path):
        (tmp_path / "drafter").mkdir()
        (tmp_path / "drafter" / "model.safetensors").touch()
        open_output(tmp_path / "run", {"seed": 0}, resume=False)
        open_output(tmp_path / "run", {"seed": 1}, resume=False)  # it failed before its first checkpoint
        (tmp_path / "run" / "checkpoint-10").mkdir()
        for used in ("drafter", "run"):
            with pytest.raises(ValueError, match=r"holds a drafter or a training run; resume it, delete it, or give"):
                open_output(tmp_path / used, {}, resume=False)

    def test_refuses_to_resume_nothing(self, tmp_path):
        with pytest.raises(ValueError, match=r"`resume` was asked for, but .*new holds no training run; leave it out"):
            open_output(tmp_path / "new", {}, resume=True)

    def test_resumes_with_the_same_settings_only(self, tmp_path):
        open_output(tmp_path, {"seed": 0, "epochs": 2.0}, resume=False)
        open_output(tmp_path, {"seed": 0, "epochs": 2.0}, resume=True)
        with pytest.raises(ValueError, match=r"begun with other settings: `seed` was 0 and is 1; resume it with those"):
            open_output(tmp_path, {"seed": 1, "epochs": 2.0}, resume=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny target with its tokenizer, and texts."""
    folder = tmp_path_factory.mktemp("train")
    tokenizer = make_tokenizer()
    tiny_llama(2, vocab_size=len(tokenizer)).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    texts = [f"{words} and {other}" for words in WORDS for other in WORDS]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def run(*arguments: str, code: int = 0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


TRAIN = ("--epochs", "3", "--num-heads", "2", "--num-held-out", "3", "--learning-rate", "0.01", "--threads", "1")


def test_medusa_from_features(folder, tmp_path):
    target, store, output = folder / "target", tmp_path / "features", tmp_path / "medusa"
    result = run("features", "--target", target, "--data", folder / "texts.jsonl", "--output", store)
    assert "16 examples" in result.stderr
    result = run(
        "train", "medusa", "--target", target, "--data", store, "--output", output, "--draft-vocab-size", 40, *TRAIN
    )
    assert "tokens_per_pass" in result.stdout
    report = json.loads((output / "training_report.json").read_text())
    assert {"loss", "accept_1", "accept_2", "tokens_per_pass", "acceptance_rate"} <= set(report)
    heads = AutoDrafter.from_pretrained(output)
    assert heads.dtype == torch.float16
    assert heads.config.num_heads == 2
    assert heads.config.draft_vocab_size == len(heads.draft_token_ids) <= 40
    result = run("generate", "--model", target, "--assistant", output, "--prompt", "the cat", "--stats", "--seed", "0")
    assert "tokens per pass" in result.stderr


def test_medusa_2_from_text(folder, tmp_path):
    pytest.importorskip("peft")
    output = tmp_path / "medusa"
    options = ("--joint-epochs", "1", "--lora-rank", "4")
    run(
        *("train", "medusa", "--target", folder / "target", "--data", folder / "texts.jsonl", "--output", output),
        *(*TRAIN, *options),
    )
    assert (output / "model.safetensors").is_file()
    assert (output / "joint" / "target" / "adapter_model.safetensors").is_file()
    assert "target_loss" in json.loads((output / "joint" / "training_report.json").read_text())


@pytest.mark.parametrize("stage", ["heads", "joint"])
def test_medusa_2_resumes_in_either_stage(folder, tmp_path, monkeypatch, stage):
    pytest.importorskip("peft")
    output = tmp_path / "medusa"
    command = ("train", "medusa", "--target", folder / "target", "--data", folder / "texts.jsonl", "--output", output)
    command += (*TRAIN, "--joint-epochs", "2", "--lora-rank", "4")
    compute_loss = DrafterTrainer.compute_loss

    def dying(self, *args, **kwargs):
        if self.state.global_step == 3 and self.model.trains_target == (stage == "joint"):
            raise RuntimeError("killed")
        return compute_loss(self, *args, **kwargs)

    monkeypatch.setattr(DrafterTrainer, "compute_loss", dying)
    run(*command, code=1)
    monkeypatch.undo()
    assert "begun with other settings: `seed` was 0 and is 1" in run(*command, "--resume", "--seed", 1, code=1).stderr
    run(*command, "--resume")
    assert (output / "joint" / "training_report.json").is_file()


def test_a_folder_called_as_a_method(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = tiny_llama(2, vocab_size=len(make_tokenizer()))
    MedusaModel.for_target(target).save_pretrained("medusa")
    for name in ("medusa", "./medusa"):
        run("generate", "--model", folder / "target", "--assistant", name, "--prompt", "the cat", "--max-new-tokens", 4)


def test_data_that_are_a_folder_of_something_else(folder, tmp_path):
    result = run(
        *("train", "medusa", "--target", folder / "target", "--data", folder / "target", "--output", tmp_path / "m"),
        code=1,
    )
    assert "a folder without an index.json of features; make them anew" in result.stderr


def test_features_go_into_a_folder_of_their_own(folder):
    result = run(
        *("features", "--target", folder / "target", "--data", folder / "texts.jsonl", "--output", folder / "target"),
        code=1,
    )
    assert "holds other files; give a new or an empty folder" in result.stderr


def test_medusa_2_needs_data_not_features(folder, tmp_path):
    store = tmp_path / "features"
    run("features", "--target", folder / "target", "--data", folder / "texts.jsonl", "--output", store)
    result = run(
        *("train", "medusa", "--target", folder / "target", "--data", store, "--output", tmp_path / "medusa"),
        *("--joint-epochs", "1"),
        code=1,
    )
    assert "--joint-epochs trains the target, whose hidden states then change; give the data itself" in result.stderr


def test_features_of_another_target_are_refused(folder, tmp_path):
    other = tmp_path / "other"
    tiny_llama(2, seed=3, vocab_size=len(make_tokenizer())).save_pretrained(other)
    make_tokenizer().save_pretrained(other)
    store = tmp_path / "features"
    run("features", "--target", other, "--data", folder / "texts.jsonl", "--output", store)
    result = run(
        *("train", "medusa", "--target", folder / "target", "--data", store, "--output", tmp_path / "medusa"), code=1
    )
    assert result.stderr.startswith("hf-specdec: ")


@pytest.mark.parametrize("layers", ["x", "0,7"])
def test_wrong_layers(folder, tmp_path, layers):
    result = run(
        *("features", "--target", folder / "target", "--data", folder / "texts.jsonl", "--output", tmp_path / "f"),
        *("--layers", layers),
        code=1,
    )
    assert "layers" in result.stderr


EAGLE = ("--epochs", "2", "--num-held-out", "1", "--learning-rate", ".01", "--draft-vocab-size", "40", "--threads", "1")
EAGLE_VERSIONS = pytest.mark.parametrize(("method", "layers"), [("eagle", ()), ("eagle3", ("--target-layers", "1,0"))])


@EAGLE_VERSIONS
def test_eagle_from_features(folder, tmp_path, method, layers):
    target, store, output = folder / "target", tmp_path / "features", tmp_path / "drafter"
    run("features", "--target", target, "--data", folder / "texts.jsonl", "--output", store, "--layers", "0,1")
    result = run("train", method, "--target", target, "--data", store, "--output", output, *layers, *EAGLE)
    report = json.loads((output / "training_report.json").read_text())
    metrics = {"distance"} if method == "eagle" else {f"accept_{step}" for step in range(2, 8)}
    assert {"loss", "accept_1", "tokens_per_pass", "acceptance_rate"} | metrics <= set(report)
    assert all(f"{name} " in result.stdout for name in metrics)
    drafter = AutoDrafter.from_pretrained(output)
    assert (drafter.config.version, drafter.dtype) == (1 if method == "eagle" else 3, torch.float16)
    assert drafter.config.target_layers == (None if method == "eagle" else [1, 0])
    assert drafter.config.draft_vocab_size == len(drafter.draft_token_ids) == 40
    result = run("generate", "--model", target, "--assistant", output, "--prompt", "the cat", "--stats", "--seed", "0")
    assert "tokens per pass" in result.stderr


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (("eagle", "--num-layers", "2", "--intermediate-size", "48"), {"version": 1}),
        (("eagle3", "--target-layers", "0", "--own-output-head"), {"target_layers": [0], "has_own_output_head": True}),
    ],
)
def test_eagle_options(folder, tmp_path, options, fields):
    data = ("--target", folder / "target", "--data", folder / "texts.jsonl", "--output", tmp_path / "drafter")
    run("train", *options, *data, *EAGLE, "--epochs", "1")
    config = AutoDrafter.from_pretrained(tmp_path / "drafter").config
    assert {name: getattr(config, name) for name in fields} == fields
    checkpoint = next((tmp_path / "drafter").glob("checkpoint-*"))
    groups = torch.load(checkpoint / "optimizer.pt", weights_only=True)["param_groups"]
    assert all(tuple(group["betas"]) == (0.9, 0.95) for group in groups)  # the published recipe
    if "--num-layers" in options:
        assert (config.layer_config["num_hidden_layers"], config.layer_config["intermediate_size"]) == (2, 48)


@pytest.mark.parametrize(
    ("options", "weaker"),
    [(("eagle", "--token-weight"), "0"), (("eagle3", "--target-layers", "0", "--num-steps"), "1")],
)
def test_options_of_the_eagle_losses(folder, tmp_path, options, weaker):
    """An option that reaches the objective makes the loss smaller by what it leaves out."""
    losses = []
    for value in (weaker, "2"):
        output = tmp_path / value
        data = ("--target", folder / "target", "--data", folder / "texts.jsonl", "--output", output)
        run("train", *options, value, *data, *EAGLE, "--epochs", "1")
        losses.append(json.loads((output / "training_report.json").read_text())["loss"])
    assert losses[0] < losses[1] - 1


@EAGLE_VERSIONS
def test_eagle_resumes(folder, tmp_path, monkeypatch, method, layers):
    def command(output):
        data = ("--target", folder / "target", "--data", folder / "texts.jsonl", "--output", output)
        return ("train", method, *data, *layers, *EAGLE)

    run(*command(tmp_path / "whole"))
    compute_loss = DrafterTrainer.compute_loss

    def dying(self, *args, **kwargs):
        if self.state.global_step == 3:
            raise RuntimeError("killed")
        return compute_loss(self, *args, **kwargs)

    monkeypatch.setattr(DrafterTrainer, "compute_loss", dying)
    run(*command(tmp_path / "cut"), code=1)
    monkeypatch.undo()
    run(*command(tmp_path / "cut"), "--resume")
    drafters = [AutoDrafter.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "cut")]
    assert all(torch.equal(tensor, drafters[1][name]) for name, tensor in drafters[0].items())


@pytest.mark.parametrize(
    "method", [("eagle",), ("eagle3", "--target-layers", "0"), ("medusa",), ("draft",)], ids=lambda method: method[0]
)
def test_bfloat16(folder, tmp_path, method):
    reports = []
    for options in ((), ("--bf16",)):
        output = tmp_path / f"drafter{len(options)}"
        data = ("--target", folder / "target", "--data", folder / "texts.jsonl", "--output", output)
        run("train", *method, *data, *EAGLE, *options, "--epochs", "1")
        reports.append(json.loads((output / "training_report.json").read_text()))
        assert AutoDrafter.from_pretrained(output).dtype == torch.float16
    assert reports[0]["loss"] != reports[1]["loss"] == pytest.approx(reports[0]["loss"], rel=0.1)


def test_features_without_the_fused_layers(folder, tmp_path):
    target, store, output = folder / "target", tmp_path / "features", tmp_path / "drafter"
    run("features", "--target", target, "--data", folder / "texts.jsonl", "--output", store)
    command = ("train", "eagle3", "--target", target, "--output", output, "--target-layers", "0", *EAGLE)
    message = " ".join(run(*command, "--data", store, code=1).stderr.split())
    assert "`layers` is (0, 1); the features in" in message and "are of the layers (1,)" in message
    assert "hf-specdec features --layers 0,1" in message
    run(*command, "--data", folder / "texts.jsonl")  # the folder was left free


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (("--target-layers", "0,x"), "--target-layers got '0,x'; expected numbers of layers such as '1,15,28'"),
        (("--target-layers", "0,7"), "reads the layers [0, 7] of its target, but LlamaForCausalLM has the layers 0"),
        ((), "the target has 2 layers, and EAGLE-3's choice of a low, a middle and a high one needs 7; say which"),
    ],
)
def test_wrong_fused_layers(folder, tmp_path, layers, message):
    command = ("train", "eagle3", "--target", folder / "target", "--data", folder / "texts.jsonl", *EAGLE)
    command += ("--output", tmp_path / "drafter")
    assert message in run(*command, *layers, code=1).stderr
    run(*command, "--target-layers", "0", "--epochs", "1")
