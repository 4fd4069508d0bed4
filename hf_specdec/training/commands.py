"""The commands of training: `hf-specdec regenerate`, `features` and `train`.

They add themselves to the app of cli.py, which imports this module last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cli import DebugOption, DeviceOption, Dtype, DtypeOption, _one_line_errors, app, load_assistant
from ..smollm2 import SMOLLM2, load_model_and_tokenizer

TargetOption = Annotated[
    str, typer.Option(help=f"The model that the drafter is for: '{SMOLLM2}', a Hub id or a local folder.")
]
DataOption = Annotated[
    str,
    typer.Option(help="A .jsonl, .json, .parquet or .txt file, or a dataset on the Hub: name or name:configuration."),
]
SplitOption = Annotated[str, typer.Option(help="Of a dataset on the Hub, e.g. 'train[:1000]'.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: torch's own choice.")]


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function that takes the number done and the total, and shows them on stderr."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=None)
        yield lambda num_done, total: bar.update(task, completed=num_done, total=total)


def _load(
    target: str, device: str | None, dtype: Dtype | None, threads: int | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if threads is not None:
        torch.set_num_threads(threads)
    return load_model_and_tokenizer(target, device=device, dtype=dtype and dtype.value)


@app.command()
def regenerate(
    target: TargetOption,
    data: DataOption,
    output: Annotated[
        Path, typer.Option(help="The .jsonl file to write. If it is there from an interrupted run, the run goes on.")
    ],
    split: SplitOption = "train",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each answer.")] = 512,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Records with a longer prompt are left out; plain text is cut to it.")
    ] = 1024,
    batch_size: Annotated[int, typer.Option(min=1, help="Records that are answered at once.")] = 16,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sample at this temperature; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    assistant: Annotated[
        str | None,
        typer.Option(
            help=f"What drafts: 'prompt_lookup', '{SMOLLM2}', a Hub id or a local folder. It changes the speed, not "
            "the answers. Default: nothing."
        ),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    debug: DebugOption = False,
) -> None:
    """Let the target answer the prompts of a data set, for a drafter to learn from.

    \b
    Example:
      hf-specdec regenerate --target smollm2 --data prompts.jsonl --output answers.jsonl
    """
    with _one_line_errors(debug):
        from .data import load_records
        from .regenerate import regenerate

        records = load_records(data, split)
        model, tokenizer = _load(target, device, dtype, threads)
        with progress_bar("Answers") as progress:
            num_answered = regenerate(
                model,
                tokenizer,
                records,
                output,
                max_new_tokens=max_new_tokens,
                max_prompt_tokens=max_prompt_tokens,
                batch_size=batch_size,
                temperature=temperature,
                seed=seed,
                assistant=assistant and load_assistant(assistant, tokenizer)["assistant"],
                progress=progress,
            )
        typer.echo(
            f"{num_answered} of {len(records)} records are in {output}; the others have no prompt or a longer one than "
            f"{max_prompt_tokens} tokens"
            if num_answered < len(records)
            else f"{num_answered} records are in {output}",
            err=True,
        )


train_app = typer.Typer(help="Train a drafter for a target.", no_args_is_help=True)
app.add_typer(train_app, name="train")

TrainingDataOption = Annotated[
    str,
    typer.Option(
        help="A folder written by hf-specdec features, or data as for it, which the target then reads in every step."
    ),
]
OutputOption = Annotated[Path, typer.Option(help="The folder for the drafter and its checkpoints.")]
VocabularyOption = Annotated[
    int | None,
    typer.Option(min=1, help="Propose only so many ids, the commonest of the data: faster. Default: all."),
]
WidthOption = Annotated[int | None, typer.Option(min=1, help="Width of its MLPs. Default: the target's.")]
EpochsOption = Annotated[float, typer.Option(min=0.0, help="Times through the data.")]
RateOption = Annotated[float, typer.Option(min=0.0, help="Learning rate, after warm-up; falls to 0 along a cosine.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Examples a step.")]
LengthOption = Annotated[int, typer.Option(min=2, help="Examples are cut to so many tokens.")]
HeldOutOption = Annotated[int, typer.Option(min=0, help="Examples kept apart for evaluation and the final test.")]
Bf16Option = Annotated[
    bool,
    typer.Option("--bf16", help="Compute in bfloat16; weights stay in float32. Faster on most GPUs and new CPUs."),
]
SeedOption = Annotated[int, typer.Option(help="Of initial weights, order and split.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --output.")]


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    """What a training run must be resumed with: all options but those that only say where and how fast."""
    free = ("output", "resume", "device", "threads", "debug")
    return {name: value for name, value in options.items() if name not in free}


def _layer_numbers(option: str, text: str) -> list[int]:
    try:
        return [int(layer) for layer in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} got {text!r}; expected numbers of layers such as '1,15,28'.") from None


@app.command()
def features(
    target: TargetOption,
    data: DataOption,
    output: Annotated[Path, typer.Option(help="The folder to write. An interrupted run goes on.")],
    split: SplitOption = "train",
    layers: Annotated[
        str | None,
        typer.Option(help="Decoder layers, from 0, whose outputs are kept: '1,15,28'. Default: the last."),
    ] = None,
    max_length: LengthOption = 2048,
    batch_size: BatchOption = 8,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    debug: DebugOption = False,
) -> None:
    """Run the target over the training data once and keep its hidden states, so that training need not.

    \b
    Example:
      hf-specdec features --target smollm2 --data answers.jsonl --output features
    """
    with _one_line_errors(debug):
        from ..modeling.target import text_config
        from .data import encode_records, load_records
        from .features import write_features

        records = load_records(data, split)
        model, tokenizer = _load(target, device, dtype, threads)
        last = text_config(model).num_hidden_layers - 1
        wanted = (last,) if layers is None else tuple(_layer_numbers("--layers", layers))
        examples = encode_records(records, tokenizer, max_length)
        with progress_bar("Features") as progress:
            write_features(model, examples, output, layers=wanted, batch_size=batch_size, progress=progress)
        num_tokens = sum(len(example.input_ids) for example in examples)
        typer.echo(f"{len(examples)} examples, {num_tokens} tokens are in {output}", err=True)


@train_app.command("medusa")
def train_medusa(
    target: TargetOption,
    data: TrainingDataOption,
    output: OutputOption,
    split: SplitOption = "train",
    num_heads: Annotated[int, typer.Option(min=1, help="Heads: the longest draft.")] = 4,
    num_layers: Annotated[int, typer.Option(min=1, help="Residual blocks of each head.")] = 1,
    own_output_heads: Annotated[
        bool,
        typer.Option("--own-output-heads", help="Give each head an output layer of its own, a copy of the target's."),
    ] = False,
    draft_vocab_size: VocabularyOption = None,
    epochs: EpochsOption = 2.0,
    joint_epochs: Annotated[
        float, typer.Option(min=0.0, help="Medusa-2: then train target and heads together, the target through LoRA.")
    ] = 0.0,
    lora_rank: Annotated[int, typer.Option(min=1, help="Of Medusa-2's adapter.")] = 32,
    learning_rate: RateOption = 1e-3,
    joint_learning_rate: Annotated[
        float, typer.Option(min=0.0, help="Of the adapter; four times it of the heads.")
    ] = 5e-4,
    batch_size: BatchOption = 8,
    max_length: LengthOption = 2048,
    num_held_out: HeldOutOption = 32,
    bf16: Bf16Option = False,
    seed: SeedOption = 0,
    resume: ResumeOption = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    debug: DebugOption = False,
) -> None:
    """Train Medusa heads.

    \b
    Examples:
      hf-specdec train medusa --target smollm2 --data features --output medusa --draft-vocab-size 8192
      hf-specdec train medusa --target Qwen/Qwen3-8B --data answers.jsonl --output medusa-2 --joint-epochs 1
    """
    settings = _settings(locals())
    with _one_line_errors(debug):
        from ..modeling.medusa import MedusaModel, MedusaObjective
        from ..modeling.target import text_config
        from . import run

        if joint_epochs > 0 and run.is_feature_folder(data):
            raise ValueError(
                "--joint-epochs trains the target, whose hidden states then change; give the data itself, not features."
            )
        model, tokenizer = _load(target, device, dtype, threads)
        examples = run.load_training_data(data, split, model, tokenizer, max_length, num_held_out, seed)
        run.open_output(output, settings, resume)
        torch.manual_seed(seed)
        heads = MedusaModel.for_target(
            model,
            draft_token_ids=examples.draft_vocabulary(draft_vocab_size, text_config(model).vocab_size),
            num_heads=num_heads,
            num_layers=num_layers,
            has_own_output_heads=own_output_heads,
        )
        arguments = run.training_arguments(output, epochs, learning_rate, batch_size, seed, bf16)
        objective = MedusaObjective(heads, model)
        report = run.train_drafter(heads, model, objective, examples, arguments, resume=resume)
        if joint_epochs > 0:
            model = run.with_adapter(model, lora_rank)
            arguments = run.training_arguments(
                output / "joint", joint_epochs, joint_learning_rate, batch_size, seed, bf16
            )
            objective = MedusaObjective(heads, model, is_joint=True)
            report = run.train_drafter(heads, model, objective, examples, arguments, trains_target=True, resume=resume)
        typer.echo(run.report_lines(report))


@train_app.command("draft")
def train_draft(
    target: TargetOption,
    data: TrainingDataOption,
    output: OutputOption,
    split: SplitOption = "train",
    draft_model: Annotated[
        str | None,
        typer.Option(help="Train this causal LM, a Hub id or folder with the target's tokenizer. Default: new layers."),
    ] = None,
    num_layers: Annotated[
        int,
        typer.Option(min=1, help="Decoder layers, begun as copies of the target's, between its embedding and head."),
    ] = 1,
    intermediate_size: WidthOption = None,
    draft_vocab_size: VocabularyOption = None,
    epochs: EpochsOption = 3.0,
    learning_rate: RateOption = 5e-4,
    batch_size: BatchOption = 8,
    max_length: LengthOption = 2048,
    num_held_out: HeldOutOption = 32,
    bf16: Bf16Option = False,
    seed: SeedOption = 0,
    resume: ResumeOption = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    debug: DebugOption = False,
) -> None:
    """Distil a draft model: it learns the target's own distribution.

    \b
    Examples:
      hf-specdec train draft --target smollm2 --data features --output draft --draft-vocab-size 8192
      hf-specdec train draft --target Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B --data answers.jsonl --output draft
    """
    settings = _settings(locals())
    with _one_line_errors(debug):
        from ..modeling.draft_layers import DraftLayersModel, DraftLayersObjective
        from ..modeling.target import text_config
        from . import run

        if draft_model is not None and (draft_vocab_size or intermediate_size):
            raise ValueError("--draft-vocab-size and --intermediate-size shape new layers; leave out --draft-model.")
        model, tokenizer = _load(target, device, dtype, threads)
        examples = run.load_training_data(data, split, model, tokenizer, max_length, num_held_out, seed)
        run.open_output(output, settings, resume)
        torch.manual_seed(seed)
        if draft_model is not None:
            drafter, _ = load_model_and_tokenizer(draft_model, device=device)
        else:
            drafter = DraftLayersModel.for_target(
                model,
                num_layers=num_layers,
                intermediate_size=intermediate_size,
                draft_token_ids=examples.draft_vocabulary(draft_vocab_size, text_config(model).vocab_size),
            )
        arguments = run.training_arguments(output, epochs, learning_rate, batch_size, seed, bf16)
        objective = DraftLayersObjective(drafter, model)
        report = run.train_drafter(drafter, model, objective, examples, arguments, resume=resume)
        if draft_model is not None:
            tokenizer.save_pretrained(output)
        typer.echo(run.report_lines(report))


@train_app.command("eagle")
def train_eagle(
    target: TargetOption,
    data: TrainingDataOption,
    output: OutputOption,
    split: SplitOption = "train",
    num_layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the drafter.")] = 1,
    intermediate_size: WidthOption = None,
    draft_vocab_size: VocabularyOption = None,
    token_weight: Annotated[
        float, typer.Option(min=0.0, help="Of the tokens' loss; that of the hidden states weighs 1.")
    ] = 0.1,
    epochs: EpochsOption = 3.0,
    learning_rate: RateOption = 1e-3,
    batch_size: BatchOption = 8,
    max_length: LengthOption = 2048,
    num_held_out: HeldOutOption = 32,
    bf16: Bf16Option = False,
    seed: SeedOption = 0,
    resume: ResumeOption = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    debug: DebugOption = False,
) -> None:
    """Train an EAGLE-1 drafter (EAGLE-2 drafts from the same weights).

    \b
    Example:
      hf-specdec train eagle --target smollm2 --data features --output eagle --draft-vocab-size 8192
    """
    settings = _settings(locals())
    with _one_line_errors(debug):
        _train_eagle(settings, output, resume, device, threads, {"token_weight": token_weight}, version=1)


@train_app.command("eagle3")
def train_eagle3(
    target: TargetOption,
    data: TrainingDataOption,
    output: OutputOption,
    split: SplitOption = "train",
    target_layers: Annotated[
        str | None,
        typer.Option(help="Layers of the target to fuse, from 0: '1,14,26'. Default: a low, a middle, a high one."),
    ] = None,
    num_layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the drafter.")] = 1,
    intermediate_size: WidthOption = None,
    draft_vocab_size: VocabularyOption = None,
    own_output_head: Annotated[
        bool,
        typer.Option("--own-output-head", help="Train an output head of its own, which begins as the target's."),
    ] = False,
    num_steps: Annotated[int, typer.Option(min=1, help="Tokens that it practises to draft in a row.")] = 7,
    epochs: EpochsOption = 3.0,
    learning_rate: RateOption = 1e-3,
    batch_size: BatchOption = 8,
    max_length: LengthOption = 2048,
    num_held_out: HeldOutOption = 32,
    bf16: Bf16Option = False,
    seed: SeedOption = 0,
    resume: ResumeOption = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    debug: DebugOption = False,
) -> None:
    """Train an EAGLE-3 drafter.

    Features for it hold the layers that it fuses and the last one.

    \b
    Example:
      hf-specdec features --target smollm2 --data answers.jsonl --output features --layers 1,14,26,29
      hf-specdec train eagle3 --target smollm2 --data features --output eagle3 --draft-vocab-size 8192
    """
    settings = _settings(locals())
    with _one_line_errors(debug):
        fields = {
            "target_layers": target_layers and _layer_numbers("--target-layers", target_layers),
            "has_own_output_head": own_output_head,
        }
        _train_eagle(settings, output, resume, device, threads, {"num_steps": num_steps}, version=3, **fields)


def _train_eagle(
    settings: dict[str, Any],
    output: Path,
    resume: bool,
    device: str | None,
    threads: int | None,
    objective_options: dict[str, Any],
    **fields: Any,
) -> None:
    from ..modeling.eagle import EagleModel
    from ..modeling.eagle.objective import objective
    from ..modeling.target import text_config
    from . import run

    def asked(*names: str) -> list[Any]:
        return [settings[name] for name in names]

    model, tokenizer = _load(settings["target"], device, settings["dtype"], threads)
    data, split, max_length, num_held_out, seed = asked("data", "split", "max_length", "num_held_out", "seed")
    examples = run.load_training_data(data, split, model, tokenizer, max_length, num_held_out, seed)
    run.open_output(output, settings, resume)
    torch.manual_seed(seed)
    drafter = EagleModel.for_target(
        model,
        draft_token_ids=examples.draft_vocabulary(settings["draft_vocab_size"], text_config(model).vocab_size),
        num_layers=settings["num_layers"],
        intermediate_size=settings["intermediate_size"],
        **fields,
    )
    arguments = run.training_arguments(output, *asked("epochs", "learning_rate", "batch_size", "seed", "bf16"))
    arguments.adam_beta2, arguments.max_grad_norm = 0.95, 0.5  # EAGLE's recipe
    report = run.train_drafter(
        drafter, model, objective(drafter, model, **objective_options), examples, arguments, resume=resume
    )
    typer.echo(run.report_lines(report))
