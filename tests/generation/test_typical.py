"""`assistant_acceptance="typical"`: the rule against a slow one that walks every branch, and what it does to a text."""

from __future__ import annotations

import math
import random

import pytest
import torch
from conftest import Moody, OracleDrafter, ragged_batch, real_rows
from transformers import LogitsProcessorList
from transformers.utils import logging

from hf_specdec import CandidateGenerator, CandidateTree, Medusa, MedusaModel, TypicalAcceptance
from hf_specdec.generation.tree import NO_TOKEN, ROOT, children

SAMPLE = {"do_sample": True, "max_new_tokens": 24, "pad_token_id": 0}


def is_typical(rule: TypicalAcceptance, probs: list[float], token: int) -> bool:
    entropy = -sum(p * math.log(p) for p in probs if p > 0)
    return probs[token] > min(rule.epsilon, rule.delta * math.exp(-entropy))


def slow_walk(rule: TypicalAcceptance, scores: torch.Tensor, tokens: list[int], parents: list[int]) -> list[int]:
    """Tokens that one row emits: every way from the root whose nodes are all kept; the longest, then the likeliest."""
    probs = scores.double().softmax(-1).tolist()
    kept = [(0, 0.0, [], ROOT)]
    for way in kept:
        for node, (token, parent) in enumerate(zip(tokens, parents)):
            if parent == way[3] and token != NO_TOKEN and is_typical(rule, probs[parent + 1], token):
                likeliness = way[1] + math.log(probs[parent + 1][token])
                kept.append((way[0] + 1, likeliness, [*way[2], token], node))
    _, _, way, end = max(kept, key=lambda way: way[:2])
    return [*way, scores[end + 1].argmax().item()]


def walk(choices: list[int], tokens: list[int], parents: list[int], depth: int) -> list[int]:
    """As the loop does it, `depth` drafts at most."""
    below, node, emitted = children(tokens, parents), ROOT, []
    while node is not None:
        emitted.append(choices[node + 1])
        node = below.get((node, choices[node + 1])) if len(emitted) <= depth else None
    return emitted


