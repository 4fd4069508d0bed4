"""A training run from data to a tested drafter: what the `hf-specdec train` commands do, as functions."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from .data import Example, encode_records, load_records
from .features import FeatureStore
from .objective import Objective
from .settings import changed_settings, write_settings
from .trainer import DrafterTrainer

LONGEST_TEST_PROMPT = 16  # tokens of plain text; in a chat the prompt is what stands before the first response


@dataclass
class TrainingData:
    """Examples, or a store with the target's hidden states for them, in two parts.

    Attributes:
        train, held_out: what a [`DrafterTrainer`] takes.
    """

    train: Sequence[Any]
    held_out: Sequence[Any]

    @classmethod
    def split(cls, examples: Sequence[Example] | FeatureStore, num_held_out: int, seed: int) -> TrainingData:
        """Holds `num_held_out` examples out, the same ones for the same seed.

        Raises:
            ValueError: if nothing would be left for training.
        """
        if not 0 <= num_held_out < len(examples):
            raise ValueError(
                f"`num_held_out` is {num_held_out} and there are {len(examples)} examples; it must be 0 or more and "
                "leave one for training."
            )
        held_out = set(random.Random(seed).sample(range(len(examples)), num_held_out))
        parts = [i for i in range(len(examples)) if i not in held_out], sorted(held_out)
        return cls(*(Subset(examples, part) for part in parts))

    def draft_vocabulary(self, size: int | None, vocab_size: int) -> torch.LongTensor | None:
        """The ids `(size,)` that occur most often in the training responses, ascending; `None` for all.

        If the responses have fewer different ids, the lowest others fill up: tokenizers number common pieces first.

        Args:
            vocab_size (`int`): of the target.

        Raises:
            ValueError: if the target has fewer ids than that.
        """
        if size is None:
            return None
        if size > vocab_size:
            raise ValueError(f"`draft_vocab_size` is {size}, but the target has {vocab_size} ids; give at most those.")
        counts: Counter[int] = Counter()
        for ids, is_response in examples_of(self.train):
            counts.update(token for token, is_counted in zip(ids, is_response) if is_counted)
        kept = dict.fromkeys(token for token, _ in counts.most_common(size))
        others = (token for token in range(vocab_size) if token not in kept)
        return torch.tensor(sorted([*kept, *itertools.islice(others, size - len(kept))]))

    def test_prompts(self, num_prompts: int) -> list[list[int]]:
        """What stands before the first response of held-out examples; of plain text its first tokens."""
        prompts = []
        for ids, is_response in examples_of(self.held_out):
            prompts.append(ids[: max(is_response.index(True), min(LONGEST_TEST_PROMPT, len(ids) // 2))])
        return [prompt for prompt in prompts if prompt][:num_prompts]


def examples_of(part: Sequence[Any]) -> Iterator[Example]:
    """The examples of one part; of a store without their hidden states, which may be many times larger."""
    source, indices = (part.dataset, part.indices) if isinstance(part, Subset) else (part, range(len(part)))
    read = source.example if isinstance(source, FeatureStore) else source.__getitem__
    return map(read, indices)


def load_training_data(
    source: str,
    split: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    num_held_out: int,
    seed: int,
) -> TrainingData:
    """Data in any form that `train` takes: a feature folder, which is checked against the target, or records."""
    if is_feature_folder(source):
        store = FeatureStore(source)
        store.check(target)
        return TrainingData.split(store, num_held_out, seed)
    return TrainingData.split(encode_records(load_records(source, split), tokenizer, max_length), num_held_out, seed)


def is_feature_folder(source: str) -> bool:
    """Whether training data are a folder of features.

    Raises:
        ValueError: if they are a folder with weights, or with features that lack their index.
    """
    if Path(source).is_dir() and not Path(source, "index.json").is_file() and any(Path(source).glob("*.safetensors")):
        raise ValueError(f"`data` is {source}, a folder without an index.json of features; make them anew.")
    return Path(source, "index.json").is_file()


def open_output(output: Path, settings: dict[str, Any], resume: bool) -> None:
    """Begins a training run in a folder, or checks that the one in it can go on with these settings.

    Raises:
        ValueError: if `output` holds a drafter or a run and `resume` was not asked for; or if it was, and there is no
            run, or one with other settings.
    """
    file = output / "training_settings.json"
    if resume:
        if not file.is_file():
            raise ValueError(f"`resume` was asked for, but {output} holds no training run; leave it out to begin.")
        if changes := changed_settings(file, settings):
            raise ValueError(f"the run in {output} was begun with other settings: {changes}; resume it with those.")
    elif any(output.glob("*.safetensors")) or any(output.glob("checkpoint-*")):  # a run that failed at once left none
        raise ValueError(f"{output} holds a drafter or a training run; resume it, delete it, or give another output.")
    write_settings(file, settings)


def training_arguments(
    output: Path, epochs: float, learning_rate: float, batch_size: int, seed: int, bf16: bool = False
) -> TrainingArguments:
    """AdamW without weight decay, warm-up over a tenth of the steps, then a cosine, as Medusa's recipe has it."""
    return TrainingArguments(
        str(output),
        num_train_epochs=epochs,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        weight_decay=0.0,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        seed=seed,
        bf16=bf16,
        use_cpu=not torch.accelerator.is_available(),  # else it refuses bfloat16
        logging_steps=20,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        report_to="none",
        dataloader_pin_memory=torch.accelerator.is_available(),
    )


