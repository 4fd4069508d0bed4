"""`assistant_sampling="rejection"`: the joint distribution of the tokens is the target's own, tested exactly.

A model whose logits stand in a table, other ones at every position and after every token, so that a rule that looks up
the wrong row, or forgets the bonus column, gives another distribution.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import OracleDrafter, ragged_batch, tiny_llama
from torch import nn
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask  # noqa: F401 (a model that takes explicit masks has it)
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_specdec import CandidateGenerator, CandidateTree
from hf_specdec.generation.cache import CACHE_NAME
from hf_specdec.generation.choice import Rejection, sample

VOCAB_SIZE = 4
NUM_NEW = 4
NUM_SAMPLES = 3000
ALPHA = 1e-6


class TableConfig(PreTrainedConfig):
    model_type = "hf_specdec_test_table"

    def __init__(self, vocab_size: int = VOCAB_SIZE, **kwargs) -> None:
        self.vocab_size, self.hidden_size = vocab_size, 1
        self.num_hidden_layers = self.num_attention_heads = self.num_key_value_heads = 1
        super().__init__(**kwargs)


class TableTarget(PreTrainedModel, GenerationMixin):
    """Logits of the token after position i, after the token t: `table[i, t]`."""

    config_class = TableConfig
    _supports_sdpa = True

    def __init__(self, config: TableConfig, seed: int = 0, num_positions: int = 12) -> None:
        super().__init__(config)
        generator = torch.Generator().manual_seed(seed)
        size = (num_positions, config.vocab_size, config.vocab_size)
        self.table = nn.Parameter(1.2 * torch.randn(size, generator=generator), requires_grad=False)
        self.embedding = nn.Embedding(config.vocab_size, 1)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, cache=None, **kwargs):
        cache = past_key_values if cache is None else cache  # its name in newer versions of transformers
        states = torch.zeros(*input_ids.shape, 1)[:, None]
        cache.update(states, states, 0)
        position_ids = position_ids.expand(input_ids.shape)
        return CausalLMOutputWithPast(logits=self.table[position_ids, input_ids], **{CACHE_NAME: cache})


class TableDrafter(CandidateGenerator):
    """Draws drafts from a table of its own.

    Args:
        kind: "sampled", "deterministic" (the most probable, no distribution given), "narrow" (its vocabulary is one
            token smaller) or "gappy" (some rows have no draft at some depths, and then none below).
    """

    default_num_draft_tokens = 3

    def __init__(self, kind: str = "sampled") -> None:
        self.kind = kind
        self.table = 1.2 * torch.randn(12, VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(77))

    def propose(self, run, num_draft_tokens):
        size = VOCAB_SIZE - (self.kind == "narrow")
        last = torch.tensor([row[-1] for row in run.tokens])
        position = torch.tensor([len(row) - 1 for row in run.tokens])
        tokens, probs = [], []
        for depth in range(num_draft_tokens):
            prob = self.table[position + depth, last, :size].softmax(-1)
            last = prob.argmax(-1) if self.kind == "deterministic" else sample(prob)
            tokens.append(last)
            probs.append(prob)
        tokens = torch.stack(tokens, dim=1)
        if self.kind == "gappy":
            tokens[torch.arange(num_draft_tokens) >= (position % 3)[:, None]] = -1
        return CandidateTree(tokens, draft_probs=None if self.kind == "deterministic" else torch.stack(probs, dim=1))


def p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Of Pearson's chi-square; cells that expect less than 5 are put together."""
    expected = probs.double() * counts.sum()
    assert counts[probs == 0].sum() == 0, "a token of probability 0"
    small = expected < 5
    counts = torch.cat([counts[~small].double(), counts[small].double().sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2).item()


def joint_distribution(
    table: torch.Tensor, prompt: list[int], num_new: int, warp=lambda logits: logits
) -> torch.Tensor:
    """Probabilities of all texts of `num_new` tokens, `(V ** num_new,)`."""
    joint = torch.ones(())
    last = torch.tensor([prompt[-1]])
    for step in range(num_new):
        probs = warp(table[len(prompt) - 1 + step, last]).double().softmax(-1)
        joint = (joint.view(-1, 1) * probs).flatten()
        last = torch.arange(len(joint)) % table.shape[-1]
    return joint


def histogram(new_tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    weights = vocab_size ** torch.arange(new_tokens.shape[1] - 1, -1, -1)
    return torch.bincount((new_tokens * weights).sum(1), minlength=vocab_size ** new_tokens.shape[1])


@pytest.fixture(scope="module")
def target():
    return TableTarget(TableConfig()).eval()


def draw(target, assistant, prompt=(2, 1), num_samples: int = NUM_SAMPLES, **kwargs) -> torch.Tensor:
    """New tokens `(num_samples, NUM_NEW)`, all rows of one batch."""
    torch.manual_seed(11)
    kwargs = {"max_new_tokens": NUM_NEW, "do_sample": True, "top_k": 0, "assistant_sampling": "rejection"} | kwargs
    ids = torch.tensor([prompt])
    output = target.generate(
        ids, attention_mask=torch.ones_like(ids), num_return_sequences=num_samples, assistant=assistant, **kwargs
    )
    return output[:, len(prompt) :]


class Nothing(LogitsProcessor):
    """A user's own processor: tokens are then chosen one by one."""

    def __call__(self, input_ids, scores):
        return scores


@pytest.mark.parametrize("kind", ["sampled", "deterministic", "narrow", "gappy"])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_joint_distribution(target, kind, one_by_one):
    """4 tokens with 3 drafts a pass: the first block has a bonus column; rows with a rejection draft a second time."""
    processors = LogitsProcessorList([Nothing()] if one_by_one else [])
    new = draw(target, TableDrafter(kind), logits_processor=processors)
    assert p_value(histogram(new, VOCAB_SIZE), joint_distribution(target.table, [2, 1], NUM_NEW)) > ALPHA


@pytest.mark.parametrize(
    ("options", "warp"),
    [
        ({"temperature": 0.5}, lambda logits: logits / 0.5),
        (
            {"top_k": 2},
            lambda logits: logits.masked_fill(logits < logits.topk(2).values[..., -1:], -torch.inf),
        ),
    ],
    ids=["temperature", "top_k"],
)
@pytest.mark.parametrize("kind", ["sampled", "deterministic"])
def test_joint_distribution_after_processing(target, kind, options, warp):
    new = draw(target, TableDrafter(kind), **options)
    assert p_value(histogram(new, VOCAB_SIZE), joint_distribution(target.table, [2, 1], NUM_NEW, warp)) > ALPHA


def test_rows_of_a_ragged_batch(target):
    """Each row has its own positions in the table."""
    num_samples = 1500
    ids = torch.tensor([[0, 0, 3], [2, 0, 1]]).repeat_interleave(num_samples, 0)
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]]).repeat_interleave(num_samples, 0)
    torch.manual_seed(11)
    new = target.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=3,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
        assistant=TableDrafter(),
        assistant_sampling="rejection",
    )[:, 3:]
    for rows, prompt in ((new[:num_samples], [3]), (new[num_samples:], [2, 0, 1])):
        assert p_value(histogram(rows, VOCAB_SIZE), joint_distribution(target.table, prompt, 3)) > ALPHA


