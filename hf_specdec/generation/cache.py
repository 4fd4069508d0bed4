"""The ragged KV cache: every row of a batch has its own length.

Shapes: B rows, H key/value heads, T new tokens, D head dimension, `capacity` slots. Row b's cached tokens lie in slots
0 .. length_b - 1, without holes. The loop owns the lengths; the cache only writes where it was told to. A rejected
draft is simply overwritten by the next pass, so rolling back costs nothing.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field

import torch
from transformers import GenerationMixin, cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

# The name of the cache among a model's inputs and outputs: `cache` since transformers 5.24, `past_key_values` before.
CACHE_NAME = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
GROWTH_ROOM = 2048  # slots allocated ahead of the prompt; a longer run doubles the buffers when it gets there


@dataclass
class WritePlan:
    """Where the next forward pass writes: row b's `width` new tokens go to slots `starts[b]`, `starts[b] + 1`, ..."""

    starts: list[int]
    width: int
    _slots: dict[torch.device, torch.LongTensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.end = max(self.starts) + self.width
        self.is_uniform = min(self.starts) == max(self.starts)

    def slots(self, device: torch.device) -> torch.LongTensor:
        """`(B, T)` slots, made once per device (layers of one model may live on several)."""
        if device not in self._slots:
            starts = torch.tensor(self.starts, device=device)
            self._slots[device] = starts[:, None] + torch.arange(self.width, device=device)
        return self._slots[device]


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer in buffers `(B, H, capacity, D)`, written in place."""

    is_sliding = False
    is_croppable = True

    def __init__(self, owner: RaggedCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        # Zeros, not empty memory: a masked slot still meets softmax weight 0, and 0 * nan would be nan.
        self.keys, self.values = (
            states.new_zeros(*states.shape[:2], self.owner.capacity, states.shape[-1])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def grow(self, capacity: int) -> None:
        if self.is_initialized and self.keys.shape[2] < capacity:
            more = capacity - self.keys.shape[2]
            self.keys, self.values = (
                torch.nn.functional.pad(buffer, (0, 0, 0, more)) for buffer in (self.keys, self.values)
            )

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        plan = self.owner.plan
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if plan.is_uniform:
            start = plan.starts[0]
            self.keys[:, :, start : plan.end] = key_states
            self.values[:, :, start : plan.end] = value_states
        else:
            slots = plan.slots(key_states.device)
            rows = torch.arange(len(slots), device=slots.device)[:, None]
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys[:, :, : plan.end], self.values[:, :, : plan.end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.plan.end, 0

    def get_seq_length(self) -> int:
        return min(self.owner.plan.starts)  # of use only where all rows are equally long

    def get_max_length(self) -> int:
        return -1


class RaggedCache(Cache):
    """A `transformers.Cache` of [`RaggedLayer`]s.

    Args:
        capacity (`int`): slots to allocate at first; `reserve` doubles it when a pass needs more.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(layer_class_to_replicate=lambda: RaggedLayer(self))
        self.capacity = capacity
        self.plan = WritePlan([0], 0)

    def prepare(self, plan: WritePlan) -> None:
        """Sets where the next forward pass writes, and makes room for it."""
        if plan.end > self.capacity:
            self.capacity = max(plan.end, 2 * self.capacity)
            for layer in self.layers:
                layer.grow(self.capacity)
        self.plan = plan

    def move(self, sources: list[list[int]], destinations: list[list[int]]) -> None:
        """Copies slots `sources[b]` to `destinations[b]` in every row b (equal lengths in all rows), in every layer."""
        for layer in self.layers:
            if layer.is_initialized:
                device = layer.keys.device
                source, destination = (torch.tensor(slots, device=device) for slots in (sources, destinations))
                rows = torch.arange(len(sources), device=device)[:, None]
                layer.keys[rows, :, destination] = layer.keys[rows, :, source]
                layer.values[rows, :, destination] = layer.values[rows, :, source]

    def keep_rows(self, rows: list[int]) -> None:
        """Keeps only these rows of the batch."""
        for layer in self.layers:
            if layer.is_initialized:
                index = torch.tensor(rows, device=layer.keys.device)
                layer.keys, layer.values = layer.keys[index], layer.values[index]

    def load(self, source: Cache, columns: list[torch.LongTensor], frees: bool) -> None:
        """Takes over what a prefill left in a cache of transformers' own, closing the holes that padding left.

        Args:
            source (`Cache`): a `DynamicCache`, full or sliding layers, in `generate`'s layout (padding on the left).
            columns: for each row the columns of `source` that hold its tokens, in order; row b's i-th goes to slot i.
                A sliding layer has forgotten the first ones: their slots stay zero, no later query attends to them.
            frees (`bool`): nobody needs `source` any more: its layers are emptied one by one, so that the prompt is
                never held twice.
        """
        for layer in source.layers:
            mine = RaggedLayer(self)
            self.layers.append(mine)
            if layer.keys is None:  # a layer that shares the keys of another one
                continue
            first = layer.get_seq_length() - layer.keys.shape[2]  # columns that the layer no longer has
            mine.lazy_initialization(layer.keys, layer.values)
            for row, cols in enumerate(columns):
                kept = cols[cols >= first]
                slots = slice(len(cols) - len(kept), len(cols))
                kept = (kept - first).to(layer.keys.device)
                mine.keys[row, :, slots] = layer.keys[row].index_select(1, kept)
                mine.values[row, :, slots] = layer.values[row].index_select(1, kept)
            if frees:
                layer.keys = layer.values = None

    def store(self, destination: Cache, columns: list[torch.LongTensor], num_columns: int) -> None:
        """The reverse of `load`: writes the rows back into a cache of transformers' own, in `generate`'s layout.

        Args:
            destination (`Cache`): overwritten; it has as many layers as this cache.
            columns: for each row the column of each of its slots, all below `num_columns`.
            num_columns (`int`): length of the result.
        """
        for mine, layer in zip(self.layers, destination.layers):
            if not mine.is_initialized:
                continue
            num_rows, num_heads, _, _ = mine.keys.shape
            states = []
            for buffer in (mine.keys, mine.values):
                full = buffer.new_zeros(num_rows, num_heads, num_columns, buffer.shape[-1])
                for row, cols in enumerate(columns):
                    full[row, :, cols.to(full.device)] = buffer[row, :, : len(cols)]
                states.append(full)
            layer.keys = layer.values = None
            layer.is_initialized = False
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = 0
            layer.update(*states)


def check_source(cache: Cache | None, model_name: str) -> None:
    """Raises `ValueError` unless [`RaggedCache`] can take over from this cache."""
    layers = [] if cache is None else cache.layers
    strange = sorted({type(layer).__name__ for layer in layers if type(layer) not in SUPPORTED_LAYERS})
    if cache is None or strange or getattr(cache, "offloading", False):
        got = "no cache" if cache is None else ", ".join(strange) or "offloaded layers"
        raise ValueError(
            f"speculative decoding keeps a cache of its own and takes over from a DynamicCache; {model_name} came with "
            f"{got}. Drop `cache_implementation` and pass no cache or a DynamicCache; a model whose layers are "
            "recurrent or keep other state than keys and values is not supported yet: generate without `assistant=`."
        )


# Later versions fill the places of layers without keys of their own with a DummyLayer.
SUPPORTED_LAYERS = tuple(
    getattr(cache_utils, name)
    for name in ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
    if hasattr(cache_utils, name)
)
