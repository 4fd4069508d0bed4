"""The target model of one call: prefill as plain `generate` does it, then verification passes on a ragged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.utils import output_capturing

from .attention import attention_kinds
from .cache import CACHE_NAME, GROWTH_ROOM, check_source
from .cached_model import CachedModel
from .checks import check_positions
from .tree import CandidateTree

if TYPE_CHECKING:
    from .record import Record
    from .run import Run

# What a pass gets from the loop itself, or only needs during the prefill.
OWN_INPUTS = {
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    CACHE_NAME,
    "use_cache",
    "logits_to_keep",
    "cache_position",
}


def real_tokens(input_ids: torch.LongTensor, attention_mask: torch.Tensor | None) -> list[list[int]]:
    """Each prompt without its padding, as lists; `input_ids` may be the end of what the mask describes."""
    if attention_mask is None or input_ids.shape[1] == 0:
        return input_ids.tolist()
    is_token = attention_mask[:, -input_ids.shape[1] :].bool().tolist()
    return [[i for i, keep in zip(ids, mask) if keep] for ids, mask in zip(input_ids.tolist(), is_token)]


def selection(layers: tuple[int, ...]) -> list[int]:
    """`output_hidden_states` for the outputs of these layers; later versions count the embeddings as number 0."""
    counts_embeddings = hasattr(output_capturing, "resolve_hidden_states_indices")
    return [layer + counts_embeddings for layer in layers]


class Target(CachedModel):
    """The model whose `generate` was called."""

    def __init__(self, model: PreTrainedModel, generation_config: GenerationConfig, run: Run) -> None:
        super().__init__(model, 0, run.exit_stack)
        if run.num_rows > 1:
            self.require_mask()
        num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
        if any(not 0 <= layer < num_layers for layer in run.generator.hidden_state_layers):
            raise ValueError(
                f"`hidden_state_layers` of {type(run.generator).__name__} is {run.generator.hidden_state_layers}; "
                f"{type(model).__name__} has the layers 0 to {num_layers - 1}."
            )
        self.generation_config = generation_config

    def drafts_with_prompt(self, run: Run, model_kwargs: dict[str, Any], record: Record) -> bool:
        """Whether the prefill can verify a first draft, which saves a pass.

        Not where the prompt is no plain sequence of ids, where a cache could not forget a rejected draft, or where the
        caller or the generator wants to see more of the prefill than its logits.
        """
        cache = model_kwargs.get(CACHE_NAME)
        return (
            model_kwargs.get("inputs_embeds") is None
            and all(run.tokens)
            and self.generation_config.prefill_chunk_size is None
            and cache is not None
            and cache.get_seq_length() == 0
            and all(type(layer) is DynamicLayer for layer in cache.layers)
            and record.hidden_states is None
            and record.attentions is None
            and not run.generator.hidden_state_layers
            and not self.needs_mask_reason
        )

    def prefill(
        self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any], run: Run, tree: CandidateTree | None
    ) -> Any:
        """Reads the prompt with `generate`'s own code, then takes its cache over.

        Whatever the prompt is (ids, embeddings, soft prompts, a cache from an earlier turn, chunks), it is read exactly
        as plain `generate` reads it; a first draft (a chain) goes behind it.
        """
        prompt_ids, prompt_kwargs = input_ids, model_kwargs
        num_drafts = 0
        if tree is not None:
            num_drafts = tree.num_nodes
            input_ids = torch.cat([input_ids, tree.tokens.clamp(min=0)], dim=1)
            model_kwargs = self.model._update_model_kwargs_for_generation(
                {}, dict(model_kwargs), is_encoder_decoder=False, num_new_tokens=num_drafts
            )
            if "logits_to_keep" in model_kwargs:
                model_kwargs["logits_to_keep"] += num_drafts
        layers = run.generator.hidden_state_layers
        if layers and not model_kwargs.get("output_hidden_states"):
            model_kwargs = {**model_kwargs, "output_hidden_states": selection(layers)}
        outputs = self.model._prefill(input_ids, self.generation_config, model_kwargs)
        self.source = outputs.get(CACHE_NAME)
        check_source(self.source, type(self.model).__name__)
        self.num_columns = self.source.get_seq_length() - num_drafts  # may exceed the prompt: soft prompts
        self.columns = self._columns(prompt_kwargs.get("attention_mask"), len(input_ids))
        self._check_windows(self.num_columns + run.max_new_tokens)
        drafted = torch.arange(self.num_columns, self.num_columns + num_drafts)
        # The prefill's block is the prompt's last token and the drafts, as later the last emitted token and the drafts.
        self.lengths = [len(columns) - 1 for columns in self.columns]
        longest = max(map(len, self.columns)) + num_drafts
        self.cache.capacity = longest + min(run.max_new_tokens, GROWTH_ROOM)
        self._learn_inputs(prompt_ids, outputs, prompt_kwargs, run)
        slots = [torch.cat([columns, drafted]) for columns in self.columns]
        self.cache.load(self.source, slots, frees=not run.keeps_cache)
        # Plain `generate` switches the experts of MoE models here as well.
        run.exit_stack.enter_context(self.model._optimize_model_for_decode())
        return outputs

    def _columns(self, mask: torch.Tensor | None, num_rows: int) -> list[torch.LongTensor]:
        """For each row, the columns of the prefill's cache that hold its tokens."""
        if mask is None:
            return [torch.arange(self.num_columns)] * num_rows
        is_token = mask.bool().cpu()
        is_token = torch.nn.functional.pad(is_token, (self.num_columns - is_token.shape[1], 0), value=True)
        return [row.nonzero()[:, 0] for row in is_token]

    def _check_windows(self, num_columns: int) -> None:
        """Raises `ValueError` where a window, shorter than the text, counts padding that the ragged cache closes up."""
        has_gaps = any(len(columns) and self.num_columns - columns[0] != len(columns) for columns in self.columns)
        windows = [size for size in attention_kinds(self.model).values() if size is not None]
        if has_gaps and windows and min(windows) < num_columns:
            raise ValueError(
                f"`attention_mask` has padding after a row's first token, and {type(self.model).__name__} has a "
                "sliding window, which counts that padding too. Begin with the whole text, padded on the left, and no "
                "cache from an earlier turn, or leave out `assistant`."
            )

    def _learn_inputs(self, input_ids: torch.LongTensor, outputs: Any, model_kwargs: dict[str, Any], run: Run) -> None:
        """Asks `generate`'s own code what the next step's inputs would be: positions, and keywords for every pass."""
        kwargs = self.model._update_model_kwargs_for_generation(outputs, dict(model_kwargs), is_encoder_decoder=False)
        ids = torch.cat([input_ids, input_ids.new_zeros(len(input_ids), 1)], dim=1)
        inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)
        if inputs.get("input_ids") is None or inputs["input_ids"].shape[1] != 1:
            raise ValueError(
                f"{type(self.model).__name__} reads the whole text again for every token; generate without "
                "`assistant=`."
            )
        self.extra_inputs = {
            name: value for name, value in inputs.items() if name not in OWN_INPUTS and value is not None
        }
        tensors = [name for name, value in self.extra_inputs.items() if isinstance(value, torch.Tensor)]
        if tensors:
            raise ValueError(
                f"{', '.join(tensors)} would have to grow with the text, which speculative decoding does not do yet; "
                "generate without `assistant=`."
            )
        positions = inputs.get("position_ids")
        if positions is not None and positions.ndim != 2:
            raise ValueError(
                f"{type(self.model).__name__} uses {positions.ndim}D position ids, which speculative decoding does "
                "not support yet; generate without `assistant=`."
            )
        self.num_slots = self.num_columns + run.max_new_tokens
        is_padded = any(len(columns) < self.num_columns for columns in self.columns)
        if positions is None:
            # The model counts them itself. Told them anyway, it does the same only if differences are all that matters.
            if self.takes_positions and not any(hasattr(module, "rope_type") for module in self.model.modules()):
                raise ValueError(
                    f"{type(self.model).__name__} counts positions in its own way, one token at a time; generate "
                    "without `assistant=`."
                )
            positions = torch.full((1, 1), self.num_columns)
        positions = positions[:, -1].expand(len(self.columns)).tolist()
        if is_padded or len(positions) > 1:
            self.check_slots(self.num_slots)
            self.check_takes_positions()
        check_positions(self.model, positions, self.num_columns, run.max_new_tokens)
        self.position_shift = [position - len(columns) for position, columns in zip(positions, self.columns)]
        # The last token emitted is never read.
        self.last_positions = [position + run.max_new_tokens - 2 for position in positions]

    def verify(self, run: Run, tree: CandidateTree | None) -> Any:
        """One pass over each row's last token and its drafts; its logits are `(B, 1 + N, V)`."""
        block = torch.tensor([[tokens[-1]] for tokens in run.tokens], device=run.device)
        inputs = {}
        if tree is not None:
            block = torch.cat([block, tree.tokens], dim=1)
        if run.generator.hidden_state_layers and not self.extra_inputs.get("output_hidden_states"):
            inputs["output_hidden_states"] = selection(run.generator.hidden_state_layers)
        return self(block, tree, **inputs)

    def commit(self, run: Run, outputs: Any, paths: list[list[int] | None]) -> None:
        """Keeps row b's last token and the nodes `paths[b]` of its tree; `None`: the row emitted nothing.

        A branch of a tree moves to where a chain would lie.
        """
        is_prefill = run.statistics.num_target_passes == 1
        if run.generator.hidden_state_layers:
            self._gather_hidden_states(run, outputs, None if is_prefill else paths)
        kept = [path or [] for path in paths]
        num_moved = max(map(len, kept))
        if any(path != list(range(len(path))) for path in kept):
            # Rows with shorter paths copy a slot onto itself.
            padded = [path + list(range(len(path), num_moved)) for path in kept]
            sources = [[start + 1 + node for node in path] for start, path in zip(self.lengths, padded)]
            places = [[start + 1 + depth for depth in range(num_moved)] for start in self.lengths]
            self.cache.move(sources, places)
        for row, path in enumerate(paths):
            if path is not None:
                self.lengths[row] += 1 + len(path)

    def _gather_hidden_states(self, run: Run, outputs: Any, paths: list[list[int] | None] | None) -> None:
        """Fills `run.hidden_states` with what the pass computed at the tokens that were kept."""
        # The embeddings may come first, by transformers' version and by whether all layers were asked for.
        shift = len(outputs.hidden_states) - self.model.config.get_text_config(decoder=True).num_hidden_layers
        asked = {layer: outputs.hidden_states[layer + shift] for layer in run.generator.hidden_state_layers}
        if paths is None:
            first = self.num_columns - next(iter(asked.values())).shape[1]
            index = [(columns[columns >= first] - first).tolist() for columns in self.columns]
        else:
            index = [[] if path is None else [0, *(node + 1 for node in path)] for path in paths]
        run.num_new = list(map(len, index))
        width = max(run.num_new)
        index = torch.tensor([row + [0] * (width - len(row)) for row in index])[..., None]
        for layer, states in asked.items():
            run.hidden_states[layer] = states.gather(1, index.to(states.device).expand(-1, -1, states.shape[-1]))

    def keep_rows(self, rows: list[int]) -> None:
        super().keep_rows(rows)
        self.columns = [self.columns[row] for row in rows]

    def export(self, run: Run) -> None:
        """Writes the cache back into the one that the prefill used, as plain `generate` would have left it."""
        num_columns = self.num_columns + run.num_steps - 1
        if any(row.num_emitted < run.num_steps for row in run.rows):
            self.verify(run, None)  # a row that stopped early: its last token has not been read yet
            self.lengths = [length + 1 for length in self.lengths]
        columns = []
        for prompt, length in zip(self.columns, self.lengths):
            emitted = torch.arange(self.num_columns, self.num_columns + length - len(prompt))
            columns.append(torch.cat([prompt, emitted[emitted < num_columns]]))
        self.cache.store(self.source, columns, num_columns)
