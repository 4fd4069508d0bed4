"""Prompt lookup against a plain search, and what it must never propose."""

import random
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LlavaConfig, Qwen2VLConfig

from hf_specdec.generation.prompt_lookup import (
    CPU_WEAK_DRAFT,
    NgramIndex,
    PromptLookup,
    continuation,
    placeholder_token_ids,
)
from hf_specdec.generation.run import output_vocab_size


def fake_run(*rows, vocab_size=1000, config=None, max_matching_ngram_size=None, device="cpu"):
    target = SimpleNamespace(
        config=config or SimpleNamespace(), get_output_embeddings=lambda: nn.Linear(1, vocab_size, bias=False)
    )
    settings = SimpleNamespace(max_matching_ngram_size=max_matching_ngram_size)
    return SimpleNamespace(
        tokens=list(rows), device=torch.device(device), target=target, settings=settings, vocab_size=vocab_size
    )


def drafts(lookup, run, num_draft_tokens=4):
    """One list a row, without the filling."""
    tree = lookup.propose(run, num_draft_tokens)
    if tree is None:
        return [[] for _ in run.tokens]
    assert tree.is_chain and tree.tokens.dtype == torch.long and tree.tokens.shape[0] == len(run.tokens)
    assert tree.num_nodes <= num_draft_tokens
    return [[token for token in row if token != -1] for row in tree.tokens.tolist()]


def propose(tokens, num_wanted=4, **kwargs):
    run = fake_run(tokens)
    lookup = PromptLookup(**kwargs)
    lookup.begin(run)
    return drafts(lookup, run, num_wanted)[0]


