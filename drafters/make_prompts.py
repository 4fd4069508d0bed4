"""The prompts that the drafters of this folder were trained on: questions of public benchmarks, and the model's own.

Of Spec-Bench every second question is left out: those are for measuring.

    python drafters/make_prompts.py --data FOLDER --output prompts.jsonl

FOLDER holds spec_bench_question.jsonl, gsm8k_train.jsonl, self_instruct_seed_tasks.jsonl and HumanEval.jsonl.gz, as
their authors publish them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from pathlib import Path

import torch

from hf_specdec.smollm2 import load_model_and_tokenizer


def benchmark_questions(folder: Path, num_math: int) -> list[list[str]]:
    """The user's turns of each chat, with so many of the 7,473 questions of GSM8K's training part."""
    spec_bench, gsm8k, tasks = (
        [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
        for name in ("spec_bench_question.jsonl", "gsm8k_train.jsonl", "self_instruct_seed_tasks.jsonl")
    )
    chats = [question["turns"] for question in spec_bench[1::2]]
    chats += [[question["question"]] for question in random.sample(gsm8k, num_math)]
    for task in tasks:
        text = task["instances"][0]["input"]
        chats.append([task["instruction"] + (f"\n\n{text}" if text else "")])
    with gzip.open(folder / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as lines:
        chats += [["Complete the following Python function.\n\n" + json.loads(line)["prompt"]] for line in lines]
    random.shuffle(chats)
    return chats


def own_questions(num_prompts: int, batch_size: int = 50) -> list[list[str]]:
    """What the model writes in the user's place, sampled at temperature 1 (as in Magpie, Xu et al. 2406.08464)."""
    model, tokenizer = load_model_and_tokenizer("smollm2")
    marker = "QUESTION"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
    inputs = tokenizer([chat[: chat.index(marker)]] * batch_size, return_tensors="pt", add_special_tokens=False)
    questions: dict[str, None] = {}
    while len(questions) < num_prompts:
        ids = model.generate(**inputs, do_sample=True, temperature=1.0, top_p=0.95, max_new_tokens=64)
        new = ids[:, inputs["input_ids"].shape[1] :]
        complete = [row for row in new.tolist() if tokenizer.eos_token_id in row]
        texts = (tokenizer.decode(row, skip_special_tokens=True).strip() for row in complete)
        questions |= dict.fromkeys(text for text in texts if len(text.split()) > 3)
    return [[question] for question in questions][:num_prompts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-math", type=int, default=360, help="questions of GSM8K")
    parser.add_argument("--num-own", type=int, default=800, help="questions that the model writes itself")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    chats = benchmark_questions(options.data, options.num_math) + own_questions(options.num_own)
    options.output.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in chats), encoding="utf-8")


if __name__ == "__main__":
    main()
