"""What `return_dict_in_generate` wants to see of every step, in plain `generate`'s shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .cache import CACHE_NAME
from .statistics import SpeculationStatistics

if TYPE_CHECKING:
    from .run import Run
    from .target import Target


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """Output of `generate` with `assistant=`: that of plain `generate`, plus `speculation`.

    Args:
        speculation ([`SpeculationStatistics`]): what the drafter was worth in this call.
    """

    speculation: SpeculationStatistics | None = None


class Record:
    """Collects scores, logits, hidden states and attentions by step.

    Rows reach a step at different passes; each step's tensors are made when the first row gets there. A row that has
    stopped holds zeros (where plain `generate` holds what the model says about padding).
    """

    def __init__(self, generation_config: GenerationConfig, target: Target) -> None:
        on = generation_config.return_dict_in_generate
        self.target = target
        self.scores: list[torch.Tensor] | None = [] if on and generation_config.output_scores else None
        self.logits: list[torch.Tensor] | None = [] if on and generation_config.output_logits else None
        self.hidden_states: list[tuple] | None = [] if on and generation_config.output_hidden_states else None
        self.attentions: list[tuple] | None = [] if on and generation_config.output_attentions else None
        kept = (self.scores, self.logits, self.hidden_states, self.attentions)
        self.is_on = any(steps is not None for steps in kept)
        self.outputs: Any = None  # of the pass that is being verified

    def add(
        self,
        run: Run,
        places: list[int],
        paths: list[list[int]],
        logits: torch.Tensor,
        scores: torch.Tensor | None,
        column: torch.Tensor | None,
    ) -> None:
        """Notes the step that each of these rows is about to emit.

        Args:
            places: rows of the pass; `paths[i]` are the nodes that row has walked through.
            logits, scores (`torch.FloatTensor` of shape `(B, M, V)`): of the pass, before and after processing.
            column (`torch.FloatTensor` of shape `(B_all, V)`, *optional*): scores of this step, instead of `scores`.
        """
        for place, path in zip(places, paths):
            row = run.rows[place]
            step, query = row.num_emitted, (path or [-1])[-1] + 1
            if self.logits is not None:
                _put(self.logits, step, run.num_rows, row.index, logits[place, query].float())
            if self.scores is not None:
                values = scores[place, query] if column is None else column[row.index]
                _put(self.scores, step, run.num_rows, row.index, values.float())
            if self.hidden_states is not None:
                if step == 0:
                    self.hidden_states[:] = [self.outputs.hidden_states]
                else:
                    # Rows are the third dimension from the end: Gemma 3n has several streams before it.
                    states = [layer[..., place, query, None, :] for layer in self.outputs.hidden_states]
                    _put_layers(self.hidden_states, step, run.num_rows, row.index, states, -3)
            if self.attentions is not None:
                if step == 0:
                    self.attentions[:] = [self.outputs.attentions]
                else:
                    weights = [self._in_columns(layer[place, :, query], layer_index, place, path, step)
                               for layer_index, layer in enumerate(self.outputs.attentions)]  # fmt: skip
                    _put_layers(self.attentions, step, run.num_rows, row.index, weights, 0)
        if self.scores is not None:
            run.scores = tuple(self.scores)

    def _in_columns(self, weights: torch.Tensor, layer: int, place: int, path: list[int], step: int) -> torch.Tensor:
        """One query's weights `(H, S)` over cache slots -> `(H, 1, columns)` as plain `generate` returns them."""
        target = self.target
        length = target.lengths[place]
        prompt = target.columns[place]
        slots = [*range(length + 1), *(length + 1 + node for node in path)]
        columns = torch.cat([prompt, torch.arange(target.num_columns, target.num_columns + len(slots) - len(prompt))])
        whole = weights.new_zeros(weights.shape[0], 1, target.num_columns + step)
        whole[:, 0, columns.to(whole.device)] = weights[:, slots]
        # Layers without keys of their own come last; an earlier layer of the same kind tells their window.
        kinds = getattr(target.model.config.get_text_config(decoder=True), "layer_types", None)
        layer = layer if kinds is None else kinds.index(kinds[layer])
        window = getattr(target.source.layers[layer], "sliding_window", None)
        return whole if window is None else whole[..., -window:]

    def output(self, run: Run, cache: Cache) -> SpeculativeOutput:
        num_steps = run.num_steps
        tuples = (
            None if steps is None else tuple(steps[:num_steps])
            for steps in (self.scores, self.logits, self.attentions, self.hidden_states)
        )
        scores, logits, attentions, hidden_states = tuples
        return SpeculativeOutput(
            sequences=run.output_ids(),
            scores=scores,
            logits=logits,
            attentions=attentions,
            hidden_states=hidden_states,
            speculation=run.statistics,
            **{CACHE_NAME: cache},
        )


def _put(steps: list[torch.Tensor], step: int, num_rows: int, row: int, values: torch.Tensor) -> None:
    while len(steps) <= step:
        steps.append(values.new_zeros(num_rows, *values.shape))
    steps[step][row] = values


def _put_layers(steps: list[tuple], step: int, num_rows: int, row: int, layers: list[torch.Tensor], dim: int) -> None:
    if len(steps) <= step:  # a row meets its steps one by one, so this is the next one
        steps.append(tuple(torch.stack([torch.zeros_like(values)] * num_rows, dim) for values in layers))
    for whole, values in zip(steps[step], layers):
        whole.select(dim, row).copy_(values)
