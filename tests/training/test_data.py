"""Reading training data, and which tokens of it are responses."""

from __future__ import annotations

import json
import sys
from itertools import groupby

import pytest
from conftest import byte_level_bpe
from tokenizers import processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from hf_specdec.training.data import Example, encode, encode_records, load_records

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>"]
USER = {"role": "user", "content": "why?"}
ANSWER = {"role": "assistant", "content": "the cat sat"}
CHAT = [USER, ANSWER, {"role": "user", "content": "and then?"}, {"role": "assistant", "content": "it ran  away"}]
SYSTEM = {"role": "system", "content": "be kind"}

# With a default system prompt, as SmolLM2 and Qwen2.5 have it.
CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nhelp<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Writes BOS itself, has no generation prompt and a space before the mark, as Llama 2.
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
# Ends a whole chat, but no earlier turn, with EOS, as Phi-3.
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
# Drops the reasoning of earlier turns and gives the last one an empty block if it has none, as Qwen3.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].lstrip() }}"
    "{% elif m.role == 'assistant' and '</think>' not in m.content %}<think>\n\n</think>\n\n{{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# No mark behind a response.
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML


def make_tokenizer(chat_template: str | None = None, trim_offsets: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE that puts <s> and </s> around every text."""
    tokenizer = byte_level_bpe("the cat sat on the mat    and the cat ran    away", 320, SPECIAL)
    around = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=trim_offsets), around])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=chat_template
    )


def responses(record, tokenizer) -> list[str]:
    """Text of every run of response tokens."""
    example = encode(record, tokenizer)
    assert len(example.input_ids) == len(example.is_response)
    runs = groupby(zip(example.input_ids, example.is_response), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for is_response, run in runs if is_response]


class TestLoad:
    def write(self, tmp_path, name, records):
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return path

    @pytest.mark.parametrize(
        ("record", "expected"),
        [
            ({"messages": CHAT}, {"messages": CHAT}),
            (
                {
                    "id": 7,
                    "conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "the cat sat"}],
                },
                {"messages": [USER, ANSWER]},
            ),
            ({"turns": ["why?", "and then?"]}, {"messages": [CHAT[0], CHAT[2]]}),
            ({"prompt": "why?"}, {"messages": [USER]}),
            ({"prompt": "why?", "completion": None, "messages": None}, {"messages": [USER]}),
            ({"prompt": "why?", "completion": " so"}, {"prompt": "why?", "completion": " so"}),
            ({"prompt": [USER], "completion": [ANSWER]}, {"messages": [USER, ANSWER]}),
            ({"prompt": [USER]}, {"messages": [USER]}),
            ({"text": "the cat"}, {"text": "the cat"}),
            ({"messages": [SYSTEM, ANSWER, *CHAT]}, {"messages": [SYSTEM, *CHAT]}),  # an answer to nothing
            ({"messages": [USER, ANSWER | {"is_cut": True, "id": 3}]}, {"messages": [USER, ANSWER | {"is_cut": True}]}),
        ],
    )
    def test_forms(self, tmp_path, record, expected):
        assert load_records(self.write(tmp_path, "data.jsonl", [record])) == [expected]

    @pytest.mark.parametrize("record", [{"conversations": []}, {"messages": []}, {"messages": [SYSTEM, ANSWER]}])
    def test_a_chat_without_a_user_is_dropped(self, tmp_path, record):
        assert load_records(self.write(tmp_path, "data.jsonl", [record, {"text": "x"}])) == [{"text": "x"}]
        with pytest.raises(ValueError, match=r'data\.jsonl holds no records; give a file or dataset with "messages"'):
            load_records(self.write(tmp_path, "data.jsonl", [record]))

    def test_files(self, tmp_path):
        records = [{"text": "one"}, {"text": "zwei ü"}]
        self.write(tmp_path, "lines.json", records)
        self.write(tmp_path, "lines.jsonl", records)
        (tmp_path / "list.json").write_text(json.dumps(records, indent=1))
        (tmp_path / "bom.jsonl").write_text('\n{"text": "one"}\n\n{"text": "zwei ü"}', encoding="utf-8-sig")
        (tmp_path / "text.txt").write_text("one\n\nzwei ü\n", encoding="utf-8")
        for name in ["lines.json", "lines.jsonl", "list.json", "bom.jsonl", "text.txt"]:
            assert load_records(tmp_path / name) == records, name
        (tmp_path / "one.json").write_text('{"text": "one"}')
        assert load_records(str(tmp_path / "one.json")) == [{"text": "one"}]

    def test_parquet(self, tmp_path, monkeypatch):
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
        path = tmp_path / "data.parquet"
        datasets.Dataset.from_list([{"messages": CHAT}, {"messages": [SYSTEM, USER]}]).to_parquet(path)
        assert load_records(path) == [{"messages": CHAT}, {"messages": [SYSTEM, USER]}]

    def test_name_of_a_dataset(self, monkeypatch):
        datasets = pytest.importorskip("datasets")
        calls = []

        def load_dataset(*arguments, **options):
            calls.append((arguments, options))
            return [{"text": "x"}]

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        assert load_records("owner/name:part", "train[:5]") == load_records("owner/name") == [{"text": "x"}]
        assert calls == [(("owner/name", "part"), {"split": "train[:5]"}), (("owner/name", None), {"split": "train"})]

    def test_datasets_is_missing(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(ModuleNotFoundError, match=r"reading 'owner/name' needs the package datasets; run: pip "):
            load_records("owner/name")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (
                '{"text": "x"}\n{"text": \n',
                r"line 2 of .*data\.jsonl is no JSON \(Expecting value\); mend or remove it",
            ),
            ("[1]", r"record 0 of .*data\.jsonl is a list; expected an object with \"messages\""),
            ('{"b": 1, "text": 2}', r"has the columns b \(int\), text \(int\); expected \"messages\""),
            ("{}", r"has the columns none; expected"),
            ('{"turns": "why?"}', r"has the columns turns \(str\)"),
            ('{"prompt": [], "completion": "x"}', r"has the columns completion \(str\), prompt \(list\)"),
            (
                '{"messages": [{"role": "tool", "content": "3"}]}',
                r"of the role 'tool' with a str as content; expected t",
            ),
            (
                '{"messages": [{"role": "user", "content": [1]}]}',
                r"of the role 'user' with a list as content.* Remove s",
            ),
            ('{"messages": [{"role": [], "content": "x"}]}', r"of the role \[\] with a str"),
            ('{"messages": ["why?"]}', r"of the role None with a str"),
            ("", r"holds no records"),
        ],
    )
    def test_bad_content(self, tmp_path, content, message):
        (tmp_path / "data.jsonl").write_text(content)
        with pytest.raises(ValueError, match=message):
            load_records(tmp_path / "data.jsonl")

    def test_bad_files(self, tmp_path):
        for source in [tmp_path / "none.jsonl", "none.txt", "./none"]:
            with pytest.raises(FileNotFoundError, match=f"there is no file '{source}'"):
                load_records(source)
        (tmp_path / "data.csv").touch()
        with pytest.raises(ValueError, match=r"data\.csv' is of an unknown kind; expected \.jsonl, \.json, "):
            load_records(tmp_path / "data.csv")
        (tmp_path / "data.json").write_text('[{"text": 1},\n')
        with pytest.raises(ValueError, match=r"data\.json is no JSON \(.*, line 2\); mend it"):
            load_records(tmp_path / "data.json")
        (tmp_path / "data.txt").write_bytes(b"\xff")
        with pytest.raises(ValueError, match=r"data\.txt is no UTF-8 text \('utf-8' codec .*\); convert it"):
            load_records(tmp_path / "data.txt")


@pytest.mark.parametrize("trim_offsets", [True, False])
class TestEncode:
    @pytest.mark.parametrize(
        ("template", "expected"),
        [
            (CHATML, ["the cat sat<|im_end|>", "it ran  away<|im_end|>"]),
            (LLAMA2, [" the cat sat </s>", " it ran  away </s>"]),
            (PHI3, ["the cat sat<|end|>", "it ran  away<|end|>"]),
            (QWEN3, ["<think>\n\n</think>\n\nit ran  away<|im_end|>"]),
            (PLAIN, [" the cat sat", " it ran  away"]),
        ],
        ids=["chatml", "llama2", "phi3", "qwen3", "plain"],
    )
    def test_chats(self, trim_offsets, template, expected):
        tokenizer = make_tokenizer(template, trim_offsets)
        assert responses({"messages": CHAT}, tokenizer) == expected
        ids = encode({"messages": CHAT}, tokenizer).input_ids
        assert ids == tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]
        assert ids.count(tokenizer.bos_token_id) == (template == LLAMA2)
        if template != LLAMA2:
            with_system = responses({"messages": [SYSTEM, *CHAT]}, tokenizer)
            assert with_system == expected

    @pytest.mark.parametrize("template", [CHATML, LLAMA2, PHI3, PLAIN])
    def test_a_cut_response_has_no_end_mark(self, trim_offsets, template):
        tokenizer = make_tokenizer(template, trim_offsets)
        complete = responses({"messages": CHAT}, tokenizer)
        cut = [message | {"is_cut": True} if message == ANSWER else message for message in CHAT]
        first, second = responses({"messages": cut}, tokenizer)
        assert (first.strip(), second) == ("the cat sat", complete[1])
        assert responses({"messages": cut[:2]}, tokenizer) == [first]

    def test_reasoning_is_a_response_where_the_template_keeps_it(self, trim_offsets):
        tokenizer = make_tokenizer(QWEN3, trim_offsets)
        reasoning = [m | {"content": "<think>so</think>" + m["content"]} if m in CHAT[1::2] else m for m in CHAT]
        assert responses({"messages": reasoning}, tokenizer) == ["<think>so</think>it ran  away<|im_end|>"]
        assert responses({"messages": reasoning[:2]}, tokenizer) == ["<think>so</think>the cat sat<|im_end|>"]
        # Reasoning that was cut: the template writes an empty block before it, which the target never wrote.
        cut = [USER, {"role": "assistant", "content": "<think>so", "is_cut": True}]
        assert responses({"messages": cut}, tokenizer) == []

    def test_chats_without_answers(self, trim_offsets):
        tokenizer = make_tokenizer(CHATML, trim_offsets)
        empty = {"role": "assistant", "content": " "}
        assert responses({"messages": [USER]}, tokenizer) == []
        assert responses({"messages": [USER, empty]}, tokenizer) == []
        assert responses({"messages": [USER, empty, *CHAT[:2]]}, tokenizer) == ["the cat sat<|im_end|>"]

    def test_a_question_last(self, trim_offsets):
        tokenizer = make_tokenizer(CHATML, trim_offsets)
        assert responses({"messages": CHAT[:3]}, tokenizer) == ["the cat sat<|im_end|>"]

    def test_text_and_completions(self, trim_offsets):
        tokenizer = make_tokenizer(None, trim_offsets)
        text = "the cat     sat é 🙂"
        example = encode({"text": text}, tokenizer)
        assert [example.input_ids[0], example.input_ids[-1]] == [tokenizer.bos_token_id, tokenizer.eos_token_id]
        assert responses({"text": text}, tokenizer) == [text]  # the first token too, which follows BOS
        completion = {"prompt": "the cat", "completion": " sat    é"}
        assert responses(completion, tokenizer) == [" sat    é"]
        assert encode({"text": ""}, tokenizer).is_response == [False, False]

    def test_nothing_predicts_the_first_token(self, trim_offsets):
        tokenizer = make_tokenizer(None, trim_offsets)
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
        assert responses({"text": "the cat sat"}, tokenizer) == [" cat sat"]
        assert encode({"text": ""}, tokenizer) == Example([], [])


class TestEncodeErrors:
    @pytest.mark.parametrize(
        ("template", "chat", "message"),
        [
            (
                None,
                CHAT,
                r"the data are chats and the target's tokenizer has no chat template; set `tokenizer\.chat_te",
            ),
            (
                STRICT,
                [SYSTEM, USER],
                r"refuses a chat of the roles system, user \(no system role\); leave such chats out",
            ),
            ("{{ messages | length }}", [USER, ANSWER], r"does not write a response behind its generation prompt, so "),
        ],
    )
    def test_chat_template(self, template, chat, message):
        with pytest.raises(ValueError, match=message):
            encode({"messages": chat}, make_tokenizer(template))

    def test_slow_tokenizer(self):
        with pytest.raises(ValueError, match=r"`tokenizer` is a ByT5Tokenizer, which does not say where .* load the"):
            encode({"text": "x"}, ByT5Tokenizer())


class TestEncodeRecords:
    def test_truncates_and_leaves_out(self):
        tokenizer = make_tokenizer(CHATML)
        records = [{"messages": [USER]}, {"messages": CHAT}, {"text": "the cat"}]
        whole = encode(records[1], tokenizer)
        start = whole.is_response.index(True)
        first, second = encode_records(records, tokenizer, start + 1)
        assert first == Example(whole.input_ids[: start + 1], whole.is_response[: start + 1])
        assert second == encode(records[2], tokenizer)
        assert encode_records(records, tokenizer, start) == [second]

    @pytest.mark.parametrize(
        ("records", "max_length", "message"),
        [
            ([], 8, "`records` is empty; give at least one"),
            ([{"text": "x"}], 1, "`max_length` is 1; it must be 2 or more"),
            (
                [{"messages": [USER]}],
                64,
                r"no response tokens among the first `max_length` = 64 .*hf-specdec regenerate",
            ),
        ],
    )
    def test_errors(self, records, max_length, message):
        with pytest.raises(ValueError, match=message):
            encode_records(records, make_tokenizer(CHATML), max_length)
