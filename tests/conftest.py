"""Tiny models made on the spot, and a drafter whose acceptance rate is set."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import hf_specdec
from hf_specdec import CandidateGenerator, CandidateTree

torch.set_num_threads(1)

VOCAB_SIZE = 97
PROMPT_LENGTHS = (5, 11, 3, 17)


def tiny_llama(num_layers: int = 2, seed: int = 0, **config) -> LlamaForCausalLM:
    """A random Llama whose greedy text does not fall into a loop at once."""
    torch.manual_seed(seed)
    defaults = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**defaults | {"num_hidden_layers": num_layers} | config)).eval()


def early_layers(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """A draft model that agrees with the target now and then: the target's first layers."""
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("model.layers.")}
    state |= {
        k: v
        for k, v in model.state_dict().items()
        if k.startswith("model.layers.") and int(k.split(".")[2]) < num_layers
    }
    draft = tiny_llama(num_layers, vocab_size=model.config.vocab_size)
    draft.load_state_dict(state)
    return draft


def byte_level_bpe(text: str, vocab_size: int, special_tokens: Sequence[str] = ("<s>", "</s>")) -> Tokenizer:
    """A byte-level BPE trained on a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def ragged_batch(lengths=PROMPT_LENGTHS, vocab_size: int = VOCAB_SIZE, seed: int = 1) -> dict[str, torch.Tensor]:
    """Left-padded prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(3, vocab_size, (length,), generator=generator)
        mask[row, -length:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def successors(vocab_size: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    """A toy language, with one likely and two other successors of a token: probabilities `(V before, V after)`."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.full((vocab_size, vocab_size), 0.03 / vocab_size, dtype=torch.double)
    for prob in (0.72, 0.19, 0.06):
        table[torch.arange(vocab_size), torch.randperm(vocab_size, generator=generator)] += prob
    return table


class OracleDrafter(CandidateGenerator):
    """Drafts the texts it was given, each token wrong with probability 1 - rate.

    Args:
        texts: complete rows (prompt without padding, then the text that plain `generate` gives).
        rate: chance that a draft token is right.
        branches: 1 drafts a chain; more draft a tree in which the right token is one of that many siblings, in a random
            place, and every sibling has children of its own.
    """

    def __init__(self, texts: list[list[int]], rate: float = 0.6, branches: int = 1, seed: int = 0) -> None:
        self.texts, self.rate, self.branches, self.seed = texts, rate, branches, seed
        self.passes: list[int] = []  # shared with the copies that the loop works on

    def begin(self, run) -> None:
        self.random = random.Random(self.seed)

    def _next(self, text: list[int] | None, index: int, vocab_size: int) -> int:
        right = text[index] if text is not None and index < len(text) else 1
        return right if self.random.random() < self.rate else (right + 1) % vocab_size

    def propose(self, run, num_draft_tokens: int) -> CandidateTree:
        self.passes.append(len(run.rows))
        vocab_size = run.target.config.get_text_config().vocab_size
        rows, parents = [], []
        for tokens in run.tokens:
            text = next((text for text in self.texts if text[: len(tokens)] == tokens), None)
            row, above, level = [], [], [-1]
            for depth in range(num_draft_tokens):
                guess = self._next(text, len(tokens) + depth, vocab_size)
                siblings = [guess, *((guess + 2 + k) % vocab_size for k in range(self.branches - 1))]
                self.random.shuffle(siblings)
                keep = self.random.sample(level, min(len(level), 2))
                level = []
                for parent in sorted(keep):
                    for token in siblings:
                        level.append(len(row))
                        row.append(token)
                        above.append(parent)
            rows.append(row)
            parents.append(above)
        width = max(map(len, rows))
        rows = [row + [-1] * (width - len(row)) for row in rows]
        parents = [row + [-1] * (width - len(row)) for row in parents]
        tokens = torch.tensor(rows, device=run.device)
        return CandidateTree(tokens, None if self.branches == 1 else torch.tensor(parents, device=run.device))


class Moody(LogitsProcessor):
    """What it returns depends on how often it was called."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids, scores):
        self.num_calls += 1
        scores[:, self.num_calls % 97 :: 5] += 1.5
        return scores


def real_rows(sequences: torch.Tensor, inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    """Rows of an output without the prompt's padding."""
    starts = (inputs["attention_mask"] == 0).sum(1).tolist()
    return [row[start:] for row, start in zip(sequences.tolist(), starts)]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character."""
    vocab = ["<pad>", "<s>", "</s>", *map(chr, range(33, 127))]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(vocab)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")


@pytest.fixture(scope="session")
def target() -> LlamaForCausalLM:
    return tiny_llama(4)


@pytest.fixture(scope="session")
def drafter(target) -> PreTrainedModel:
    return early_layers(target, 2)


@pytest.fixture
def same_text() -> Callable[..., hf_specdec.SpeculativeOutput]:
    """Checks that `assistant=` leaves the text as it is; returns the output of the assisted run.

    An oracle may be asked for by `oracle=(rate, branches)` instead of an assistant.
    """

    def check(model, inputs, assistant=None, oracle=None, seed: int = 5, **kwargs):
        kwargs = {"max_new_tokens": 40, "pad_token_id": 0} | kwargs
        plain = {k: v for k, v in kwargs.items() if k not in ASSISTANT_ONLY}
        torch.manual_seed(seed)
        expected = model.generate(**inputs, **plain)
        state = torch.get_rng_state()
        if oracle is not None:
            assistant = OracleDrafter(real_rows(expected, inputs), *oracle)
        torch.manual_seed(seed)
        output = model.generate(**inputs, assistant=assistant, return_dict_in_generate=True, **kwargs)
        assert output.sequences.tolist() == expected.tolist()
        assert torch.equal(torch.get_rng_state(), state), "the random state differs from plain generate's"
        torch.manual_seed(seed)
        assert model.generate(**inputs, assistant=assistant, **kwargs).tolist() == expected.tolist()
        return output

    return check


ASSISTANT_ONLY = {
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "assistant_tokenizer",
}
