"""Decoding speed: plain `generate`, transformers' assisted generation and hf_specdec, in one process.

Every prompt is decoded by every method in turn, so that a busy machine slows all of them alike; ratios are taken
within one prompt and repeat. See benchmarks/README.md for what the columns mean.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Column, Table
from transformers import DynamicCache

import hf_specdec
from hf_specdec.smollm2 import early_layers_copy, load_model_and_tokenizer, resolve_name

PLAIN, BARE = "plain generate", "bare loop"
OURS, THEIRS = "hf_specdec", "transformers"
ASSISTANTS = {"draft": "draft model", "lookup": "prompt lookup"}

ARTICLE = """The harbour museum of Eastmere reopened on Saturday after four years of repairs. The roof of the old \
customs house, built in 1871, had been leaking since the storm of 2019, and two of the three halls were closed to \
visitors. The town council paid 2.4 million for the work, the rest of the 3.1 million came from the Friends of the \
Harbour, a society of 640 members. Curator Helen Marsh said that the new hall of ship models is the largest in the \
region. It shows 112 models, among them the steam ferry Lady Anne, which carried the mail between Eastmere and the \
islands until 1958. Entrance is free on the first Sunday of every month."""
CODE = """def total_price(items, tax_rate):
    total = 0
    for item in items:
        if item["quantity"] > 0:
            total = total + item["price"] * item["quantity"]
    total = total + total * tax_rate
    return total"""
TABLE = """| city | country | population | founded |
| Porto | Portugal | 231,800 | 868 |
| Bergen | Norway | 291,900 | 1070 |
| Ghent | Belgium | 265,100 | 650 |
| Tartu | Estonia | 97,400 | 1030 |"""
BUILT_IN_PROMPTS = [
    f"Repeat this article word for word, then summarise it in two sentences.\n\n{ARTICLE}",
    f"Write this function again with `items` renamed to `order_lines`, and change nothing else.\n\n{CODE}",
    f"Turn every row of this table into one line of JSON with the same keys.\n\n{TABLE}",
    f"List the five most important facts of this text, quoting its own words.\n\n{ARTICLE}",
    f"Repeat this table without any change.\n\n{TABLE}",
    f"Repeat this code without any change, then say what it returns.\n\n{CODE}",
    f"Correct the spelling of this text and change nothing else.\n\n{ARTICLE}",
    f"Which city was founded first? Quote the rows of the table that you compare.\n\n{TABLE}",
]


class ForwardClock:
    """Counts and times the forward passes of target and drafter, by hooks on the two modules, for every method alike.

    Attributes (since the last `reset`):
        seconds (`float`): time spent in forward passes of either model.
        num_row_passes (`int`): forward passes of the target, times the rows of each.
    """

    def __init__(self, target: torch.nn.Module, drafter: torch.nn.Module | None) -> None:
        self.reset()
        for module in (target, drafter):
            if module is not None:
                module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
                module.register_forward_hook(self._after, with_kwargs=True, always_call=True)
        self._target = target

    def reset(self) -> None:
        self.seconds, self.num_row_passes = 0.0, 0

    def _before(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        if module is self._target:
            self.num_row_passes += len(args[0] if args else kwargs["input_ids"])
        self._start = time.perf_counter()

    def _after(self, module: torch.nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        self.seconds += time.perf_counter() - self._start


@torch.no_grad()
def bare_loop(model: torch.nn.Module, input_ids: torch.Tensor, max_new_tokens: int, eos_ids: set[int]) -> torch.Tensor:
    """The least that greedy decoding can do around a forward pass; batch 1. The floor of the share outside forwards."""
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    kwargs = {cache_name: DynamicCache(config=model.config), "use_cache": True, "logits_to_keep": 1}
    pieces = [input_ids]
    for _ in range(max_new_tokens):
        logits = model(input_ids=pieces[-1], **kwargs).logits
        pieces.append(logits[:, -1:].argmax(-1))
        if pieces[-1].item() in eos_ids:
            break
    return torch.cat(pieces, dim=1)


def transformers_draft(generate: Callable, drafter: torch.nn.Module, num_tokens: int) -> Callable:
    """transformers reads the draft length from the drafter's generation config: a fixed one, for the call only."""

    def run(inputs: dict, length: int) -> torch.Tensor:
        saved = drafter.generation_config
        drafter.generation_config = copy.deepcopy(saved)
        drafter.generation_config.num_assistant_tokens = num_tokens
        drafter.generation_config.num_assistant_tokens_schedule = "constant"
        drafter.generation_config.assistant_confidence_threshold = 0.0
        try:
            return generate(inputs, length, assistant_model=drafter)
        finally:
            drafter.generation_config = saved

    return run


