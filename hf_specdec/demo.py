"""The demo: a few prompts, answered by the model alone and with each drafter, and a table that compares them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from .cli import encode_prompt
from .generation.statistics import SpeculationStatistics
from .modeling.auto import AutoDrafter
from .smollm2 import load_model_and_tokenizer

PLAIN = "plain generate"
ACCEPTED_STYLE = "bold green"
SAMPLING_SEED = 0
# Trained for the default model; in the repository, not in the wheel.
DRAFTERS = next(filter(Path.is_dir, (Path(__file__).parent.parent / "drafters", Path("drafters"))), Path("drafters"))


def _trained(folder: str, target: PreTrainedModel) -> dict[str, Any]:
    return {"assistant": AutoDrafter.from_pretrained(DRAFTERS / folder, target=target)}


# What is compared with plain generate: a name, and what makes the keywords of `generate` from the target.
ROWS: list[tuple[str, Callable[[PreTrainedModel], dict[str, Any]]]] = [
    ("prompt lookup", lambda target: {"assistant": "prompt_lookup"}),
    ("draft model, distilled", partial(_trained, "smollm2-135m-instruct-draft")),
    ("Medusa heads", partial(_trained, "smollm2-135m-instruct-medusa")),
    ("EAGLE", partial(_trained, "smollm2-135m-instruct-eagle")),
    ("EAGLE-3", partial(_trained, "smollm2-135m-instruct-eagle3")),
]


@dataclass(frozen=True)
class Prompt:
    """One task: what the model is asked, and keywords of `generate` beyond greedy decoding."""

    name: str
    text: str
    options: dict[str, Any] = field(default_factory=dict)


PROMPTS = [
    Prompt(
        "summarise",
        "Summarise this report in a few sentences.\n\n"
        "The harbour bridge in Norvik was closed on Monday morning after engineers found cracks in two of the steel "
        "cables that hold the roadway. The cables were installed in 1987 and were due to be replaced next spring. The "
        "city council said that the bridge will stay closed for at least six weeks, and that ferries will carry "
        "passengers across the harbour free of charge every fifteen minutes. Lorries must take the coastal road, which "
        "adds forty minutes to the journey to the fish market. The mayor, Ingrid Solberg, said that the safety of the "
        "people comes first, and that the council will look for money to bring the replacement forward to this winter.",
    ),
    Prompt(
        "school mathematics",
        "A farmer has 24 hens. Each hen lays 5 eggs a week, and he sells the eggs for 3 dollars a dozen. How much does "
        "he earn in four weeks?",
    ),
    Prompt(
        "edit code",
        "Rename the variable `subtotal` to `amount` in this function. Write the whole function.\n\n"
        "```python\n"
        "def calc(items, discount, tax_rate):\n"
        "    subtotal = 0\n"
        "    for item in items:\n"
        "        subtotal = subtotal + item.price * item.quantity\n"
        "    if discount > 0:\n"
        "        subtotal = subtotal - subtotal * discount\n"
        "    tax = subtotal * tax_rate\n"
        "    return subtotal + tax\n"
        "```",
    ),
    Prompt(
        "extract from a table",
        "| Part | Number | Price |\n"
        "|---|---|---|\n"
        "| brake pad | BP-1120 | 24.90 |\n"
        "| oil filter | OF-0031 | 8.50 |\n"
        "| spark plug | SP-2207 | 6.20 |\n"
        "| wiper blade | WB-0450 | 13.75 |\n"
        "| fan belt | FB-1034 | 18.00 |\n\n"
        "Convert this table to a list with the part and its price.",
    ),
    Prompt(
        "chat, sampled",
        "Explain to a ten-year-old why the sky is blue.",
        {"do_sample": True, "temperature": 0.7, "top_p": 0.95},
    ),
]
QUICK_PROMPTS = PROMPTS[:2]
QUICK_TOKENS = 40


@dataclass
class Answer:
    """What one row of the table gave for one prompt."""

    ids: list[int]
    seconds: float
    speculation: SpeculationStatistics | None


class AnswerStreamer(BaseStreamer):
    """Collects the new tokens, their text and who wrote them: of a block put at once, all but the last were drafts.

    Example: blocks [4], [7, 8, 9] -> ids [4, 7, 8, 9], is_drafted [False, True, True, False].
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.is_drafted: list[bool] = []
        self.pieces: list[str] = []  # the text that each token adds; a character of several tokens comes with its last
        self.num_characters = 0
        self.has_prompt = False

    def put(self, value: torch.LongTensor) -> None:
        if not self.has_prompt:
            self.has_prompt = True
            return
        block = value.flatten().tolist()
        self.is_drafted += [True] * (len(block) - 1) + [False]
        for token in block:
            self.ids.append(token)
            text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
            self._add("" if text.endswith("\ufffd") else text[self.num_characters :])

    def end(self) -> None:
        if self.pieces:
            text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
            self.pieces[-1] += text[self.num_characters :]

    def _add(self, piece: str) -> None:
        self.pieces.append(piece)
        self.num_characters += len(piece)

    def coloured(self, is_drafted: list[bool] | None = None) -> Text:
        """The text so far with the drafts in colour; `is_drafted` overrides what the blocks said."""
        text = Text()
        for piece, drafted in zip(list(self.pieces), self.is_drafted if is_drafted is None else is_drafted):
            text.append(piece, ACCEPTED_STYLE if drafted else "")
        return text


