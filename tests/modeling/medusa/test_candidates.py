"""Medusa's trees: who guesses what, one pass over them, and the text that comes out, on a toy language.

In the toy language a token has one likely successor and two others. Model and heads are written down, not trained: the
target's embedding is a one-hot code and its output layer a table of log-probabilities; random layers between them make
the context matter. The heads hold the table's powers, so they know the language, but not the context.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from conftest import VOCAB_SIZE, Moody, ragged_batch, successors
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MistralConfig,
    MistralForCausalLM,
)

import hf_specdec
from hf_specdec import Medusa, MedusaConfig, MedusaModel
from hf_specdec.generation.cache import CACHE_NAME
from hf_specdec.generation.choice import Greedy, SharedNoise
from hf_specdec.generation.tree import NO_TOKEN, ROOT

HIDDEN_SIZE = 128
RAGGED = (5, 11, 3, 17)
SIZES = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


def as_output(table: torch.Tensor) -> torch.Tensor:
    """Weight `(V after, D)` of an output layer that gives these probabilities for one-hot states of norm sqrt(D)."""
    logits = table.log() - table.log().min()
    return torch.nn.functional.pad(logits.T, (0, HIDDEN_SIZE - len(table))).float() / HIDDEN_SIZE**0.5


def speaker(kind: str = "llama", vocab_size: int = VOCAB_SIZE, context: float = 0.25, **config):
    """A target that speaks the toy language; `context` is how much its layers have to say."""
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_embd": HIDDEN_SIZE, "n_head": 4, "n_layer": 2, "n_positions": 64, "n_inner": 64}
        sizes |= {"tie_word_embeddings": False, "eos_token_id": None, "bos_token_id": 1}
        model = GPT2LMHeadModel(GPT2Config(**sizes | {"vocab_size": vocab_size} | config))
    else:
        configs, classes = (
            {"llama": LlamaConfig, "mistral": MistralConfig},
            {
                "llama": LlamaForCausalLM,
                "mistral": MistralForCausalLM,
            },
        )
        model = classes[kind](configs[kind](**SIZES | {"vocab_size": vocab_size} | config))
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            weight.data.normal_(std=context * HIDDEN_SIZE**-0.5 if "proj" in name else 0.02)
        if "self_attn.q_proj" in name or "self_attn.k_proj" in name:
            weight.data.normal_(std=0.15)
    model.get_input_embeddings().weight.data.copy_(torch.eye(vocab_size, HIDDEN_SIZE))
    model.get_output_embeddings().weight.data.copy_(as_output(successors(vocab_size)))
    return model.eval()


def listener(target, num_heads: int = 4, token_ids: torch.Tensor | None = None, own_outputs: bool = True):
    """Heads that know the toy language.

    With output layers of their own they hold its distributions; sharing the target's, head i moves the state on to
    that of the token i + 1 likely steps ahead.
    """
    table = successors(target.config.vocab_size)
    model = MedusaModel.for_target(target, token_ids, num_heads=num_heads, has_own_output_heads=own_outputs)
    likely = ahead = table.argmax(-1)
    for head in range(num_heads):
        if own_outputs:
            rows = as_output(torch.linalg.matrix_power(table, head + 2))
            model.output_heads[head].weight.data.copy_(rows if token_ids is None else rows[token_ids])
        else:
            weight = model.heads[head][0].linear.weight.data
            weight[ahead, torch.arange(len(ahead))] = 2.0
            ahead = likely[ahead]
    return model.eval()


@pytest.fixture(scope="module")
def target():
    return speaker()


@pytest.fixture(scope="module")
def heads(target):
    return listener(target)


class Watched(Medusa):
    """Notes what it proposes, and for which texts."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def propose(self, run, num_draft_tokens):
        tree = super().propose(run, num_draft_tokens)
        texts = [list(tokens) for tokens in run.tokens]
        self.seen.append((texts, [row.num_emitted for row in run.rows], tree, num_draft_tokens))
        return tree