def build_methods(target, drafter, options: argparse.Namespace, eos_ids: set[int]) -> dict[str, Callable]:
    """Name -> function of the inputs and the most new tokens; it gives prompt and new tokens, ours with statistics."""
    num_tokens = options.num_assistant_tokens

    is_greedy = options.temperature == 0
    sampling = (
        {"do_sample": False} if is_greedy else {"do_sample": True, "temperature": options.temperature, "top_k": 0}
    )

    def generate(inputs: dict, length: int, **kwargs) -> torch.Tensor:
        torch.manual_seed(0)
        return target.generate(**inputs, max_new_tokens=length, **sampling, **kwargs)

    asked = {"num_assistant_tokens": num_tokens, "assistant_confidence_threshold": options.confidence_threshold}
    asked = {name: value for name, value in asked.items() if value is not None}

    def ours(assistant) -> Callable:
        return lambda inputs, length: generate(
            inputs, length, assistant=assistant, return_dict_in_generate=True, **asked
        )

    methods = {PLAIN: generate}
    # The bare loop, and transformers' assisted generation, which refuses batches and samples another text.
    has_peers = options.batch_size == 1 and is_greedy and num_tokens is not None
    if has_peers:
        methods[BARE] = lambda inputs, length: bare_loop(target, inputs["input_ids"], length, eos_ids)
    for assistant in options.assistants:
        if assistant not in ASSISTANTS:
            methods[f"{Path(assistant).name}, {OURS}"] = ours(resolve_name(assistant))
            continue
        name = ASSISTANTS[assistant]
        if has_peers:
            methods[f"{name}, {THEIRS}"] = (
                transformers_draft(generate, drafter, num_tokens)
                if assistant == "draft"
                else lambda inputs, length: generate(inputs, length, prompt_lookup_num_tokens=num_tokens)
            )
        methods[f"{name}, {OURS}"] = ours(drafter if assistant == "draft" else "prompt_lookup")
    return methods


def load_models(options: argparse.Namespace):
    """Target, drafter (`None` if no method needs it) and tokenizer."""
    places = {"device": options.device, "dtype": options.dtype}
    target, tokenizer = load_model_and_tokenizer(options.model, **places)
    drafter = None
    if "draft" in options.assistants and options.drafter.isdigit():
        drafter = early_layers_copy(target, int(options.drafter))
    elif "draft" in options.assistants:
        drafter, _ = load_model_and_tokenizer(options.drafter, **places)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return target, drafter, tokenizer


def read_prompts(options: argparse.Namespace) -> list[tuple[str, str]]:
    """(category, prompt) pairs: at most `--num-prompts` of each category, the categories taking turns."""
    if options.prompts is None:
        prompts = [("built-in", prompt) for prompt in BUILT_IN_PROMPTS]
    else:
        lines = [line for line in options.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
        if options.prompts.suffix == ".jsonl":
            questions = [json.loads(line) for line in lines]
            prompts = [(question["category"], question["turns"][0]) for question in questions]
        else:
            prompts = [(options.prompts.name, line) for line in lines]
    by_category = defaultdict(list)
    for category, prompt in prompts:
        if not options.categories or category in options.categories:
            by_category[category].append((category, prompt))
    if not by_category:
        raise SystemExit(f"no prompts: `--categories` must be among {sorted({category for category, _ in prompts})}")
    columns = [column[:: options.every][: options.num_prompts] for column in by_category.values()]
    return [column[i] for i in range(max(map(len, columns))) for column in columns if i < len(column)]


def encode(tokenizer, prompts: list[str], device: str) -> dict[str, torch.Tensor]:
    """Left-padded ids and mask; the chat template applied where the tokenizer has one."""
    has_template = tokenizer.chat_template is not None
    if has_template:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompts, padding=True, add_special_tokens=not has_template, return_tensors="pt")
    return {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}