def searched(tokens, num_draft_tokens, max_size, min_size):
    """The same by trying every place."""
    for size in range(min(max_size, len(tokens) - 1), min_size - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                period = len(tokens) - start - size
                if size < max_size:  # a weak match gets a short draft on a CPU
                    num_draft_tokens = min(num_draft_tokens, CPU_WEAK_DRAFT)
                return [tokens[start + size + i % period] for i in range(num_draft_tokens)]
    return []


def test_longest_ngram_wins_over_the_latest_match():
    # (1, 2, 3) -> 50 long ago; (2, 3) -> 60 since then.
    tokens = [1, 2, 3, 50, 51, 9, 2, 3, 60, 61, 8, 1, 2, 3]
    assert propose(tokens, 2) == [50, 51]
    assert propose(tokens, 2, max_ngram_size=2) == [60, 61]


def test_latest_match_wins():
    assert propose([1, 2, 50, 3, 1, 2, 60, 3, 1, 2], 1) == [60]


def test_text_is_no_match_of_its_own_end():
    assert propose([1, 2, 3, 4]) == []
    assert propose([1], min_ngram_size=1) == []
    assert propose([]) == []


def test_short_ngrams():
    tokens = [7, 8, 9, 7]
    assert propose(tokens, 1) == [8]
    assert propose(tokens, min_ngram_size=2) == []
    assert propose([1, 2, 3, 9, 2, 3], min_ngram_size=3) == []


def test_weak_matches_get_short_drafts_on_a_cpu():
    tokens = [1, 2, 3, 4, 5, 6, 9, 1, 2]
    assert propose(tokens, 5) == [3, 4]
    assert propose([*tokens, 3], 5) == [4, 5, 6, 9, 1]  # as long as the longest n-gram: not weak
    assert propose(tokens, 5, max_ngram_size=2) == [3, 4, 5, 6, 9]
    run = fake_run(tokens, device="meta")  # an accelerator, where a wide pass costs little more than a narrow one
    lookup = PromptLookup()
    lookup.begin(run)
    assert lookup.propose(run, 5).num_nodes == 5


def test_periodic_text_is_continued_round_and_round():
    assert propose([9, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]
    assert propose([5, 5, 5, 5], 4) == [5, 5, 5, 5]
    assert continuation([1, 2, 3, 1, 2, 3], 3, 5) == [1, 2, 3, 1, 2]
    assert continuation([1, 2, 3, 1, 2, 3], 1, 2) == [2, 3]


@pytest.mark.parametrize("num_symbols", [2, 4, 12])
@pytest.mark.parametrize(("max_size", "min_size"), [(3, 1), (3, 2), (1, 1), (5, 3)])
def test_equals_plain_search_while_rows_grow(num_symbols, max_size, min_size):
    rng = random.Random(num_symbols * 10 + max_size)
    run = fake_run(*([rng.randrange(num_symbols) for _ in range(length)] for length in (40, 3, 0)))
    lookup = PromptLookup(max_ngram_size=max_size, min_ngram_size=min_size)
    lookup.begin(run)
    num_found = 0
    for _ in range(60):
        found = drafts(lookup, run, 6)
        assert found == [searched(tokens, 6, max_size, min_size) for tokens in run.tokens]
        num_found += sum(map(bool, found))
        for tokens in run.tokens:
            tokens.extend(rng.randrange(num_symbols) for _ in range(rng.randrange(4)))
    assert num_found > 0


def test_rows_are_apart_and_may_leave():
    run = fake_run([1, 2, 3, 4, 1, 2], [1, 2, 9], [1, 2, 7, 8, 1, 2])
    lookup = PromptLookup()
    lookup.begin(run)
    assert drafts(lookup, run, 2) == [[3, 4], [], [7, 8]]
    run.tokens = [run.tokens[0], run.tokens[2]]
    lookup.keep_rows(torch.tensor([0, 2]))
    assert drafts(lookup, run, 2) == [[3, 4], [7, 8]]
    run.tokens[1] += [5, 7, 8]
    assert drafts(lookup, run, 2) == [[3, 4], [1, 2]]
    run.tokens = run.tokens[1:]
    lookup.keep_rows(torch.tensor([1]))
    assert drafts(lookup, run, 2) == [[1, 2]]


def test_equal_prompts_grow_apart():
    run = fake_run([1, 2, 3, 1], [1, 2, 3, 1], [1, 2, 3, 1])
    lookup = PromptLookup()
    lookup.begin(run)
    run.tokens[0] += [2]
    run.tokens[1] += [5, 6, 1, 5]
    assert drafts(lookup, run, 2) == [[3, 1], [6, 1], [2, 3]]


def test_no_draft_in_any_row_is_none():
    run = fake_run([1, 2, 3], [])
    lookup = PromptLookup()
    lookup.begin(run)
    assert lookup.propose(run, 5) is None


def test_draft_length_is_that_of_the_argument():
    assert propose(list(range(50)) * 2, 30, num_draft_tokens=3) == list(range(30))
    assert PromptLookup(7).default_num_draft_tokens == 7


def test_ngram_size_of_generate_overrides():
    tokens = [1, 2, 3, 50, 9, 2, 3, 60, 8, 1, 2, 3]
    for asked, expected in ((None, [50]), (2, [60]), (3, [50]), (1, [60])):
        run = fake_run(tokens, max_matching_ngram_size=asked)
        lookup = PromptLookup()
        lookup.begin(run)
        assert drafts(lookup, run, 1) == [expected]
    run = fake_run(tokens, max_matching_ngram_size=0)
    with pytest.raises(ValueError, match="`max_matching_ngram_size` is 0; expected an int of at least 1"):
        PromptLookup().begin(run)


def test_one_object_serves_calls_of_different_settings():
    lookup = PromptLookup(min_ngram_size=2)
    first = fake_run([7, 8, 9, 7], max_matching_ngram_size=1)
    lookup.begin(first)
    assert drafts(lookup, first) == [[8, 9, 7, 8]]
    second = fake_run([7, 8, 9, 7])
    lookup.begin(second)
    assert drafts(lookup, second) == [[]]
    assert (lookup.max_ngram_size, lookup.min_ngram_size) == (3, 2)


def test_placeholders_and_ids_beyond_the_head_end_a_draft():
    config = SimpleNamespace(image_token_id=77, text_config=SimpleNamespace(audio_token_ids=[78, 79]), bos_token_id=5)
    for stop in (77, 79, 100, -200):
        run = fake_run([1, 2, 5, stop, 6, 1, 2], vocab_size=100, config=config)
        lookup = PromptLookup()
        lookup.begin(run)
        assert drafts(lookup, run) == [[5]]
    run = fake_run([1, 2, 77, 77, 1, 2], config=config)
    lookup = PromptLookup()
    lookup.begin(run)
    assert lookup.propose(run, 4) is None


def test_placeholder_ids_of_real_configs():
    config = Qwen2VLConfig()
    assert {config.image_token_id, config.video_token_id} <= placeholder_token_ids(config)
    assert LlavaConfig(image_token_index=32000).image_token_id in placeholder_token_ids(LlavaConfig())
    nested = {"thinker_config": {"audio_token_index": 3, "vision_start_token_id": None}, "eos_token_id": 2}
    assert placeholder_token_ids(nested) == {3}


def test_output_vocab_size():
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=9))
    head = nn.Linear(2, 12)
    assert output_vocab_size(SimpleNamespace(config=config, get_output_embeddings=lambda: head)) == 12
    assert output_vocab_size(SimpleNamespace(config=config, get_output_embeddings=lambda: None)) == 9


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_draft_tokens": 0}, "`num_draft_tokens` is 0; expected an int of at least 1"),
        ({"num_draft_tokens": "auto"}, "`num_draft_tokens` is 'auto'; expected an int"),
        ({"max_ngram_size": 0}, "`max_ngram_size` is 0; expected an int of at least 1"),
        ({"min_ngram_size": 0}, "`min_ngram_size` is 0; expected an int of at least 1"),
        ({"min_ngram_size": 4}, "`min_ngram_size` is 4; expected at most `max_ngram_size`, which is 3"),
    ],
)
def test_errors(kwargs, message):
    with pytest.raises(ValueError, match=message):
        PromptLookup(**kwargs)


def test_step_does_not_grow_with_the_prompt():
    rng = random.Random(0)
    tokens = [rng.randrange(2000) for _ in range(32_000)]
    run = fake_run(tokens, vocab_size=2000)
    lookup = PromptLookup()
    lookup.begin(run)
    seconds = []
    for _ in range(101):
        tokens.extend(tokens[100:105])
        start = time.perf_counter()
        assert lookup.propose(run, 10) is not None
        seconds.append(time.perf_counter() - start)
    assert sorted(seconds)[50] < 1e-3  # about 2e-5 on an idle core; a search of the text takes more than 1e-3


def test_index_holds_only_what_something_followed():
    index = NgramIndex(2, 2)
    index.extend([1, 2])
    assert index.find([1, 2]) == (None, 0)
    index.extend([1, 2, 3, 1, 2])
    assert index.find([1, 2, 3, 1, 2]) == (2, 2)