def ways(tree, row: int) -> list[list[int] | None]:
    """Tokens on the way to each node of a row; `None` for nodes without a token."""
    parents = tree.parents.expand_as(tree.tokens)[row].tolist()
    found: list[list[int] | None] = []
    for token, parent in zip(tree.tokens[row].tolist(), parents):
        above = [] if parent == ROOT else found[parent]
        found.append(None if token == NO_TOKEN or above is None else [*above, token])
    return found


# What the heads read and guess


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("lengths", [(6,), RAGGED])
def test_untrained_heads_repeat_the_targets_last_guess(kind, lengths):
    """They read the state, after the final norm, of the token before the newest."""
    target = speaker(kind)
    untrained = MedusaModel.for_target(target, num_heads=2, num_layers=3)
    assert not any(parameter.any() for parameter in untrained.parameters())
    medusa = Watched(untrained)
    inputs = ragged_batch(lengths)
    target.generate(**inputs, max_new_tokens=12, pad_token_id=0, assistant=medusa, assistant_confidence_threshold=0.0)
    assert len(medusa.seen) > 2
    for texts, _, tree, _ in medusa.seen:
        assert tree.tokens[:, 0].tolist() == [text[-1] for text in texts]


def test_states_on_which_the_drafts_rest(target, heads):
    """The first guess of each depth is that of the head for it, at the last token that was read."""
    inputs = ragged_batch(RAGGED)
    medusa = Watched(heads, tree=[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]])
    output = target.generate(**inputs, max_new_tokens=20, pad_token_id=0, assistant=medusa)
    assert output.shape[1] == 37
    for texts, num_emitted, tree, _ in medusa.seen:
        for row, text in enumerate(texts):
            states = target.model(torch.tensor([text[:-1]])).last_hidden_state[0, -1]
            guesses = [(states @ heads.output_heads[depth].weight.T).argmax().item() for depth in range(4)]
            assert tree.tokens[row].tolist() == guesses[: tree.num_nodes]
        assert tree.num_nodes == min(4, 20 - min(num_emitted) - 1)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("lengths", [(6,), (4, 9, 2)])
@torch.no_grad()
def test_one_pass_over_the_trees_equals_a_pass_for_each_path(kind, do_sample, lengths):
    target = speaker(kind, **({"sliding_window": 5} if kind == "mistral" else {}))
    medusa = Watched(listener(target))
    logits = []
    handle = target.register_forward_hook(lambda module, args, output: logits.append(output.logits))
    torch.manual_seed(5)
    target.generate(
        **ragged_batch(lengths),
        max_new_tokens=16,
        pad_token_id=0,
        do_sample=do_sample,
        assistant=medusa,
        assistant_confidence_threshold=0.0,
    )
    handle.remove()
    assert 0 <= len(logits) - len(medusa.seen) - 1 <= 1  # the prefill, and where a single token was left
    num_checked = 0
    differ = False
    for (texts, num_emitted, tree, _), got in zip(medusa.seen, logits[1:]):
        by_length: dict[int, list[tuple[list[int], torch.Tensor]]] = {}
        for row, text in enumerate(texts):
            for node, way in enumerate([[], *([] if tree is None else ways(tree, row))]):
                if way is not None and num_emitted[row] + len(way) < 16:  # deeper ones are never chosen
                    by_length.setdefault(len(text) + len(way), []).append((text + way, got[row, node]))
        for pairs in by_length.values():
            ids, mine = zip(*pairs)
            expected = target(torch.tensor(ids)).logits[:, -1]
            torch.testing.assert_close(torch.stack(mine), expected, atol=1e-3, rtol=1e-3)
            num_checked += len(mine)
        differ = differ or (tree is not None and len({str(row) for row in tree.parents.tolist()}) > 1)
    assert num_checked > 60 * len(lengths)
    assert differ or len(lengths) == 1, "rows were to have trees of different shapes"


