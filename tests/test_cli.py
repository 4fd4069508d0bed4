"""The command `hf-specdec` and the demo, on a tiny model in a folder."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest
import torch
from conftest import byte_level_bpe
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import hf_specdec
from hf_specdec import DraftLayersModel, EagleModel, MedusaModel, demo
from hf_specdec.cli import app, encode_prompt, load_assistant
from hf_specdec.smollm2 import early_layers_copy, load_model_and_tokenizer

TEXT = "the cat sat on the mat and the cat sat on the mat and the dog sat on the log and "
CHAT_TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"


def make_tokenizer(num_merges: int = 60, **options) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on a few words."""
    tokenizer = byte_level_bpe(TEXT, 258 + num_merges)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>", **options
    )


def make_llama(seed: int = 0, num_layers: int = 3) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=1,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model without a chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    make_llama().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    """The same model with a chat template."""
    folder = tmp_path_factory.mktemp("tiny-chat")
    make_llama().save_pretrained(folder)
    make_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory):
    """A draft model with the target's vocabulary."""
    folder = tmp_path_factory.mktemp("draft")
    make_llama(seed=1, num_layers=1).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def other_draft_folder(tmp_path_factory):
    """A draft model with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("other-draft")
    make_llama(seed=2, num_layers=1).save_pretrained(folder)
    make_tokenizer(num_merges=5).save_pretrained(folder)
    return folder


def run(*arguments, stdin: str | bytes | None = None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def generate(model, *arguments, prompt: str = TEXT, stdin=None):
    return run("generate", "--model", model, "--prompt", prompt, "--max-new-tokens", 24, *arguments, stdin=stdin)


def expected_text(folder, text: str = TEXT, seed: int | None = None, **options) -> str:
    """What plain `generate` gives, from its own call."""
    model, tokenizer = load_model_and_tokenizer(str(folder))
    inputs = tokenizer(text, return_tensors="pt")
    if seed is not None:
        torch.manual_seed(seed)
    ids = model.generate(**inputs, max_new_tokens=24, **({"do_sample": False} | options))
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


class TestGenerate:
    @pytest.mark.parametrize("streaming", ["--stream", "--no-stream"])
    def test_plain_text_of_the_model(self, folder, streaming):
        result = generate(folder, streaming)
        assert (result.exit_code, result.stdout, result.stderr) == (0, expected_text(folder) + "\n", "")

    @pytest.mark.parametrize("options", [(), ("--num-assistant-tokens", 3), ("--num-assistant-tokens", "auto")])
    @pytest.mark.parametrize("assistant", ["prompt_lookup", "draft", "other draft"])
    def test_drafts_do_not_change_the_text(self, request, folder, assistant, options):
        fixtures = {"draft": "draft_folder", "other draft": "other_draft_folder"}
        if assistant in fixtures:
            assistant = request.getfixturevalue(fixtures[assistant])
        result = generate(folder, "--assistant", assistant, *options)
        assert (result.exit_code, result.stdout) == (0, expected_text(folder) + "\n")

    @pytest.mark.parametrize("assistant", [(), ("--assistant", "prompt_lookup")])
    def test_sampling_with_a_seed(self, folder, assistant):
        result = generate(folder, "--temperature", 0.5, "--top-k", 7, "--top-p", 0.9, "--seed", 11, *assistant)
        sampling = {"do_sample": True, "temperature": 0.5, "top_k": 7, "top_p": 0.9}
        assert result.stdout == expected_text(folder, seed=11, **sampling) + "\n"
        assert result.stdout != expected_text(folder) + "\n"

    def test_temperature_zero_is_greedy(self, folder):
        assert generate(folder, "--temperature", 0, "--top-k", 7).stdout == expected_text(folder) + "\n"

    def test_rejection_sampling(self, folder, draft_folder):
        result = generate(
            folder, "--assistant", draft_folder, "--temperature", 1, "--assistant-sampling", "rejection", "--seed", 3
        )
        assert result.exit_code == 0
        assert result.stdout

    def test_prompt_from_stdin(self, folder):
        assert generate(folder, prompt="-", stdin=TEXT + "\n").stdout == expected_text(folder) + "\n"

    def test_chat_template_is_used_if_there_is_one(self, folder, chat_folder):
        in_template = expected_text(folder, f"<s>{TEXT}</s>")
        assert in_template != expected_text(folder)
        assert generate(chat_folder).stdout == in_template + "\n"
        assert generate(chat_folder, "--chat").stdout == in_template + "\n"
        assert generate(chat_folder, "--no-chat").stdout == expected_text(folder) + "\n"

    def test_statistics_go_to_stderr(self, folder):
        result = generate(folder, "--assistant", "prompt_lookup", "--stats")
        assert result.stdout == expected_text(folder) + "\n"
        assert re.search(r"new tokens +24 in .* s, .* per second\n", result.stderr)
        assert re.search(r"target passes +\d+, \d\.\d\d tokens per pass\n", result.stderr)
        assert re.search(r"draft tokens +\d+, \d+ accepted \(\d+%; by depth: .*\)\n", result.stderr)
        assert re.search(r"time +target .*%, drafter .*%, other .*%\n", result.stderr)

    def test_statistics_of_plain_generate(self, folder):
        assert re.fullmatch(r"new tokens +24 in .* s, .* per second\n", generate(folder, "--stats").stderr)

    def test_dtype_and_device(self, folder, monkeypatch):
        seen = {}

        def load(name, **options):
            seen.update(options)
            return load_model_and_tokenizer(name, **options)

        monkeypatch.setattr("hf_specdec.cli.load_model_and_tokenizer", load)
        assert generate(folder, "--dtype", "bfloat16", "--device", "cpu").exit_code == 0
        assert seen == {"dtype": "bfloat16", "device": "cpu"}

    def test_vocabularies_decide_whether_drafts_are_retokenised(self, folder, draft_folder, other_draft_folder):
        tokenizer = make_tokenizer()
        assert load_assistant("prompt_lookup", tokenizer) == {"assistant": "prompt_lookup"}
        assert load_assistant(str(draft_folder), tokenizer) == {"assistant": str(draft_folder)}
        assert set(load_assistant(str(other_draft_folder), tokenizer)) == {
            "assistant",
            "tokenizer",
            "assistant_tokenizer",
        }


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["generate", "--prompt", "x"], "Missing option '--model'"),
            (["generate", "--model", "m", "--prompt", "  "], "the prompt is empty"),
            (["generate", "--model", "m", "--prompt", "x", "--max-new-tokens", "0"], "Invalid value for"),
            (["generate", "--model", "m", "--prompt", "x", "--num-assistant-tokens", "3"], "need --assistant"),
            (["generate", "--model", "m", "--prompt", "x", "--assistant-sampling", "rejection"], "need --assistant"),
            (["generate", "--model", "m", "--prompt", "x", "--num-assistant-tokens", "0"], "got '0'"),
            (["generate", "--model", "m", "--prompt", "x", "--num-assistant-tokens", "many"], "got 'many'"),
            (["generate", "--model", "m", "--prompt", "x", "--device", "toaster"], "got 'toaster'"),
            (["generate", "--model", "m", "--prompt", "x", "--dtype", "int8"], "Invalid value for"),
            (["generate", "--model", "m", "--prompt", "x", "--temperature", "-1"], "Invalid value for"),
            (["translate"], "No such command"),
        ],
    )
    def test_wrong_usage_is_2(self, arguments, message):
        result = run(*arguments)
        assert result.exit_code == 2
        assert message in re.sub(r"[\s│]+", " ", result.stderr)

    def test_empty_stdin_is_wrong_usage(self):
        assert generate("m", prompt="-", stdin="\n").exit_code == 2

    def test_failures_are_1_with_one_line(self, folder, tmp_path):
        (tmp_path / "empty").mkdir()
        for arguments, message in [
            ((tmp_path / "none",), "there is no folder"),
            ((tmp_path / "empty",), "the model '.*empty' cannot be loaded: "),
            ((folder, "--assistant", tmp_path / "none"), "there is no folder"),
            ((folder, "--assistant", tmp_path / "empty"), "the assistant '.*empty' cannot be loaded: "),
            ((folder, "--chat"), "the model's tokenizer has no chat template; use --no-chat."),
        ]:
            result = generate(*arguments)
            assert (result.exit_code, result.stdout) == (1, "")
            assert re.fullmatch(f"hf-specdec: {message}.*\n", result.stderr)

    def test_stdin_that_is_no_text(self):
        result = generate("m", prompt="-", stdin=b"\xff")
        assert result.exit_code == 1
        assert result.stderr.startswith("hf-specdec: 'utf-8' codec can't decode")

    def test_debug_shows_the_traceback(self, folder):
        result = generate(folder, "--chat", "--debug")
        assert result.exit_code == 1
        assert "Traceback" in result.stderr

    def test_an_unexpected_error_names_its_type(self, folder, monkeypatch):
        def fail(*_):
            raise KeyError("x")

        monkeypatch.setattr("hf_specdec.cli.encode_prompt", fail)
        assert generate(folder).stderr == "hf-specdec: KeyError: 'x'\n"

    def test_interrupt(self, folder, monkeypatch):
        def interrupt(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr("hf_specdec.cli.encode_prompt", interrupt)
        assert generate(folder).exit_code == 130


class TestCommand:
    def test_version(self):
        result = run("--version")
        assert (result.exit_code, result.stdout) == (0, f"hf-specdec {hf_specdec.__version__}\n")

    @pytest.mark.parametrize("command", [[], ["generate"], ["demo"]])
    def test_help(self, command):
        result = run(*command, "--help")
        assert result.exit_code == 0
        assert "Usage: " in result.stdout

    def test_as_a_module_in_a_pipe_whose_reader_leaves(self, folder):
        command = [sys.executable, "-m", "hf_specdec", "generate", "--model", str(folder), "--prompt", TEXT]
        command += ["--max-new-tokens", "1000", "--threads", "1", "--assistant", "prompt_lookup"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        start = process.stdout.read(8)
        process.stdout.close()
        stderr = process.stderr.read()
        assert process.wait() == 1
        assert stderr == b""
        assert b"\x1b" not in start


class TestDemo:
    @pytest.fixture(autouse=True)
    def drafters(self, folder, tmp_path, monkeypatch):
        """Untrained drafters for the tiny target where the demo looks for its own."""
        model, _ = load_model_and_tokenizer(str(folder))
        DraftLayersModel.for_target(model).save_pretrained(tmp_path / "smollm2-135m-instruct-draft")
        MedusaModel.for_target(model).save_pretrained(tmp_path / "smollm2-135m-instruct-medusa")
        EagleModel.for_target(model, version=1).save_pretrained(tmp_path / "smollm2-135m-instruct-eagle")
        eagle3 = EagleModel.for_target(model, target_layers=[0, 1])
        eagle3.save_pretrained(tmp_path / "smollm2-135m-instruct-eagle3")
        monkeypatch.setattr(demo, "DRAFTERS", tmp_path)

    def test_every_row_gives_the_same_text(self, chat_folder, monkeypatch):
        monkeypatch.setenv("COLUMNS", "120")
        result = run("demo", "--model", chat_folder, "--max-new-tokens", 12, "--threads", 1)
        assert result.exit_code == 0, result.stderr
        for name in ["prompt lookup", "draft model, distilled", "Medusa heads", "EAGLE", "EAGLE-3"]:
            assert re.search(rf"│ {name} +│ +yes │ +\d+\.\d\d │ +[\d.]+ │ +\d+\.\d\dx │", result.stdout)
        assert re.search(r"│ plain generate +│ +│ +1\.00 │ +[\d.]+ │ +1\.00x │", result.stdout)
        assert all(prompt.name in result.stdout for prompt in demo.PROMPTS)
        assert "\x1b" not in result.stdout

    def test_quick(self, folder):
        console = Console(file=io.StringIO())
        shown = demo.run_demo(str(folder), quick=True, threads=1, console=console)
        assert [len(answers) for answers in shown.answers.values()] == [len(demo.QUICK_PROMPTS)] * (1 + len(demo.ROWS))
        assert all(len(answer.ids) == demo.QUICK_TOKENS for answers in shown.answers.values() for answer in answers)

    def test_colours_show_the_accepted_drafts(self, folder):
        console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=100)
        model, tokenizer = load_model_and_tokenizer(str(folder))
        shown = demo.Demo(model, tokenizer, 80, console)
        prompt = demo.Prompt("copy", TEXT)
        shown.answer(prompt, demo.PLAIN)
        shown.answer(prompt, "prompt lookup")
        accepted = shown.answers["prompt lookup"][0].speculation.num_accepted
        assert accepted > 0
        assert "\x1b[1;32m" in console.file.getvalue()

    def test_another_target_has_no_rows_of_drafters_made_for_the_default_one(self):
        model = GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=16, n_layer=1, n_head=2))
        console = Console(file=io.StringIO(), width=200)
        shown = demo.Demo(model, make_tokenizer(), 4, console)
        assert list(shown.rows) == [demo.PLAIN, "prompt lookup"]
        drafters = {"draft model, distilled": "DraftLayersModel", "Medusa heads": "MedusaModel", "EAGLE": "EagleModel"}
        for name, drafter in drafters.items():
            assert f"Left out: {name}. this {drafter} was made for a target with hidden_size" in console.file.getvalue()

    def test_the_number_of_threads_is_put_back(self, folder):
        before = torch.get_num_threads()
        demo.run_demo(str(folder), max_new_tokens=2, quick=True, threads=2, console=Console(file=io.StringIO()))
        assert torch.get_num_threads() == before


class TestAnswerStreamer:
    def test_blocks(self):
        streamer = demo.AnswerStreamer(make_tokenizer())
        for block in ([[5, 6]], [4], [7, 8, 9]):  # the prompt first
            streamer.put(torch.tensor(block))
        streamer.end()
        assert streamer.ids == [4, 7, 8, 9]
        assert streamer.is_drafted == [False, True, True, False]

    @pytest.mark.parametrize("text", ["the café costs 5 € 🙂 and", "the cat 🙂"])
    @pytest.mark.parametrize("num_dropped", [0, 1])
    def test_pieces_add_up_to_the_text(self, text, num_dropped):
        tokenizer = make_tokenizer()
        ids = tokenizer(text)["input_ids"]
        ids = ids[: len(ids) - num_dropped]  # the end may be half a character
        streamer = demo.AnswerStreamer(tokenizer)
        streamer.put(torch.tensor([[0]]))
        for token in ids:
            streamer.put(torch.tensor([token]))
        streamer.end()
        assert len(streamer.pieces) == len(ids)
        assert "".join(streamer.pieces) == tokenizer.decode(ids)
        assert streamer.coloured().plain == tokenizer.decode(ids)

    @pytest.mark.parametrize("do_sample", [False, True])
    def test_blocks_agree_with_the_statistics(self, folder, do_sample):
        model, tokenizer = load_model_and_tokenizer(str(folder))
        streamer = demo.AnswerStreamer(tokenizer)
        torch.manual_seed(0)
        outputs = model.generate(
            **encode_prompt(model, tokenizer, TEXT),
            assistant=early_layers_copy(model, 2),
            num_assistant_tokens=3,
            max_new_tokens=60,
            do_sample=do_sample,
            streamer=streamer,
            return_dict_in_generate=True,
        )
        assert 0 < outputs.speculation.num_accepted < outputs.speculation.num_drafted
        assert streamer.is_drafted[:-1] == outputs.speculation.drafted_mask[0][:-1]
