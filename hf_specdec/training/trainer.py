"""`DrafterTrainer`: transformers' Trainer for drafters, so that accelerate, FSDP, DeepSpeed, logging and resuming come
with it."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset, Subset
from transformers import PreTrainedModel, Trainer, TrainingArguments

from ..modeling.base import DrafterModel
from ..modeling.target import hidden_states
from .features import FeatureStore
from .objective import Batch, Objective

JOINT_DRAFTER_RATE = 4.0  # learning rate of the drafter relative to the target's, as in Medusa-2's recipe


class TrainingModule(nn.Module):
    """What one step runs, in one forward pass: the target for its hidden states, the drafter, the loss.

    Args:
        trains_target (`bool`): the target is trained too, so it is a submodule; else it stands aside, frozen.
    """

    def __init__(self, drafter: DrafterModel, target: Any, objective: Objective, trains_target: bool = False) -> None:
        super().__init__()
        self.drafter = drafter
        self.objective = objective
        self.trains_target = trains_target
        if trains_target:
            self.target = target
        else:
            self._aside = (target.requires_grad_(False).eval(),)  # a tuple, so that torch does not see it

    def forward(
        self,
        input_ids: torch.LongTensor,
        attention_mask: torch.LongTensor,
        is_response: torch.BoolTensor,
        hidden_states: dict[int, torch.Tensor] | None = None,
    ) -> dict[str, Any]:
        target = self.target if self.trains_target else self._aside[0]
        if hidden_states is None:
            hidden_states = self._hidden_states(target, input_ids, attention_mask)
        losses = self.objective(self.drafter, target, Batch(input_ids, attention_mask, is_response, hidden_states))
        return {"loss": losses.loss, "counts": losses.counts}

    def _hidden_states(
        self, target: Any, input_ids: torch.LongTensor, attention_mask: torch.LongTensor
    ) -> dict[int, torch.Tensor]:
        with torch.set_grad_enabled(self.trains_target and torch.is_grad_enabled()):
            return hidden_states(target, input_ids, attention_mask, self.objective.hidden_state_layers)


class DrafterTrainer(Trainer):
    """Trains a drafter for a target.

    Args:
        drafter ([`DrafterModel`]): what is trained and saved.
        target: a causal LM, frozen; with `trains_target` it is trained too (give it a PEFT adapter, or all of it is).
        objective: the method's, e.g. `MedusaObjective(drafter, target)`.
        args ([`TrainingArguments`]): as for any Trainer.
        train_dataset, eval_dataset: examples ([`Example`]), whose hidden states are then computed in every step, or a
            [`FeatureStore`], which holds them.

    Raises:
        ValueError: if a store lacks a layer that the objective needs.

    Metrics: whatever the objective counts, e.g. `accept_1`, the share of held-out tokens that the first head guesses.
    """

    def __init__(
        self,
        drafter: DrafterModel,
        target: Any,
        objective: Objective,
        args: TrainingArguments,
        train_dataset: Dataset | Sequence[Any],
        eval_dataset: Dataset | Sequence[Any] | None = None,
        trains_target: bool = False,
        **kwargs: Any,
    ) -> None:
        for dataset in (train_dataset, eval_dataset):
            source = dataset.dataset if isinstance(dataset, Subset) else dataset
            if isinstance(source, FeatureStore):
                source.check(layers=objective.hidden_state_layers)
        args.remove_unused_columns = False
        args.label_names = []
        module = TrainingModule(drafter, target, objective, trains_target)
        self.drafter, self.target, self.objective = drafter, target, objective
        self._counts: dict[str, list[torch.Tensor]] = {}
        super().__init__(
            module, args, data_collator=collate, train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs
        )
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        self.objective.progress = self.state.global_step / max(self.state.max_steps, 1)
        outputs = model(**inputs)
        self._count(outputs["counts"])
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Trained together with its target, a drafter learns faster than the target does."""
        if self.optimizer is None and self.model.trains_target:
            make, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            groups = [
                {"params": [p for p in part.parameters() if p.requires_grad], "lr": self.args.learning_rate * factor}
                for part, factor in ((self.drafter, JOINT_DRAFTER_RATE), (self.target, 1.0))
            ]
            self.optimizer = make(groups, **options)
        return super().create_optimizer(*args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.detach(), None, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        training_counts, self._counts = self._counts, {}
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in self._means().items()})
        self._counts = training_counts
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs |= self._means()
        super().log(logs, *args, **kwargs)

    def _count(self, counts: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        for name, pair in counts.items():
            new = torch.stack([torch.as_tensor(part, device=self.args.device).detach() for part in pair])
            self._counts[name] = self._counts[name] + new if name in self._counts else new

    def _means(self) -> dict[str, float]:
        """The metrics counted since the last call, over all processes."""
        means = {}
        for name, pair in self._counts.items():
            total = self.accelerator.reduce(pair, reduction="sum")
            means[name] = round(float(total[0] / total[1].clamp(min=1)), 4)
        self._counts = {}
        return means

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """A folder that `AutoDrafter` loads; an adapter of the target goes into `target/` below it."""
        folder = Path(output_dir or self.args.output_dir)
        state = self.model.state_dict() if state_dict is None else state_dict
        parts: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, tensor in state.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        self.drafter.save_pretrained(folder, state_dict=parts["drafter"])
        if self.model.trains_target:
            self.target.save_pretrained(folder / "target", state_dict=parts["target"])

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """A checkpoint that could not be written completely is removed, so that resuming finds the one before it."""
        try:
            super()._save_checkpoint(*args, **kwargs)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors hide the OSError
            folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
            shutil.rmtree(folder, ignore_errors=True)
            raise OSError(
                f"the checkpoint {folder} could not be written ({error}); free some disk space and resume: the last "
                "complete checkpoint is kept."
            ) from error

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        _load(self.drafter, _read(folder))
        if not self.model.trains_target:
            return
        state = _read(folder / "target")
        if hasattr(self.target, "peft_config"):
            from peft import set_peft_model_state_dict

            set_peft_model_state_dict(self.target, state)
        else:
            _load(self.target, state)


def _read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _load(model: PreTrainedModel, state: dict[str, torch.Tensor]) -> None:
    """Of tied weights one alone is saved."""
    model.load_state_dict(state, strict=not getattr(model.config, "tie_word_embeddings", False))
    model.tie_weights()


def collate(examples: Sequence[Any]) -> dict[str, Any]:
    """Pads examples on the right, to the length of the longest."""
    rows = [example if isinstance(example, dict) else _as_row(example) for example in examples]

    def pad(tensors: list[torch.Tensor]) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(tensors, batch_first=True)

    batch = {
        "input_ids": pad([row["input_ids"] for row in rows]),
        "attention_mask": pad([torch.ones_like(row["input_ids"]) for row in rows]),
        "is_response": pad([row["is_response"] for row in rows]),
    }
    if "hidden_states" in rows[0]:
        batch["hidden_states"] = {
            layer: pad([row["hidden_states"][layer] for row in rows]) for layer in rows[0]["hidden_states"]
        }
    return batch


def _as_row(example: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor(example.input_ids), "is_response": torch.tensor(example.is_response)}