def test_number_of_nodes(target, heads):
    inputs = ragged_batch(RAGGED)
    options = {"max_new_tokens": 12, "pad_token_id": 0, "assistant_confidence_threshold": 0.0}
    for asked, expected in ((1, 1), (2, 2), (200, 200), (None, 32)):
        medusa = Watched(heads)
        target.generate(**inputs, assistant=medusa, num_assistant_tokens=asked, **options)
        for _, num_emitted, tree, num_draft_tokens in medusa.seen:
            assert num_draft_tokens == expected
            assert tree.num_nodes <= expected
            assert tree.num_nodes == expected or 12 - min(num_emitted) < 4
            assert tree.depth <= 12 - min(num_emitted) - 1
    medusa = Watched(heads, num_draft_tokens=7)
    target.generate(**inputs, assistant=medusa, **options)
    assert medusa.seen[0][2].num_nodes == 7


@pytest.mark.parametrize(("tree", "num_nodes"), [(16, 15), (26, 25), (64, 63), ([[0], [1], [1, 0]], 3)])
def test_static_trees(target, heads, same_text, tree, num_nodes):
    for lengths in ((6,), RAGGED):
        medusa = Watched(heads, tree=tree)
        for do_sample in (False, True):
            same_text(target, ragged_batch(lengths), medusa, do_sample=do_sample, max_new_tokens=20)
        first = medusa.seen[0][2]
        assert first.num_nodes == num_nodes
        assert first.parents.ndim == 1
    medusa = Watched(heads, tree=tree)
    same_text(target, ragged_batch(RAGGED), medusa, num_assistant_tokens=2, max_new_tokens=8)
    assert {tree.num_nodes for *_, tree, _ in medusa.seen if tree is not None} == {2}


@pytest.mark.parametrize("token_ids", [[5, 9, 11], [8]])
def test_draft_vocabulary_smaller_than_a_tree_is_wide(target, same_text, token_ids):
    heads = listener(target, token_ids=torch.tensor(token_ids))
    for tree in (None, 64, [[0], [7], [7, 1]], [[9]]):
        for do_sample in (False, True):
            medusa = Medusa(heads, tree=tree)
            options = {"max_new_tokens": 12, "assistant_confidence_threshold": 0.0}
            same_text(target, ragged_batch(RAGGED), medusa, do_sample=do_sample, **options)


# The text


WAYS_TO_CHOOSE = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "top_k": 0},
    "cold": {"do_sample": True, "temperature": 0.3},
    "hot": {"do_sample": True, "temperature": 1.7, "top_k": 0},
    "top_p": {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.9},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "penalty_sample": {"do_sample": True, "repetition_penalty": 1.2, "top_k": 20},
    "suppress": {"do_sample": True, "suppress_tokens": list(range(0, 97, 3)), "bad_words_ids": [[7], [8, 9]]},
}
HEADS = {
    "own_outputs": {},
    "shared_output": {"own_outputs": False},
    "reduced": {"token_ids": torch.arange(96, 2, -2)},
    "reduced_shared": {"token_ids": torch.arange(3, 90, 2), "own_outputs": False, "num_heads": 2},
}


@pytest.mark.parametrize(("kind", "lengths"), [("own_outputs", (7,)), *((kind, RAGGED) for kind in HEADS)])
@pytest.mark.parametrize("choose", WAYS_TO_CHOOSE)
def test_same_text(target, same_text, kind, choose, lengths):
    medusa = Medusa(listener(target, **HEADS[kind]))
    output = same_text(target, ragged_batch(lengths), medusa, max_new_tokens=25, **WAYS_TO_CHOOSE[choose])
    assert output.speculation.num_accepted > 0