def new_tokens(output: torch.Tensor, num_prompt: int, eos_ids: set[int]) -> list[list[int]]:
    """What each row gained, up to and with its first EOS (what follows is padding)."""
    rows = [row[num_prompt:] for row in output.tolist()]
    ends = [next((i + 1 for i, token in enumerate(row) if token in eos_ids), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends)]


def measure(methods, clock: ForwardClock, batches, options: argparse.Namespace, eos_ids: set[int]) -> list[dict]:
    """One record for each run. The order of the methods shifts from batch to batch, so that none is always first."""
    for method in methods.values():
        method(batches[0][1], 8)  # warm-up
    names, records = list(methods), []
    for repeat in range(options.repeats):
        for index, (categories, inputs) in enumerate(batches):
            shift = (repeat + index) % len(names)
            runs, texts = {}, {}
            for name in names[shift:] + names[:shift]:
                clock.reset()
                start = time.perf_counter()
                output = methods[name](inputs, options.max_new_tokens)
                speculation = getattr(output, "speculation", None)
                output = output if speculation is None else output.sequences
                if output.is_cuda:
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - start
                texts[name] = new_tokens(output, inputs["input_ids"].shape[1], eos_ids)
                num_tokens = sum(map(len, texts[name]))
                runs[name] = {
                    "method": name,
                    "batch": index,
                    "categories": categories,
                    "repeat": repeat,
                    "seconds": seconds,
                    "num_tokens": num_tokens,
                    "tokens_per_second": num_tokens / seconds,
                    "tokens_per_target_pass": num_tokens / clock.num_row_passes,
                    "share_outside_forwards": 1 - clock.seconds / seconds,
                    "drafter_seconds": speculation.drafter_seconds if speculation else 0.0,
                    "num_drafted": speculation.num_drafted if speculation else 0,
                }
            for name, run in runs.items():
                run["same_text"] = texts[name] == texts[PLAIN]
                run["ratio_to_plain"] = run["tokens_per_second"] / runs[PLAIN]["tokens_per_second"]
                records.append(run)
    return records


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def tokens_per_pass(runs: list[dict]) -> float:
    """Of all runs together."""
    num_passes = sum(run["num_tokens"] / run["tokens_per_target_pass"] for run in runs)
    return sum(run["num_tokens"] for run in runs) / num_passes


def draft_cost(runs: list[dict], plain: list[dict]) -> str:
    """c: seconds of the drafter for a draft token (of the longest branch), over those of plain `generate`'s tokens."""
    num_drafted = sum(run["num_drafted"] for run in runs)
    if num_drafted == 0:
        return "-"
    plain_seconds = sum(run["seconds"] for run in plain) / sum(run["num_tokens"] for run in plain)
    return f"{sum(run['drafter_seconds'] for run in runs) / num_drafted / plain_seconds:.3f}"


def report_categories(records: list[dict], console: Console) -> None:
    """Tokens a pass and ratio to plain `generate` of each category's totals."""
    by_category = defaultdict(lambda: defaultdict(list))
    for record in records:
        for category in set(record["categories"]):
            by_category[category][record["method"]].append(record)
    names = [name for name in dict.fromkeys(record["method"] for record in records) if name not in (PLAIN, BARE)]
    table = Table("category", "prompts", *names, title="tokens / pass, speed over plain generate (of totals)")
    for category, by_method in by_category.items():
        plain = by_method[PLAIN]
        cells = []
        for runs in (by_method[name] for name in names):
            speed = sum(run["seconds"] for run in plain) / sum(run["seconds"] for run in runs)
            cells.append(f"{tokens_per_pass(runs):.2f}, {speed:.2f}")
        table.add_row(category, str(len(plain)), *cells)
    console.print(table)