class Demo:
    """A model, its prompts and its drafters; `answer` runs one of them, `table` compares them all."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int, console: Console
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.console = console
        self.rows: dict[str, dict[str, Any]] = {PLAIN: {}}  # keywords of `generate`
        for name, make in ROWS:
            try:
                self.rows[name] = make(model)
            except (ValueError, OSError) as error:
                console.print(Text(f"Left out: {name}. {error}", "dim"))
        self.answers: dict[str, list[Answer]] = {name: [] for name in self.rows}  # one for each prompt

    def warm_up(self, choose_threads: bool) -> None:
        """Runs every row for a few tokens; with `choose_threads` uses one CPU thread if that is faster now."""
        prompt = PROMPTS[-1]
        for row in self.rows:
            self.generate(prompt, row, AnswerStreamer(self.tokenizer), max_new_tokens=4)
        default = torch.get_num_threads()
        if not choose_threads or default == 1 or self.model.device.type != "cpu":
            return
        # On a busy machine several threads wait for each other and can be many times slower than one.
        seconds = {}
        for candidate in (default, 1):
            torch.set_num_threads(candidate)
            seconds[candidate] = self.generate(prompt, PLAIN, AnswerStreamer(self.tokenizer), max_new_tokens=8).seconds
        torch.set_num_threads(min(seconds, key=seconds.get))

    def generate(self, prompt: Prompt, row: str, streamer: AnswerStreamer, max_new_tokens: int | None = None) -> Answer:
        """One timed call of `generate`, with the same seed each time."""
        inputs = encode_prompt(self.model, self.tokenizer, prompt.text)
        options = {"do_sample": False, "max_new_tokens": max_new_tokens or self.max_new_tokens}
        options |= prompt.options | self.rows[row]
        torch.manual_seed(SAMPLING_SEED)
        start = time.perf_counter()
        outputs = self.model.generate(**inputs, **options, streamer=streamer, return_dict_in_generate=True)
        ids = outputs.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return Answer(ids, time.perf_counter() - start, getattr(outputs, "speculation", None))

    def answer(self, prompt: Prompt, row: str) -> None:
        """Generates while showing the text, then leaves one line of numbers and the final colours on the screen."""
        streamer = AnswerStreamer(self.tokenizer)

        def show() -> Text:
            return Text.assemble((f"{row} ...\n", "bold"), streamer.coloured())

        with Live(console=self.console, get_renderable=show, refresh_per_second=8, transient=True):
            answer = self.generate(prompt, row, streamer)
        self.answers[row].append(answer)
        plain, speculation = self.answers[PLAIN][-1], answer.speculation
        speed = tokens_per_second([answer])
        numbers = f"{speed:.1f} tokens per second"
        # A block that ends the text may end with a draft: the streamer cannot tell, the statistics can.
        is_drafted = None if speculation is None else speculation.drafted_mask[0]
        if speculation is not None:
            numbers += f" ({speed / tokens_per_second([plain]):.2f}x)"
            numbers += f", {speculation.mean_acceptance_length:.2f} tokens per pass"
            numbers += f", {sum(is_drafted)} of {len(is_drafted)} drafted"
        self.console.print(Text(f"{row}: {numbers}", "bold"))
        shows_drafts = self.console.color_system is not None and any(is_drafted or ())
        if row != PLAIN and answer.ids == plain.ids and not shows_drafts:
            self.console.print(Text("The same text.", "dim"))
        else:
            self.console.print(streamer.coloured(is_drafted))
        self.console.print()

    def table(self) -> Table:
        """Each row against plain generate, over all prompts."""
        table = Table(title=f"{len(self.answers[PLAIN])} prompts, together")
        table.add_column("")
        for heading in ("same text", "tokens per\ntarget pass", "tokens per\nsecond", "speedup"):
            table.add_column(heading, justify="right")
        plain = self.answers[PLAIN]
        plain_speed = tokens_per_second(plain)
        for row, answers in self.answers.items():
            speculations = [answer.speculation for answer in answers if answer.speculation is not None]
            passes = sum(speculation.num_row_passes for speculation in speculations)
            is_same = [answer.ids for answer in answers] == [answer.ids for answer in plain]
            speed = tokens_per_second(answers)
            table.add_row(
                row,
                "" if row == PLAIN else "yes" if is_same else "no",
                f"{sum(len(answer.ids) for answer in answers) / passes:.2f}" if passes else "1.00",
                f"{speed:.1f}",
                f"{speed / plain_speed:.2f}x",
            )
        return table


def tokens_per_second(answers: list[Answer]) -> float:
    return sum(len(answer.ids) for answer in answers) / sum(answer.seconds for answer in answers)


def run_demo(
    model: str,
    *,
    max_new_tokens: int = 80,
    quick: bool = False,
    device: str | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    console: Console | None = None,
) -> Demo:
    """Answers the prompts with every row, prompt by prompt, and prints the comparison.

    Args:
        model (`str`): `"smollm2"`, a Hub id or a local folder.
        max_new_tokens (`int`): most tokens for each answer.
        quick (`bool`): only two prompts and at most 40 tokens.
        device, dtype (`str`, *optional*): as for `load_model_and_tokenizer`.
        threads (`int`, *optional*): CPU threads; `None` takes one or torch's own number, what is faster now.
        console (`rich.console.Console`, *optional*): where to print; stdout by default.

    Returns:
        [`Demo`] with all answers.
    """
    console = console or Console(highlight=False)
    prompts = QUICK_PROMPTS if quick else PROMPTS
    threads_before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        console.print(f"Loading {model} ...")
        demo = Demo(
            *load_model_and_tokenizer(model, device=device, dtype=dtype),
            max_new_tokens=min(max_new_tokens, QUICK_TOKENS) if quick else max_new_tokens,
            console=console,
        )
        demo.warm_up(choose_threads=threads is None)
        if console.color_system is not None:
            console.print(Text("Text in this colour", ACCEPTED_STYLE) + Text(" was drafted, and the model agreed."))
        for prompt in prompts:
            console.rule(f"[bold]{prompt.name}")
            console.print(Text(prompt.text, "dim"))
            console.print()
            for row in demo.rows:
                demo.answer(prompt, row)
        console.print(demo.table())
    finally:
        torch.set_num_threads(threads_before)
    return demo