@pytest.mark.parametrize("num_assistant_tokens", [1, 2, 200])
@pytest.mark.parametrize("threshold", [0.0, 0.02, 1.0])
def test_any_budget_and_threshold(target, heads, same_text, num_assistant_tokens, threshold):
    for lengths in ((4,), RAGGED):
        for do_sample in (False, True):
            options = {"max_new_tokens": 16, "do_sample": do_sample, "num_assistant_tokens": num_assistant_tokens}
            output = same_text(
                target, ragged_batch(lengths), heads, assistant_confidence_threshold=threshold, **options
            )
            assert output.speculation.num_accepted > 0 or threshold == 1.0


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_few_tokens(target, heads, same_text, limit):
    for lengths in ((4,), RAGGED):
        for do_sample in (False, True):
            output = same_text(target, ragged_batch(lengths), heads, max_new_tokens=limit, do_sample=do_sample)
            assert output.speculation.num_emitted == limit * len(lengths)


def test_num_return_sequences(target, heads, same_text):
    same_text(target, ragged_batch((5, 9)), heads, num_return_sequences=3, do_sample=True)


@pytest.mark.parametrize("lengths", [(7,), RAGGED])
@pytest.mark.parametrize("do_sample", [False, True])
def test_end_inside_a_branch(target, heads, tokenizer, same_text, lengths, do_sample):
    """An EOS token, or a stop string's last character, that a draft of an accepted branch is, not its last one."""
    inputs = ragged_batch(lengths)
    options = {"max_new_tokens": 30, "do_sample": do_sample, "assistant_confidence_threshold": 0.0}
    output = same_text(target, inputs, heads, **options)
    drafted = output.speculation.drafted_mask[0]
    text = output.sequences[0, max(lengths) :].tolist()
    inside = [n for n in range(2, 29) if drafted[n] and drafted[n + 1] and text[n] not in text[:n]]
    inside = [n for n in inside if min(text[: n + 1]) > 2]
    assert inside
    for place in inside[:2]:
        eos = same_text(target, inputs, heads, eos_token_id=text[place], **options)
        string = tokenizer.decode(text[place - 1 : place + 1])
        stop = same_text(target, inputs, heads, stop_strings=[string], tokenizer=tokenizer, **options)
        both = same_text(target, inputs, heads, stop_strings=string, tokenizer=tokenizer, eos_token_id=2, **options)
        for ended in (eos, both) if len(lengths) > 1 else (eos, stop, both):
            assert len(ended.speculation.drafted_mask[0]) == place + 1
            assert ended.speculation.drafted_mask[0][place]


@pytest.mark.parametrize("lengths", [(7,), RAGGED])
@pytest.mark.parametrize("do_sample", [False, True])
def test_own_logits_processor(target, heads, lengths, do_sample):
    def generate(**more):
        torch.manual_seed(5)
        moody = Moody()
        options = {"max_new_tokens": 20, "pad_token_id": 0, "do_sample": do_sample}
        ids = target.generate(**ragged_batch(lengths), **options, logits_processor=LogitsProcessorList([moody]), **more)
        return ids.tolist(), moody.num_calls

    assert generate(assistant=heads) == generate() == generate(assistant=Medusa(heads, tree=16))