def with_adapter(target: PreTrainedModel, rank: int) -> Any:
    """The target with a LoRA adapter on all its linear layers (Medusa-2's recipe).

    Raises:
        ModuleNotFoundError: if the package `peft` is missing.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'training the target needs the package peft; run: pip install "hf_specdec[train]"', name="peft"
        ) from error
    options = {"r": rank, "lora_alpha": rank // 2, "lora_dropout": 0.05, "target_modules": "all-linear"}
    return get_peft_model(target, LoraConfig(task_type="CAUSAL_LM", **options))


def train_drafter(
    drafter: PreTrainedModel,
    target: Any,
    objective: Objective,
    data: TrainingData,
    arguments: TrainingArguments,
    *,
    trains_target: bool = False,
    resume: bool = False,
    num_test_prompts: int = 20,
) -> dict[str, float]:
    """Trains in float32, saves in half precision, and tests; `training_report.json` in the output keeps the result.

    With `resume` it goes on from the last checkpoint in the output folder, if there is one.

    Returns: the metrics of the last evaluation on the held-out text, and `tokens_per_pass` and `acceptance_rate`, from
        greedy decoding of up to `num_test_prompts` held-out prompts.

    Raises:
        OSError: if the disk is full; the last complete checkpoint stays, and `resume` goes on from it.
    """
    dtype = target.dtype
    trainer = DrafterTrainer(
        drafter.float(),
        target,
        objective,
        arguments,
        data.train,
        data.held_out if len(data.held_out) else None,
        trains_target,
    )
    has_checkpoint = Path(arguments.output_dir).is_dir() and get_last_checkpoint(arguments.output_dir) is not None
    trainer.train(resume_from_checkpoint=True if resume and has_checkpoint else None)
    report = trainer.evaluate() if len(data.held_out) else {}
    report = {name.removeprefix("eval_"): value for name, value in report.items()}
    drafter.to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)
    trainer.save_model()
    drafter.to(dtype).eval()
    target.eval()
    if prompts := data.test_prompts(num_test_prompts):
        report |= measure_by_decoding(target, drafter, prompts)
    Path(arguments.output_dir, "training_report.json").write_text(json.dumps(report, indent=1))
    return report


def measure_by_decoding(
    target: Any, assistant: Any, prompts: list[list[int]], max_new_tokens: int = 128, **options: Any
) -> dict[str, float]:
    """Decodes these prompts one by one, greedily unless `options` say otherwise.

    Returns: `tokens_per_pass`: tokens that one pass of the target gave, on average; `acceptance_rate`: share of the
        draft tokens (of the longest branch of each tree) that were kept.
    """
    import hf_specdec  # noqa: F401 (adds the keyword)

    num_emitted = num_passes = num_drafted = num_accepted = 0
    options = {"do_sample": False, "max_new_tokens": max_new_tokens} | options
    for prompt in prompts:
        ids = torch.tensor([prompt], device=target.device)
        mask = torch.ones_like(ids)
        output = target.generate(
            input_ids=ids, attention_mask=mask, assistant=assistant, return_dict_in_generate=True, **options
        )
        num_emitted += output.speculation.num_emitted
        num_passes += output.speculation.num_target_passes
        num_drafted += output.speculation.num_drafted
        num_accepted += output.speculation.num_accepted
    return {
        "tokens_per_pass": round(num_emitted / num_passes, 3),
        "acceptance_rate": round(num_accepted / max(num_drafted, 1), 3),
    }


def report_lines(report: dict[str, float]) -> str:
    """The report as lines of text."""
    hidden = ("runtime", "per_second", "epoch")
    return "\n".join(f"{name:18} {value:.4g}" for name, value in report.items() if not name.endswith(hidden))