def report(records: list[dict], console: Console, show_share: bool) -> None:
    by_method = defaultdict(list)
    for record in records:
        by_method[record["method"]].append(record)
    columns = ["tokens / s", "ratio to plain", "tokens / pass", "c", "outside forwards", "text"]
    table = Table(Column("method", no_wrap=True), *columns)
    for name, runs in by_method.items():
        num_tokens, seconds = sum(run["num_tokens"] for run in runs), sum(run["seconds"] for run in runs)
        num_same = sum(run["same_text"] for run in runs)
        table.add_row(
            name,
            f"{num_tokens / seconds:.1f}",
            spread([run["ratio_to_plain"] for run in runs]),
            f"{tokens_per_pass(runs):.2f}",
            draft_cost(runs, by_method[PLAIN]),
            f"{statistics.median(run['share_outside_forwards'] for run in runs):.2%}" if show_share else "-",
            "same" if num_same == len(runs) else f"differs in {len(runs) - num_same} of {len(runs)}",
        )
    console.print(table)
    for assistant in ASSISTANTS.values():
        ours, theirs = by_method[f"{assistant}, {OURS}"], by_method[f"{assistant}, {THEIRS}"]
        if ours and theirs:
            ratios = [a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(ours, theirs)]
            console.print(f"{assistant}: {OURS} / {THEIRS}, tokens / s: {spread(ratios)}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2", help="smollm2, a Hub id or a folder")
    add("--drafter", default="6", help="a Hub id, a folder, or how many of the target's first layers to copy")
    add("--assistants", default="draft,lookup", help="which to measure: draft, lookup, folders or Hub ids of drafters")
    add("--prompts", type=Path, help="Spec-Bench .jsonl, or a text file with one prompt a line (default: built in)")
    add("--categories", default="", help="only these categories of the .jsonl, e.g. summarization,rag")
    add("--num-prompts", type=int, default=8, help="at most so many of each category")
    add("--batch-size", type=int, default=1, help="prompts decoded together; transformers drafts for 1 only")
    add("--max-new-tokens", type=int, default=128)
    add("--num-assistant-tokens", type=int, default=5, help="draft length K, the same for all; 0: each one's default")
    add("--every", type=int, default=1, help="of each category, take the first prompt and then every N-th")
    add("--temperature", type=float, default=0.0, help="sample, each method with the same seed; 0: greedy")
    add("--confidence-threshold", type=float, help="`assistant_confidence_threshold`; default: each drafter's own")
    add("--repeats", type=int, default=1)
    add("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    add("--device", default="cpu")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--json", type=Path, help="write the settings and every single run to this file")
    options = parser.parse_args()
    options.categories = [name for name in options.categories.split(",") if name]
    options.assistants = [name for name in options.assistants.split(",") if name]
    options.num_assistant_tokens = options.num_assistant_tokens or None
    return options


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    prompts = read_prompts(options)
    target, drafter, tokenizer = load_models(options)
    eos = target.generation_config.eos_token_id
    eos_ids = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    groups = [prompts[i : i + options.batch_size] for i in range(0, len(prompts), options.batch_size)]
    batches = [
        ([category for category, _ in group], encode(tokenizer, [prompt for _, prompt in group], options.device))
        for group in groups
    ]
    methods = build_methods(target, drafter, options, eos_ids)
    records = measure(methods, ForwardClock(target, drafter), batches, options, eos_ids)

    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    versions = {module.__name__: module.__version__ for module in (torch, transformers, hf_specdec)}
    console = Console(width=max(120, Console().width))
    console.print(f"{settings}\n{versions}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores")
    report(records, console, show_share=options.device == "cpu")
    report_categories(records, console)
    if options.json:
        options.json.write_text(json.dumps({"settings": settings, "versions": versions, "runs": records}, indent=1))


if __name__ == "__main__":
    main()