@pytest.mark.parametrize("lengths", [(7,), RAGGED])
def test_all_outputs(target, heads, lengths):
    inputs = ragged_batch(lengths)
    names = ("scores", "logits", "hidden_states", "attentions")
    options = {"max_new_tokens": 14, "pad_token_id": 0, "return_dict_in_generate": True, "do_sample": True}
    options |= {f"output_{name}": True for name in names}
    model = copy.deepcopy(target)
    model.set_attn_implementation("eager")
    torch.manual_seed(5)
    plain = model.generate(**inputs, **options)
    torch.manual_seed(5)
    ours = model.generate(**inputs, assistant=heads, **options)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert ours.speculation.num_accepted > 0
    for name in names:
        mine, theirs = getattr(ours, name), getattr(plain, name)
        assert len(mine) == len(theirs) == 14
        for step in (1, 7, 13):
            last = (mine[step], theirs[step]) if name in ("scores", "logits") else (mine[step][-1], theirs[step][-1])
            torch.testing.assert_close(*last, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("lengths", [(20,), (40, 33, 50)])
@pytest.mark.parametrize("do_sample", [False, True])
def test_up_to_the_end_of_a_position_table(same_text, lengths, do_sample):
    """GPT-2 has no embedding for the positions that the deepest nodes of a row at its end would have."""
    target = speaker("gpt2")
    output = same_text(
        target,
        ragged_batch(lengths),
        listener(target),
        max_new_tokens=64 - max(lengths),
        do_sample=do_sample,
        assistant_confidence_threshold=0.0,
    )
    assert output.speculation.num_accepted > 0
    assert output.sequences.shape[1] == 64


@pytest.mark.parametrize("lengths", [(7,), RAGGED])
@pytest.mark.parametrize("do_sample", [False, True])
def test_sliding_window(same_text, lengths, do_sample):
    target = speaker("mistral", sliding_window=6)
    output = same_text(target, ragged_batch(lengths), listener(target), do_sample=do_sample)
    assert output.speculation.num_accepted > 0


def test_half_precision_up_to_near_ties(target, heads):
    model, inputs = copy.deepcopy(target).bfloat16(), ragged_batch((9,))
    options = {"max_new_tokens": 40, "pad_token_id": 0}
    plain = model.generate(**inputs, **options, output_logits=True, return_dict_in_generate=True)
    for assistant in (heads, copy.deepcopy(heads).bfloat16()):
        got = model.generate(**inputs, **options, assistant=assistant, return_dict_in_generate=True)
        assert got.speculation.num_accepted > 0
        differs = (plain.sequences != got.sequences)[0, 9:].nonzero()
        if len(differs):
            best = plain.logits[int(differs[0])][0].topk(2).values
            assert best[0] - best[1] <= 2**-7 * best[0].abs() * 4


def test_later_turn_with_a_cache(target, heads):
    """The heads start on what the second turn reads."""
    inputs = ragged_batch((9,))
    options = {"max_new_tokens": 10, "pad_token_id": 0, "return_dict_in_generate": True}
    first = target.generate(**inputs, assistant=heads, **options)
    ids = torch.cat([first.sequences, torch.tensor([[4, 17]])], dim=1)
    medusa = Watched(heads)
    second = target.generate(ids, assistant=medusa, **options, **{CACHE_NAME: first[CACHE_NAME]})
    assert second.sequences.tolist() == target.generate(ids, **options).sequences.tolist()
    assert second.speculation.num_accepted > 0
    assert medusa.seen[0][2] is not None


@pytest.mark.parametrize("broken", [0, 2])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_head_that_overflows_costs_its_guesses_only(target, heads, same_text, broken, do_sample):
    heads = copy.deepcopy(heads)
    heads.output_heads[broken].weight.data[5] = torch.nan
    for tree in (None, 16):
        medusa = Medusa(heads, tree=tree)
        output = same_text(target, ragged_batch(RAGGED), medusa, do_sample=do_sample, max_new_tokens=20)
        assert (output.speculation.num_accepted > 0) == (broken > 0) or tree


@pytest.mark.parametrize("kind", ["own_outputs", "reduced"])
@pytest.mark.parametrize("lengths", [(7,), RAGGED])
def test_a_head_that_overflows_under_rejection(target, kind, lengths):
    heads = listener(target, **HEADS[kind])
    heads.output_heads[1].weight.data[5] = torch.nan
    output = target.generate(
        **ragged_batch(lengths),
        max_new_tokens=20,
        pad_token_id=0,
        do_sample=True,
        assistant=heads,
        assistant_sampling="rejection",
        return_dict_in_generate=True,
    )
    assert output.sequences.shape[1] == max(lengths) + 20
    assert len(output.speculation.acceptance_rate_per_depth) == 1 or not any(
        output.speculation.acceptance_rate_per_depth[1:]
    )


@pytest.mark.parametrize("lengths", [(7,), RAGGED])
def test_prompts_of_other_kinds(target, heads, same_text, lengths):
    """Read in chunks, or given as embeddings: the heads start on the state of the prompt's last token all the same."""
    inputs = ragged_batch(lengths)
    output = same_text(target, inputs, heads, prefill_chunk_size=3, max_new_tokens=20)
    assert output.speculation.num_accepted > 0
    embedded = {
        "inputs_embeds": target.get_input_embeddings()(inputs["input_ids"]),
        "attention_mask": inputs["attention_mask"],
    }
    output = same_text(target, embedded, heads, max_new_tokens=20)
    assert output.speculation.num_accepted > 0


# What it brings


def test_the_likely_text_is_drafted_whole(heads):
    """Without a context the heads know the greedy text: all four are right in every pass."""
    target = speaker(context=0.0)
    for model in (heads, listener(target, own_outputs=False)):
        assistant = Medusa(model, tree=64)
        output = target.generate(
            **ragged_batch((6,)), max_new_tokens=61, pad_token_id=0, assistant=assistant, return_dict_in_generate=True
        )
        assert output.speculation.num_target_passes == 1 + 60 / 5


def tokens_per_pass(target, assistant, **options) -> float:
    torch.manual_seed(5)
    options = {"max_new_tokens": 100, "pad_token_id": 0, "return_dict_in_generate": True} | options
    return target.generate(**ragged_batch(RAGGED), assistant=assistant, **options).speculation.mean_acceptance_length


@pytest.mark.parametrize(("threshold", "least"), [(0.1, 1.8), (0.0, 2.2)])
def test_it_really_drafts(target, heads, threshold, least, monkeypatch):
    options = {"assistant_confidence_threshold": threshold}
    assert tokens_per_pass(target, heads, **options) > 2
    options |= {"do_sample": True, "top_k": 0}
    with_noise = tokens_per_pass(target, heads, **options)
    monkeypatch.setattr(SharedNoise, "chances", Greedy.chances)
    assert with_noise > max(least, tokens_per_pass(target, heads, **options) + 0.2)


# Rejection sampling


@pytest.mark.parametrize("kind", ["own_outputs", "reduced"])
@pytest.mark.parametrize("lengths", [(7,), RAGGED])
@pytest.mark.parametrize(
    "options", [{"top_k": 0}, {"temperature": 0.7, "top_k": 5}, {"top_k": 0, "suppress_tokens": [4, 6, 50]}]
)
def test_rejection_drafts_chains_with_their_distributions(target, kind, lengths, options):
    heads = listener(target, **HEADS[kind])
    medusa = Watched(heads)
    output = target.generate(
        **ragged_batch(lengths),
        max_new_tokens=20,
        pad_token_id=0,
        do_sample=True,
        assistant=medusa,
        assistant_sampling="rejection",
        return_dict_in_generate=True,
        **options,
    )
    assert output.speculation.num_accepted > 0
    for _, num_emitted, tree, _ in medusa.seen:
        assert tree.is_chain
        assert tree.num_nodes == min(4, 20 - min(num_emitted) - 1)
        assert tree.draft_probs.shape == (*tree.tokens.shape, VOCAB_SIZE)
        torch.testing.assert_close(tree.draft_probs.sum(-1), torch.ones(tree.tokens.shape))
        assert (tree.draft_probs.gather(-1, tree.tokens[..., None]) > 0).all()
        if heads.token_ids is not None:
            others = torch.ones(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, heads.token_ids, False)
            assert (tree.draft_probs[..., others] == 0).all()


@pytest.mark.parametrize("token_ids", [None, [4, 0, 3]])
def test_distribution_under_rejection(token_ids):
    """Of all texts of four tokens: the second pass verifies a chain."""
    target = speaker(vocab_size=5)
    with torch.no_grad():
        heads = listener(target, num_heads=2, token_ids=None if token_ids is None else torch.tensor(token_ids))
        prompt, num_samples = [3, 1, 4], 4000
        ids = torch.tensor([prompt])
        torch.manual_seed(11)
        new = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_return_sequences=num_samples,
            max_new_tokens=4,
            do_sample=True,
            temperature=2.5,
            assistant=heads,
            assistant_sampling="rejection",
        )[:, 3:]
        texts = torch.tensor([[*prompt, *rest] for rest in itertools.product(range(5), repeat=4)])
        logits = target(texts).logits[:, 2:-1].double() / 2.5
    probs = logits.log_softmax(-1).gather(-1, texts[:, 3:, None]).sum((1, 2)).exp()
    counts = torch.bincount((new * 5 ** torch.arange(3, -1, -1)).sum(1), minlength=len(texts)).double()
    common = probs * num_samples >= 5
    counts = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = num_samples * torch.cat([probs[common], probs[~common].sum()[None]])
    statistic = ((counts - expected) ** 2 / expected).sum() / 2
    assert torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic) > 1e-6


