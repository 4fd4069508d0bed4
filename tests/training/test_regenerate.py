"""Answers of the target: what is written, resuming, and the command."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch
from conftest import byte_level_bpe, early_layers, tiny_llama
from tokenizers import processors
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_specdec.cli import app
from hf_specdec.training.data import load_records
from hf_specdec.training.regenerate import regenerate

CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
ENDS = [1, *range(5, 270, 11)]  # so that some answers end before `max_new_tokens`
SIZES = {"max_new_tokens": 12, "max_prompt_tokens": 96, "batch_size": 3}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


RECORDS = [
    {"messages": [user(f"the cat {'sat ' * i}"), {"role": "assistant", "content": "old"}, user("and é?")]}
    for i in range(5)
]
RECORDS += [{"prompt": "the dog", "completion": " old"}, {"text": "the cat sat on the mat"}]


def make_tokenizer(num_merges: int = 60) -> PreTrainedTokenizerFast:
    """A byte-level BPE that puts <s> and </s> around every text."""
    tokenizer = byte_level_bpe("the cat sat on the mat and the dog sat on the log and the", 258 + num_merges)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    model = tiny_llama(3, vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = ENDS
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model, tokenizer):
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model, tokenizer) -> dict[float, bytes]:
    """The file of an uninterrupted run, for each temperature."""
    files = {}
    for temperature in (0.0, 1.0):
        path = tmp_path_factory.mktemp("whole") / "answers.jsonl"
        assert regenerate(model, tokenizer, RECORDS, path, temperature=temperature, **SIZES) == len(RECORDS)
        files[temperature] = path.read_bytes()
    return files


def plain_answer(model, tokenizer, ids: list[int]) -> tuple[str, bool]:
    """What plain `generate` answers to one prompt, and whether it was cut."""
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
    new = model.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, len(ids) :].tolist()
    return tokenizer.decode(new, skip_special_tokens=True).rstrip("\ufffd"), new[-1] not in ENDS


class TestAnswers:
    def test_every_turn_is_the_targets_own(self, model, tokenizer, whole):
        written = [json.loads(line) for line in whole[0.0].decode().splitlines()]
        chats = [record["messages"] for record in written if "messages" in record]
        assert sorted(chat[0]["content"] for chat in chats) == sorted(r["messages"][0]["content"] for r in RECORDS[:5])
        marks = []
        for chat in chats:
            assert [message["role"] for message in chat] == ["user", "assistant"] * 2
            for index in (1, 3):
                prompt = tokenizer.apply_chat_template(chat[:index], add_generation_prompt=True, return_dict=True)
                answer, is_cut = plain_answer(model, tokenizer, prompt["input_ids"])
                assert chat[index] == {"role": "assistant", "content": answer} | ({"is_cut": True} if is_cut else {})
                marks.append(is_cut)
        assert set(marks) == {True, False}

    def test_text_and_completions(self, model, tokenizer, whole):
        written = [json.loads(line) for line in whole[0.0].decode().splitlines()]
        texts = {record["prompt"]: record["completion"] for record in written if "prompt" in record}
        assert list(texts) == ["the dog", "the cat sat on the mat"]
        for prompt, completion in texts.items():
            ids = tokenizer(prompt)["input_ids"][:-1]  # no answer comes behind </s>
            assert completion == plain_answer(model, tokenizer, ids)[0]

    def test_text_is_cut_to_a_prompt(self, tmp_path, model, tokenizer):
        sizes = SIZES | {"max_prompt_tokens": 4}
        regenerate(model, tokenizer, [{"text": "the cat sat on the mat"}, {"text": "the é"}], tmp_path / "a", **sizes)
        first, second = load_records_of(tmp_path / "a")
        assert (first["prompt"], second["prompt"]) == ("the cat sat", "the ")  # not half an é

    def test_the_file_is_training_data(self, tmp_path, whole):
        (tmp_path / "answers.jsonl").write_bytes(whole[0.0])
        assert load_records(tmp_path / "answers.jsonl") == [json.loads(line) for line in whole[0.0].splitlines()]

    def test_long_prompts(self, tmp_path, model, tokenizer):
        records = [{"messages": [user("the"), user("cat " * 120)]}, {"messages": [user("cat " * 120)]}]
        assert regenerate(model, tokenizer, records, tmp_path / "a", **SIZES) == 1
        [record] = load_records_of(tmp_path / "a")
        assert [message["role"] for message in record["messages"]] == ["user", "assistant", "user"]

    def test_sampling_is_seeded(self, tmp_path, model, tokenizer, whole):
        assert whole[1.0] != whole[0.0]
        torch.rand(3)
        regenerate(model, tokenizer, RECORDS, tmp_path / "same", temperature=1.0, **SIZES)
        assert (tmp_path / "same").read_bytes() == whole[1.0]
        regenerate(model, tokenizer, RECORDS, tmp_path / "other", temperature=1.0, seed=7, **SIZES)
        assert (tmp_path / "other").read_bytes() != whole[1.0]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("drafter", ["prompt_lookup", "model", "other tokenizer"])
    def test_a_drafter_changes_nothing(self, tmp_path, model, tokenizer, whole, drafter, temperature):
        assistant = drafter
        if drafter == "model":
            assistant = early_layers(model, 1)
        if drafter == "other tokenizer":
            assistant = tmp_path / "drafter"
            tiny_llama(1, vocab_size=263).save_pretrained(assistant)
            make_tokenizer(num_merges=5).save_pretrained(assistant)
        options = {"temperature": temperature, "assistant": assistant} | SIZES
        regenerate(model, tokenizer, RECORDS, tmp_path / "answers.jsonl", **options)
        assert (tmp_path / "answers.jsonl").read_bytes() == whole[temperature]

    def test_progress(self, tmp_path, model, tokenizer):
        calls = []
        options = {"progress": lambda *numbers: calls.append(numbers)} | SIZES
        for _ in range(2):
            regenerate(model, tokenizer, RECORDS, tmp_path / "a", **options)
        assert calls == [(0, 7), (3, 7), (6, 7), (7, 7), (7, 7)]


def load_records_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class TestResume:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_from_anywhere(self, tmp_path, model, tokenizer, whole, temperature):
        path, content = tmp_path / "answers.jsonl", whole[temperature]
        ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
        options = {"temperature": temperature} | SIZES
        regenerate(model, tokenizer, RECORDS, path, **options)
        # Nothing, inside a line, after a line, after a batch, inside the last line, all; each with the batches kept.
        for length, num_kept in [(0, 0), (9, 0), (ends[1], 0), (ends[2], 3), (ends[5] + 1, 6), (ends[-1] - 1, 6)]:
            path.write_bytes(content[:length])
            calls = []
            regenerate(model, tokenizer, RECORDS, path, progress=lambda *n, calls=calls: calls.append(n), **options)
            assert path.read_bytes() == content
            assert calls[0] == (num_kept, 7)

    def test_after_an_interrupt(self, tmp_path, model, tokenizer, whole):
        def interrupt(num_done, total):
            if num_done == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            regenerate(model, tokenizer, RECORDS, tmp_path / "a", progress=interrupt, **SIZES)
        assert len(load_records_of(tmp_path / "a")) == 3
        regenerate(model, tokenizer, RECORDS, tmp_path / "a", **SIZES)
        assert (tmp_path / "a").read_bytes() == whole[0.0]

    def test_other_settings_are_refused(self, tmp_path, model, tokenizer, whole):
        path = tmp_path / "answers.jsonl"
        regenerate(model, tokenizer, RECORDS, path, **SIZES)
        for records, options, message in [
            (RECORDS, {"temperature": 1.0}, r"`temperature` was 0\.0 and is 1\.0; give another output, or delete it"),
            (RECORDS, {"max_new_tokens": 13, "seed": 1}, r"`max_new_tokens` was 12 and is 13; `seed` was 0 and is 1"),
            (RECORDS[1:], {}, r"`num_records` was 7 and is 6"),
            ([*RECORDS[:-1], {"text": "x"}], {}, r"with other settings: `records_sha256` was '\w+' and is '\w+'"),
        ]:
            with pytest.raises(
                ValueError, match=r"`output` is .*answers\.jsonl, which exists and was made .*" + message
            ):
                regenerate(model, tokenizer, records, path, **SIZES | options)
        assert path.read_bytes() == whole[0.0]

    def test_a_file_of_someone_elses_is_refused(self, tmp_path, model, tokenizer):
        (tmp_path / "a").write_text("mine\n")
        with pytest.raises(
            ValueError, match=r"`output` is .*, which exists and was not made by this function; give an"
        ):
            regenerate(model, tokenizer, RECORDS, tmp_path / "a", **SIZES)
        assert (tmp_path / "a").read_text() == "mine\n"

    def test_full_disk(self, tmp_path, model, tokenizer, whole):
        resource = pytest.importorskip("resource")
        path = tmp_path / "new" / "answers.jsonl"
        regenerate(model, tokenizer, RECORDS, path, **SIZES)
        first_batch = b"".join(whole[0.0].splitlines(keepends=True)[:3])
        path.write_bytes(first_batch)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(first_batch) + 9, limits[1]))
        try:
            with pytest.raises(OSError, match=r"; the answers written before stay usable, and .*: '.*answers\.jsonl'"):
                regenerate(model, tokenizer, RECORDS, path, **SIZES)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == first_batch
        regenerate(model, tokenizer, RECORDS, path, **SIZES)
        assert path.read_bytes() == whole[0.0]


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_new_tokens": 0}, "`max_new_tokens` is 0; it must be 1 or more"),
            ({"max_prompt_tokens": -1}, "`max_prompt_tokens` is -1; it must be 1 or more"),
            ({"batch_size": 0}, "`batch_size` is 0; it must be 1 or more"),
            ({"temperature": -0.5}, r"`temperature` is -0\.5; it must be 0 \(greedy\) or more"),
            (
                {"max_prompt_tokens": 501},
                "are 501 and 12, together more than the 512 tokens that the target reads; lower",
            ),
            (
                {"max_prompt_tokens": 1},
                "`max_prompt_tokens` is 1 and every prompt is longer, or there is none; raise it",
            ),
        ],
    )
    def test_arguments(self, tmp_path, model, tokenizer, options, message):
        with pytest.raises(ValueError, match=message):
            regenerate(model, tokenizer, RECORDS[:5], tmp_path / "a", **SIZES | options)
        assert not os.listdir(tmp_path)

    def test_no_chat_template(self, tmp_path, model):
        tokenizer = make_tokenizer()
        tokenizer.chat_template = None
        with pytest.raises(ValueError, match="the data are chats and the target's tokenizer has no chat template"):
            regenerate(model, tokenizer, RECORDS, tmp_path / "a", **SIZES)


class TestCommand:
    def run(self, *arguments):
        return CliRunner().invoke(app, ["regenerate", *map(str, arguments)])

    @pytest.fixture
    def data(self, tmp_path):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
        return path

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("assistant", [(), ("--assistant", "prompt_lookup")])
    def test_the_same_file(self, tmp_path, folder, data, whole, assistant, temperature):
        arguments = ["--target", folder, "--data", data, "--output", tmp_path / "answers.jsonl", *assistant]
        arguments += ["--temperature", temperature, "--threads", 1, "--batch-size", 3, "--max-new-tokens", 12]
        arguments += ["--max-prompt-tokens", 96]
        for _ in range(2):
            result = self.run(*arguments)
            assert (result.exit_code, result.stdout) == (0, ""), result.stderr
            assert (tmp_path / "answers.jsonl").read_bytes() == whole[temperature]
            stderr = re.sub(r"\s+", " ", result.stderr)
            assert "Answers" in stderr
            assert "7/7" in stderr
            assert f"7 records are in {tmp_path / 'answers.jsonl'}" in stderr
            assert "\x1b" not in stderr

    def test_records_left_out(self, tmp_path, folder, data):
        arguments = ["--target", folder, "--data", data, "--output", tmp_path / "a", "--max-new-tokens", 2]
        result = self.run(*arguments, "--max-prompt-tokens", 6)
        assert result.exit_code == 0
        assert "2 of 7 records are in" in result.stderr
        assert "the others have no prompt or a longer one than 6 tokens" in result.stderr

    def test_failures_are_1_with_one_line(self, tmp_path, folder, data):
        output = ("--output", tmp_path / "a")
        for arguments, message in [
            (("--target", folder, "--data", tmp_path / "none.jsonl"), "there is no file '.*none.jsonl'"),
            (("--target", tmp_path / "none", "--data", data), "there is no folder '.*none'"),
            (
                ("--target", folder, "--data", data, "--max-prompt-tokens", 512),
                "`max_prompt_tokens` and .*; lower one.",
            ),
        ]:
            result = self.run(*arguments, *output)
            assert (result.exit_code, result.stdout) == (1, "")
            assert re.fullmatch(f"hf-specdec: {message}", result.stderr.strip().splitlines()[-1])
            assert "Traceback" not in result.stderr
        assert "Traceback" in self.run(*arguments, *output, "--debug").stderr

    @pytest.mark.parametrize("option", ["--batch-size", "--max-new-tokens", "--max-prompt-tokens", "--threads"])
    def test_wrong_usage_is_2(self, option):
        assert self.run("--target", "m", "--data", "d", "--output", "o", option, 0).exit_code == 2
        assert self.run("--target", "m").exit_code == 2

    def test_help(self):
        result = self.run("--help")
        assert result.exit_code == 0
        assert "--max-prompt-tokens" in result.stdout