def random_tree(num_nodes: int, vocab_size: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """No two siblings are equal; some nodes hold no token, and some of these have children."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(num_nodes):
        parents.append(rng.randint(max(ROOT, node - 6), node - 1))
        taken = {token for token, parent in zip(tokens, parents) if parent == parents[-1]}
        free = [token for token in range(vocab_size) if token not in taken]
        tokens.append(NO_TOKEN if rng.random() < 0.05 or not free else rng.choice(free))
    return tokens, parents


RULES = [TypicalAcceptance(), TypicalAcceptance(0.3, 0.3), TypicalAcceptance(0.02, 5.0), TypicalAcceptance(0, 0)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.epsilon}-{rule.delta}")
@pytest.mark.parametrize("shape", ["own_parents", "shared_parents", "chain"])
@pytest.mark.parametrize("num_nodes", [1, 4, 21])
def test_rule_against_a_slow_one(rule, shape, num_nodes):
    rng = random.Random(num_nodes)
    num_rows, vocab_size, num_kept = 12, 7, set()
    for seed in range(6):
        rows = [random_tree(num_nodes, vocab_size, rng) for _ in range(num_rows)]
        if shape == "chain":
            rows = [(tokens, list(range(-1, num_nodes - 1))) for tokens, _ in rows]
        elif shape == "shared_parents":
            rows = [rows[0]] * num_rows
        tokens, parents = (torch.tensor(part) for part in zip(*rows))
        tree = CandidateTree(tokens, {"own_parents": parents, "shared_parents": parents[0], "chain": None}[shape])
        scores = 2 * torch.randn(num_rows, num_nodes + 1, vocab_size, generator=torch.Generator().manual_seed(seed))
        scores[scores < -2] = -torch.inf
        choices = rule.choose(scores, None, tree)
        assert choices.shape == (num_rows, num_nodes + 1)
        for row in range(num_rows):
            expected = slow_walk(rule, scores[row], *rows[row])
            num_kept.add(len(expected) - 1)
            assert walk(choices[row].tolist(), *rows[row], len(expected) - 1) == expected
            # Where the way has ended, the target's likeliest token may itself be a draft below: that is kept too, and
            # so is what the target says after it.
            assert walk(choices[row].tolist(), *rows[row], num_nodes)[: len(expected)] == expected
    assert len(num_kept) > 1


def test_by_hand():
    """Uniform over 4: the entropy is log 4, so 0.25 > min(0.09, 0.3 / 4) and every draft is kept."""
    scores = torch.zeros(1, 4, 4)
    tree = CandidateTree(torch.tensor([[3, 2, 1]]), torch.tensor([-1, -1, 1]))
    assert TypicalAcceptance().choose(scores, None, tree).tolist() == [[2, 0, 1, 0]]
    assert TypicalAcceptance(1.0, 0.9).choose(scores, None, tree).tolist() == [[2, 0, 1, 0]]  # 0.25 > 0.225
    assert TypicalAcceptance(1.0, 1.1).choose(scores, None, tree).tolist() == [[0, 0, 0, 0]]  # 0.25 < 0.275
    assert TypicalAcceptance(0.2, 9.0).choose(scores, None, tree).tolist() == [[2, 0, 1, 0]]
    assert TypicalAcceptance(0.25, 9.0).choose(scores, None, tree).tolist() == [[0, 0, 0, 0]]  # not above it
    # Of branches equally long the likeliest.
    scores[0, 0, 3] = 0.1
    shallow = CandidateTree(torch.tensor([[2, 3]]), torch.tensor([-1, -1]))
    assert TypicalAcceptance().choose(scores[:, :3], None, shallow)[0, 0] == 3
    assert TypicalAcceptance().choose(scores[:, :1], None, None).tolist() == [[3]]


@pytest.fixture(scope="module")
def medusa(target):
    heads = MedusaModel.for_target(target, num_heads=3)
    generator = torch.Generator().manual_seed(2)
    for parameter in heads.parameters():
        parameter.data.normal_(std=0.1, generator=generator)
    return Medusa(heads)


@pytest.mark.parametrize("lengths", [(7,), (5, 11, 3)])
@pytest.mark.parametrize("kind", ["medusa", "draft_model", "oracle_tree", "prompt_lookup"])
@pytest.mark.parametrize("returns_dict", [False, True])
def test_a_threshold_that_nothing_passes_leaves_greedy_decoding(target, drafter, medusa, lengths, kind, returns_dict):
    inputs = ragged_batch(lengths)
    expected = target.generate(**inputs, max_new_tokens=24, pad_token_id=0)
    assistant = {
        "medusa": medusa,
        "draft_model": drafter,
        "oracle_tree": OracleDrafter(real_rows(expected, inputs), 0.7, 3),
        "prompt_lookup": "prompt_lookup",
    }[kind]
    rule = TypicalAcceptance(1.0, 1e9)
    state = torch.get_rng_state()
    got = target.generate(
        **inputs, **SAMPLE, assistant=assistant, assistant_acceptance=rule, return_dict_in_generate=returns_dict
    )
    assert getattr(got, "sequences", got).tolist() == expected.tolist()
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn"


class Fixed(CandidateGenerator):
    """Two branches whatever the text is."""

    drafts_trees = True

    def propose(self, run, num_draft_tokens):
        tokens = torch.tensor([[20, 30, 31, 32]]).repeat(len(run.rows), 1)
        return CandidateTree(tokens, torch.tensor([-1, -1, 1, 2]))


@pytest.mark.parametrize("lengths", [(7,), (5, 11, 3)])
def test_a_threshold_that_everything_passes_keeps_the_longest_branch(target, lengths):
    output = target.generate(
        **ragged_batch(lengths),
        do_sample=True,
        top_k=0,
        max_new_tokens=11,
        pad_token_id=0,
        assistant=Fixed(),
        assistant_acceptance=TypicalAcceptance(0.0, 0.0),
        return_dict_in_generate=True,
    )
    new = output.sequences[:, max(lengths) :].tolist()
    for row in new:
        assert row[1:4] == row[5:8] == [30, 31, 32]
        assert row[9:] == [30, 31]
    assert output.speculation.num_accepted == 8 * len(lengths)


@pytest.mark.parametrize("kind", ["medusa", "draft_model"])
@pytest.mark.parametrize("lengths", [(7,), (5, 11, 3)])
def test_every_token_is_typical(target, drafter, medusa, kind, lengths):
    """Each emitted token passes the threshold, or is the likeliest."""
    inputs = ragged_batch(lengths)
    assistant = {"medusa": medusa, "draft_model": drafter}[kind]
    output = target.generate(
        **inputs,
        **SAMPLE,
        temperature=1.5,
        top_k=0,
        assistant=assistant,
        assistant_acceptance="typical",
        assistant_confidence_threshold=0.0,
        return_dict_in_generate=True,
    )
    greedy = target.generate(**inputs, max_new_tokens=24, pad_token_id=0)
    assert output.speculation.num_accepted > 0
    assert output.sequences.tolist() != greedy.tolist()
    rule = TypicalAcceptance()
    for row, start in zip(real_rows(output.sequences, inputs), lengths):
        probs = (target(torch.tensor([row])).logits[0].double() / 1.5).softmax(-1).tolist()
        for place in range(start, len(row)):
            before = probs[place - 1]
            assert is_typical(rule, before, row[place]) or before[row[place]] >= max(before) - 1e-5


@pytest.mark.parametrize("lengths", [(7,), (5, 11, 3)])
@pytest.mark.parametrize("kind", ["medusa", "draft_model"])
def test_own_logits_processor(target, drafter, medusa, lengths, kind):
    moody = Moody()
    output = target.generate(
        **ragged_batch(lengths),
        **SAMPLE,
        assistant={"medusa": medusa, "draft_model": drafter}[kind],
        assistant_acceptance="typical",
        logits_processor=LogitsProcessorList([moody]),
    )
    assert output.shape[1] == max(lengths) + 24
    assert moody.num_calls == 24


def test_stops_inside_a_branch(target):
    """EOS in the middle of what the rule would keep."""
    output = target.generate(
        **ragged_batch((7,)),
        do_sample=True,
        max_new_tokens=10,
        eos_token_id=31,
        pad_token_id=0,
        assistant=Fixed(),
        assistant_acceptance=TypicalAcceptance(0.0, 0.0),
        top_k=0,
    )
    assert output[0, 8:].tolist() == [30, 31]


def test_it_is_said_once(target, medusa, monkeypatch):
    type(logging.get_logger()).warning_once.cache_clear()
    said = []
    monkeypatch.setattr(logging.get_logger("hf_specdec.generation.run"), "warning", lambda text, *_: said.append(text))
    for _ in range(2):
        target.generate(**ragged_batch((7,)), **SAMPLE, assistant=medusa, assistant_acceptance="typical")
    assert len(said) == 1
    assert "not lossless" in said[0]


def test_without_an_assistant_it_is_plain_generate(target):
    torch.manual_seed(3)
    expected = target.generate(**ragged_batch((7,)), **SAMPLE)
    torch.manual_seed(3)
    got = target.generate(**ragged_batch((7,)), **SAMPLE, assistant=None, assistant_acceptance="typical")
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"do_sample": False, "assistant_acceptance": "typical"},
            "is 'typical', which is a rule for sampling.*pass `do",
        ),
        (
            {"assistant_acceptance": "typical", "assistant_sampling": "rejection"},
            "is 'typical', which is a rule.*no `assistant_sampling`",
        ),
        ({"assistant_acceptance": "loose"}, r"is 'loose'; expected 'exact', 'typical', or TypicalAcceptance\(epsilon"),
        ({"assistant_acceptance": None}, "is None; expected 'exact', 'typical'"),
        ({"assistant_acceptance": 0.3}, r"is 0\.3; expected 'exact', 'typical'"),
        ({"assistant_acceptance": TypicalAcceptance}, "is <class .*; expected 'exact', 'typical'"),
    ],
)
def test_errors(target, options, message):
    with pytest.raises(ValueError, match=f"`assistant_acceptance` {message}"):
        target.generate(**ragged_batch((7,)), **SAMPLE | {"assistant": "prompt_lookup"} | options)


@pytest.mark.parametrize(
    ("thresholds", "message"),
    [
        ((-0.1,), "`epsilon` is -0.1; expected a number of at least 0"),
        ((0.1, float("nan")), "`delta` is nan; expected a number of at least 0"),
        (("low",), "`epsilon` is 'low'; expected a number"),
    ],
)
def test_errors_of_the_thresholds(thresholds, message):
    with pytest.raises(ValueError, match=message):
        TypicalAcceptance(*thresholds)