def test_acceptance_is_that_of_the_rule(target):
    """The first draft is kept with probability sum(min(target, draft))."""
    drafter = TableDrafter()
    drafter.default_num_draft_tokens = 1
    ids = torch.tensor([[2, 1]])
    torch.manual_seed(11)
    output = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_return_sequences=NUM_SAMPLES,
        max_new_tokens=2,
        do_sample=True,
        top_k=0,
        assistant=drafter,
        assistant_sampling="rejection",
        return_dict_in_generate=True,
    )
    overlap = torch.minimum(target.table[1, 1].softmax(-1), drafter.table[1, 1].softmax(-1)).sum().item()
    assert output.speculation.num_drafted == NUM_SAMPLES
    sigma = (overlap * (1 - overlap) / NUM_SAMPLES) ** 0.5
    assert abs(output.speculation.acceptance_rate - overlap) < 5 * sigma


def test_draft_model():
    """A draft model's distribution travels with its drafts, as it was sampled from."""
    target, drafter = (tiny_llama(1, seed=seed, vocab_size=5, initializer_range=0.4) for seed in (0, 1))
    prompt = [3, 1, 4]
    new = draw(target, drafter, prompt, 3000, max_new_tokens=3, temperature=1.5, num_assistant_tokens=2)
    texts = [[*prompt, *rest] for rest in itertools.product(range(5), repeat=3)]
    logits = target(torch.tensor(texts)).logits[:, 2:-1].double() / 1.5
    chosen = logits.log_softmax(-1).gather(-1, torch.tensor(texts)[:, 3:, None])
    assert p_value(histogram(new, 5), chosen.sum((1, 2)).exp().detach()) > ALPHA