# Errors


def refuses(target, assistant, message: str, error=ValueError, **options) -> None:
    with pytest.raises(error, match=message):
        target.generate(**ragged_batch((6,)), max_new_tokens=6, pad_token_id=0, assistant=assistant, **options)


def test_plain_name(target):
    refuses(target, "medusa", "`assistant` got 'medusa', a method that has weights; give the Hub id or folder")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"hidden_size": 64}, "hidden_size 64, but LlamaForCausalLM has hidden_size 128"),
        ({"vocab_size": 90}, "vocab_size 90, but LlamaForCausalLM has vocab_size 97"),
        ({"num_target_layers": 3}, "num_hidden_layers 3, but LlamaForCausalLM has num_hidden_layers 2"),
        ({"hidden_size": 64, "target_name_or_path": "some/model"}, r"hidden_size 64 \(some/model\), but"),
    ],
)
def test_heads_of_another_target(target, field, message):
    fields = {"hidden_size": HIDDEN_SIZE, "vocab_size": VOCAB_SIZE, "num_target_layers": 2} | field
    heads = MedusaModel(MedusaConfig(**fields))
    for assistant in (heads, Medusa(heads)):
        refuses(
            target, assistant, f"this MedusaModel was made for a target .*{message}.*take the drafter of this target"
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_assistant_tokens": "auto"}, "`num_assistant_tokens` is 'auto', which adapts.*but Medusa drafts trees"),
        (
            {"num_assistant_tokens_schedule": "heuristic"},
            "`num_assistant_tokens_schedule` is 'heuristic', which adapts.*give the number of nodes",
        ),
        ({"num_assistant_tokens": 0}, "`num_assistant_tokens` is 0; expected an int of at least 1"),
    ],
)
def test_draft_lengths(target, heads, options, message):
    refuses(target, heads, message, **options)


def test_settings_of_the_generator(target, heads):
    for model in (target, "medusa", None):
        with pytest.raises(ValueError, match=r"`model` is a .*; Medusa takes a loaded MedusaModel"):
            Medusa(model)
    refuses(target, Medusa(heads, num_draft_tokens=0), "`num_draft_tokens` is 0; expected an int of at least 1")
    with pytest.raises(ValueError, match="`tree` is 17; the ready-made sizes are"):
        Medusa(heads, tree=17)
    with pytest.raises(ValueError, match="at most 4 of them"):
        Medusa(heads, tree=[[0] * depth for depth in range(1, 6)])
    with pytest.raises(ValueError, match="`assistant` got the class Medusa; pass an object of it"):
        target.generate(**ragged_batch((6,)), max_new_tokens=6, assistant=hf_specdec.Medusa)


@pytest.mark.parametrize("draft_token_ids", [[3, 5, 3], [3, 97], [-1, 4], [], [[3, 5]]])
def test_draft_vocabulary(target, draft_token_ids):
    with pytest.raises(ValueError, match=r"`draft_token_ids` .*expected one row of different ids from 0 to 96"):
        MedusaModel.for_target(target, torch.tensor(draft_token_ids))