@pytest.mark.parametrize("mutant", ["residual_of_target", "always_kept", "other_row", "bonus_of_the_draft"])
def test_wrong_rules_are_caught(target, monkeypatch, mutant):
    class Wrong(Rejection):
        def choose(self, scores, run, tree):
            if tree is None:
                return super().choose(scores, run, tree)
            tokens, probs = tree.tokens, tree.draft_probs
            if mutant == "other_row":  # the distribution of the next depth
                tree = CandidateTree(tokens, draft_probs=probs.roll(-1, 1))
            right = super().choose(scores, run, tree)
            if mutant == "bonus_of_the_draft":  # the token after the last draft, from the row before it
                right[:, -1] = sample(scores[:, -2].softmax(-1))
            if mutant == "always_kept":
                right[:, :-1] = tokens
            elif mutant == "residual_of_target":  # draws from the target where it should from the residual
                is_kept = right[:, :-1] == tokens
                right[:, :-1] = torch.where(is_kept, right[:, :-1], sample(scores[:, :-1].softmax(-1)))
            return right

    monkeypatch.setattr("hf_specdec.generation.run.Rejection", Wrong)
    new = draw(target, TableDrafter())
    assert p_value(histogram(new, VOCAB_SIZE), joint_distribution(target.table, [2, 1], NUM_NEW)) < ALPHA


def test_plain_generate_has_that_distribution(target):
    """The test itself: transformers' own sampling passes it, and so does the default with shared noise."""
    joint = joint_distribution(target.table, [2, 1], NUM_NEW)
    torch.manual_seed(11)
    ids = torch.tensor([[2, 1]]).repeat(NUM_SAMPLES, 1)
    plain = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=True, top_k=0)[
        :, 2:
    ]
    assert p_value(histogram(plain, VOCAB_SIZE), joint) > ALPHA
    ours = draw(target, TableDrafter(), assistant_sampling="shared_noise")
    assert torch.equal(ours, plain)


def test_greedy_needs_no_rule(target):
    ids = torch.tensor([[2, 1]])
    kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    expected = target.generate(ids, **kwargs)
    assert torch.equal(
        target.generate(ids, **kwargs, assistant=TableDrafter(), assistant_sampling="rejection"), expected
    )


@pytest.mark.parametrize("lengths", [(4,), (3, 5)])
def test_trees_are_refused(lengths):
    model = tiny_llama(1)
    with pytest.raises(
        ValueError, match=r'"rejection"` is defined for chains.*OracleDrafter proposed a tree.*shared_noise'
    ):
        model.generate(
            **ragged_batch(lengths),
            max_new_tokens=5,
            pad_token_id=0,
            do_sample=True,
            assistant=OracleDrafter([], 0.5, 3),
            assistant_sampling="rejection",
        )
